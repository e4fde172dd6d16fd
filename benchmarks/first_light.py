"""The numbers of the main path: requests against a bare echo, coalescing, imports, and weights reaching the device."""

from __future__ import annotations

import mmap
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks import models
from benchmarks.load import INFER, LoadResult, Stream, drive, median_of, open_channel
from benchmarks.report import Bound, Measurement
from benchmarks.servers import Server, echo_server, rsrv_server
from rsrv.core.shm import OwnedRegion
from rsrv.core.tensors import OutputTarget
from rsrv.core.wire import RequestedOutput, ShmInput, encode_request, join

ECHO_THREADS = 4  # what was measured best for a bare grpcio sync server


def _addsub_request() -> bytes:
    x = np.arange(16, dtype=np.float32).reshape(1, 16)
    return join(encode_request("addsub", [("INPUT0", x), ("INPUT1", x)]))


def _identity_request() -> bytes:
    x = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)
    return join(encode_request("identity", [("INPUT0", x)]))


def request_cost(*, short: bool) -> Iterator[Measurement]:
    """Server CPU per tiny request against a bare echo of the same bytes, at 8 and 32 in flight, in turns."""
    rounds, seconds, warmup = (1, 0.3, 0.1) if short else (5, 3.0, 0.5)
    with TemporaryDirectory() as tmp, ExitStack() as stack:
        repo = Path(tmp)
        models.tiny(repo)
        server = stack.enter_context(rsrv_server(repo))
        echo = stack.enter_context(echo_server(ECHO_THREADS))
        stream = Stream("addsub", _addsub_request())

        def load(driven: Server, in_flight: int) -> LoadResult:
            return drive(
                driven.target,
                [stream],
                in_flight=in_flight,
                seconds=seconds,
                server_pids=[driven.pid],
                warmup_seconds=warmup,
            )

        for in_flight in (8, 32):
            ours, theirs = _turns(rounds, partial(load, server, in_flight), partial(load, echo, in_flight))
            cpu, control = median_of(ours, lambda r: r.cpu_us), median_of(theirs, lambda r: r.cpu_us)
            _no_errors(ours)
            yield Measurement(
                f"tiny request, {in_flight} in flight: server CPU ÷ echo",
                cpu / control,
                Bound("≤", 2.0),
                parts={
                    "rsrv_cpu_us": cpu,
                    "echo_cpu_us": control,
                    "rsrv_rate": median_of(ours, lambda r: r.rate),
                    "echo_rate": median_of(theirs, lambda r: r.rate),
                },
            )


def large_requests(*, short: bool) -> Iterator[Measurement]:
    """602 112 bytes in and out, 8 in flight: inline against the echo, and through shared memory against inline."""
    rounds, seconds, warmup = (1, 0.3, 0.1) if short else (5, 3.0, 0.5)
    with TemporaryDirectory() as tmp, ExitStack() as stack:
        repo = Path(tmp)
        models.identity(repo)
        server = stack.enter_context(rsrv_server(repo))
        echo = stack.enter_context(echo_server(ECHO_THREADS))
        body = _identity_request()
        inline = Stream("identity", body)
        shared = stack.enter_context(_shared_identity(server.target))
        by_echo: list[LoadResult] = []
        by_inline: list[LoadResult] = []
        by_shm: list[LoadResult] = []
        for _ in range(rounds):
            for results, driven, streams in (
                (by_echo, echo, [inline]),
                (by_inline, server, [inline]),
                (by_shm, server, shared),
            ):
                results.append(
                    drive(
                        driven.target,
                        streams,
                        in_flight=8,
                        seconds=seconds,
                        server_pids=[driven.pid],
                        warmup_seconds=warmup,
                    )
                )
        _no_errors(by_inline)
        _no_errors(by_shm)
        rates = {
            "echo_rate": median_of(by_echo, lambda r: r.rate),
            "inline_rate": median_of(by_inline, lambda r: r.rate),
            "shm_rate": median_of(by_shm, lambda r: r.rate),
            "inline_cpu_us": median_of(by_inline, lambda r: r.cpu_us),
            "shm_cpu_us": median_of(by_shm, lambda r: r.cpu_us),
        }
        yield Measurement(
            "600 KB identity, 8 in flight: requests/s ÷ echo",
            rates["inline_rate"] / rates["echo_rate"],
            Bound("≥", 0.65),
            rates,
        )
        yield Measurement(
            "600 KB identity, 8 in flight: shared memory ÷ inline",
            rates["shm_rate"] / rates["inline_rate"],
            Bound("≥", 1.5),
            rates,
        )


@contextmanager
def _shared_identity(target: str) -> Iterator[list[Stream]]:
    """Eight request bodies, each with an input and an output window of its own in one registered region."""
    from rsrv.core.dtypes import DType
    from rsrv.protos import inference

    x = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)
    window = -(-x.nbytes // 64) * 64
    region = OwnedRegion.create("bench", 16 * window)
    channel = open_channel(target)
    prefix = "/inference.GRPCInferenceService/SystemSharedMemory"
    try:
        register = inference.SystemSharedMemoryRegisterRequest(
            name=region.name, key=region.key, offset=0, byte_size=region.byte_size
        )
        channel.unary_unary(prefix + "Register")(register.SerializeToString(), timeout=10)
        streams = []
        for i in range(8):
            region.view[i * window : i * window + x.nbytes] = x.tobytes()
            source = ShmInput("INPUT0", DType.F32, x.shape, region.name, i * window, x.nbytes)
            output = RequestedOutput("OUTPUT0", OutputTarget(region.name, (8 + i) * window, x.nbytes))
            streams.append(Stream("identity", join(encode_request("identity", [source], outputs=[output]))))
        yield streams
        for i in range(8):
            written = bytes(region.view[(8 + i) * window : (8 + i) * window + x.nbytes])
            if written != x.tobytes():
                raise RuntimeError("the identity through shared memory did not return its input")
        unregister = inference.SystemSharedMemoryUnregisterRequest(name=region.name)
        channel.unary_unary(prefix + "Unregister")(unregister.SerializeToString(), timeout=10)
    finally:
        channel.close()
        region.close()


def coalescing(*, short: bool) -> Iterator[Measurement]:
    """32 clients with one-row requests to a model of about 200 ms: how full the batches are, who else is answered."""
    seconds, model_seconds = (1.0, 0.05) if short else (12.0, 0.2)
    with TemporaryDirectory() as tmp, ExitStack() as stack:
        repo = Path(tmp)
        took = models.slow(repo, seconds=model_seconds)
        server = stack.enter_context(rsrv_server(repo, core=None))
        x = np.ones((1, 256), np.float32)
        body = join(encode_request("slow", [("x", x)]))
        before = _statistics(server.target, "slow")
        live: list[float] = []
        done = threading.Event()

        def probe() -> None:
            channel = open_channel(server.target)
            call = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            while not done.wait(0.05):
                started = time.perf_counter()
                call(b"", timeout=10)
                live.append(1e3 * (time.perf_counter() - started))
            channel.close()

        thread = threading.Thread(target=probe)
        thread.start()
        result = drive(server.target, [Stream("slow", body)], in_flight=32, seconds=seconds, server_pids=[server.pid])
        done.set()
        thread.join()
        after = _statistics(server.target, "slow")
        _no_errors([result])
        rows, dispatches = after[0] - before[0], after[1] - before[1]
        parts = {"rows": rows, "dispatches": dispatches, "model_ms": 1e3 * took, "rate": result.rate}
        what = f"32 clients, {1e3 * model_seconds:.0f} ms model: rows ÷ dispatches"
        yield Measurement(what, rows / dispatches, Bound(">", 4.0), parts)
        yield Measurement(
            "ServerLive meanwhile, slowest answer (ms)",
            max(live),
            Bound("<", 100.0),
            {"median_ms": statistics.median(live)},
        )


def _statistics(target: str, model: str) -> tuple[int, int]:
    """Rows served and dispatches of `model`, from ModelStatistics."""
    from rsrv.protos import inference

    channel = open_channel(target)
    request = inference.ModelStatisticsRequest(name=model)
    answer = channel.unary_unary("/inference.GRPCInferenceService/ModelStatistics")(
        request.SerializeToString(), timeout=10
    )
    channel.close()
    stats = inference.ModelStatisticsResponse.FromString(answer).model_stats[0]
    return stats.inference_count, stats.execution_count


def imports(*, short: bool) -> Iterator[Measurement]:
    """Wall time of ``import rsrv.client`` against ``import numpy, grpc``, each in a fresh interpreter, in turns."""
    package: list[float] = []
    client: list[float] = []
    control: list[float] = []
    for _ in range(1 if short else 15):
        package.append(_import_seconds("rsrv.client"))
        client.append(_import_seconds("rsrv.client; rsrv.client.KServeModel"))
        control.append(_import_seconds("numpy, grpc"))
    ours, theirs = 1e3 * statistics.median(client), 1e3 * statistics.median(control)
    lazy = 1e3 * statistics.median(package)
    yield Measurement(
        "import rsrv.client ÷ import numpy, grpc",
        lazy / theirs,
        Bound("≤", 1.4),
        {"package_ms": lazy, "numpy_grpc_ms": theirs},
    )
    yield Measurement(
        "from rsrv.client import KServeModel ÷ import numpy, grpc",
        ours / theirs,
        None,
        {"client_ms": ours, "numpy_grpc_ms": theirs},
    )


def _import_seconds(what: str) -> float:
    code = f"import time; t = time.perf_counter(); import {what}; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def weights(*, short: bool) -> Iterator[Measurement]:
    """Weights onto the CPU device, 100 MB of them, against a memcpy into fresh memory (page cache warm), and mapped."""
    from rsrv.bundle.safetensors import write_weights
    from rsrv.runtime import open_device
    from rsrv.serve.residency.tensors import TensorPool, open_weights

    n_tensors, elements = 10 if short else 100, 262_144
    with TemporaryDirectory() as tmp:
        path = Path(tmp) / "weights.safetensors"
        rng = np.random.default_rng(0)
        write_weights(path, [(f"w{i}", rng.standard_normal(elements, np.float32)) for i in range(n_tensors)])
        file = open_weights(path)
        device = open_device("cpu")
        source = np.fromfile(path, np.uint8)[file.header.data_offset :]
        copy: list[float] = []
        read: list[float] = []
        mapped: list[float] = []
        for _ in range(1 if short else 15):
            fresh = mmap.mmap(-1, source.nbytes)
            view = np.frombuffer(fresh, np.uint8)
            copy.append(_seconds(lambda v=view: np.copyto(v, source)))
            del view
            fresh.close()
            for results, map_weights in ((read, False), (mapped, True)):
                started = time.perf_counter()
                loaded = TensorPool(device, map_weights=map_weights).load(file)
                results.append(time.perf_counter() - started)
                loaded.free()
        device.close()
    copy_ms, read_ms, mapped_ms = (1e3 * statistics.median(x) for x in (copy, read, mapped))
    yield Measurement(
        f"{n_tensors} MB of weights to the device ÷ memcpy",
        read_ms / copy_ms,
        Bound("≤", 2.5),
        {"read_ms": read_ms, "memcpy_ms": copy_ms},
    )
    yield Measurement(f"{n_tensors} MB of weights mapped (ms)", mapped_ms, Bound("≤", 5.0), {})


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _turns(
    rounds: int, ours: Callable[[], LoadResult], theirs: Callable[[], LoadResult]
) -> tuple[list[LoadResult], list[LoadResult]]:
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _no_errors(results: list[LoadResult]) -> None:
    failed = sum(m.errors + m.wrong for r in results for m in r.models)
    if failed:
        raise RuntimeError(f"{failed} requests failed or were answered wrongly while measuring {INFER}")


CASES: dict[str, Callable[..., Iterator[Measurement]]] = {
    "request-cost": request_cost,
    "large-requests": large_requests,
    "coalescing": coalescing,
    "imports": imports,
    "weights": weights,
}
