"""Where bundles are made: a hidden directory beside them, from which finished ones are moved as a whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rsrv.bundle.directory import inspect_bundle
from rsrv.bundle.files import MANIFEST
from rsrv.bundle.staging import staged_directory
from rsrv.core.errors import ExportError

_PREFIX, _SUFFIX = ".rsrv-convert.", ".partial"
"""Servers skip such names."""


@contextlib.contextmanager
def staging_area(root: Path) -> Iterator[Path]:
    """A directory in `root` for the time of the block. What a run that was killed left there is removed."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"{_PREFIX}*{_SUFFIX}"):
        if (lock := _lock(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    area, lock = _locked_area(root)
    try:
        yield area
    finally:
        shutil.rmtree(area, ignore_errors=True)
        os.close(lock)


def move_bundles(made: Path, root: Path) -> list[str]:
    """Move every bundle in `made` to `root`, replacing those of the same name; returns their names.

    Raises BundleError for a bundle whose files or manifest do not hold, and for a target that is no bundle.
    """
    found = []
    for path in sorted(made.iterdir()):
        if path.is_dir() and (path / MANIFEST).is_file():
            _, problems = inspect_bundle(path)
            if problems:
                raise problems[0]
            found.append(path)
    for path in found:
        with staged_directory(root / path.name, overwrite=True) as staged:
            for entry in list(path.iterdir()):
                os.rename(entry, staged / entry.name)
    return [path.name for path in found]


def remove_bundle(target: Path) -> bool:
    """Delete a bundle, which disappears as a whole; False when there is none. Raises ExportError for other things."""
    if not os.path.lexists(target):
        return False
    if target.is_symlink() or not target.is_dir() or (any(target.iterdir()) and not (target / MANIFEST).is_file()):
        raise ExportError(f"{target} is no bundle, so it is not removed", hint="move it away by hand")
    aside = target.with_name(f".{target.name}.{os.getpid()}.old{_SUFFIX}")
    os.rename(target, aside)
    shutil.rmtree(aside)
    return True


def _locked_area(root: Path) -> tuple[Path, int]:
    """A new directory with its lock. Until it is locked, another run may take it for that of a dead one and remove it:
    then it is made again."""
    while True:
        area = Path(tempfile.mkdtemp(prefix=_PREFIX, suffix=_SUFFIX, dir=root))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(area, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # no locks on this file system: nobody will take it for dead, either
                fcntl.flock(lock, fcntl.LOCK_EX)
            if area.exists():
                return area, lock
            os.close(lock)


def _lock(directory: Path) -> int | None:
    """A lock on `directory` that ends with this process; None when another one holds it, or it is gone."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd
