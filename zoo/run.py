"""Goes through the models: each in a process of its own, which may take too long, too much memory, or die."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zoo.child import Order, work
from zoo.results import FAILED, Result, append, read

ROOT = Path(__file__).parents[1]

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["zoo.preload"])


@dataclass(frozen=True)
class Limits:
    seconds: float = 900.0
    memory_gb: float = 12.0


def run(
    jobs: Sequence[Order],
    cache: Path,
    *,
    redo: bool = False,
    limits: Limits = Limits(),
    say: Callable[[str], object] = lambda text: None,
    after: Callable[[], object] = lambda: None,
) -> list[Result]:
    """The results of `jobs`, in order; those that `cache` already has as served are taken from there unless `redo`.

    Every new result is appended to `cache` at once, so that an interrupted run goes on where it was. `say` is told what
    happens, `after` is called when a job is done.
    """
    results = []
    for number, job in enumerate(jobs, 1):
        known = read(cache).get(job.name)
        if known is not None and known.served and not redo:
            results.append(known)
            continue
        say(f"[{number}/{len(jobs)}] {job.name} …")
        began = time.monotonic()
        result = _one(job, cache, limits)
        word = "served" if result.served else f"failed at {result.stage}: {result.error}"
        say(f"[{number}/{len(jobs)}] {job.name} {word} ({time.monotonic() - began:.0f} s)")
        results.append(result)
        after()
    return results


def _one(job: Order, cache: Path, limits: Limits) -> Result:
    before = cache.stat().st_size if cache.exists() else 0
    log = cache.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix="rsrv-zoo-"
    ) as folder:  # ours, so that it also goes after a child that died
        child = _processes.Process(target=work, args=(job, str(cache), str(log), folder, limits.memory_gb))
        child.start()
        try:
            child.join(limits.seconds)
            late = child.is_alive()
        finally:
            _end(child)
    ending = f"it took longer than {limits.seconds:g} s" if late else f"its process ended with {child.exitcode}"
    if cache.exists() and cache.stat().st_size > before:
        return read(cache)[job.name]
    result = Result(job.name, FAILED, stage="process", error=f"{ending}; see {log.name}")
    append(cache, result)
    return result


def _end(child: multiprocessing.process.BaseProcess) -> None:
    """The child and whatever it started: they are a session of their own."""
    assert child.pid is not None
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        child.kill()
    child.join()
