"""One dispatch as data: its requests merged into aligned, padded arrays, and its results cut back into theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rsrv.core.errors import DeviceError
from rsrv.core.memory import ALIGNMENT, address
from rsrv.core.shm.tensor import RegionTensor, Tensor
from rsrv.core.staging import StagingPool
from rsrv.core.tensors import TensorSpec
from rsrv.serve.scheduler.queue import Dropped, ModelQueue, Ticket

if TYPE_CHECKING:
    from rsrv.runtime.device import Executable
    from rsrv.serve.scheduler.model import ServableModel
    from rsrv.serve.scheduler.plan import Variant


SMALL_BYTES = 4096
"""Up to here the device's own copy costs less than keeping track of a block."""
LARGE_BYTES = 1 << 20
"""From here on an unaligned array is copied into a block ahead of the launch; the device would copy it during that."""


class Staged(NamedTuple):
    """Program inputs in argument order, each with whether the device may use its memory without a copy.

    Those that were written here and are not small lie at the start of 64-byte aligned, pooled `blocks`.
    """

    inputs: list[tuple[np.ndarray, bool]]
    blocks: list[np.ndarray]


@dataclass(slots=True, eq=False)
class Batch:
    """One dispatch: planned and staged by the dispatch thread, run by the device thread, settled by the former.

    Attributes:
        final: it may be launched as it is; else only while no queued request could join it.
        alone: its one request was in a batch that failed, and must not be merged with others again.
        quick: it is known to take less time than handing it to another thread is worth.
        staged: None before it is staged, and after its blocks were given back.
        outputs, error: what the launch gave; both stay None when nobody was left to run it for.
        dropped: requests found cancelled or too late at launch, by position; their rows ran as padding.
        compute_ns: how long upload, execution and download took; `upload_ns` and `download_ns` are its parts.
        margin_ns: how long before their deadlines the requests have to be launched.
        recalled: it goes back to its queue, and is not launched.
        urgent_ns: the earliest deadline in it; 0 = nobody has asked yet.
        programs: those of which it ran one; None before the launch.
    """

    queue: ModelQueue
    tickets: list[Ticket]
    batch_key: int
    final: bool
    alone: bool = False
    quick: bool = False
    staged: Staged | None = None
    outputs: list[np.ndarray] | None = None
    error: BaseException | None = None
    dropped: dict[int, Dropped] | None = None
    launched_ns: int = 0
    compute_ns: int = 0
    upload_ns: int = 0
    download_ns: int = 0
    margin_ns: int = 0
    recalled: bool = False
    urgent_ns: int = 0
    programs: Mapping[Variant, Mapping[int, Executable]] | None = None
    _rows: int = 0

    @property
    def live(self) -> list[Ticket]:
        """The requests that were not dropped at launch."""
        dropped = self.dropped
        if not dropped:
            return self.tickets
        return [ticket for position, ticket in enumerate(self.tickets) if position not in dropped]

    @property
    def live_rows(self) -> int:
        """Their rows; asked for only after the launch, which decides who is dropped."""
        if not self._rows:
            self._rows = sum([ticket.rows for ticket in self.live])
        return self._rows

    def release(self, pool: StagingPool) -> None:
        """Give the blocks back; only when no device buffer aliases them any more."""
        staged, self.staged = self.staged, None
        if staged is not None and staged.blocks:
            _release(staged, pool)


def stage(model: ServableModel, tickets: Sequence[Ticket], batch_key: int, pool: StagingPool) -> Staged:
    """Merge checked requests of one variant into the inputs of the program compiled for `batch_key`.

    An input of a single request that fits exactly passes through. Any other is written once, straight into its place,
    along its own batch axis, and the rows up to `batch_key` are zeros.
    """
    head = tickets[0]
    rows = batch_key if model.coalescable else head.rows
    staged = Staged([], [])
    try:
        for name, dtype, shape, axis in model.input_shapes(head.variant, rows):
            first = head.inputs[name]
            if len(tickets) > 1 or first.shape != shape:
                assert axis is not None, f"input {name!r} has no batch axis, so requests cannot be merged"
                _merge(_place(staged, pool, dtype, shape), [ticket.inputs[name] for ticket in tickets], axis)
            elif isinstance(first, RegionTensor):
                first.read_into(_place(staged, pool, dtype, shape))
            else:
                _pass_through(staged, pool, first)
    except BaseException:
        _release(staged, pool)
        raise
    return staged


def _release(staged: Staged, pool: StagingPool) -> None:
    for block in staged.blocks:
        pool.release(block)


def _merge(target: np.ndarray, parts: Sequence[Tensor], axis: int) -> None:
    before = (slice(None),) * axis
    rows = sum([part.shape[axis] for part in parts])
    full = rows == target.shape[axis]
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts):
        np.concatenate(arrays, axis, out=target if full else target[(*before, slice(rows))], casting="no")
    else:
        _merge_one_by_one(target, parts, axis)
    if not full:
        target[(*before, slice(rows, None))] = 0


def _merge_one_by_one(target: np.ndarray, parts: Sequence[Tensor], axis: int) -> None:
    """As `_merge`, where some rows come straight from shared memory; one read per part."""
    before, start = (slice(None),) * axis, 0
    for part in parts:
        place = target[(*before, slice(start, start := start + part.shape[axis]))]
        if not isinstance(part, RegionTensor):
            np.copyto(place, part, casting="no")
        elif place.flags.c_contiguous:
            part.read_into(place)
        else:
            np.copyto(place, part.read(), casting="no")


def _pass_through(staged: Staged, pool: StagingPool, array: np.ndarray) -> None:
    n_bytes, ordered = array.nbytes, array.flags.c_contiguous
    aligned = ordered and n_bytes > SMALL_BYTES and address(array) % ALIGNMENT == 0
    if aligned or (ordered and n_bytes < LARGE_BYTES):
        staged.inputs.append((array, aligned))
    else:
        np.copyto(_place(staged, pool, array.dtype, array.shape), array, casting="no")


def _place(staged: Staged, pool: StagingPool, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> np.ndarray:
    """Uninitialised memory for one input."""
    n_bytes = prod(shape) * dtype.itemsize
    array: np.ndarray
    if n_bytes <= SMALL_BYTES:
        array = np.empty(shape, dtype)
    else:
        block = pool.acquire(n_bytes)
        staged.blocks.append(block)
        array = np.ndarray(shape, dtype, buffer=block)
    staged.inputs.append((array, n_bytes > SMALL_BYTES))
    return array


def split(
    model: ServableModel, outputs: Sequence[np.ndarray], rows: Sequence[int], batch_key: int
) -> list[dict[str, np.ndarray]]:
    """Each request's outputs by name: views along every output's own batch axis, without the padding.

    A single request that filled its program gets the results as they are. Raises DeviceError when the results are not
    what the model declares.
    """
    specs = model.output_specs
    if len(outputs) != len(specs):
        raise DeviceError(f"model {model.name!r}: the program returned {len(outputs)} results, not {len(specs)}")
    if not model.coalescable or (len(rows) == 1 and rows[0] == batch_key):
        return [{spec.name: output for spec, output in zip(specs, outputs, strict=True)}]
    bounds, end = [], 0
    for n in rows:
        bounds.append((end, end + n))
        end += n
    columns = []
    for spec, output in zip(specs, outputs, strict=True):
        _require_rows(model, spec, output, batch_key)
        if spec.batch_axis == 0:
            columns.append([output[start:end] for start, end in bounds])
        else:
            before = (slice(None),) * (spec.batch_axis or 0)
            columns.append([output[(*before, slice(start, end))] for start, end in bounds])
    if len(specs) == 1:
        name = specs[0].name
        return [{name: part} for part in columns[0]]
    names = [spec.name for spec in specs]
    return [dict(zip(names, parts, strict=True)) for parts in zip(*columns, strict=True)]


def _require_rows(model: ServableModel, spec: TensorSpec, output: np.ndarray, batch_key: int) -> None:
    axis = spec.batch_axis
    if axis is None or output.ndim <= axis or output.shape[axis] != batch_key:
        raise DeviceError(
            f"model {model.name!r}: result {spec.name!r} has shape {list(output.shape)}, "
            f"declared is {spec.describe()} with n = {batch_key}"
        )
