"""The header of `weights.safetensors`: a bounds-checked reader and the writer. Tensor bytes are loaded elsewhere.

The reader trusts nothing in the file: what it returns lies inside of the data, without overlap or gap, and fits its
dtype and shape. The stock library reads what is written here, and the reverse.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from rsrv.bundle.blocks import is_sha256
from rsrv.bundle.files import is_text, open_regular
from rsrv.bundle.problems import violation
from rsrv.core.dtypes import DType
from rsrv.core.errors import WeightsError
from rsrv.core.shapes import MAX_RANK

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 1 << 16
"""Each tensor is an argument of a program; a header with a million of them would take a minute to read."""
ALIGNMENT = 64

_METADATA = "__metadata__"
_KEYS = {"dtype", "shape", "data_offsets"}
_LENGTH_BYTES = 8
_LFS_POINTER = b"version "
"""How the file begins that Git leaves in the place of one that it keeps elsewhere."""


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """One tensor; `shape` is that of the program's argument, row-major.

    Its bytes are ``[begin, end)``, counted from `WeightsHeader.data_offset`; C order, but see `column_major` there.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class WeightsHeader:
    """What a weights file declares.

    Attributes:
        tensors: in the order of their bytes in the file.
        argument_order: names in the order of the program's arguments.
        tensor_digests: sha256 of the bytes of each tensor, as declared; a hint until it was verified.
        data_offset: where in the file the data begins.
        data_bytes: size of the data.
        column_major: the file is of a format 2.0 bundle, where a tensor is stored with its axes reversed: its bytes are
            the C order of ``shape[::-1]``, and transposing that gives the program's argument (B-58).
    """

    tensors: Mapping[str, WeightEntry]
    argument_order: tuple[str, ...]
    tensor_digests: Mapping[str, str]
    data_offset: int
    data_bytes: int
    column_major: bool = False


def ordered(header: WeightsHeader) -> list[WeightEntry]:
    """The tensors in program-argument order."""
    return [header.tensors[name] for name in header.argument_order]


def read_header(source: Path | str | int, *, column_major: bool = False, path: Path | None = None) -> WeightsHeader:
    """Read and check the header of a weights file, given by path or by an open descriptor (whose position is kept).

    `column_major` for the file of a format 2.0 bundle (`Manifest.column_major`): shapes are then reversed here. `path`
    is what errors call a file that is given by descriptor.
    Raises WeightsError (B-58 … B-60) for a file that is not exactly what the header says.
    """
    if isinstance(source, int):
        label = f"weights (descriptor {source})" if path is None else str(path)
        return _read(source, label, None if path is None else path.name, column_major)
    path = Path(source)
    fd = open_regular(path, error=WeightsError, rule="B-58")
    try:
        return _read(fd, str(path), path.name, column_major)
    finally:
        os.close(fd)


def _read(fd: int, label: str, file: str | None, column_major: bool) -> WeightsHeader:
    reader = _HeaderReader(label, file, column_major)
    try:
        return reader.read(fd)
    except OSError as error:
        raise violation(WeightsError, "B-58", f"{label}: cannot be read: {error.strerror}", file=file) from error


class _HeaderReader:
    """Reads one header; `label` and `file` name the file in errors."""

    def __init__(self, label: str, file: str | None, column_major: bool) -> None:
        self._label = label
        self._file = file
        self._column_major = column_major

    def refuse(self, problem: str, rule: str = "B-60", hint: str | None = None) -> NoReturn:
        raise violation(WeightsError, rule, f"{self._label}: {problem}", file=self._file, hint=hint)

    def read(self, fd: int) -> WeightsHeader:
        file_bytes = os.fstat(fd).st_size
        if file_bytes < _LENGTH_BYTES:
            self.refuse(f"{file_bytes} bytes hold no header length; the file is truncated")
        first = self._pread(fd, _LENGTH_BYTES, 0)
        if first == _LFS_POINTER:
            self.refuse("this is a pointer of Git LFS, not the file itself", hint="git lfs pull")
        length = int.from_bytes(first, "little")
        if length > MAX_HEADER_BYTES:
            self.refuse(f"header length is {length}; at most {MAX_HEADER_BYTES} bytes are read")
        data_offset = _LENGTH_BYTES + length
        if data_offset > file_bytes:
            self.refuse(f"header length is {length}, but the file has {file_bytes} bytes; it is truncated")
        header = self._json(self._pread(fd, length, _LENGTH_BYTES), "header")
        if not isinstance(header, dict):
            self.refuse(f"the header must be a JSON object, got a {type(header).__name__}")
        metadata = self._metadata(header.pop(_METADATA, {}))
        data_bytes = file_bytes - data_offset
        tensors = self._tensors(header, data_bytes)
        return WeightsHeader(
            tensors=tensors,
            argument_order=self._argument_order(metadata, tensors),
            tensor_digests=self._tensor_digests(metadata, tensors),
            data_offset=data_offset,
            data_bytes=data_bytes,
            column_major=self._column_major,
        )

    def _pread(self, fd: int, size: int, offset: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = os.pread(fd, size, offset)
            if not part:
                self.refuse(f"the file ended at byte {offset} while its header was read")
            parts.append(part)
            size -= len(part)
            offset += len(part)
        return b"".join(parts)

    def _json(self, text: bytes | str, what: str) -> Any:
        objects = 0

        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            nonlocal objects
            objects += 1
            if objects > MAX_TENSORS + 2:  # one for each tensor, the metadata, and the header itself
                self.refuse(f"{what} has more than {MAX_TENSORS} tensors; so many are not read")
            mapping = dict(pairs)
            if len(mapping) < len(pairs):
                self._refuse_repeated(pairs, what)
            return mapping

        def constant(name: str) -> NoReturn:
            self.refuse(f"{what} contains {name}, which is not JSON")

        try:
            decoded = text.decode("utf-8") if isinstance(text, bytes) else text
            return json.loads(decoded, object_pairs_hook=unique, parse_constant=constant)
        except UnicodeDecodeError as error:
            self.refuse(f"{what} is not UTF-8 at byte {error.start}")
        except RecursionError:
            self.refuse(f"{what} is nested too deeply")
        except ValueError as error:  # JSONDecodeError, and integers with more digits than Python converts
            self.refuse(f"{what} is not JSON: {error}")

    def _refuse_repeated(self, pairs: list[tuple[str, Any]], what: str) -> NoReturn:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                break
            seen.add(key)
        self.refuse(f"{what} has the key {key!r} twice")

    def _metadata(self, value: object) -> dict[str, str]:
        if not isinstance(value, dict):
            self.refuse(f"{_METADATA} must be an object of strings, got {_shortened(value)}")
        for key, text in value.items():
            if not isinstance(text, str):
                self.refuse(f"{_METADATA}[{_shortened(key)}] must be a string, got {_shortened(text)}")
        return value

    def _tensors(self, header: Mapping[str, object], data_bytes: int) -> dict[str, WeightEntry]:
        entries = [self._entry(name, value, data_bytes) for name, value in header.items()]
        entries.sort(key=lambda entry: (entry.begin, entry.end))
        reached = 0
        for entry in entries:
            if entry.begin != reached:
                problem = "overlaps the tensor before it" if entry.begin < reached else "leaves a gap before it"
                self.refuse(
                    f"tensor {entry.name!r} begins at byte {entry.begin} of the data, want {reached}: it {problem}"
                )
            reached = entry.end
        if reached != data_bytes:
            self.refuse(f"the tensors end at byte {reached}, but the file holds {data_bytes} bytes of data")
        return {entry.name: entry for entry in entries}

    def _entry(self, name: str, value: object, data_bytes: int) -> WeightEntry:
        where = f"tensor {name!r}"
        if not is_text(name):
            self.refuse(f"{where}: the name is not valid Unicode")
        if not isinstance(value, dict) or value.keys() != _KEYS:
            self.refuse(f"{where} must have exactly dtype, shape and data_offsets, got {_shortened(value)}")
        tag, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        try:
            dtype = DType.from_safetensors(tag)
        except (KeyError, TypeError):
            known = ", ".join(dtype.safetensors for dtype in DType)
            self.refuse(f"{where}: dtype {_shortened(tag)} is not supported; supported: {known}")
        if isinstance(shape, list) and len(shape) > MAX_RANK:
            self.refuse(f"{where}: {len(shape)} axes; at most {MAX_RANK} are possible")
        if not isinstance(shape, list) or not all(map(_is_count, shape)):
            self.refuse(f"{where}: shape {_shortened(shape)} must be a list of integers, 0 or above")
        # Zero extents leave no bytes behind, but numpy multiplies the others all the same.
        if math.prod(filter(None, shape)) * dtype.itemsize >= 2**63:
            self.refuse(f"{where}: shape {_shortened(shape)} overflows")
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
            self.refuse(f"{where}: data_offsets {_shortened(offsets)} must be two integers, 0 or above")
        begin, end = offsets
        if not begin <= end <= data_bytes:
            self.refuse(f"{where}: data_offsets {_shortened(offsets)} lie outside of the {data_bytes} bytes of data")
        wanted = math.prod(shape) * dtype.itemsize
        if end - begin != wanted:
            self.refuse(f"{where}: data_offsets {offsets} hold {end - begin} bytes; {tag} {shape} needs {wanted}")
        return WeightEntry(name, dtype, tuple(shape[::-1] if self._column_major else shape), begin, end)

    def _argument_order(self, metadata: Mapping[str, str], tensors: Mapping[str, WeightEntry]) -> tuple[str, ...]:
        if "argument_order" not in metadata:
            if tensors:
                self.refuse(f"metadata argument_order is missing, but there are {len(tensors)} tensors", "B-59")
            return ()
        order = self._json(metadata["argument_order"], "metadata argument_order")
        if not isinstance(order, list) or not all(isinstance(name, str) for name in order):
            self.refuse(f"metadata argument_order must be a list of names, got {_shortened(order)}", "B-59")
        seen: set[str] = set()
        for name in order:
            if name in seen:
                self.refuse(f"metadata argument_order lists {name!r} twice", "B-59")
            if name not in tensors:
                self.refuse(f"metadata argument_order lists {name!r}, which is not in the file", "B-59")
            seen.add(name)
        for name in tensors:
            if name not in seen:
                self.refuse(f"tensor {name!r} is not in metadata argument_order", "B-59")
        return tuple(order)

    def _tensor_digests(self, metadata: Mapping[str, str], tensors: Mapping[str, WeightEntry]) -> dict[str, str]:
        if "tensor_digests" not in metadata:
            return {}
        digests = self._json(metadata["tensor_digests"], "metadata tensor_digests")
        if not isinstance(digests, dict):
            self.refuse(f"metadata tensor_digests must be an object, got {_shortened(digests)}", "B-58a")
        for name, digest in digests.items():
            if name not in tensors:
                self.refuse(f"metadata tensor_digests names {name!r}, which is not in the file", "B-58a")
            if not isinstance(digest, str) or not is_sha256(digest):
                self.refuse(f"metadata tensor_digests[{name!r}] is {_shortened(digest)}, want a sha256", "B-58a")
        return digests


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # a bool is an int of another type


def _shortened(value: object, limit: int = 200) -> str:
    """`value` for a message; of a value of a hundred megabytes only the beginning is looked at."""
    text = _SHORT.repr(value)
    return text if len(text) <= limit else text[:limit] + "…"


_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxdict = _SHORT.maxlevel = 8
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 100


def write_weights(path: Path | str, items: Sequence[tuple[str, np.ndarray]]) -> None:
    """Write `items` as a weights file whose `argument_order` is their order (B-58a).

    Data begins at a multiple of 64 bytes; tensors whose size is a multiple of 64 come first, so that each of them
    starts at such an offset too. Equal items give equal bytes. Raises WeightsError for a repeated name (X-6) or a
    dtype that no bundle holds.
    """
    arrays = dict(_checked(items))
    layout = sorted(arrays, key=lambda name: arrays[name].nbytes % ALIGNMENT != 0)
    header = _header(arrays, layout)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(_LENGTH_BYTES, "little"))
        file.write(header)
        for name in layout:
            file.write(_bytes_of(arrays[name]))


def _checked(items: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, np.ndarray]]:
    seen: set[str] = set()
    for name, value in items:
        if not isinstance(name, str) or name in ("", _METADATA) or not is_text(name):
            raise violation(WeightsError, "X-6", f"a weight cannot be named {name!r}")
        if name in seen:
            raise violation(WeightsError, "X-6", f"two weights are named {name!r}")
        seen.add(name)
        array = np.asarray(value, order="C")
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        try:
            DType.from_numpy(array.dtype)
        except TypeError as error:
            raise violation(WeightsError, "B-58", f"weight {name!r}: {error}") from None
        yield name, array


def _header(arrays: Mapping[str, np.ndarray], layout: Sequence[str]) -> bytes:
    if len(arrays) > MAX_TENSORS:
        raise violation(WeightsError, "B-60", f"{len(arrays)} tensors; at most {MAX_TENSORS} go into a file")
    digests = {name: hashlib.sha256(_bytes_of(array)).hexdigest() for name, array in arrays.items()}
    header: dict[str, Any] = {
        _METADATA: {"argument_order": json.dumps(list(arrays)), "tensor_digests": json.dumps(digests)}
    }
    begin = 0
    for name in layout:
        array = arrays[name]
        end = begin + array.nbytes
        header[name] = {
            "dtype": DType.from_numpy(array.dtype).safetensors,
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise violation(
            WeightsError,
            "B-60",
            f"the header takes {len(text)} bytes, above {MAX_HEADER_BYTES}",
        )
    return text


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
