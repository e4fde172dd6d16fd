"""``rsrv cache``: what the executable cache of a server holds, and how to empty it. Loads no executable."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rsrv.cli import output
from rsrv.core.errors import UsageError

if TYPE_CHECKING:
    from rsrv.runtime.cache import CacheEntry
    from rsrv.runtime.cache_directory import CacheDirectory

VARIABLE = "RSRV_WORKER_CACHE_DIR"

app = typer.Typer(no_args_is_help=True, help="Look at and empty the cache of compiled programs.")

DirectoryArgument = Annotated[
    Path | None, typer.Argument(metavar="DIR", help=f"The cache_dir of the servers; default: ${VARIABLE}.")
]

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@app.command("ls")
def list_(directory: DirectoryArgument = None, as_json: output.JsonOption = False) -> None:
    """List the compiled programs in a cache, the one that was used last on top.

    Example:
        rsrv cache ls /var/cache/rsrv
        rsrv cache ls /var/cache/rsrv --json
    """
    from rsrv.runtime.cache import list_entries

    with _open(directory) as cache:
        entries = list_entries(cache)[::-1]
    if output.is_json():
        output.json([_facts(entry) for entry in entries])
        return
    total = sum(entry.n_bytes for entry in entries)
    output.table(
        f"{cache.path}: {len(entries)} programs, {output.size(total)}",
        ("key", "program", "size", "last used", "compiled for"),
        [
            (entry.key[:12], entry.label or "-", output.size(entry.n_bytes), _age(entry.used), _where(entry))
            for entry in entries
        ],
    )


@app.command()
def clear(
    directory: DirectoryArgument = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove every program.")] = False,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Remove what was not used for 90m, 12h, 30d, 4w.")
    ] = None,
    as_json: output.JsonOption = False,
) -> None:
    """Remove compiled programs from a cache; servers that use it compile them again when they start next.

    Example:
        rsrv cache clear /var/cache/rsrv --older-than 30d
        rsrv cache clear /var/cache/rsrv --all
    """
    if everything == (older_than is not None):
        raise UsageError("wanted either --all or --older-than AGE", hint="rsrv cache ls shows what there is")
    before = None if older_than is None else time.time() - age_seconds(older_than)
    removed = n_bytes = 0
    with _open(directory) as cache:
        for file in cache.files():
            if (before is None or file.used < before) and cache.remove(file.name):
                removed += 1
                n_bytes += file.n_bytes
    if output.is_json():
        output.json({"removed": removed, "bytes": n_bytes})
    else:
        output.data(f"removed {removed} programs, {output.size(n_bytes)}")


def age_seconds(text: str) -> float:
    """``90m``, ``12h``, ``30d`` or ``4w`` in seconds. Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smhdw])", text.strip())
    if match is None:
        raise UsageError(f"--older-than {text!r} is no age; wanted a number and s, m, h, d or w", hint="such as 30d")
    return float(match[1]) * _SECONDS[match[2]]


def _open(directory: Path | None) -> CacheDirectory:
    from rsrv.runtime.cache import DIRECTORY
    from rsrv.runtime.cache_directory import CacheDirectory

    if directory is None:
        value = os.environ.get(VARIABLE)
        if not value:
            raise UsageError(f"which cache? give the directory, or set {VARIABLE}")
        directory = Path(value)
    if not (directory / DIRECTORY).is_dir():
        raise UsageError(
            f"{directory} holds no executable cache (there is no directory {DIRECTORY} in it)",
            hint="give what the servers have as cache_dir",
        )
    return CacheDirectory(directory / DIRECTORY, create=False)


def _facts(entry: CacheEntry) -> dict[str, object]:
    return {
        "key": entry.key,
        "program": entry.label,
        "bytes": entry.n_bytes,
        "last_used": entry.used,
        "compiled_for": dict(entry.facts),
        "problem": entry.problem or None,
    }


def _where(entry: CacheEntry) -> str:
    if entry.problem:
        return f"unusable: {entry.problem}"
    names = ("device", "jaxlib", "threads")
    return ", ".join(f"{name} {entry.facts[name]}" for name in names if name in entry.facts) or "-"


def _age(used: float) -> str:
    seconds = max(0.0, time.time() - used)
    for unit in ("d", "h", "m"):
        if seconds >= _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.0f} {unit} ago"
    return "just now"
