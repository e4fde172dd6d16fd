"""How many items go into one request, in how many slots, and how many requests are in flight: arithmetic, no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rsrv.core.errors import UsageError
from rsrv.core.memory import ALIGNMENT, aligned


@dataclass(frozen=True, slots=True)
class Geometry:
    """At most `chunk` items in a request, which takes `span` adjacent slots; `window` of them fit into the pool."""

    chunk: int
    span: int
    window: int


def chunk_geometry(
    input_bytes: int,
    output_bytes: Sequence[int] = (),
    *,
    slot_bytes: int,
    n_slots: int,
    max_batch_size: int,
    buffers: int = 1,
    batch_sizes: Sequence[int] = (),
) -> Geometry:
    """The geometry of a dataset whose items take `input_bytes` in `buffers` inputs, and in each output so many bytes.

    Outputs count where they share the slot with the inputs, in shared memory. Each buffer starts at a multiple of 64.
    A chunk takes as many slots as `max_batch_size` items need, but leaves room for a second one; where it cannot have
    that many, and the model is compiled for `batch_sizes`, it has the largest of them that fits, so that the server
    need not pad. Raises UsageError when not even one item fits into the pool.
    """

    def footprint(items: int) -> int:
        """Bytes that so many items take at most, however the inputs share them."""
        inputs = (items * input_bytes + (ALIGNMENT - 1) * max(1, buffers)) // ALIGNMENT * ALIGNMENT
        return inputs + sum(aligned(items * size) for size in output_bytes)

    least = max(1, -(-footprint(1) // slot_bytes))
    if least > n_slots:
        raise UsageError(
            f"one item takes {input_bytes} bytes of inputs and {sum(output_bytes)} of outputs in shared memory, and "
            f"does not fit into a pool of {n_slots} slots of {slot_bytes} bytes ({n_slots * slot_bytes} in all)",
            hint=f"client_init(pool_bytes=…) with at least {2 * footprint(1)} bytes",
        )
    widest = max(least, n_slots // 2) * slot_bytes
    chunk = _largest(footprint, widest, max_batch_size)
    chunk = max((size for size in batch_sizes if size <= chunk), default=chunk)
    span = max(1, -(-footprint(chunk) // slot_bytes))
    return Geometry(chunk, span, max(1, n_slots // span))


def _largest(footprint: Callable[[int], int], room: int, limit: int) -> int:
    """The most items, at least one and no more than `limit`, whose footprint is within `room`."""
    low, high = 1, max(1, limit)
    while low < high:
        middle = (low + high + 1) // 2
        if footprint(middle) <= room:
            low = middle
        else:
            high = middle - 1
    return low
