"""``python -m benchmarks.dataset_clients KIND TARGET ROWS IN_FLIGHT``: a client of `dataset` and `client-cpu`.

Each client has a process of its own, so that its CPU time is its own and no library disturbs another. It prints
``ready``; then, for every line with a number of items on stdin, one line of JSON: the seconds and the seconds of CPU
that they took.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.dataset_images import IMAGE_BYTES, SHAPE, check, chunks, generate
from benchmarks.load import pin
from benchmarks.servers import DRIVER_CORE

Items = Callable[[int], None]
"""Bring so many items to the server and check what comes back."""


@dataclass(frozen=True)
class Took:
    """For a number of items: wall-clock seconds, and user + system seconds of the client's process."""

    seconds: float
    cpu_seconds: float


class Client:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, items: int) -> Took:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{items}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._process.args[2:])} ended with {self._process.wait(30)}")  # type: ignore[index]
        return Took(**json.loads(line))


@contextmanager
def client(kind: str, target: str, rows: int, in_flight: int) -> Iterator[Client]:
    """The process; it ends when the block is left."""
    command = [sys.executable, "-m", "benchmarks.dataset_clients", kind, target, str(rows), str(in_flight)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the client {kind} ended with {process.wait(30)} before it was ready")
        yield Client(process)
    finally:
        process.communicate(timeout=60)


# --- datasets --------------------------------------------------------------------------------------------------------


@contextmanager
def rsrv_dataset(target: str, rows: int, in_flight: int) -> Iterator[Items]:
    from rsrv.client import InferenceIO, InferOutput, InferResponse, KServeModel, OutputSpec, infer_async, scratch
    from rsrv.client import pool_view as view_of

    class Images(InferenceIO):
        def __init__(self, items: int) -> None:
            self.items = items

        def __len__(self) -> int:
            return self.items

        def item_input_bytes(self) -> int:
            return IMAGE_BYTES

        def output_specs(self) -> list[OutputSpec]:
            return [OutputSpec("total", np.float32)]

        def encode_chunk(self, rows: range, slot: Any) -> Any:
            image = scratch(slot, "image", (len(rows), *SHAPE), np.float32)
            generate(rows, view_of(image))
            return image

        def decode_chunk(self, rows: range, response: InferResponse) -> None:
            check(rows, InferOutput("total", response))

    with KServeModel(target, "images", max_batch_size=rows, shared_memory="on", deadline=60) as model:
        yield lambda items: infer_async(model, Images(items), window=in_flight)


@contextmanager
def tritonclient_inline(target: str, rows: int, in_flight: int) -> Iterator[Items]:
    """The loop of its examples, in threads: an array, `set_data_from_numpy`, `infer`, `as_numpy`."""
    import tritonclient.grpc as triton

    with triton.InferenceServerClient(target) as server, ThreadPoolExecutor(in_flight) as threads:

        def one(some: range) -> None:
            images = np.empty((len(some), *SHAPE), np.float32)
            generate(some, images)
            tensor = triton.InferInput("image", list(images.shape), "FP32")
            tensor.set_data_from_numpy(images)
            check(some, server.infer("images", [tensor]).as_numpy("total"))

        yield lambda items: _all(threads, one, chunks(items, rows))


@contextmanager
def tritonclient_shared(target: str, rows: int, in_flight: int) -> Iterator[Items]:
    """The same with its helper: `set_shared_memory_region` into a window of each thread's, outputs inline."""
    import threading
    from queue import SimpleQueue

    import tritonclient.grpc as triton
    import tritonclient.utils.shared_memory as shm

    window_bytes = rows * IMAGE_BYTES
    name = f"rsrv-benchmark-{time.time_ns()}"
    mine = threading.local()
    offsets: SimpleQueue[int] = SimpleQueue()
    for index in range(in_flight):
        offsets.put(index * window_bytes)
    with triton.InferenceServerClient(target) as server, ThreadPoolExecutor(in_flight) as threads:
        region = shm.create_shared_memory_region(name, name, in_flight * window_bytes)
        try:
            server.register_system_shared_memory(name, name, in_flight * window_bytes)

            def one(some: range) -> None:
                if not hasattr(mine, "offset"):
                    mine.offset = offsets.get_nowait()
                    mine.images = np.empty((rows, *SHAPE), np.float32)
                images = mine.images[: len(some)]
                generate(some, images)
                shm.set_shared_memory_region(region, [images], mine.offset)
                tensor = triton.InferInput("image", list(images.shape), "FP32")
                tensor.set_shared_memory(name, images.nbytes, mine.offset)
                check(some, server.infer("images", [tensor]).as_numpy("total"))

            yield lambda items: _all(threads, one, chunks(items, rows))
            server.unregister_system_shared_memory(name)
        finally:
            shm.destroy_shared_memory_region(region)


# --- tiny requests ---------------------------------------------------------------------------------------------------


def _rsrv_tiny(shared_memory: Any, target: str, rows: int, in_flight: int) -> Iterator[Items]:
    from rsrv.client import KServeModel

    x = np.arange(rows * 16, dtype=np.float32).reshape(rows, 16)
    pin(DRIVER_CORE)
    with (
        KServeModel(target, "addsub", shared_memory=shared_memory) as model,
        ThreadPoolExecutor(in_flight) as threads,
    ):

        def one(_: range) -> None:
            outputs = model.infer({"INPUT0": x, "INPUT1": x})
            _right(x, outputs["OUTPUT0"], outputs["OUTPUT1"])

        yield lambda items: _all(threads, one, chunks(items, 1))


@contextmanager
def rsrv_tiny(target: str, rows: int, in_flight: int) -> Iterator[Items]:
    yield from _rsrv_tiny("off", target, rows, in_flight)


@contextmanager
def rsrv_tiny_shared(target: str, rows: int, in_flight: int) -> Iterator[Items]:
    yield from _rsrv_tiny("auto", target, rows, in_flight)


@contextmanager
def tritonclient_tiny(target: str, rows: int, in_flight: int) -> Iterator[Items]:
    import tritonclient.grpc as triton

    x = np.arange(rows * 16, dtype=np.float32).reshape(rows, 16)
    pin(DRIVER_CORE)
    with triton.InferenceServerClient(target) as server, ThreadPoolExecutor(in_flight) as threads:

        def one(_: range) -> None:
            tensors = [triton.InferInput(name, list(x.shape), "FP32") for name in ("INPUT0", "INPUT1")]
            for tensor in tensors:
                tensor.set_data_from_numpy(x)
            outputs = server.infer("addsub", tensors)
            _right(x, outputs.as_numpy("OUTPUT0"), outputs.as_numpy("OUTPUT1"))

        yield lambda items: _all(threads, one, chunks(items, 1))


def _right(x: np.ndarray, total: np.ndarray | None, difference: np.ndarray | None) -> None:
    if total is None or difference is None or total[0, 1] != 2 * x[0, 1] or difference[0, 1] != 0:
        raise RuntimeError(f"wrong answer: {total} {difference}")


def _all(threads: ThreadPoolExecutor, one: Callable[[range], None], ranges: list[range]) -> None:
    for _ in threads.map(one, ranges):
        pass


KINDS = {
    "rsrv-dataset": rsrv_dataset,
    "tritonclient-inline": tritonclient_inline,
    "tritonclient-shared": tritonclient_shared,
    "rsrv-tiny": rsrv_tiny,
    "rsrv-tiny-shared": rsrv_tiny_shared,
    "tritonclient-tiny": tritonclient_tiny,
}


def main(kind: str, target: str, rows: int, in_flight: int) -> None:
    with ExitStack() as stack:
        bring = stack.enter_context(KINDS[kind](target, rows, in_flight))
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for line in sys.stdin:
            began, cpu = time.perf_counter(), time.process_time()
            bring(int(line))
            took = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
            sys.stdout.write(json.dumps(took) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
