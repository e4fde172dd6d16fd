"""Which files make up a bundle, what they may be called, and how they are opened; not what they hold."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from rsrv.bundle.problems import violation
from rsrv.core.errors import BundleError

MANIFEST = "manifest.yaml"
WEIGHTS = "weights.safetensors"
HOOKS = "model.py"
LEGACY_HOOKS = "model.jl"
"""Hooks of format 2.0 bundles, in a language that is not run here."""
PATCH = "working_tree.patch"
GOLDEN = "golden.safetensors"

MAX_PROGRAM_BYTES = 1 << 30
"""A program above this size is refused before it is read. Weights are not part of it: those we know have a few MB."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PASSING_SUFFIXES = (".tmp", ".partial", ".swp", ".swo", ".swx", "~")


def is_passing(name: str) -> bool:
    """True for names that never belong to a bundle: hidden files, editor swap files, files still being written."""
    return name.startswith(".") or name.endswith(_PASSING_SUFFIXES) or name == "__pycache__"


def name_problem(name: str) -> str | None:
    """Why `name` cannot be the name of a bundle or of a file directly in a directory; None when it can."""
    if not name:
        return "is empty"
    if name in (".", ".."):
        return "is not a name"
    if "/" in name or "\\" in name:
        return "contains a path separator"
    if _CONTROL.search(name):
        return "contains a control character"
    if not is_text(name):
        return "is not valid UTF-8"
    return None


def relative_name_problem(name: str) -> str | None:
    """As `name_problem`, for a file that may lie in a subdirectory of the bundle (``tokenizer/vocab.txt``)."""
    if not name:
        return "is empty"
    for part in name.split("/"):
        problem = name_problem(part)
        if problem is not None:
            return "leaves the bundle" if part in ("", ".", "..") else problem
    return None


def is_text(name: str) -> bool:
    """False for a string that has no UTF-8 form, such as a file name of other bytes."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def require_name(name: str) -> str:
    """`name` itself when a bundle can be called so, else BundleError (B-2)."""
    problem = name_problem(name)
    if problem is not None:
        raise violation(BundleError, "B-2", f"a bundle cannot be called {name!r}: the name {problem}")
    return name


def link_problem(path: Path, repository: Path) -> str | None:
    """Why the symbolic link `path` is refused; None when it stays inside of `repository`, or is no link."""
    if not path.is_symlink():
        return None
    target = Path(os.path.realpath(path))
    if target.is_relative_to(os.path.realpath(repository)):
        return None
    return f"is a symbolic link to {str(target)!r}, outside of the repository {str(repository)!r}"


def walk(directory: Path) -> list[str]:
    """Names, relative to `directory`, of everything in a bundle but passing names; sorted.

    Links to directories are listed and not entered: what lies behind them belongs to somebody else.
    """
    found: list[str] = []
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(directory / prefix) as entries:
            for entry in entries:
                if is_passing(entry.name):
                    continue
                found.append(prefix + entry.name)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{found[-1]}/")
    return sorted(found)


def bundle_files(directory: Path) -> list[str]:
    """Names of the regular files that the manifest's ``files`` covers: all but the manifest and passing names.

    Raises BundleError for a name that cannot be written into a manifest.
    """
    names = [name for name in walk(directory) if name != MANIFEST and (directory / name).is_file()]
    for name in names:
        problem = relative_name_problem(name)
        if problem is not None:
            raise violation(BundleError, "B-15a", f"{directory}: the file name {name!r} {problem}")
    return names


def open_regular(path: Path, *, error: type[BundleError], rule: str) -> int:
    """A descriptor for reading the regular file `path`; anything else there raises `error`, without blocking."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as problem:
        raise violation(error, rule, f"{path}: cannot be opened: {problem.strerror}", file=path.name) from problem
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise violation(error, rule, f"{path}: is not a regular file", file=path.name)
    return fd


def read_regular(path: Path, *, max_bytes: int | None = None, error: type[BundleError], rule: str) -> bytes:
    """The bytes of the regular file `path`. A file above `max_bytes` is refused before it is read."""
    fd = open_regular(path, error=error, rule=rule)
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        if max_bytes is not None and size > max_bytes:
            raise violation(error, rule, f"{path}: {size} bytes; at most {max_bytes} are read", file=path.name)
        try:
            data = file.read() if max_bytes is None else file.read(max_bytes + 1)
        except OSError as problem:
            raise violation(error, rule, f"{path}: cannot be read: {problem.strerror}", file=path.name) from problem
    if max_bytes is not None and len(data) > max_bytes:
        raise violation(error, rule, f"{path}: grew above {max_bytes} bytes while it was read", file=path.name)
    return data


def read_program(path: Path) -> bytes:
    """The bytes of a program file. Raises BundleError (B-32), also for one above `MAX_PROGRAM_BYTES`."""
    return read_regular(path, max_bytes=MAX_PROGRAM_BYTES, error=BundleError, rule="B-32")


def sync_directory(path: Path) -> None:
    """Make renames and new names in `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
