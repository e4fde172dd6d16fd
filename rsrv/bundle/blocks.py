"""The small blocks of a manifest beside its tensors: batching, meta, hooks and file digests, each with its reader."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rsrv.bundle.files import MANIFEST, relative_name_problem
from rsrv.bundle.problems import Problems
from rsrv.core.shapes import is_extent, is_integer

_SHA256 = re.compile(r"[0-9a-f]{64}")
HOOK_MODES = ("thread", "process")
MAX_PROCESSES = 256
"""So that a slip of the pen does not fill a machine with interpreters."""
MAX_SECONDS = 1e9
"""As in the configuration: no clock, lock or poll of the system takes more."""


@dataclass(frozen=True, slots=True)
class BatchingSpec:
    """Batch sizes that programs exist for, ascending; `dynamic`: one program with a symbolic batch axis serves all."""

    compiled_batch_sizes: tuple[int, ...] = ()
    dynamic: bool = False


@dataclass(frozen=True, slots=True)
class HooksSpec:
    """How the hooks run; None means what the worker's configuration says."""

    mode: str = "thread"
    processes: int | None = None
    timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Size in bytes and lower-case hexadecimal sha256 of a file."""

    size: int
    sha256: str


def is_sha256(text: str) -> bool:
    return _SHA256.fullmatch(text) is not None


def read_batching(value: object, problems: Problems, *, strict: bool) -> BatchingSpec:
    """Types only; that sizes are positive and unique is a later rule (§1.14)."""
    at = ("batching",)
    if not isinstance(value, dict):
        problems.add("B-30", f"batching must be a mapping, got {value!r}", at=at)
        return BatchingSpec()
    if strict:
        problems.unknown_keys(value, ("compiled_batch_sizes", "dynamic"), at=at)
    sizes = value.get("compiled_batch_sizes", [])
    if not isinstance(sizes, list):
        problems.add(
            "B-30",
            f"batching.compiled_batch_sizes must be a list of integers, got {sizes!r}",
            at=(*at, "compiled_batch_sizes"),
        )
        sizes = []
    for i, size in enumerate(sizes):
        if not is_integer(size):
            problems.add(
                "B-15",
                f"batching.compiled_batch_sizes[{i}] is {size!r}, want an integer",
                at=(*at, "compiled_batch_sizes", i),
            )
    dynamic = value.get("dynamic", False)
    if not isinstance(dynamic, bool):
        problems.add("B-12a", f"batching.dynamic must be true or false, got {dynamic!r}", at=(*at, "dynamic"))
        dynamic = False
    return BatchingSpec(tuple(sorted(size for size in sizes if is_integer(size))), dynamic)


def read_meta_calls(value: object, problems: Problems, *, strict: bool) -> tuple[str, ...]:
    """``meta.calls``, the models that a meta may call (B-52)."""
    at = ("meta",)
    if not isinstance(value, dict):
        problems.add("B-52", f"kind: meta needs a mapping 'meta' with a list 'calls', got {value!r}", at=at)
        return ()
    if strict:
        problems.unknown_keys(value, ("calls",), at=at)
    calls = value.get("calls")
    if not isinstance(calls, list):
        problems.add("B-52", f"meta.calls must be a list of model names, got {calls!r}", at=(*at, "calls"))
        return ()
    for i, call in enumerate(calls):
        if not isinstance(call, str) or not call:
            problems.add("B-52", f"meta.calls[{i}] is {call!r}, want the name of a model", at=(*at, "calls", i))
    return tuple(call for call in calls if isinstance(call, str) and call)


def read_hooks(value: object, problems: Problems, *, strict: bool) -> HooksSpec:
    at = ("hooks",)
    if not isinstance(value, dict):
        problems.add("B-75", f"hooks must be a mapping, got {value!r}", at=at)
        return HooksSpec()
    if strict:
        problems.unknown_keys(value, ("mode", "processes", "timeout_seconds"), at=at)
    mode = value.get("mode", "thread")
    if mode not in HOOK_MODES:
        problems.add("B-75", f"hooks.mode is {mode!r}, want one of {', '.join(HOOK_MODES)}", at=(*at, "mode"))
        mode = "thread"
    processes = value.get("processes")
    if "processes" in value and not _is_process_count(processes):
        problems.add(
            "B-75",
            f"hooks.processes is {processes!r}, want an integer from 1 to {MAX_PROCESSES}",
            at=(*at, "processes"),
        )
        processes = None
    timeout = value.get("timeout_seconds")
    if "timeout_seconds" in value and not _is_duration(timeout):
        problems.add(
            "B-75",
            f"hooks.timeout_seconds is {timeout!r}, want a number above 0 and at most {MAX_SECONDS:g}",
            at=(*at, "timeout_seconds"),
        )
        timeout = None
    return HooksSpec(mode, processes, None if timeout is None else float(timeout))


def _is_process_count(value: object) -> bool:
    return isinstance(value, int) and is_extent(value) and value <= MAX_PROCESSES


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_SECONDS


def read_files(value: object, problems: Problems, *, strict: bool) -> Mapping[str, FileDigest]:
    """``files``: name → size and sha256 of every file but the manifest (B-15a)."""
    at = ("files",)
    digests: dict[str, FileDigest] = {}
    if not isinstance(value, dict):
        problems.add("B-15a", f"files must be a mapping file name → {{size, sha256}}, got {value!r}", at=at)
        return digests
    for name, entry in value.items():
        place = (*at, name) if isinstance(name, str) else at
        trouble = relative_name_problem(name) if isinstance(name, str) else "is not a string"
        if trouble is not None or name == MANIFEST:
            problems.add("B-15a", f"files names {name!r}, which {trouble or 'holds this very list'}", at=place)
            continue
        if not isinstance(entry, dict):
            problems.add("B-15a", f"files[{name!r}] must be {{size, sha256}}, got {entry!r}", at=place)
            continue
        if strict:
            problems.unknown_keys(entry, ("size", "sha256"), at=place)
        size, sha256 = entry.get("size"), entry.get("sha256")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            problems.add("B-15a", f"files[{name!r}].size is {size!r}, want a number of bytes", at=(*place, "size"))
        elif not isinstance(sha256, str) or not is_sha256(sha256):
            problems.add(
                "B-15a",
                f"files[{name!r}].sha256 is {sha256!r}, want 64 lower-case hexadecimal digits in quotes",
                at=(*place, "sha256"),
            )
        else:
            digests[name] = FileDigest(size, sha256)
    return digests
