"""How long a server with models of ResNet size takes from its start to ready: cold, and with all programs in its cache.

``python -m benchmarks.restart REPO CACHE`` is the warm start once more in one process, with the time of its parts.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.report import Bound, Measurement
from benchmarks.resnets import SHORT_STAGES, STAGES, resnet
from benchmarks.servers import rsrv_server

MODELS = 20


def restart(*, short: bool) -> Iterator[Measurement]:
    """Seconds to ready without and with a cache, in turns; every cold start begins with an empty one."""
    models, rounds, warm_starts = (2, 1, 1) if short else (MODELS, 3, 2)
    cold: list[float] = []
    warm: list[float] = []
    with TemporaryDirectory() as tmp:
        repo = Path(tmp) / "repo"
        for index in range(models):
            resnet(repo, f"net{index:02}", seed=index, stages=SHORT_STAGES if short else STAGES)
        for round_ in range(rounds):
            cache = Path(tmp) / f"cache{round_}"
            cold.append(_seconds_to_ready(repo, cache))
            warm += [_seconds_to_ready(repo, cache) for _ in range(warm_starts)]
        parts = _parts(repo, cache)
    seconds = {"cold_s": statistics.median(cold), "warm_s": statistics.median(warm)}
    yield Measurement(
        f"start of {models} ResNet-sized models: cold ÷ warm",
        seconds["cold_s"] / seconds["warm_s"],
        None if short else Bound("≥", 4.0),
        {**seconds, **parts},
    )


def _seconds_to_ready(repo: Path, cache: Path) -> float:
    started = time.perf_counter()
    with rsrv_server(repo, environ={"RSRV_WORKER_CACHE_DIR": str(cache)}, core=None):
        return time.perf_counter() - started


def _parts(repo: Path, cache: Path) -> dict[str, float]:
    started = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.restart", str(repo), str(cache)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    parts: dict[str, float] = json.loads(answer.splitlines()[-1])
    interpreter = time.perf_counter() - started - parts.pop("total_s")
    return {"interpreter_s": interpreter, **parts}


def profile(repo: str, cache: str) -> dict[str, float]:
    """Seconds of a warm start by part; those of the loading are sums over its threads."""
    spent: Counter[str] = Counter()
    started = time.perf_counter()
    from rsrv.core.config import EndpointsConfig, ServerConfig

    spent["import_config_s"] = time.perf_counter() - started
    from rsrv.serve.worker import RunningServer

    spent["import_server_s"] = time.perf_counter() - started - spent["import_config_s"]
    from rsrv.runtime import pjrt
    from rsrv.runtime.cache import ExecutableCache
    from rsrv.serve.loading import loader
    from rsrv.serve.residency.tensors import TensorPool

    _timed(spent, pjrt.PjrtDevice, "__init__", "device_with_jax_s")
    _timed(spent, pjrt.PjrtCompiler, "load", "deserialise_s")
    _timed(spent, ExecutableCache, "load", "cache_read_s")
    _timed(spent, TensorPool, "load", "weights_s")
    _timed(spent, loader.Loader, "_open", "open_bundles_s")
    server = RunningServer(
        ServerConfig(model_dirs=[repo], cache_dir=cache, endpoints=EndpointsConfig(grpc_port=0, http_port=0))
    )
    opened = time.perf_counter()
    server.open()
    loading = time.perf_counter()
    spent["listening_s"] = loading - opened - spent["device_with_jax_s"]
    server.load()
    done = time.perf_counter()
    server.stop(0.0)
    return {**spent, "loading_s": done - loading, "total_s": time.perf_counter() - started}


def _timed(spent: Counter[str], owner: Any, name: str, part: str) -> None:
    function: Callable[..., Any] = getattr(owner, name)

    @wraps(function)
    def timed(*arguments: Any, **keywords: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*arguments, **keywords)
        finally:
            spent[part] += time.perf_counter() - started

    setattr(owner, name, timed)


CASES: dict[str, Callable[..., Iterator[Measurement]]] = {"restart": restart}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(profile(*sys.argv[1:3])) + "\n")
