"""Objects in /dev/shm: which names are acceptable, how they are opened, and whose they are."""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import Final

from rsrv.core.errors import InvalidRequest, RegionLimit, RsrvError

DIRECTORY: Final = "/dev/shm/"
# O_NONBLOCK: a FIFO, or a file on which somebody holds a lease, must not stall the caller.
OPEN_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

_NAME_MAX = 255
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_NONCE_BYTES = 16
_OWNED_NAME = re.compile(r"rsrv-.+-([0-9]{1,10})-[0-9a-f]{16}")


def same_ipc_namespace(name: str, nonce: bytes = b"") -> bool:
    """Whether this process can open the object `name`, and with a 16-byte nonce, whether the object starts with it.

    Never raises. A nonce of any other length is False: comparing fewer bytes would let a caller guess what is in
    somebody else's object byte by byte.
    """
    if nonce and len(nonce) != _NONCE_BYTES:
        return False
    try:
        fd = open_object(object_name(name), os.O_RDONLY)
    except RsrvError:
        return False
    try:
        return not nonce or os.pread(fd, _NONCE_BYTES, 0) == nonce
    except OSError:
        return False
    finally:
        os.close(fd)


def object_name(key: str) -> str:
    """The file name in /dev/shm of a key with or without leading slashes. Raises InvalidRequest for a hostile one."""
    name = key.lstrip("/")
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"shared memory key {key!r} is not valid text") from None
    if not 0 < length <= _NAME_MAX or "/" in name or "\0" in name or name in (".", ".."):
        shown = key if length <= _NAME_MAX else f"{key[:40]}…"
        raise InvalidRequest(
            f"shared memory key {shown!r} is not the name of an object: it has 1 to {_NAME_MAX} bytes, no '/' but the "
            f"leading one, no NUL, and is not '.' or '..'"
        )
    return name


def owner_pid(key: str) -> int | None:
    """The pid in a name that `OwnedRegion` made, or None for any other name."""
    match = _OWNED_NAME.fullmatch(key.lstrip("/"))
    return int(match[1]) if match else None


def open_object(file_name: str, access: int) -> int:
    """Open a regular file of /dev/shm. Raises InvalidRequest, or RegionLimit when no descriptor is left."""
    try:
        fd = os.open(DIRECTORY + file_name, access | OPEN_FLAGS)
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise RegionLimit(f"no descriptor for shared memory object {file_name!r}: {error.strerror}") from error
        detail = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise InvalidRequest(f"cannot open shared memory object {file_name!r}: {detail}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidRequest(f"shared memory object {file_name!r} is not a regular file")
    return fd


def alive(pid: int) -> bool:
    """Whether a process of that pid exists here and still runs; a killed one whose parent has not waited does not."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return True
