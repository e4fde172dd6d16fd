"""Samples that a user brings as ``.npy`` files, to be answered by the original model and by the bundle (X-51)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rsrv.core.errors import UsageError
from rsrv.core.tensors import TensorSpec

Sample = dict[str, np.ndarray]


def read_samples(directory: Path | str, inputs: Sequence[TensorSpec], limit: int | None = None) -> dict[str, Sample]:
    """The samples in `directory`, in the order of their names: name → input → array.

    They are ``.npy`` files for a model with one input, else a directory for each sample that holds ``<input>.npy``; of
    other files and of hidden ones nothing is read. An array without its batch axis gets one.

    Raises UsageError that names the file when there are none, or one is not what the bundle takes.
    """
    root = Path(directory)
    if not root.is_dir():
        raise UsageError(f"{directory}: no such directory", hint=f"it is to hold {_wanted(inputs)}")
    found: dict[str, Sample] = {}
    for path in sorted(root.iterdir()):
        if limit is not None and len(found) == limit:
            break
        if path.name.startswith("."):
            continue
        if path.is_dir():
            found[path.name] = {spec.name: _load(path / f"{spec.name}.npy", spec) for spec in inputs}
        elif path.suffix == ".npy":
            if len(inputs) != 1:
                names = ", ".join(spec.name for spec in inputs)
                raise UsageError(f"{path} is one array, but the bundle takes {names}; want a directory for each sample")
            found[path.name] = {inputs[0].name: _load(path, inputs[0])}
        if path.name in found:
            _require_rows(path, inputs, found[path.name])
    if not found:
        raise UsageError(f"{directory} holds no sample: looked for {_wanted(inputs)}")
    return found


def _require_rows(path: Path, inputs: Sequence[TensorSpec], sample: Sample) -> None:
    rows = {spec.name: sample[spec.name].shape[spec.batch_axis] for spec in inputs if spec.batch_axis is not None}
    if 0 in rows.values() or len(set(rows.values())) > 1:
        seen = ", ".join(f"{count} rows of {name!r}" for name, count in rows.items())
        raise UsageError(f"{path} has {seen}; want the same number of rows, 1 or more, of every input")


def _wanted(inputs: Sequence[TensorSpec]) -> str:
    """What `read_samples` looks for."""
    files = " and ".join(f"{spec.name}.npy ({spec.describe()})" for spec in inputs)
    folders = f"a directory for each sample with {files}"
    return f"ANY.npy ({inputs[0].describe()}), or {folders}" if len(inputs) == 1 else folders


def _load(path: Path, spec: TensorSpec) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no .npy file: {error}") from None
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{path} is no .npy file but an archive")
    if array.dtype.kind == "V" and array.dtype.itemsize == spec.dtype.itemsize:
        array = array.view(spec.dtype.numpy)  # numpy stores the types of ml_dtypes as plain bytes
    if array.dtype != spec.dtype.numpy:
        raise UsageError(f"{path} is {array.dtype}, want {spec.describe()}")
    if spec.batch_axis is not None and array.ndim == spec.rank - 1:
        array = np.expand_dims(array, spec.batch_axis)
    wanted = spec.wire_shape
    if array.ndim != len(wanted) or any(size not in (-1, here) for size, here in zip(wanted, array.shape, strict=True)):
        raise UsageError(f"{path} has the shape {list(array.shape)}, want {spec.describe()}")
    return np.ascontiguousarray(array).reshape(array.shape)
