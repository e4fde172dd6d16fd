"""A directory that is written beside its target and put in its place in one step, as a whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rsrv.bundle.files import MANIFEST, sync_directory
from rsrv.bundle.problems import violation
from rsrv.core.errors import BundleError

log = logging.getLogger(__name__)

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EPERM}


@contextlib.contextmanager
def staged_directory(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """An empty directory ``.<name>.<pid>.partial`` beside `target`; it becomes `target` when the block ends well.

    An existing target is replaced as a whole, and only with `overwrite` (X-12). When the block raises, or the
    replacement fails, the target is what it was and the staged directory is gone. Raises BundleError when the target
    exists, is something that a bundle must not replace, or is being written by another export of this process id.
    """
    _require_replaceable(target, overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise violation(
            BundleError, "X-12", f"{target} cannot be created: a file is in the place of a directory"
        ) from None
    staged = target.parent / f".{target.name}.{os.getpid()}.partial"
    lock = _claim(staged)
    try:
        with _naming(target):
            yield staged
            _set_modes(staged)
            _sync_tree(staged)
        replaced = _install(staged, target, overwrite)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    finally:
        os.close(lock)
    # The new bundle is in place: what fails from here on is no failure of the export.
    try:
        sync_directory(target.parent)
        if replaced is not None:
            shutil.rmtree(replaced)
    except OSError as error:
        log.warning("bundle written, but not all is tidy path=%s error=%s", target, error)


@contextlib.contextmanager
def _naming(target: Path) -> Iterator[None]:
    """A write that fails (disk full, quota) does not say where: say it."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in _NO_ROOM:
            raise
        raise violation(BundleError, "X-12", f"{target} cannot be written: {error.strerror}") from error


def final_name(staged: Path) -> str:
    """The name that the staged directory `staged` is going to have."""
    return staged.name.removeprefix(".").removesuffix(".partial").rpartition(".")[0]


def _require_replaceable(target: Path, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    trouble, hint = None, None
    if not overwrite:
        trouble, hint = "exists", "overwrite=True (--overwrite) replaces it as a whole"
    elif target.is_symlink() or not target.is_dir():
        trouble = "is not a directory, so it is not replaced"
    elif any(target.iterdir()) and not (target / MANIFEST).is_file():
        trouble = f"holds files but no {MANIFEST}: not a bundle, so it is not replaced"
    if trouble is not None:
        raise violation(BundleError, "X-12", f"{target} {trouble}", hint=hint)


def _claim(staged: Path) -> int:
    """Create `staged` and lock it; returns the lock.

    What a dead process of the same id left there (ids repeat in containers) is removed.
    """
    for _ in range(2):
        with contextlib.suppress(FileExistsError):
            os.mkdir(staged)
            os.chmod(staged, 0o755)  # whatever the umask says
            return _lock(staged)
        os.close(_lock(staged))
        shutil.rmtree(staged)
    raise violation(BundleError, "X-12", f"{staged} cannot be created: it keeps coming back")


def _lock(staged: Path) -> int:
    fd = os.open(staged, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise violation(BundleError, "X-12", f"{staged} is being written by another export") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _set_modes(directory: Path) -> None:
    """The same permissions whatever the umask of the process and the modes of copied files."""
    for folder, _, files in os.walk(directory):
        os.chmod(folder, 0o755)
        for file in files:
            os.chmod(os.path.join(folder, file), 0o644)


def _sync_tree(directory: Path) -> None:
    for folder, _, files in os.walk(directory):
        for name in files:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        sync_directory(Path(folder))


def _install(staged: Path, target: Path, overwrite: bool) -> Path | None:
    """Put `staged` at `target`; returns where the old target is now, if there was one."""
    if not os.path.lexists(target):
        if not _rename(staged, target, _NOREPLACE):
            os.rename(staged, target)
        return None
    _require_replaceable(target, overwrite)
    if _rename(staged, target, _EXCHANGE):
        return staged
    # Two steps where the file system cannot exchange names: a crash between them leaves the old bundle under `aside`.
    aside = staged.with_name(f"{staged.name.removesuffix('.partial')}.old.partial")
    os.rename(target, aside)
    try:
        os.rename(staged, target)
    except BaseException:
        os.rename(aside, target)
        raise
    return aside


def _rename(source: Path, target: Path, flags: int) -> bool:
    """renameat2(2); False where the C library, the kernel or the file system does not have it."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    if code == errno.EEXIST:
        raise violation(BundleError, "X-12", f"{target} appeared while the bundle was written")
    raise OSError(code, os.strerror(code), str(target))
