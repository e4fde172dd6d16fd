"""Files that a long command writes at its end, refused at its beginning when they cannot be written."""

from __future__ import annotations

import os
from pathlib import Path


def require_writable(option: str, path: Path | None) -> None:
    """Make the directory of the file `path` that `option` names, and see that the file can be written there later.

    None is an option that was not given. Raises UsageError.
    """
    from rsrv.core.errors import UsageError

    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option} {path} is a directory, want a file", hint=f"for example {option} {path}/report")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.filename} cannot be made: {error.strerror}") from error
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written: permission denied")
