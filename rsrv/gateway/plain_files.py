"""Reading a small file that others write: never a pipe or a device, which would keep whoever reads it waiting."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_plain(path: Path, limit: int) -> bytes:
    """The content, and no more than `limit` bytes of it. Raises OSError, also for what is no plain file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL in the path
        raise OSError(errno.EINVAL, str(error)) from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        with open(fd, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(fd)
