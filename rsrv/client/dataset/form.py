"""What a map is given and gives back: one array or several by name, with what the server says about the tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rsrv.client.arrays import array_of, fitted, is_of_python
from rsrv.client.dataset.answers import items_text, require_rows
from rsrv.client.dataset.io import OutputSpec
from rsrv.client.server import ModelMetadata, TensorMeta
from rsrv.client.shapes import fits
from rsrv.client.tensors import InferResponse
from rsrv.core.errors import InvalidRequest, InvalidResponse, UsageError


@dataclass(frozen=True, slots=True)
class Form:
    """The form of the data: `single` when it is an array without a name, and which outputs are wanted (none = all)."""

    model_name: str
    single: bool
    outputs: tuple[str, ...]
    metadata: ModelMetadata | None

    @classmethod
    def of(cls, model_name: str, data: Any, outputs: Sequence[str] | None, metadata: ModelMetadata | None) -> Form:
        """Raises UsageError when `data` has no name and the model not exactly one input, or none that is known."""
        if isinstance(outputs, str):
            outputs = (outputs,)
        form = cls(model_name, not isinstance(data, Mapping), tuple(outputs or ()), metadata)
        if len(set(form.outputs)) < len(form.outputs):
            raise UsageError(f"outputs={list(form.outputs)} names an output twice")
        if form.single:
            form._only_input()
        elif not data:
            raise UsageError(f"model {model_name!r} was given no input: the mapping is empty")
        return form

    def check_rows(self, limit: int) -> None:
        """Raise UsageError when the server says that an input or a wanted output has no rows, or not on axis 0, or that
        an input always has more of them than the `limit` of a request."""
        if self.metadata is None:
            return
        inputs = self.metadata.inputs
        if not self.metadata.tells_rows:
            for one in inputs:
                if not one.shape or one.shape[0] > limit:
                    raise UsageError(
                        f"input {one.describe()} of model {self.model_name!r} has no open axis for rows, and a request "
                        f"of this map has at most {limit}",
                        hint="send one request at a time: model(x), or infer"
                        + (f"; batch={one.shape[0]} if axis 0 counts items" if one.shape else ""),
                    )
            return
        for kind, tensors in (("input", inputs), ("output", self.wanted())):
            for one in tensors:
                if one.batch_axis != 0:
                    has = "no axis for rows" if one.batch_axis is None else f"its rows on axis {one.batch_axis}"
                    raise UsageError(
                        f"{kind} {one.describe()} of model {self.model_name!r} has {has}; a map needs them on axis 0",
                        hint=("name the wanted outputs (outputs=[…]), or " if kind == "output" else "")
                        + "use infer_async, which takes any tensors",
                    )

    def tensors(self, data: Any, label: str) -> dict[str, np.ndarray]:
        """`data` by the inputs' names; `label` says in messages whose it is. Raises InvalidRequest for another form or
        dtype than the model's, UsageError for a dtype that cannot travel and for masked arrays."""
        if isinstance(data, Mapping) == self.single:
            wanted = "one array" if self.single else "a mapping of arrays"
            raise InvalidRequest(f"{label} is a {type(data).__name__}; wanted {wanted}, as before")
        named = {self._only_input(): data} if self.single else data
        return {str(name): self._tensor(str(name), value, label) for name, value in named.items()}

    def check_items(self, items: Mapping[str, np.ndarray], label: str) -> None:
        """Raise InvalidRequest when the server tells the shape of an item, and `items` have another one.

        `items` are the inputs of one item each, without the axis for rows.
        """
        for name, item in items.items():
            meta = self._input(name)
            if meta is None or meta.batch_axis != 0:
                continue
            wanted = meta.shape[1:]
            if not fits(wanted, item.shape):
                raise InvalidRequest(
                    f"{label}: an item of input {name!r} has the shape {list(item.shape)}, model {self.model_name!r} "
                    f"takes {list(wanted)}",
                    hint=_axis_slip(wanted, item.shape, meta),
                )

    def specs(self) -> list[OutputSpec]:
        """The wanted outputs, when the server tells the size of a row of each; otherwise none."""
        return row_specs(self.metadata, self.wanted()) if self.metadata is not None else []

    def wanted(self) -> list[TensorMeta]:
        """The wanted outputs that the server tells of."""
        known = self.metadata.outputs if self.metadata is not None else ()
        if not self.outputs:
            return list(known)
        by_name = {output.name: output for output in known}
        return [by_name[name] for name in self.outputs if name in by_name]

    def rows_of(self, response: InferResponse, rows: range) -> dict[str, np.ndarray]:
        """The wanted outputs by name. Raises InvalidResponse unless each has one row for each of `rows`."""
        arrays = response.arrays()
        found = {name: arrays[name] for name in self.outputs if name in arrays} if self.outputs else arrays
        missing = [name for name in self.outputs if name not in found]
        if missing or not found:
            names = ", ".join(arrays) or "no outputs"
            raise InvalidResponse(
                f"the response for {items_text(rows)} has no {', '.join(missing) or 'output'}; {names}"
            )
        hint = "a map takes outputs with a row for each item: name those (outputs=[…]), or use infer_async"
        for name, array in found.items():
            require_rows(name, array, rows, hint)
        return found

    def given_back(self, found: Mapping[str, Any]) -> Any:
        """In the form in which the data came: an array for an array, when there is one output."""
        if self.single and len(found) == 1:
            return next(iter(found.values()))
        return dict(found)

    def _only_input(self) -> str:
        if self.metadata is None:
            raise UsageError(
                f"the server does not say what the inputs of model {self.model_name!r} are called",
                hint="name them: {name: array}",
            )
        names = [one.name for one in self.metadata.inputs]
        if len(names) != 1:
            raise UsageError(
                f"model {self.model_name!r} has {len(names)} inputs ({', '.join(names)}), and was given one array",
                hint="give a mapping: {name: array, …}",
            )
        return names[0]

    def _tensor(self, name: str, value: Any, label: str) -> np.ndarray:
        meta = self._input(name)
        try:
            array = array_of(f"{label}: input {name!r}", value)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(str(error)) from None
        wanted = None if meta is None else meta.dtype
        if wanted is None or array.dtype.newbyteorder("=") == wanted:
            return array
        plain = is_of_python(value)
        if plain and (cast := fitted(array, wanted)) is not None:
            return cast
        assert meta is not None
        numpy_name = f"{'ml_dtypes' if wanted.kind == 'V' else 'np'}.{wanted.name}"
        raise InvalidRequest(
            f"{label}: input {name!r} is {array.dtype}, model {self.model_name!r} takes {meta.describe()}",
            hint=f"not all of its numbers fit into {numpy_name}"
            if plain and array.dtype.kind in "biuf"
            else f"convert it first: array.astype({numpy_name})",
        )

    def _input(self, name: str) -> TensorMeta | None:
        if self.metadata is None:
            return None
        known = {one.name: one for one in self.metadata.inputs}
        if known and name not in known:
            raise InvalidRequest(f"model {self.model_name!r} has no input {name!r}; it has: {', '.join(known)}")
        return known.get(name)


def row_specs(metadata: ModelMetadata, outputs: Sequence[TensorMeta]) -> list[OutputSpec]:
    """`outputs`, when all of them have rows, on axis 0, of a known size; else nothing, which asks for everything."""
    specs = []
    for output in outputs:
        dtype = output.dtype
        if dtype is None or metadata.row_axis(output) != 0 or min(output.shape[1:], default=0) < 0:
            return []
        specs.append(OutputSpec(output.name, dtype, output.shape[1:]))
    return specs


def _axis_slip(wanted: Sequence[int], shape: Sequence[int], meta: TensorMeta) -> str:
    """What may have gone wrong with an item of `shape`."""
    if shape[:1] == (1,) and fits(wanted, shape[1:]):
        return "items have no axis for rows: leave the leading 1 out, or map one array of all rows"
    if len(shape) == len(wanted) - 1:
        return "axis 0 of an array counts its rows: a single one needs it, too, array[np.newaxis]"
    return f"the model takes {meta.describe()}, rows first"
