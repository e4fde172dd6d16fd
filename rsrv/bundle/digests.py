"""The `files:` digests of a bundle: computing, comparing and writing them anew (B-15a)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rsrv.bundle.blocks import FileDigest
from rsrv.bundle.directory import Bundle
from rsrv.bundle.files import (
    HOOKS,
    LEGACY_HOOKS,
    MANIFEST,
    MAX_PROGRAM_BYTES,
    bundle_files,
    link_problem,
    open_regular,
    read_program,
    read_regular,
    sync_directory,
)
from rsrv.bundle.manifest import KEYS, MAX_MANIFEST_BYTES, load_mapping, parse_manifest
from rsrv.bundle.outline import replace_block
from rsrv.bundle.problems import violation
from rsrv.bundle.programs import is_program_name
from rsrv.bundle.text import emit_block, emit_manifest
from rsrv.core.errors import BundleError, DigestMismatch, ManifestError

DigestsMode = Literal["strict", "programs", "off"]


@dataclass(frozen=True, slots=True)
class DigestFinding:
    """A file that differs from its digest: in `size`, which then is all that was looked at, or in `sha256`.

    `declared` is None for a file that ``files`` lacks, `size` for one that is missing. A difference in a program, or a
    missing file, is an error; any other file may be replaced on its own: a warning.
    """

    file: str
    declared: FileDigest | None
    size: int | None
    sha256: str | None
    severity: Literal["error", "warning"]

    @property
    def message(self) -> str:
        if self.size is None:
            return f"{self.file} is listed in files, but missing"
        if self.declared is None:
            return f"{self.file} is not listed in files"
        if self.declared.size != self.size:
            return f"{self.file} has {self.size} bytes, files says {self.declared.size}"
        if self.sha256 is None:
            return f"{self.file} has {self.size} bytes; programs above {MAX_PROGRAM_BYTES} are not read"
        return f"{self.file} has sha256 {self.sha256}, files says {self.declared.sha256}"


def digest_file(
    path: Path | str, *, max_bytes: int | None = None, look: Callable[[], None] = lambda: None
) -> FileDigest:
    """Size and sha256 of a regular file, read in parts; `look` is called after each and may raise.

    Raises BundleError when it cannot be read, or is larger than `max_bytes`.
    """
    file = Path(path)
    fd = open_regular(file, error=BundleError, rule="B-15a")
    hasher = hashlib.sha256()
    size = 0
    buffer = bytearray(1 << 20)
    with open(fd, "rb", buffering=0) as stream:
        if max_bytes is not None and (large := os.fstat(fd).st_size) > max_bytes:
            raise violation(
                BundleError, "B-15a", f"{file}: {large} bytes; at most {max_bytes} are read", file=file.name
            )
        try:
            while count := stream.readinto(buffer):
                hasher.update(memoryview(buffer)[:count])
                size += count
                look()
        except OSError as error:
            raise violation(
                BundleError, "B-15a", f"{file}: cannot be read: {error.strerror}", file=file.name
            ) from error
    return FileDigest(size, hasher.hexdigest())


def digest_bytes(data: bytes) -> FileDigest:
    return FileDigest(len(data), hashlib.sha256(data).hexdigest())


def verify_files(
    bundle: Bundle, which: Literal["programs", "all"] = "programs", *, look: Callable[[], None] = lambda: None
) -> list[DigestFinding]:
    """Files of `bundle` that differ from the digests in its manifest; empty when the manifest has none.

    `look` is called now and then, and may raise.
    """
    declared = bundle.manifest.files
    if declared is None:
        return []
    programs = {_name_in(bundle, path) for path in bundle.program_files()}
    present = set(bundle_files(bundle.path)) if which == "all" else set()
    names = programs | present | set(declared) if which == "all" else programs
    findings = []
    for name in sorted(names):
        is_there = name in present or (name in programs and (bundle.path / name).is_file())
        size = (bundle.path / name).stat().st_size if is_there else None
        wanted, sha256 = declared.get(name), None
        readable = name not in programs or (size is not None and size <= MAX_PROGRAM_BYTES)
        if wanted is not None and size == wanted.size and readable:  # else the size tells enough
            actual = digest_file(bundle.path / name, look=look)
            if actual == wanted:
                continue
            size, sha256 = actual.size, actual.sha256
        severity: Literal["error", "warning"] = "error" if name in programs or size is None else "warning"
        findings.append(DigestFinding(name, wanted, size, sha256, severity))
    return findings


def read_verified_program(bundle: Bundle, path: Path, digests: DigestsMode) -> bytes:
    """The bytes of a program of `bundle`, which are the very bytes that were compared with its digest.

    Raises DigestMismatch when they differ, unless `digests` is ``off`` or the manifest has no ``files``. Raises
    BundleError for a file above `MAX_PROGRAM_BYTES`, which is not read.
    """
    data = read_program(path)
    if digests == "off" or bundle.manifest.files is None:
        return data
    name, actual = _name_in(bundle, path), digest_bytes(data)
    if actual != (declared := bundle.manifest.files.get(name)):
        finding = DigestFinding(name, declared, actual.size, actual.sha256, "error")
        raise violation(
            DigestMismatch,
            "B-15a",
            f"bundle {bundle.name!r}: {finding.message}",
            file=name,
            hint="export the bundle again; 'rsrv bundle seal' accepts the file as it is",
        )
    return data


def _name_in(bundle: Bundle, path: Path) -> str:
    return path.relative_to(bundle.path).as_posix()


def seal(directory: Path | str) -> Mapping[str, FileDigest]:
    """Write the digests of all files into the manifest's ``files`` and leave every other byte of it alone; return them.

    The manifest must be valid but for ``files``. It is replaced in one step; its permissions stay.
    """
    bundle = Path(os.path.abspath(directory))
    path = bundle / MANIFEST
    text = read_regular(path, max_bytes=MAX_MANIFEST_BYTES, error=ManifestError, rule="B-1")
    rest = {key: value for key, value in load_mapping(text).items() if key != "files"}
    has_hooks = any(os.path.lexists(bundle / file) for file in (HOOKS, LEGACY_HOOKS))
    parse_manifest(rest, name=bundle.name, has_hooks=has_hooks)
    names = bundle_files(bundle)
    for name in names:
        trouble = link_problem(bundle / name, bundle.parent)
        if trouble is not None:
            raise violation(BundleError, "B-1", f"bundle {bundle.name!r}: {name} {trouble}", file=name)
    digests = {
        name: digest_file(bundle / name, max_bytes=MAX_PROGRAM_BYTES if is_program_name(name) else None)
        for name in names
    }
    sealed = _with_files(text.decode(), rest, files_block(digests)).encode()
    if len(sealed) > MAX_MANIFEST_BYTES:
        problem = f"{path}: {len(sealed)} bytes with the digests of {len(names)} files, above {MAX_MANIFEST_BYTES}"
        raise violation(ManifestError, "X-13", problem, file=MANIFEST)
    if sealed != text:
        _replace(path, sealed)
    return digests


def files_block(digests: Mapping[str, FileDigest]) -> dict[str, dict[str, Any]]:
    """`digests` as the manifest's ``files`` holds them."""
    return {name: {"size": digest.size, "sha256": digest.sha256} for name, digest in digests.items()}


def _with_files(text: str, rest: Mapping[str, Any], files: Mapping[str, Any]) -> str:
    """`text` with `files` in place of its own; written anew only when its layout leaves no lines to replace."""
    replaced = replace_block(text, "files", emit_block("files", files), before="x-")
    if replaced is not None:
        # The text is edited without a full parse, so what came out is read again before anybody relies on it.
        with contextlib.suppress(ManifestError):
            found = load_mapping(replaced.encode())
            if found.pop("files", None) == files and repr(found) == repr(rest):  # == is never true of .nan
                return replaced
    return emit_manifest({**rest, "files": files}, KEYS)


def _replace(path: Path, data: bytes) -> None:
    mode = path.stat().st_mode & 0o7777
    fd, staged = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(staged)
        raise
    sync_directory(path.parent)
