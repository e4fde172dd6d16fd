"""Whether all that was read of a bundle belongs to one version of it, though somebody writes to it meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rsrv.bundle.files import HOOKS, MANIFEST, WEIGHTS
from rsrv.bundle.problems import violation
from rsrv.core.errors import BundleError
from rsrv.serve.repository.snapshot import FileStat, versions_of

if TYPE_CHECKING:
    from rsrv.bundle.directory import Bundle


class Versions:
    """The files of a bundle, as they were before the first of them was read.

    The times of the last status change do not count: a backup that links to the files, and chmod, change those.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = versions_of(directory)

    def require_same(self, bundle: Bundle) -> None:
        """Raises BundleError when a file that belongs to `bundle` is another one by now, has come, or is gone.

        Those that it is made of count, and those that its manifest lists; what hooks write beside them does not.
        """
        now = versions_of(self._directory)
        programs = {path.name for path in bundle.program_files()}
        for name in sorted({MANIFEST, WEIGHTS, HOOKS, *programs, *(bundle.manifest.files or ())}):
            if _content(self._files, name) != _content(now, name):
                raise violation(
                    BundleError,
                    "B-80",
                    f"bundle {bundle.name!r}: {name} changed while the bundle was being read",
                    file=name,
                    hint="load it again once all of its files are written",
                )


def _content(files: Mapping[str, FileStat], name: str) -> tuple[int, int, int] | None:
    file = files.get(name)
    return None if file is None else (file.size, file.mtime_ns, file.inode)
