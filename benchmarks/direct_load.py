"""``python -m benchmarks.direct_load FILE …``: weights files to the CPU device and off it again, without a server.

It prints ``ready``; then, for every line with the number of a file on stdin, the seconds that its load took.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class DirectLoads:
    """The process, which ends when the block of `direct_loads` is left."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def seconds(self, file: int) -> float:
        """Of one load of the file with that number; its memory is given back afterwards."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{file}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


@contextmanager
def direct_loads(files: Sequence[Path]) -> Iterator[DirectLoads]:
    command = [sys.executable, "-m", "benchmarks.direct_load", *map(str, files)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the direct loads ended with {process.wait(30)} before they were ready")
        yield DirectLoads(process)
    finally:
        process.communicate(timeout=60)


def main(paths: Sequence[str]) -> None:
    from rsrv.core.memory import tune_malloc
    from rsrv.runtime import open_device
    from rsrv.serve.residency.tensors import TensorPool, open_weights

    tune_malloc()
    device = open_device("cpu")
    files = [open_weights(path) for path in paths]
    for file in files:
        TensorPool(device).load(file).free()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        began = time.perf_counter()
        weights = TensorPool(device).load(files[int(line)])
        spent = time.perf_counter() - began
        weights.free()
        sys.stdout.write(f"{spent}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
