"""Files of arrays and numbers: .npy, .npz, .json and .csv. Each function names the file in what it raises."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from rsrv.cli.infer.wanted import Wanted

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
Reader = Callable[[Wanted, Path, str], np.ndarray]


def read(wanted: Wanted, path: Path, key: str) -> np.ndarray:
    """The array in `path`, which the end of its name says how to read; `key` chooses one of several, "" for none."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise wanted.refuse(
            f"{str(path)!r} is no kind of file that can be read",
            hint=f"{', '.join(READERS)}, a picture, or a directory of pictures",
        )
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise wanted.refuse(f"{path} is not a regular file")
        return reader(wanted, path, key)
    except FileNotFoundError:
        raise wanted.refuse(f"there is no file {str(path)!r}") from None
    except OSError as error:
        raise wanted.refuse(f"{path} cannot be read: {error.strerror or error}") from None
    except MemoryError:
        raise wanted.refuse(f"{path} does not fit into memory", hint="as .npy it is read a batch at a time") from None


def _npy(wanted: Wanted, path: Path, key: str) -> np.ndarray:
    if key:
        raise wanted.refuse(f"{path} holds one array, so that :{key} cannot choose one")
    try:
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise wanted.refuse(f"{path} is not a .npy file of numbers: {error}") from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise wanted.refuse(f"{path} is an .npz archive", hint="rename it to .npz")
    return array


def _npz(wanted: Wanted, path: Path, key: str) -> np.ndarray:
    with path.open("rb") as file:  # by itself numpy leaves a damaged archive open
        try:
            archive: Any = np.load(file, allow_pickle=False)
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            raise wanted.refuse(f"{path} is not an .npz file: {error}") from None
        if isinstance(archive, np.ndarray):
            raise wanted.refuse(f"{path} is not an .npz file, but a single array", hint="rename it to .npy")
        with archive:
            chosen = _chosen(wanted, path, key, archive.files)
            try:
                array = archive[chosen]
            except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
                raise wanted.refuse(f"{path}: {chosen!r} is not an array of numbers: {error}") from None
    if not isinstance(array, np.ndarray):
        raise wanted.refuse(f"{path}: {chosen!r} is not an array")
    return array


def _json(wanted: Wanted, path: Path, key: str) -> np.ndarray:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise wanted.refuse(f"{path} is not text in UTF-8: {error}") from None
    except json.JSONDecodeError as error:
        raise wanted.refuse(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise wanted.refuse(f"{path} is nested too deep") from None
    except ValueError as error:  # a number of thousands of digits
        raise wanted.refuse(f"{path} cannot be read: {error}") from None
    if isinstance(value, dict):
        value = value[_chosen(wanted, path, key, value)]
    elif key:
        raise wanted.refuse(f"{path} is no object, so that :{key} cannot choose anything")
    return from_json(wanted, value, str(path))


def from_json(wanted: Wanted, value: Any, where: str) -> np.ndarray:
    """The array that a JSON value is: numbers or booleans, nested like the tensor."""
    try:
        parsed = np.array(value)
    except (ValueError, OverflowError) as error:
        raise wanted.refuse(f"{where}: {error}") from None
    return wanted.numbers(parsed, where)


def _csv(wanted: Wanted, path: Path, key: str) -> np.ndarray:
    """A row is a line and an item; its columns are the item's elements in C order. A line of names is left out."""
    if key:
        raise wanted.refuse(f"{path} holds one table, so that :{key} cannot choose one")
    delimiter = _DELIMITERS[path.suffix.lower()]
    try:
        with path.open(encoding="utf-8-sig") as file:
            lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
            number, first = next(lines, (0, ""))
            if not number:
                raise wanted.refuse(f"{path} is empty")
            skipped = number if _are_names(first.split(delimiter)) else 0
            only_names = skipped and next(lines, None) is None
    except UnicodeDecodeError as error:
        raise wanted.refuse(f"{path} is not text in UTF-8: {error}") from None
    if only_names and delimiter in first:
        raise wanted.refuse(f"{path} holds names and no numbers")
    if only_names:
        raise wanted.refuse(
            f"{path} has one line, which is no number: {brief(first.strip())}",
            hint=f"columns must be separated by {delimiter!r}",
        )
    try:
        table: np.ndarray = np.loadtxt(
            path,
            _parsed_as(wanted.dtype),
            comments=None,
            delimiter=delimiter,
            quotechar='"',
            skiprows=skipped,
            ndmin=2,
            encoding="utf-8-sig",
        )
    except (ValueError, OverflowError) as error:
        after = " (rows are counted after the line of names)" if skipped else ""
        hint = None if delimiter in first else f"its columns must be separated by {delimiter!r}"
        raise wanted.refuse(f"{path} is no table of numbers: {error}{after}", hint=hint) from None
    return _as_items(wanted, wanted.numbers(table, str(path)), path)


def _as_items(wanted: Wanted, table: np.ndarray, path: Path) -> np.ndarray:
    """The columns of `table` in the shape of an item, where that is known to have as many elements."""
    item, columns = wanted.item, table.shape[1]
    if item is None:
        return table
    if not wanted.rows:
        return table.reshape(item) if min(item, default=0) >= 0 and prod(item) == table.size else table
    known = prod(extent for extent in item if extent >= 0)
    open_axes = sum(extent < 0 for extent in item)
    if (not open_axes and columns == known) or (open_axes == 1 and known and columns % known == 0):
        return table.reshape((table.shape[0], *item))
    elements = f"{columns} column{'s' * (columns != 1)}"
    raise wanted.refuse(f"{path} has {elements}, which make no item of {wanted.describe()}")


def brief(text: str) -> str:
    """`text` quoted, for messages, without the end of a long one."""
    return repr(text if len(text) <= 60 else text[:59] + "…")


def _are_names(cells: Iterable[str]) -> bool:
    """Whether some cell of a line is neither a number nor empty."""
    for cell in cells:
        text = cell.strip().strip('"')
        try:
            float(text or 0)
        except ValueError:
            return True
    return False


def _parsed_as(dtype: np.dtype[Any] | None) -> type:
    """What numpy reads text as: integers exactly, all else as floats."""
    if dtype is None or dtype.kind not in "iu":
        return np.float64
    return np.int64 if dtype.kind == "i" else np.uint64


def _chosen(wanted: Wanted, path: Path, key: str, keys: Iterable[str]) -> str:
    """The member that is meant: `key`, else the input's name, else the only one."""
    names = list(keys)
    if key in names:
        return key
    if not key and wanted.name in names:
        return wanted.name
    if not key and len(names) == 1:
        return names[0]
    listed = ", ".join(names) or "nothing"
    why = f"{path} has no {key!r}; it has: {listed}" if key else f"{path} has none of that name; it has: {listed}"
    raise wanted.refuse(why, hint=f"choose one: {wanted.name}=@{path}:{names[0]}" if names else None)


READERS: dict[str, Reader] = {".npy": _npy, ".npz": _npz, ".json": _json, ".csv": _csv, ".tsv": _csv}
