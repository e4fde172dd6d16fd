"""``python -m benchmarks.direct BUNDLE ROWS THREADS``: full batches in a loop without a server.

It prints ``ready``; then for every line with a number of seconds on stdin, the rows per second of that time.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np


class Direct:
    """The loop in a process of its own, which ends when the block of `direct_loop` is left."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def rate(self, seconds: float) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


@contextmanager
def direct_loop(bundle: Path, rows: int, threads: int) -> Iterator[Direct]:
    command = [sys.executable, "-m", "benchmarks.direct", str(bundle), str(rows), str(threads)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the direct loop ended with {process.wait(30)} before it was ready")
        yield Direct(process)
    finally:
        process.communicate(timeout=60)


def main(path: str, rows: int, threads: int) -> None:
    from rsrv.bundle.directory import open_bundle
    from rsrv.runtime import open_device
    from rsrv.serve.residency.tensors import TensorPool, open_weights

    bundle = open_bundle(Path(path))
    assert bundle.weights_path is not None
    device = open_device("cpu", cpu_threads=threads)
    weights = TensorPool(device).load(open_weights(bundle.weights_path))
    executable = device.compile(bundle.programs[()][rows].read_bytes())
    [kind] = executable.signature.arguments[:1]
    x = np.random.default_rng(0).standard_normal(kind.shape, np.float32)

    def run() -> None:
        buffers = [device.put(x, alias=True)]
        device.launch(executable, [*buffers, *weights.buffers]).result()
        device.free(buffers)

    run()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        done, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < float(line):
            run()
            done += rows
        sys.stdout.write(f"{done / spent}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
