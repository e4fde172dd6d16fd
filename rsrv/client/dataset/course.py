"""The course of a dataset: its requests, each of them as steps, from the slot that is lent to the answer that is taken.

Not for how many requests run at a time, nor where (`rsrv.client.dataset.driver`, `rsrv.client.aio`).
"""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

from rsrv.client.budget import Budget
from rsrv.client.dataset.answers import carve_windows, items_text, read_answer, requested_outputs
from rsrv.client.dataset.geometry import Geometry, chunk_geometry
from rsrv.client.dataset.io import InferenceIO, OutputSpec, PoolInferInput
from rsrv.client.dataset.survey import Survey
from rsrv.client.exchange import Attempts
from rsrv.client.failures import answered_by_server
from rsrv.client.notes import Detail, ItemsNote
from rsrv.client.shared import Entry
from rsrv.client.steps import Lend, Steps, Work
from rsrv.client.transport.pools import inline_pool, shared_pool, sweep
from rsrv.client.windows import OutOfSharedMemory
from rsrv.core.dtypes import DType
from rsrv.core.errors import Cancelled, PoolWithdrawn, RsrvError, ShmUnrecoverable, UsageError
from rsrv.core.shm.pool import BufferPool
from rsrv.core.wire.encode import ShmInput

if TYPE_CHECKING:
    from rsrv.client.model import KServeModel
    from rsrv.client.tensors import InferResponse
    from rsrv.core.shm.slot import PoolSlot

log = logging.getLogger(__name__)

_UNKNOWN_INPUTS = 8
"""Buffers to leave room between when the server does not tell how many inputs its model has."""

_held: ContextVar[tuple[BufferPool, ...]] = ContextVar("_held", default=())
"""Pools of which a slot is held for as long as the user's code that runs now."""


class Course:
    """Items of `io` through `model`, `window` requests of at most `chunk` items at a time. Thread safe.

    Every chunk ends with a call of `decode_chunk`, or an error whose notes name the items.
    """

    def __init__(
        self,
        model: KServeModel,
        io: InferenceIO,
        found: Survey,
        *,
        copy_outputs: bool = True,
        outputs: Sequence[str] = (),
    ) -> None:
        """`outputs` are asked for when `io` declares none; none = all."""
        self._model = model
        self._outputs = outputs
        self._io = io
        self._copy = copy_outputs
        self._inline_only = found.no_room
        self._pool = found.pool
        self._item_bytes = _item_bytes(io)
        self._specs = _declared(io)
        metadata = found.metadata
        self._buffers = len(metadata.inputs) if metadata is not None else _UNKNOWN_INPUTS
        self._batch_sizes: Sequence[int] = metadata.batch_sizes if metadata is not None else ()
        try:
            geometry = self._fit(found.pool, found.limit, self._batch_sizes)
        except UsageError as error:
            if found.pool.region is None or model.mode == "on":
                raise
            geometry = self._fit(inline_pool(), found.limit, self._batch_sizes)
            self._stay_inline(error)
        self.chunk = geometry.chunk
        self.window = geometry.window
        self._encoding = threading.Lock()
        self._outer = _held.get()
        self._gate = threading.Condition()
        self._inside: list[int] = []  # threads
        self._abandoned = False

    def ranges(self) -> Iterator[range]:
        """The chunks of all items, in order."""
        n_items = len(self._io)
        for start in range(0, n_items, self.chunk):
            yield range(start, min(start + self.chunk, n_items))

    def run(self, rows: range) -> Steps[None]:
        """One chunk. Where shared memory was lost and ``"auto"`` allows it, what is not decoded yet goes inline."""
        try:
            while rows:
                rows = yield from self._some(rows)
        except Exception as error:
            what = f"{items_text(rows)} of the dataset for model {self._model.model_name!r}"
            error.add_note(ItemsNote(what, rows))
            raise

    def abandon(self) -> None:
        """Call the user's code no more, once this returns. What runs goes on until its next use of it, and ends."""
        with self._gate:
            self._abandoned = True
            me = threading.get_ident()  # inside, where the garbage that is collected there abandons its own map
            while any(thread != me for thread in self._inside):
                self._gate.wait()

    def _some(self, rows: range) -> Steps[range]:
        """Send as many of `rows` as fit into a pool, in one request; returns those that are left."""
        model = self._model
        budget = Budget(model.deadline)
        inline = False
        while True:
            pool = inline_pool() if inline else (yield from self._choose(budget))
            shared = pool.region is not None
            try:
                geometry = self._fit(pool, len(rows))
            except UsageError as error:
                if not shared or model.mode == "on":
                    raise
                self._stay_inline(error)
                continue
            if shared and pool.withdrawn * 2 > pool.n_slots:  # few are left, and another pool has them all
                inline = yield from self._replace(pool, budget, None)
                continue
            if pool in self._outer:
                raise UsageError(
                    "a map or dataset inside encode_chunk or decode_chunk of another one would wait for buffers that "
                    "are held until that returns",
                    hint="use infer or model(x) there, which need none of them, or map before or afterwards",
                )
            try:
                slot = yield Lend(pool, geometry.span, budget.end())
            except PoolWithdrawn as error:
                inline = yield from self._replace(pool, budget, error)
                continue
            part = rows[: geometry.chunk]
            attempts = Attempts()
            try:
                left = budget.remaining()
                inputs = yield Work(lambda slot=slot, part=part: self._encode(part, slot))  # type: ignore[misc]
                budget = budget.resumed(left)  # what the user's code takes is not the request's
                entries = [_entry(one, shared=shared) for one in inputs]
                windows = carve_windows(self._specs, len(part), slot) if shared else {}
                wanted = requested_outputs(self._specs, windows) or self._outputs
                message = yield from model.exchange.send(entries, wanted, "", budget, pool.region, attempts)

                def take() -> None:
                    response = read_answer(message, self._specs, part, windows, copy=self._copy)  # noqa: B023
                    self._decode(part, response, pool)  # noqa: B023

                yield Work(take)
                return rows[len(part) :]
            except ShmUnrecoverable as error:
                if model.mode == "on" or not shared:
                    raise
                model.endpoint.latch(error)
                inline = True
            finally:
                slot.release(reusable=not shared or attempts.settled)
                sweep()  # it may have been the last one of a pool that was replaced

    def _choose(self, budget: Budget) -> Steps[BufferPool]:
        """The pool for the next request. ``"auto"`` looks each time: shared memory may be given up, and come back."""
        model = self._model
        if model.mode == "off" or self._inline_only or (model.mode == "on" and self._pool.region is not None):
            return self._pool if model.mode == "on" else inline_pool()
        endpoint = model.endpoint
        use = endpoint.route(model.mode)
        if use is None:
            use = yield from model.exchange.prepare(lambda: endpoint.uses_shared_memory(model.mode, budget), budget)
        if use and self._pool.region is None:
            use = not (yield from self._replace(self._pool, budget, None))
        return self._pool if use else inline_pool()

    def _stay_inline(self, why: RsrvError) -> None:
        log.warning("model=%s event=no_shm_slots using=inline %s", self._model.model_name, why)
        self._inline_only = True

    def _replace(self, pool: BufferPool, budget: Budget, error: PoolWithdrawn | None) -> Steps[bool]:
        """Have another shared pool than `pool`, whose slots are lost; returns whether to go inline instead."""
        if pool.region is None and error is not None:  # closed by client_init: there is a new one already
            budget.remaining()
            return True
        model = self._model
        instead_of = None if error is None else pool  # also when only its free slots are not adjacent
        try:
            if self._pool is pool:  # its server may be away just now: that is how slots are lost
                self._pool = yield from model.exchange.prepare(
                    lambda: shared_pool(model.endpoint, budget, instead_of), budget
                )
        except OutOfSharedMemory as failure:
            if model.mode == "on":
                raise
            self._stay_inline(failure)
            return True
        except RsrvError as failure:
            if model.mode == "on" or not answered_by_server(failure):
                raise
            model.endpoint.latch(failure)
            return True
        return False

    def _fit(self, pool: BufferPool, limit: int, batch_sizes: Sequence[int] = ()) -> Geometry:
        outputs = [spec.item_bytes for spec in self._specs] if pool.region is not None else []
        return chunk_geometry(
            self._item_bytes,
            outputs,
            slot_bytes=pool.slot_bytes,
            n_slots=pool.n_slots,
            max_batch_size=limit,
            buffers=self._buffers,
            batch_sizes=batch_sizes,
        )

    def _encode(self, rows: range, slot: PoolSlot) -> list[PoolInferInput]:
        with self._encoding, self._users_code(f"encode_chunk({rows})", slot.pool):
            slot.reset()
            found = self._io.encode_chunk(rows, slot)
            inputs = [found] if isinstance(found, PoolInferInput) else _listed(found)
            _check(inputs, slot)
            return inputs

    def _decode(self, rows: range, response: InferResponse, pool: BufferPool) -> None:
        with self._users_code(f"decode_chunk({rows})", pool):
            self._io.decode_chunk(rows, response)

    @contextmanager
    def _users_code(self, what: str, pool: BufferPool) -> Iterator[None]:
        me = threading.get_ident()
        with self._gate:
            if self._abandoned:
                raise Cancelled("the dataset was abandoned")
            self._inside.append(me)
        before = _held.set((*_held.get(), pool))
        try:
            yield
        except Exception as error:
            error.add_note(Detail(f"raised by {what}"))
            raise
        finally:
            _held.reset(before)
            with self._gate:
                self._inside.remove(me)
                self._gate.notify_all()


def _entry(one: PoolInferInput, *, shared: bool) -> Entry:
    if not shared or not one.nbytes:
        return one.name, one.subslot.view(one.dtype, one.shape)
    pool = one.subslot.pool
    return ShmInput(one.name, DType.from_numpy(one.dtype), one.shape, pool.region_name, one.subslot.offset, one.nbytes)


def require_io(io: InferenceIO) -> None:
    """Raise UsageError for what has not the methods of an `InferenceIO`, or has them as coroutines."""
    for name in ("__len__", "item_input_bytes", "encode_chunk", "decode_chunk"):
        method = getattr(io, name, None)
        if not callable(method):
            raise UsageError(
                f"{type(io).__name__} is no InferenceIO: it has no method {name}",
                hint="for arrays, and for items that come one by one: model.map(data)",
            )
        if iscoroutinefunction(method):
            raise UsageError(
                f"{name} of {type(io).__name__} is a coroutine function; wanted a plain one",
                hint="AsyncKServeModel runs it in a thread",
            )


def _item_bytes(io: InferenceIO) -> int:
    found = io.item_input_bytes()
    try:
        n_bytes = operator.index(found)
    except TypeError:
        n_bytes = 0
    if n_bytes <= 0:
        raise UsageError(
            f"item_input_bytes() of {type(io).__name__} is {found!r}; wanted the bytes of one item, above 0"
        )
    return n_bytes


def _declared(io: InferenceIO) -> tuple[OutputSpec, ...]:
    specs = tuple(io.output_specs()) if hasattr(io, "output_specs") else ()
    for spec in specs:
        if not isinstance(spec, OutputSpec):
            raise UsageError(
                f"output_specs() of {type(io).__name__} has {spec!r}; wanted OutputSpec(name, dtype, dims)"
            )
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise UsageError(f"output_specs() of {type(io).__name__} names an output twice: {', '.join(names)}")
    return specs


def _listed(found: Any) -> list[PoolInferInput]:
    inputs = list(found) if isinstance(found, Sequence) else [found]
    for one in inputs:
        if not isinstance(one, PoolInferInput):
            raise UsageError(
                f"encode_chunk returned {type(one).__name__}; wanted what scratch() returns, or a list of these"
            )
    return inputs


def _check(inputs: Sequence[PoolInferInput], slot: PoolSlot) -> None:
    if not inputs:
        raise UsageError("encode_chunk returned no input")
    names = [one.name for one in inputs]
    if len(set(names)) < len(names):
        raise UsageError(f"encode_chunk returned an input twice: {', '.join(names)}")
    for one in inputs:
        if one.subslot.pool is not slot.pool or one.subslot.generation != slot.generation:
            raise UsageError(
                f"input {one.name!r} lies in another slot than the one that encode_chunk was given",
                hint="carve every buffer from that slot, in every call",
            )
        if one.subslot.offset + one.nbytes > slot.offset + slot.cursor:
            raise UsageError(
                f"input {one.name!r} lies on bytes that were not carved, where outputs may be written",
                hint="take its buffer with scratch(slot, …) or slot.subslot(n_bytes), and do not reset the slot after",
            )
