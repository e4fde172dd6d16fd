"""A map over arrays: rows of inputs that are there already, memory-mapped ones too, to rows of outputs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from rsrv.client.dataset.answers import items_text
from rsrv.client.dataset.course import Course
from rsrv.client.dataset.driver import Progress, drive
from rsrv.client.dataset.form import Form
from rsrv.client.dataset.io import InferenceIO, OutputSpec, PoolInferInput, pool_view, scratch
from rsrv.client.dataset.survey import Batch, Survey, known_metadata, naming_metadata, survey
from rsrv.client.steps import Aside, Steps, run
from rsrv.client.tensors import wire_array
from rsrv.core.dtypes import DType
from rsrv.core.errors import InvalidRequest, InvalidResponse, UsageError

if TYPE_CHECKING:
    from rsrv.client.model import KServeModel
    from rsrv.client.tensors import InferResponse
    from rsrv.core.shm.slot import PoolSlot


def is_rows(data: Any) -> bool:
    """Whether `data` has rows (an array, or a mapping of arrays), rather than being an iterable of items."""
    return isinstance(data, (np.ndarray, Mapping)) or hasattr(data, "__array__")


class RowsIO(InferenceIO):
    """Rows of arrays as a dataset; `results` has the outputs, as soon as every chunk was decoded."""

    def __init__(self, arrays: Mapping[str, np.ndarray], form: Form) -> None:
        """Raises UsageError unless all arrays have the same number of rows."""
        counts = {name: array.shape[0] if array.ndim else None for name, array in arrays.items()}
        if None in counts.values() or len(set(counts.values())) != 1:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
            raise UsageError(f"inputs of a map need the same number of rows (axis 0); these have the shapes: {shapes}")
        self._arrays = arrays
        self._form = form
        self._n_rows: int = next(array.shape[0] for array in arrays.values())
        self._specs = form.specs()
        self._lock = threading.Lock()
        self.results: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return self._n_rows

    def item_input_bytes(self) -> int:
        return max(1, sum(array.dtype.itemsize * prod(array.shape[1:]) for array in self._arrays.values()))

    def output_specs(self) -> Sequence[OutputSpec]:
        return self._specs

    def encode_chunk(self, rows: range, slot: PoolSlot) -> list[PoolInferInput]:
        inputs = carve(slot, self._arrays, len(rows))
        for one in inputs:
            np.copyto(pool_view(one), self._arrays[one.name][rows.start : rows.stop])
        return inputs

    def decode_chunk(self, rows: range, response: InferResponse) -> None:
        found = self._form.rows_of(response, rows)
        with self._lock:
            if not self.results:
                self.results = {
                    name: np.empty((self._n_rows, *array.shape[1:]), array.dtype) for name, array in found.items()
                }
        for name, array in found.items():
            result = self.results.get(name)
            if result is None or (result.shape[1:], result.dtype) != (array.shape[1:], array.dtype):
                before = "none" if result is None else f"rows of {result.dtype}{list(result.shape[1:])}"
                raise InvalidResponse(
                    f"output {name!r} of {items_text(rows)} has rows of {array.dtype}{list(array.shape[1:])}, other "
                    f"items have {before}: they do not fit into one array",
                    hint="map an iterator, iter(array): it gives the outputs of each item by themselves",
                )
            result[rows.start : rows.stop] = array

    def without_rows(self) -> dict[str, np.ndarray]:
        """The outputs for no rows at all, as the server's metadata has them."""
        wanted = self._form.wanted()
        if not wanted:
            raise UsageError(
                f"the data has no rows, and the server does not say what the outputs of model "
                f"{self._form.model_name!r} are"
            )
        return {
            one.name: np.empty((0, *(max(extent, 0) for extent in one.shape[1:])), DType.from_wire(one.datatype).numpy)
            for one in wanted
        }


def carve(slot: PoolSlot, arrays: Mapping[str, np.ndarray], n_rows: int) -> list[PoolInferInput]:
    """Room for `n_rows` rows of each array, in native byte order."""
    layout = {name: ((n_rows, *array.shape[1:]), array.dtype.newbyteorder("=")) for name, array in arrays.items()}
    return scratch(slot, layout)


def surveyed_form(
    model: KServeModel, data: Any, batch: Batch, outputs: Sequence[str] | None
) -> Steps[tuple[Survey, Form]]:
    """How every map begins: what the server says, and the form of `data`, or of its first item."""
    found = yield from survey(model, batch)
    metadata = yield from naming_metadata(model, found.metadata, data)
    form = Form.of(model.model_name, data, outputs, metadata)
    form.check_rows(found.limit)
    return found, form


class RowMap:
    """A map over arrays: run its `course`, None when there are no rows, and read the `result`."""

    def __init__(self, io: RowsIO, form: Form, course: Course | None) -> None:
        self.io = io
        self.course = course
        self._form = form

    @classmethod
    def prepare(
        cls, model: KServeModel, data: Any, batch: Batch = None, outputs: Sequence[str] | None = None
    ) -> Steps[RowMap]:
        found, form = yield from surveyed_form(model, data, batch, outputs)
        arrays = form.tensors(data, "the data")
        io = RowsIO(arrays, form)
        # No element is read: an item in shape alone.
        form.check_items(
            {name: np.broadcast_to(np.empty((), array.dtype), array.shape[1:]) for name, array in arrays.items()},
            "the data",
        )
        if not len(io):
            return cls(io, form, None)
        return cls(io, form, Course(model, io, found, copy_outputs=False, outputs=form.outputs))

    def result(self) -> Any:
        """Outputs with as many rows as the data, in its form."""
        return self._form.given_back(self.io.without_rows() if self.course is None else self.io.results)


def over_rows(
    model: KServeModel,
    data: Any,
    batch: Batch = None,
    progress: Progress | None = None,
    outputs: Sequence[str] | None = None,
) -> Any:
    """The outputs for all rows; see `KServeModel.map`."""
    rows = run(RowMap.prepare(model, data, batch, outputs))
    if rows.course is not None:
        drive(rows.course, len(rows.io), progress)
    return rows.result()


def call_steps(model: KServeModel, data: Any, outputs: Sequence[str] | None) -> Steps[Any]:
    """One request with all the rows of `data`; gives the outputs in its form."""
    metadata = None
    if not isinstance(data, Mapping):
        known = yield Aside(lambda: known_metadata(model, remembered=True))
        metadata = yield from naming_metadata(model, known, data)
    try:
        form = Form.of(model.model_name, data, outputs, metadata)
        tensors = [(name, wire_array(name, array)) for name, array in form.tensors(data, "the data").items()]
        response = yield from model.tensor_steps(tensors, form.outputs or None)
    except (InvalidRequest, UsageError):
        model.facts.forget()  # the model may have been replaced by one with other inputs
        raise
    return form.given_back(response.arrays())
