"""What goes into a call and what comes out of it: `InferInput`, `InferResponse` and `InferOutput`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from rsrv.client.arrays import array_of
from rsrv.core.dtypes import DType
from rsrv.core.errors import InvalidRequest, InvalidResponse, UsageError

if TYPE_CHECKING:
    from rsrv.core.wire.response import ResponseMessage


class InferInput:
    """One input tensor: ``InferInput(name, array)``, or ``InferInput(name, shape, flat)`` with the elements in C order.

    Raises TypeError for a dtype that the wire cannot carry, ValueError when `flat` does not fill `shape`, UsageError
    for masked arrays.
    """

    __slots__ = ("data", "name")

    @overload
    def __init__(self, name: str, array: Any, /) -> None: ...
    @overload
    def __init__(self, name: str, shape: Sequence[int], flat: Any, /) -> None: ...
    def __init__(self, name: str, first: Any, flat: Any = None, /) -> None:
        self.name = name
        if flat is None:
            self.data = wire_array(name, first)
            return
        shape = tuple(int(extent) for extent in first)
        elements = wire_array(name, flat)
        if min(shape, default=0) < 0 or elements.size != int(np.prod(shape, dtype=object)):
            raise ValueError(f"input {name!r}: {elements.size} elements do not fill the shape {list(shape)}")
        self.data = elements.reshape(shape)

    def __repr__(self) -> str:
        return f"InferInput({self.name!r}, {self.data.dtype}{list(self.data.shape)})"


class InferResponse:
    """The answer to one call. Arrays are read-only: copy one before changing it in place.

    An inline output is a view of the received message; an output that came through shared memory is a copy of its own.
    Neither is touched by later calls.
    """

    __slots__ = ("_message", "_shared")

    def __init__(self, message: ResponseMessage, shared: Mapping[str, np.ndarray] | None = None) -> None:
        self._message = message
        self._shared = shared or {}

    @property
    def model_name(self) -> str:
        return self._message.model_name

    @property
    def model_version(self) -> str:
        return self._message.model_version

    @property
    def id(self) -> str:
        return self._message.id

    @property
    def parameters(self) -> Mapping[str, bool | int | float | str]:
        return self._message.parameters

    @property
    def names(self) -> list[str]:
        """The outputs' names in the order of the answer."""
        return [output.name for output in self._message.outputs]

    def array(self, name: str) -> np.ndarray:
        """The output `name`, in its wire shape. Raises InvalidRequest, listing the names, for one that is not there."""
        if name not in self.names:
            raise InvalidRequest(f"the response has no output {name!r}; it has: {', '.join(self.names) or 'none'}")
        array = self._message.array(name)
        return array if array is not None else _present(name, self._shared.get(name))

    def arrays(self) -> dict[str, np.ndarray]:
        """All outputs by name, in the order of the answer."""
        shared = self._shared
        return {
            name: array if array is not None else _present(name, shared.get(name))
            for name, array in self._message.arrays().items()
        }


def _present(name: str, array: np.ndarray | None) -> np.ndarray:
    if array is None:
        raise InvalidResponse(f"output {name!r} is in a shared memory region that this client did not offer")
    return array


def InferOutput(name: str, response: InferResponse, dtype: Any = None) -> np.ndarray:
    """The output `name` of `response`; raises InvalidRequest when it is missing or, with `dtype`, has another one."""
    array = response.array(name)
    if dtype is not None and array.dtype != np.dtype(dtype):
        raise InvalidRequest(f"output {name!r} is {array.dtype}, not {np.dtype(dtype)}")
    return array


def named_arrays(inputs: Mapping[str, Any]) -> list[tuple[str, np.ndarray]]:
    """The arrays of a mapping as the wire can carry them; see `wire_array`. Raises UsageError for another form."""
    if not isinstance(inputs, Mapping):
        raise UsageError(
            f"the inputs are a {type(inputs).__name__}; wanted arrays by name, {{name: array}}",
            hint="model(x) takes an array for the only input",
        )
    return [(name, wire_array(name, array)) for name, array in inputs.items()]


def require_text(what: str, value: Any) -> None:
    """Raise UsageError for what is no text, or none that can be written in UTF-8."""
    if not isinstance(value, str) or not (value.isascii() or value.encode(errors="replace").decode() == value):
        raise UsageError(f"{what} is {value!r}; wanted text")


def output_names(wanted: Any) -> Sequence[str]:
    """The names of wanted outputs. Raises UsageError for what are none."""
    if not isinstance(wanted, Iterable):
        raise UsageError(f"outputs={wanted!r} are no names of outputs")
    names = wanted if isinstance(wanted, Sequence) else tuple(wanted)
    for name in names:
        require_text("the name of an output", name)
    return names


def wire_array(name: str, value: Any) -> np.ndarray:
    """`value` as a C-ordered array that the wire can carry, in native byte order.

    Raises TypeError naming the input and its dtype, ValueError for nested sequences that make no array, and UsageError
    for masked arrays.
    """
    array = np.asarray(array_of(f"input {name!r}", value), order="C")
    try:
        datatype = DType.from_numpy(array.dtype).wire
    except TypeError as error:
        if not array.dtype.isnative and array.dtype.fields is None:
            return wire_array(name, array.astype(array.dtype.newbyteorder("=")))
        raise TypeError(f"input {name!r}: {error}") from None
    if datatype is None:
        raise TypeError(f"input {name!r}: dtype {array.dtype} has no form on the wire")
    return array
