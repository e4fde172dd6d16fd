"""A map over items that come one by one, from an iterator that may be endless: chunks out of items, items out of
answers. Not for when they are read and sent (`rsrv.client.dataset.stream`, `rsrv.client.aio`).
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rsrv.client.dataset.course import Course
from rsrv.client.dataset.form import Form
from rsrv.client.dataset.io import InferenceIO, OutputSpec, PoolInferInput, pool_view
from rsrv.client.dataset.rows import carve, surveyed_form
from rsrv.client.dataset.survey import Batch, Survey
from rsrv.client.steps import Steps
from rsrv.core.errors import InvalidRequest, UsageError

if TYPE_CHECKING:
    from rsrv.client.model import KServeModel
    from rsrv.client.tensors import InferResponse
    from rsrv.core.shm.slot import PoolSlot


def require_items(data: Any) -> None:
    """Raise UsageError for what is no iterable of items."""
    if isinstance(data, AsyncIterable):
        raise UsageError(
            f"{type(data).__name__} is an asynchronous iterable, which a KServeModel cannot read",
            hint="async for y in AsyncKServeModel(…).map(data)",
        )
    try:
        if isinstance(data, (str, bytes)):
            raise TypeError
        iter(data)
    except TypeError:
        raise UsageError(
            f"cannot map a {type(data).__name__}: wanted an array, a mapping of arrays by name, or an iterable of items"
        ) from None


@dataclass(slots=True)
class _Staged:
    """Items that were read, stacked, and what came of them: parts with the outputs of some of them each."""

    start: int
    arrays: dict[str, np.ndarray]
    count: int = 0
    parts: list[tuple[int, dict[str, np.ndarray]]] = field(default_factory=list)

    @property
    def rows(self) -> range:
        return range(self.start, self.start + self.count)


class ItemsIO(InferenceIO):
    """The chunks of a stream that are on their way, as a dataset. Items are copied when they are read, so that a
    source may yield the same array again and again.
    """

    def __init__(self, form: Form, first: Mapping[str, np.ndarray]) -> None:
        self._form = form
        self._like = dict(first)
        self._specs = form.specs()
        self._lock = threading.Lock()
        self._under_way: dict[int, _Staged] = {}

    def __len__(self) -> int:
        return 0

    def item_input_bytes(self) -> int:
        return max(1, sum(array.nbytes for array in self._like.values()))

    def output_specs(self) -> Sequence[OutputSpec]:
        return self._specs

    def encode_chunk(self, rows: range, slot: PoolSlot) -> list[PoolInferInput]:
        staged = self._holding(rows)
        inputs = carve(slot, staged.arrays, len(rows))
        first = rows.start - staged.start
        for one in inputs:
            np.copyto(pool_view(one), staged.arrays[one.name][first : first + len(rows)])
        return inputs

    def decode_chunk(self, rows: range, response: InferResponse) -> None:
        self._holding(rows).parts.append((rows.start, self._form.rows_of(response, rows)))

    def send(self, staged: _Staged) -> range:
        with self._lock:
            self._under_way[staged.start] = staged
        return staged.rows

    def take(self, rows: range) -> _Staged:
        with self._lock:
            return self._under_way.pop(rows.start)

    def _holding(self, rows: range) -> _Staged:
        with self._lock:
            return next(one for one in self._under_way.values() if rows.start in one.rows)


class ItemMap:
    """Reads items (`add`) until a chunk is `full`, gives it to its `course` (`cut`) and afterwards its `results`.

    One thread reads; chunks run anywhere.
    """

    def __init__(self, model: KServeModel, form: Form, first: Mapping[str, np.ndarray], found: Survey) -> None:
        self._form = form
        self._like = dict(first)
        self._io = ItemsIO(form, first)
        self.course = Course(model, self._io, found, outputs=form.outputs)
        self._spare: list[dict[str, np.ndarray]] = []
        self._n_items = 0
        self._staged = self._blank()

    @classmethod
    def prepare(
        cls, model: KServeModel, first: Any, batch: Batch = None, outputs: Sequence[str] | None = None
    ) -> Steps[ItemMap]:
        """The first item decides what all of them look like; it has to be added, too."""
        found, form = yield from surveyed_form(model, first, batch, outputs)
        tensors = form.tensors(first, "item 0")
        form.check_items(tensors, "item 0")
        return cls(model, form, tensors, found)

    @property
    def full(self) -> bool:
        return self._staged.count == self.course.chunk

    def add(self, item: Any) -> None:
        """Raises InvalidRequest, naming the item, for one with other inputs, dtypes or shapes than the first."""
        label = f"item {self._n_items}"
        tensors = self._form.tensors(item, label)
        if tensors.keys() != self._like.keys():
            raise InvalidRequest(f"{label} has the inputs {', '.join(tensors)}; the first has {', '.join(self._like)}")
        for name, array in tensors.items():
            like = self._like[name]
            if (array.shape, array.dtype) != (like.shape, like.dtype):
                raise InvalidRequest(
                    f"{label}: input {name!r} is {array.dtype}{list(array.shape)}, that of the first is "
                    f"{like.dtype}{list(like.shape)}",
                    hint="make all items of one map alike, by padding for example, or map them apart",
                )
        for name, array in tensors.items():
            self._staged.arrays[name][self._staged.count] = array
        self._staged.count += 1
        self._n_items += 1

    def cut(self) -> range | None:
        """The chunk that was read, to be run; None when it has no item."""
        if not self._staged.count:
            return None
        rows = self._io.send(self._staged)
        self._staged = self._blank()
        return rows

    def results(self, rows: range) -> Iterator[Any]:
        """The outputs of each item of a chunk that ran, in order, in the form of the items."""
        staged = self._io.take(rows)
        self._spare.append(staged.arrays)
        staged.arrays = {}
        for _, outputs in sorted(staged.parts, key=lambda part: part[0]):
            for i in range(len(next(iter(outputs.values())))):
                yield self._form.given_back({name: array[i] for name, array in outputs.items()})

    def _blank(self) -> _Staged:
        arrays = (
            self._spare.pop()
            if self._spare
            else {
                name: np.empty((self.course.chunk, *array.shape), array.dtype.newbyteorder("="))
                for name, array in self._like.items()
            }
        )
        return _Staged(self._n_items, arrays)
