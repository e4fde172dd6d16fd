"""What ``rsrv infer`` sends and shows: inputs as people write them on a command line, timed calls, outputs in brief."""

from __future__ import annotations

import difflib
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rsrv.cli import output
from rsrv.core.dtypes import DType
from rsrv.core.errors import UsageError

if TYPE_CHECKING:
    from rsrv.client.model import KServeModel
    from rsrv.client.server import ModelMetadata, TensorMeta

SUMMARY_COLUMNS = ("output", "dtype", "shape", "min", "mean", "max", "first values")
_FIRST_VALUES = 4


@dataclass(frozen=True, slots=True)
class Run:
    """The joined outputs of all requests of one pass, and how long every request took."""

    outputs: dict[str, np.ndarray]
    seconds: list[float]

    def timing(self) -> dict[str, float | int]:
        ordered = sorted(self.seconds)
        p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        facts = {
            "min": ordered[0],
            "median": statistics.median(ordered),
            "mean": statistics.fmean(ordered),
            "p99": p99,
            "max": ordered[-1],
        }
        return {"requests": len(ordered), **{f"{name}_ms": round(value * 1e3, 4) for name, value in facts.items()}}


def read_inputs(specs: Sequence[str], model: ModelMetadata, *, rows: int) -> dict[str, np.ndarray]:
    """The arrays that ``NAME=…`` options stand for; generated ones have `rows` rows. Raises UsageError."""
    declared = {tensor.name: tensor for tensor in model.inputs}
    arrays: dict[str, np.ndarray] = {}
    for spec in specs:
        name, equals, value = spec.partition("=")
        if not equals or not value:
            raise UsageError(f"--input {spec!r}: wanted NAME=@file.npy, NAME=JSON, NAME=zeros or NAME=random")
        if name not in declared:
            close = difflib.get_close_matches(name, declared, n=1)
            raise UsageError(
                f"model {model.name!r} has no input {name!r}; it has: {_list(model.inputs)}",
                hint=f"did you mean {close[0]!r}?" if close else None,
            )
        if name in arrays:
            raise UsageError(f"input {name!r} is given twice")
        arrays[name] = _array(declared[name], value, rows)
    if missing := [tensor for name, tensor in declared.items() if name not in arrays]:
        raise UsageError(
            f"model {model.name!r} also needs: {_list(missing)}" if arrays else f"no input for {_list(missing)}",
            hint=" ".join(f"--input {tensor.name}=random" for tensor in missing),
        )
    return arrays


def send(
    handle: KServeModel,
    inputs: Mapping[str, np.ndarray],
    model: ModelMetadata,
    *,
    batch: int | None,
    repeat: int,
) -> Run:
    """Send `inputs` `repeat` times, each time in pieces of `batch` rows when that is given."""
    pieces = [dict(inputs)] if batch is None else _split(model, inputs, batch)
    seconds: list[float] = []
    answers: list[dict[str, np.ndarray]] = []
    for _ in range(repeat):
        answers = []
        for piece in pieces:
            start = time.perf_counter()
            answers.append(handle.infer(piece))
            seconds.append(time.perf_counter() - start)
    if len(answers) == 1:
        return Run(answers[0], seconds)
    return Run({name: _join([answer[name] for answer in answers]) for name in answers[0]}, seconds)


def write_outputs(outputs: Mapping[str, np.ndarray], directory: Path) -> dict[str, Path]:
    """Write each output to ``directory/NAME.npy``; bfloat16 is stored as numpy stores it, two raw bytes an element."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = {name: directory / f"{name.replace('/', '_')}.npy" for name in outputs}
    for name, array in outputs.items():
        np.save(paths[name], array)
    return paths


def describe(array: np.ndarray) -> dict[str, Any]:
    return {"datatype": DType.from_numpy(array.dtype).wire, "shape": list(array.shape)}


def summary(name: str, array: np.ndarray) -> tuple[object, ...]:
    """One line about an output, in the order of `SUMMARY_COLUMNS`."""
    first = ", ".join(f"{value:.5g}" for value in array.flat[:_FIRST_VALUES].astype(np.float64).tolist())
    if array.size > _FIRST_VALUES:
        first += ", …"
    numbers = array.astype(np.float64)
    facts = (float(numbers.min()), float(numbers.mean()), float(numbers.max())) if array.size else (None,) * 3
    return (name, str(array.dtype), "×".join(map(str, array.shape)) or "scalar", *facts, first)


# --- inputs -------------------------------------------------------------------------------------------------------


def _array(tensor: TensorMeta, value: str, rows: int) -> np.ndarray:
    dtype = DType.from_wire(tensor.datatype).numpy
    if value.startswith("@"):
        return _load(tensor, Path(value[1:]), dtype)
    if value in ("zeros", "random"):
        shape = _generated_shape(tensor, rows)
        return np.zeros(shape, dtype) if value == "zeros" else _random(shape, dtype)
    try:
        parsed = np.array(json.loads(value))
    except json.JSONDecodeError:
        raise UsageError(f"input {tensor.name!r}: {value!r} is neither @file.npy, JSON, zeros nor random") from None
    except ValueError as error:
        raise UsageError(f"input {tensor.name!r}: {error}") from None
    if parsed.dtype.kind not in "biuf":
        raise UsageError(f"input {tensor.name!r}: JSON must hold numbers or booleans, nested like the tensor")
    with np.errstate(over="ignore", invalid="ignore"):
        array = parsed.astype(dtype)
    if dtype.kind in "biu" and not np.array_equal(array, parsed):
        raise UsageError(f"input {tensor.name!r}: a value of {value[:60]!r} is not a {tensor.datatype}")
    return array


def _load(tensor: TensorMeta, path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UsageError(f"input {tensor.name!r}: there is no file {str(path)!r}") from None
    except (ValueError, EOFError) as error:
        raise UsageError(f"input {tensor.name!r}: {path} is not a .npy file of numbers: {error}") from None
    if array.dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize:
        array = array.view(dtype)  # numpy writes bfloat16 as raw bytes
    return array


def _generated_shape(tensor: TensorMeta, rows: int) -> tuple[int, ...]:
    if any(extent < 0 for extent in tensor.shape[1:]):
        output.note(f"input {tensor.describe()}: open axes are taken as 1")
    return tuple(extent if extent >= 0 else rows if axis == 0 else 1 for axis, extent in enumerate(tensor.shape))


def _random(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """The same numbers each time: standard normal floats, integers in 0..99, coin flips."""
    source = np.random.default_rng(0)
    if dtype.kind == "b":
        return source.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        return source.integers(0, 100, shape).astype(dtype)
    return source.standard_normal(shape).astype(dtype)


def _split(model: ModelMetadata, inputs: Mapping[str, np.ndarray], batch: int) -> list[dict[str, np.ndarray]]:
    batched = {tensor.name for tensor in model.inputs if tensor.shape[:1] == (-1,)}
    rows = {name: array.shape[0] for name, array in inputs.items() if name in batched and array.ndim}
    if not rows:
        raise UsageError(f"--batch: no input of model {model.name!r} has rows along axis 0")
    if len(set(rows.values())) > 1:
        raise UsageError(f"--batch: the inputs have different numbers of rows: {rows}")
    count = next(iter(rows.values()))
    return [
        {name: array[start : start + batch] if name in rows else array for name, array in inputs.items()}
        for start in range(0, count, batch)
    ] or [dict(inputs)]


def _join(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts[0].ndim else np.stack(parts)


def _list(tensors: Sequence[TensorMeta]) -> str:
    return ", ".join(tensor.describe() for tensor in tensors)
