"""``python -m benchmarks.dataset_floor REGION SLOT_BYTES``: the other process of the floor of the `dataset` case.

For every token on stdin, a byte with the number of a slot of the shared-memory object REGION, it copies that slot into
memory of its own as the server does (`preadv` into an aligned buffer that is used again) and gives the token back on
stdout. No gRPC, no threads, no program.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.dataset_images import IMAGE_BYTES, SHAPE, chunks, generate
from rsrv.core.memory import aligned_empty
from rsrv.core.shm import BufferPool, PoolSlot


@contextmanager
def floor(rows: int, in_flight: int) -> Iterator[Callable[[int], None]]:
    """A function that brings so many images through the other process: `rows` to a slot, `in_flight` slots."""
    with BufferPool(in_flight * rows * IMAGE_BYTES, n_slots=in_flight, name="floor") as pool:
        command = [sys.executable, "-m", "benchmarks.dataset_floor", pool.region_name, str(pool.slot_bytes)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        there, back = process.stdin.fileno(), process.stdout.fileno()
        free = [pool.acquire() for _ in range(in_flight)]
        away: list[PoolSlot] = []

        def take_back() -> None:
            (token,) = os.read(back, 1)
            slot = away.pop(0)
            assert token == slot.index
            free.append(slot)

        def bring(items: int) -> None:
            for some in chunks(items, rows):
                if not free:
                    take_back()
                slot = free.pop(0)
                generate(some, slot.view(np.float32, (len(some), *SHAPE)))
                os.write(there, bytes([slot.index]))
                away.append(slot)
            while away:
                take_back()

        try:
            yield bring
        finally:
            process.stdin.close()
            process.stdout.close()
            process.wait(30)
            for slot in free + away:
                slot.release()


def main(region: str, slot_bytes: int) -> None:
    memory = memoryview(aligned_empty(slot_bytes, np.uint8))
    fd = os.open(f"/dev/shm/{region}", os.O_RDONLY)
    while token := os.read(0, 1):
        os.preadv(fd, [memory], token[0] * slot_bytes)
        os.write(1, token)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
