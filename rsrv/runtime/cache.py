"""The executable cache: what a program was compiled to the last time, on this machine and with these settings.

A cache never fails a caller. Whatever is wrong with it is one warning, and the program is compiled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rsrv.core.errors import CacheError
from rsrv.runtime.cache_directory import SUFFIX, CacheDirectory
from rsrv.runtime.compiled import Compiled
from rsrv.runtime.device import CompileOptions
from rsrv.runtime.fingerprint import Fingerprint
from rsrv.stablehlo.policy import REWRITES_VERSION, Policy

logger = logging.getLogger(__name__)

FORMAT = 1
"""1: magic; sha256 of all that follows; length of a JSON header (u32, little-endian); the header; the blob."""

DIRECTORY = "executables"
"""Where in ``cache_dir`` the entries lie."""

_MAGIC = b"RSRVEXE1"
_DIGEST_BYTES = 32
_LENGTH = struct.Struct("<I")
_KINDS_OF_DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError, struct.error)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the server started."""

    hits: int = 0
    misses: int = 0
    rejected: int = 0
    stored: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One entry as people see it; `problem` says why it cannot be used ("" when it can, as far as is known here)."""

    key: str
    n_bytes: int
    used: float
    label: str
    facts: Fingerprint
    problem: str = ""


class ExecutableCache:
    """The cache of one server. Thread safe; several servers may share a directory.

    Args:
        directory: `open_cache` opens it.
        facts: what executables depend on here (`fingerprint`).
        max_bytes: all entries together; beyond it the least recently used go. None = no bound.
    """

    def __init__(self, directory: CacheDirectory, facts: Fingerprint, max_bytes: int | None = None) -> None:
        self._directory = directory
        self._facts = dict(facts)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._stats = CacheStats()
        self._broken = False

    @property
    def stats(self) -> CacheStats:
        return self._stats

    @property
    def empty(self) -> bool:
        """Whether there is nothing to find."""
        try:
            return not self._directory.files()
        except OSError:
            return True

    def key(self, program_sha256: str, policy: Policy, options: CompileOptions) -> str:
        """The name of what the program with this digest compiles to; programs are hashed, never parsed."""
        identity = {
            "format": FORMAT,
            "program": program_sha256,
            "policy": policy.to_json(),
            "rewrites": REWRITES_VERSION,
            "options": options.to_json(),
            "facts": self._facts,
        }
        return hashlib.sha256(_canonical(identity)).hexdigest()

    def has(self, key: str) -> bool:
        """Whether there is such an entry; whether it can be used is seen when it is loaded."""
        return self._directory.has(key)

    def load(self, key: str) -> Compiled | None:
        """What was stored as `key`, checked bit by bit; None when there is nothing, or nothing that can be used."""
        try:
            data = self._directory.read(key)
            if data is None:
                self._count("misses")
                return None
            header, blob = _decode(data)
            _require_ours(header, key, self._facts)
            compiled = Compiled.from_json(header["compiled"], blob)
        except (CacheError, *_KINDS_OF_DAMAGE) as error:
            message = error.message if isinstance(error, CacheError) else f"its header is damaged: {error!r}"
            self.reject(key, message)
            return None
        self._count("hits")
        return compiled

    def reject(self, key: str, why: str) -> None:
        """Say once that an entry cannot be used, and remove it so that it can be written anew."""
        self._count("rejected")
        logger.warning("cached executable ignored file=%s why=%s", self._path(key), why)
        try:
            self._directory.remove(key)
        except OSError as error:
            logger.debug("cached executable not removed file=%s why=%s", self._path(key), error)

    def store(self, key: str, compiled: Compiled, *, label: str = "") -> None:
        """Keep `compiled` as `key`; `label` tells people what it is. After one failure nothing more is written."""
        if self._broken:
            return
        header = {
            "key": key,
            "facts": self._facts,
            "label": label,
            "stored": time.time(),
            "compiled": compiled.to_json(),
        }
        parts = _encode(header, compiled.blob or b"")
        if self._max_bytes is not None and sum(map(len, parts)) > self._max_bytes:
            return
        try:
            self._directory.write(key, parts)
            self._count("stored")
            if self._max_bytes is not None:
                self._count("evicted", self._directory.trim(self._max_bytes, keep=key))
        except IsADirectoryError:
            # In the way of this entry, and of no other.
            logger.warning("executable not cached file=%s why=it is a directory", self._path(key))
        except OSError as error:
            with self._lock:
                first, self._broken = not self._broken, True
            if first:
                path, why = self._directory.path, error.strerror or error
                logger.warning("executables are not cached any more directory=%s why=%s", path, why)

    def close(self) -> None:
        self._directory.close()

    def _path(self, key: str) -> Path:
        return self._directory.path / (key + SUFFIX)

    def _count(self, what: str, n: int = 1) -> None:
        with self._lock:
            self._stats = replace(self._stats, **{what: getattr(self._stats, what) + n})


def open_cache(cache_dir: str | Path, facts: Fingerprint, max_bytes: int | None = None) -> ExecutableCache | None:
    """The cache below `cache_dir`; None, after a warning, when that directory cannot be used."""
    try:
        return ExecutableCache(CacheDirectory(Path(cache_dir) / DIRECTORY), facts, max_bytes)
    except CacheError as error:
        logger.warning("executables are not cached why=%s", error.message)
        return None


def list_entries(directory: CacheDirectory) -> list[CacheEntry]:
    """Every entry, the least recently used first; looking at them does not count as use."""
    entries = []
    for file in directory.files():
        label, facts, problem = "", {}, ""
        try:
            header, _ = _decode(directory.read(file.name, touch=False) or b"")
            label, facts = str(header["label"]), {str(k): str(v) for k, v in header["facts"].items()}
        except CacheError as error:
            problem = error.message
        except _KINDS_OF_DAMAGE as error:
            problem = f"its header is damaged: {error!r}"
        entries.append(CacheEntry(file.name, file.n_bytes, file.used, label, facts, problem))
    return entries


def _encode(header: Mapping[str, Any], blob: bytes) -> list[bytes]:
    text = _canonical(header)
    length = _LENGTH.pack(len(text))
    hasher = hashlib.sha256(length)
    hasher.update(text)
    hasher.update(blob)
    return [_MAGIC + hasher.digest() + length + text, blob]


def _decode(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and blob of an entry. Raises CacheError when a single bit is not what was written."""
    start = len(_MAGIC) + _DIGEST_BYTES
    if not data.startswith(_MAGIC) or len(data) < start + _LENGTH.size:
        raise CacheError(f"its {len(data)} bytes are not an entry of this version")
    with memoryview(data) as memory:
        if hashlib.sha256(memory[start:]).digest() != data[len(_MAGIC) : start]:
            raise CacheError("its bytes do not have the sha256 that was written with them")
    (length,) = _LENGTH.unpack_from(data, start)
    text = start + _LENGTH.size
    header: dict[str, Any] = json.loads(data[text : text + length])
    return header, data[text + length :]


def _require_ours(header: Mapping[str, Any], key: str, facts: Mapping[str, str]) -> None:
    """An entry has the right name only as long as nobody renames it."""
    theirs = header["facts"]
    for name in sorted({*facts, *theirs}):
        if facts.get(name) != theirs.get(name):
            raise CacheError(f"it was compiled where {name} is {theirs.get(name)!r}, here it is {facts.get(name)!r}")
    if header["key"] != key:
        raise CacheError(f"it holds what belongs to {header['key']}")


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
