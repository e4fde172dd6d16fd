"""``--input NAME=VALUE``: from what people write to the rows of each input."""

from __future__ import annotations

import difflib
import glob
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rsrv.cli import output
from rsrv.cli.infer import files
from rsrv.cli.infer.images import SUFFIXES, ImageOptions, ImageRows
from rsrv.cli.infer.rows import RandomRows, Rows, random_array, zeros
from rsrv.cli.infer.wanted import Wanted
from rsrv.core.errors import UsageError

if TYPE_CHECKING:
    from rsrv.client.server import ModelMetadata, TensorMeta

FORMS = "NAME=@FILE, NAME=@DIRECTORY, NAME=JSON, NAME=zeros or NAME=random"
_GENERATED = ("zeros", "random")


@dataclass(frozen=True, slots=True)
class Inputs:
    """All inputs by name; `batched` are those whose axis 0 counts items."""

    rows: Mapping[str, Rows]
    batched: frozenset[str]

    def count(self) -> int:
        """How many items there are. Raises UsageError when inputs differ, when none has rows, or when there is none."""
        counts = {name: self.rows[name].shape[0] for name in self.rows if name in self.batched}
        if not counts:
            raise UsageError("--batch: no input has rows along axis 0", hint="leave out --batch")
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise UsageError(f"--batch: the inputs have different numbers of rows: {listed}")
        (count, *_) = counts.values()
        if not count:
            raise UsageError(f"there is nothing to send: {', '.join(counts)} has 0 rows")
        return count

    def request_rows(self) -> int:
        """The rows of one request with everything; 1 where a request has no rows."""
        return next((self.rows[name].shape[0] for name in self.rows if name in self.batched), 1)


def batched_names(model: ModelMetadata, tensors: Sequence[TensorMeta]) -> frozenset[str]:
    """Those of the model's `tensors` whose axis 0 counts items."""
    return frozenset(tensor.name for tensor in tensors if model.row_axis(tensor) == 0)


def read_inputs(
    specs: Sequence[str],
    model: ModelMetadata,
    *,
    rows: int | None = None,
    default_rows: Callable[[], int] = lambda: 1,
    images: ImageOptions | None = None,
) -> Inputs:
    """The inputs that `specs` stand for. Generated ones have `rows` rows, or as many as the others, or `default_rows`.

    Raises UsageError for what is not readable, has another dtype or shape than the model wants, is missing or unknown.
    """
    values = _by_name(specs, model)
    batched = batched_names(model, model.inputs) if model.inputs or model.tells_rows else frozenset(values)
    wanted = {tensor.name: Wanted.of(tensor, rows=tensor.name in batched) for tensor in model.inputs}
    wanted = {name: wanted.get(name) or Wanted(name) for name in values}
    found: dict[str, Rows] = {
        name: _read(wanted[name], value, images or ImageOptions())
        for name, value in values.items()
        if value not in _GENERATED
    }
    if rows is None:
        others = [given.shape[0] for name, given in found.items() if name in batched and given.shape]
        rows = others[0] if others else default_rows() if len(found) < len(values) else 1
    for name, value in values.items():
        if value in _GENERATED:
            found[name] = _generated(wanted[name], value, rows)
    return Inputs({name: found[name] for name in values}, frozenset(name for name in batched if found[name].shape))


def _by_name(specs: Sequence[str], model: ModelMetadata) -> dict[str, str]:
    declared = {tensor.name: tensor for tensor in model.inputs}
    values: dict[str, str] = {}
    for spec in specs:
        name, equals, value = spec.partition("=")
        if not name or not equals or not value:
            raise UsageError(f"--input {spec!r}: wanted {FORMS}")
        if declared and name not in declared:
            close = difflib.get_close_matches(name, declared, n=1)
            raise UsageError(
                f"model {model.name!r} has no input {name!r}; it has: {_list(model.inputs)}",
                hint=f"did you mean {close[0]!r}?" if close else None,
            )
        if name in values:
            raise UsageError(f"input {name!r} is given twice")
        values[name] = value
    if missing := [tensor for name, tensor in declared.items() if name not in values]:
        raise UsageError(
            f"model {model.name!r} also needs: {_list(missing)}" if values else f"no input for {_list(missing)}",
            hint=" ".join(f"--input {tensor.name}=random" for tensor in missing),
        )
    if not values:
        raise UsageError("no input is given", hint=f"--input {FORMS}")
    return values


def _read(wanted: Wanted, value: str, images: ImageOptions) -> Rows:
    if not value.startswith("@"):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):  # also for a number of thousands of digits
            raise wanted.refuse(f"{files.brief(value)} is neither @file, JSON, zeros nor random") from None
        return wanted.checked(files.from_json(wanted, parsed, files.brief(value)), files.brief(value))
    value = "@" + os.path.expanduser(value[1:])  # which a shell leaves alone behind "=@"
    path = Path(value[1:])
    if path.is_dir():
        pictures = sorted(entry for entry in path.iterdir() if entry.suffix.lower() in SUFFIXES)
        if not pictures:
            raise wanted.refuse(f"there are no pictures in {str(path)!r}", hint=f"files with {', '.join(SUFFIXES)}")
        return _pictures(wanted, pictures, images)
    if glob.has_magic(value) and not path.exists():
        matches = sorted(Path(match) for match in glob.glob(value[1:], recursive=True))
        if not matches:
            raise wanted.refuse(f"no file matches {value[1:]!r}")
        others = [match for match in matches if match.suffix.lower() not in SUFFIXES]
        if others:
            raise wanted.refuse(f"{value[1:]!r} also matches {str(others[0])!r}, which is no picture")
        return _pictures(wanted, matches, images)
    if path.suffix.lower() in SUFFIXES:
        return _pictures(wanted, [path], images)
    path, key = _path_and_key(value[1:])
    where = f"{path}:{key}" if key else str(path)
    return wanted.checked(files.read(wanted, path, key), where)


def _pictures(wanted: Wanted, paths: Sequence[Path], images: ImageOptions) -> Rows:
    pictures = ImageRows(wanted, paths, images)
    if wanted.rows:
        return pictures
    if len(paths) > 1:
        raise wanted.refuse(f"{len(paths)} pictures, where one {wanted.describe()} is wanted")
    one: np.ndarray = pictures[0:1][0]
    return one


def _path_and_key(text: str) -> tuple[Path, str]:
    """``x.npz:key`` in its parts; a file whose own name has a colon is itself."""
    before, colon, key = text.rpartition(":")
    if colon and Path(before).suffix.lower() in files.READERS and not Path(text).exists():
        return Path(before), key
    return Path(text), ""


def _generated(wanted: Wanted, kind: str, rows: int) -> Rows:
    if wanted.shape is None or wanted.dtype is None:
        raise wanted.refuse(f"the server does not tell its shape, so that it cannot be {kind}")
    if any(extent < 0 for extent in wanted.item or ()):
        output.note(f"input {wanted.describe()}: open axes are taken as 1")
    item = tuple(extent if extent >= 0 else 1 for extent in wanted.item or ())
    shape = (rows, *item) if wanted.rows else item
    if prod(shape) * wanted.dtype.itemsize > sys.maxsize:
        raise wanted.refuse(f"{rows} rows are more than any machine can address")
    if kind == "zeros":
        return zeros(shape, wanted.dtype)
    return RandomRows(shape, wanted.dtype) if wanted.rows else random_array(0, shape, wanted.dtype)


def _list(tensors: Sequence[TensorMeta]) -> str:
    return ", ".join(tensor.describe() for tensor in tensors)
