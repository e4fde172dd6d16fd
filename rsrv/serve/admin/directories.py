"""Which directories on the server's machine an administrator may name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rsrv.bundle.files import MANIFEST
from rsrv.core.errors import InvalidRequest


def allowed_directory(given: str, roots: Sequence[str], *, external: bool) -> Path:
    """The directory that `given` means, without ``..``; a relative path is looked for under each of `roots`.

    It must lie under one of them, unless `external`: what somebody linked into a root counts as under it. Raises
    InvalidRequest, also when it is no directory.
    """
    if "\0" in given:
        raise InvalidRequest("field 'directory' holds a NUL")
    if not os.path.isabs(given):
        found = [path for root in roots if os.path.isdir(path := os.path.abspath(os.path.join(root, given)))]
        if not found:
            raise InvalidRequest(f"there is no directory {given!r} under {', '.join(roots)} (model_dirs)")
        given = found[0]
    # What is looked at is what is used: the kernel takes a link before "..", this text does not.
    path = os.path.abspath(given)
    if not external and not any(_lies_under(path, root) for root in roots):
        raise InvalidRequest(
            f"directory {path} is not under {', '.join(roots)} (model_dirs)",
            hint="copy it there, or set admin.allow_external_dirs",
        )
    if not os.path.isdir(path):
        raise InvalidRequest(f"directory {path} is not there, or is no directory")
    return Path(path)


def allowed_bundle(given: str, roots: Sequence[str], *, external: bool) -> Path:
    """As `allowed_directory`, and it must have a manifest."""
    path = allowed_directory(given, roots, external=external)
    if not os.path.lexists(path / MANIFEST):
        raise InvalidRequest(f"directory {path} has no {MANIFEST}, so it is no bundle")
    return path


def _lies_under(path: str, root: str) -> bool:
    root = os.path.abspath(root)
    if path != root and os.path.commonpath([path, root]) == root:
        return True
    real, real_root = os.path.realpath(path), os.path.realpath(root)
    return real != real_root and os.path.commonpath([real, real_root]) == real_root
