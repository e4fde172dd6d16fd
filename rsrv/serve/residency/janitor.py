"""Removes what is left in shared memory: weight regions that nobody holds, and the regions of clients that are gone."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rsrv.core.shm.objects import alive, owner_pid
from rsrv.serve.residency.regions import (
    DIRECTORY,
    RegionHeader,
    RegionLock,
    digest_of,
    open_region,
    region_name,
    remove_region,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """One object in shared memory, and what became of it.

    Attributes:
        name: of the file.
        owner: the model of a weight region ("" when it has no header), or the pid of the client.
        nbytes: its size.
        outcome: ``removed``; ``held``, somebody uses it; ``failed``, see `problem`.
    """

    name: str
    owner: str
    nbytes: int
    outcome: Literal["removed", "held", "failed"]
    problem: str = ""


def sweep_unheld(directory: Path | str = DIRECTORY, *, dry_run: bool = False) -> list[Finding]:
    """Remove the weight regions in `directory` that nobody holds, ready or not, and their lock files; sorted by name.

    Safe beside running servers: a region in use is locked, and who opens a lock file looks whether it still is there.
    With `dry_run` nothing is removed. A directory that is not there has nothing in it.
    """
    digests = sorted({digest for name in _names(Path(directory)) if (digest := digest_of(name)) is not None})
    findings = [_sweep(Path(directory), digest, dry_run) for digest in digests]
    return [finding for finding in findings if finding is not None]


def sweep_clients(directory: Path | str = DIRECTORY, *, dry_run: bool = False) -> list[Finding]:
    """Remove the regions that clients of this library made and whose process is gone; sorted by name.

    A client in another pid namespace looks gone: call this where the pids of all clients are visible.
    """
    findings: list[Finding] = []
    for name in sorted(_names(Path(directory))):
        pid = owner_pid(name)
        path = Path(directory, name)
        if pid is None or (status := _regular(path)) is None:
            continue
        outcome: Literal["removed", "held", "failed"] = "held" if alive(pid) else "removed"
        problem = ""
        if outcome == "removed" and not dry_run:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                outcome, problem = "failed", error.strerror or str(error)
        findings.append(Finding(name, str(pid), status.st_size, outcome, problem))
    return findings


def sweep_versions(directory: Path, model: str, keep: int, *, mode: int) -> list[str]:
    """Remove regions of other versions of `model` that nobody holds; only crashes leave them. Their names, sorted.

    Args:
        keep: digest of the version that stays.
        mode: permissions of a lock file that is missing. Lock files stay, as somebody may be about to take them.
    """
    removed: list[str] = []
    wanted = model.encode()
    for name in sorted(_names(directory)):
        digest = digest_of(name)
        if digest is None or digest == keep or name != region_name(digest):
            continue
        path = directory / name
        try:
            if _model_of(path) == wanted and _remove_unheld(path, digest, wanted, mode):
                removed.append(name)
        except OSError as error:
            logger.debug("old weight region stays name=%s model=%s error=%s", name, model, error)
    if removed:
        logger.info("old weight regions removed model=%s names=%s", model, ",".join(removed))
    return removed


def _remove_unheld(path: Path, digest: int, model: bytes, mode: int) -> bool:
    with RegionLock.of(path.parent, digest, mode) as lock:
        # Under the lock the region may be another one than before, made for another model.
        if not (lock.exclude() and lock.is_current() and _model_of(path) == model):
            return False
        remove_region(path)
        return True


def _sweep(directory: Path, digest: int, dry_run: bool) -> Finding | None:
    """The region of `digest`, removed if nobody holds it; None when there is only a lock file, or no regular file."""
    path = directory / region_name(digest)
    status = _regular(path)
    if status is None and os.path.lexists(path):
        return None
    owner = ""
    try:
        owner = (_model_of(path) or b"").decode(errors="replace") if status else ""
        unheld = _try_lock(path, digest, status, dry_run)
    except OSError as error:
        problem = error.strerror or str(error)
        return Finding(path.name, owner, status.st_size, "failed", problem) if status else None
    return Finding(path.name, owner, status.st_size, "removed" if unheld else "held") if status else None


def _try_lock(path: Path, digest: int, status: os.stat_result | None, dry_run: bool) -> bool:
    """Whether nobody holds the region; then it is removed, and its lock file too, unless that is only asked."""
    if dry_run and not path.with_name(f"{path.name}.lock").exists():
        return True
    # A missing lock file gets the permissions of its region, for the case that somebody opens it meanwhile.
    mode = stat.S_IMODE(status.st_mode) if status else 0o600
    with RegionLock.of(path.parent, digest, mode) as lock:
        if not (lock.exclude() and lock.is_current()):
            return False
        if not dry_run:
            remove_region(path)
            with contextlib.suppress(OSError):  # another user's lock file in a sticky directory: it holds no bytes
                lock.path.unlink()
        return True


def _model_of(path: Path) -> bytes | None:
    """The name in a region's header; None without region or header."""
    try:
        fd = open_region(path)
    except FileNotFoundError:
        return None
    try:
        header = RegionHeader.read(fd)
    finally:
        os.close(fd)
    return None if header is None else header.model


def _regular(path: Path) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            return status
    return None


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError as error:
        logger.debug("shared memory cannot be listed directory=%s error=%s", directory, error)
        return []
