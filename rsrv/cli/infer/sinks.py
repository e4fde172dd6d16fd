"""Where outputs go: memory, one .npy file for each, or one .npy, .npz, .json or .jsonl file for all.

Files appear when they are complete, or not at all. Nothing here prints.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import numpy as np

from rsrv.cli.infer.stores import FileStore, MemoryStore, Store, naming
from rsrv.client.dataset.answers import items_text, require_rows
from rsrv.core.dtypes import DType
from rsrv.core.errors import InvalidResponse, UsageError

_NO_ROWS = "if its axis 0 does not count items, send them without --batch"


class Sink:
    """Takes the answers to a range of items each, in any order, from several threads; keeps them in memory.

    `count` items are to come; outputs in `batched` have a row for each of them, and the others are joined along their
    axis 0 in the order of the items. As a context manager it leaves nothing behind that was not finished.
    """

    def __init__(self, count: int, batched: frozenset[str]) -> None:
        self._count = count
        self._batched = batched
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._stores: dict[str, Store] = {}
        self._parts: dict[str, dict[int, np.ndarray]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def write(self, rows: range, outputs: Mapping[str, np.ndarray]) -> None:
        """Take the answer to the items `rows`. Raises InvalidResponse for one that cannot be joined with the others."""
        with self._lock:
            self._names = self._names or list(outputs)
            for name, array in outputs.items():
                if name not in self._batched:
                    self._parts.setdefault(name, {})[rows.start] = np.array(array)
                elif name not in self._stores:
                    require_rows(name, array, rows, _NO_ROWS)
                    self._stores[name] = self._room(name, (self._count, *array.shape[1:]), array.dtype)
        for name, array in outputs.items():
            store = self._stores.get(name)
            if store is None:
                continue
            require_rows(name, array, rows, _NO_ROWS)
            if (array.shape[1:], array.dtype) != (store.shape[1:], store.dtype):
                raise InvalidResponse(
                    f"output {name!r} of {items_text(rows)} is {array.dtype}{list(array.shape[1:])} an item, "
                    f"that of others {store.dtype}{list(store.shape[1:])}",
                    hint="write it to a .jsonl file, whose lines may differ",
                )
            store.write(rows.start, array)

    def finish(self) -> dict[str, Path]:
        """All answers are there: put the files to their places. Returns the file of each output."""
        return {}

    def close(self) -> None:
        """Remove what is not at its place."""

    def arrays(self) -> dict[str, np.ndarray]:
        """The joined outputs, in the order of the answers; those in files are mapped."""
        return {name: self._joined(name) for name in self._names}

    def _joined(self, name: str) -> np.ndarray:
        if name in self._stores:
            return self._stores[name].array()
        parts = [part for _, part in sorted(self._parts[name].items())]
        if len(parts) == 1:
            return parts[0]
        try:
            return np.concatenate(parts) if parts[0].ndim else np.stack(parts)
        except ValueError as error:
            raise InvalidResponse(f"output {name!r}: the answers cannot be joined: {error}") from None

    def _room(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Store:
        return MemoryStore(shape, dtype)


class JsonSink(Sink):
    """One JSON object, written at the end."""

    def __init__(self, count: int, batched: frozenset[str], path: Path) -> None:
        super().__init__(count, batched)
        self._path = path

    def finish(self) -> dict[str, Path]:
        value = {name: {**describe(array), "data": array.tolist()} for name, array in self.arrays().items()}
        with _replacing(self._path) as part, naming(part):
            part.write_text(strict_json(value) + "\n", encoding="utf-8")
        return dict.fromkeys(self._names, self._path)


class FilesSink(Sink):
    """Rows go to .npy files beside their places as they come; `publish` says where they are put in the end."""

    def __init__(self, count: int, batched: frozenset[str], beside: Path) -> None:
        super().__init__(count, batched)
        self._beside = beside
        self._made: list[Path] = []

    def close(self) -> None:
        for store in self._stores.values():
            with suppress(OSError):
                store.close()
        for path in self._made:
            with suppress(OSError):
                path.unlink()
        self._made.clear()

    def _room(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Store:
        path = self._beside / part_name(file_name(name))
        self._made.append(path)
        return FileStore(path, shape, dtype)

    def _complete(self) -> dict[str, Path]:
        """An .npy file of each output, not yet at its place."""
        for store in self._stores.values():
            store.close()
        for name in self._names:
            if name not in self._stores:
                path = self._beside / part_name(file_name(name))
                self._made.append(path)
                with naming(path), path.open("wb") as file:
                    np.save(file, self._joined(name))
        return {name: self._beside / part_name(file_name(name)) for name in self._names}


class DirectorySink(FilesSink):
    """``DIR/NAME.npy`` for each output, over what was there."""

    def write(self, rows: range, outputs: Mapping[str, np.ndarray]) -> None:
        if not self._names:
            self.require_places(self._beside, list(outputs))
        super().write(rows, outputs)

    @staticmethod
    def require_places(directory: Path, names: Sequence[str]) -> None:
        """Raise UsageError for outputs that cannot have a file of their own in `directory`."""
        if len({file_name(name) for name in names}) < len(names):
            raise UsageError(
                f"two of the outputs {', '.join(names)} have the same file name", hint="write an .npz file"
            )
        for name in names:
            _require_replaceable(directory / file_name(name), f"--output-dir {directory}: output {name!r}")

    def finish(self) -> dict[str, Path]:
        places = {name: self._beside / file_name(name) for name in self._names}
        parts = self._complete()
        for name, place in places.items():
            os.replace(parts[name], place)
            if isinstance(store := self._stores.get(name), FileStore):
                store.path = place
        self._made.clear()
        return places


class NpySink(FilesSink):
    """One .npy file of the only output."""

    def __init__(self, count: int, batched: frozenset[str], path: Path) -> None:
        super().__init__(count, batched, path.parent)
        self._path = path

    def write(self, rows: range, outputs: Mapping[str, np.ndarray]) -> None:
        self.require_one(self._path, list(outputs))
        super().write(rows, outputs)

    @staticmethod
    def require_one(path: Path, names: Sequence[str]) -> None:
        """Raise UsageError unless there is one output."""
        if len(names) != 1:
            raise UsageError(
                f"{path} holds one output, and there are: {', '.join(names)}",
                hint="choose one with --only NAME, or write an .npz file, or use --output-dir",
            )

    def finish(self) -> dict[str, Path]:
        ((name, part),) = self._complete().items()
        os.replace(part, self._path)
        if isinstance(store := self._stores.get(name), FileStore):
            store.path = self._path
        self._made.clear()
        return {name: self._path}


class NpzSink(FilesSink):
    """One .npz file, not compressed, as `numpy.savez` makes it."""

    def __init__(self, count: int, batched: frozenset[str], path: Path) -> None:
        super().__init__(count, batched, path.parent)
        self._path = path

    def finish(self) -> dict[str, Path]:
        with _replacing(self._path) as whole, naming(whole), zipfile.ZipFile(whole, "w") as archive:
            for name, part in self._complete().items():
                archive.write(part, f"{name}.npy")
        return dict.fromkeys(self._names, self._path)


class JsonLinesSink(Sink):
    """One JSON object a line and item, in order. What has no row for each item is on each line of its request."""

    def __init__(self, count: int, batched: frozenset[str], path: Path) -> None:
        super().__init__(count, batched)
        self._path = path
        self._part = path.parent / part_name(path.name)
        self._file: TextIO | None = None
        self._waiting: dict[int, tuple[int, list[str]]] = {}
        self._next = 0

    def write(self, rows: range, outputs: Mapping[str, np.ndarray]) -> None:
        columns = {}
        for name, array in outputs.items():
            if name in self._batched:
                require_rows(name, array, rows, _NO_ROWS)
            columns[name] = array.tolist()
        lines = [
            strict_json({name: value[at] if name in self._batched else value for name, value in columns.items()})
            for at in range(len(rows))
        ]
        with self._lock, naming(self._part):
            self._names = self._names or list(outputs)
            if self._file is None:
                self._file = self._part.open("w", encoding="utf-8")
            self._waiting[rows.start] = (rows.stop, lines)
            while self._next in self._waiting:
                self._next, ready = self._waiting.pop(self._next)
                self._file.writelines(f"{line}\n" for line in ready)

    def finish(self) -> dict[str, Path]:
        if self._file is not None:
            with naming(self._part):
                self._file.close()
            self._file = None
            os.replace(self._part, self._path)
        return dict.fromkeys(self._names, self._path)

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # what is not written yet may not fit on the disk
                self._file.close()
            self._file = None
            with suppress(OSError):
                self._part.unlink()

    def arrays(self) -> dict[str, np.ndarray]:
        """Nothing: the lines are in the file alone."""
        return {}


KINDS: dict[str, Callable[[int, frozenset[str], Path], Sink]] = {
    ".npy": NpySink,
    ".npz": NpzSink,
    ".json": JsonSink,
    ".jsonl": JsonLinesSink,
}


@dataclass(frozen=True, slots=True)
class Destination:
    """Where outputs are to go.

    Attributes:
        sink: makes what takes the answers to so many items; the named outputs have a row for each of them.
        require_places: raises UsageError for outputs of these names that cannot go there.
    """

    sink: Callable[[int, frozenset[str]], Sink]
    require_places: Callable[[Sequence[str]], None] = lambda names: None


def make(path: Path | None, directory: Path | None, *, overwrite: bool) -> Destination:
    """A file, a directory, or, without both, memory.

    Raises UsageError, before anything is sent, for a file that is there already, has no place, or is of no known kind.
    """
    if directory is not None:
        if path is not None:
            raise UsageError("--output and --output-dir exclude each other")
        directory.mkdir(parents=True, exist_ok=True)
        _require_writable(directory, f"--output-dir {directory}")
        return Destination(
            lambda count, batched: DirectorySink(count, batched, directory),
            lambda names: DirectorySink.require_places(directory, names),
        )
    if path is None:
        return Destination(Sink)
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise UsageError(f"--output {path}: wanted a file that ends with {', '.join(KINDS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--output {path}: there is no directory {str(path.parent)!r}")
    _require_replaceable(path, f"--output {path}")
    if path.exists() and not overwrite:
        raise UsageError(f"--output {path}: the file exists", hint="--overwrite replaces it")
    _require_writable(path.parent, f"--output {path}")
    only_one = (lambda names: NpySink.require_one(path, names)) if kind is NpySink else (lambda names: None)
    return Destination(lambda count, batched: kind(count, batched, path), only_one)


def _require_writable(directory: Path, option: str) -> None:
    """Raise UsageError when no file can be made there, rather than at the end of a long run."""
    probe = directory / part_name("rsrv")
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"{option}: no file can be made in {str(directory)!r}: {error.strerror}") from None


def _require_replaceable(place: Path, label: str) -> None:
    """Raise UsageError when no file can be put to `place`, by way of one with a longer name beside it."""
    there = None
    try:
        with suppress(FileNotFoundError):
            os.lstat(place.parent / part_name(place.name))
        with suppress(FileNotFoundError):
            there = os.lstat(place)
    except OSError as error:
        raise UsageError(f"{label}: {str(place)!r} can be no file: {error.strerror}") from None
    except ValueError as error:  # a name with a NUL
        raise UsageError(f"{label}: {str(place)!r} can be no file: {error}") from None
    if place.is_dir():
        raise UsageError(f"{label}: {str(place)!r} is a directory")
    parent = place.parent.stat()
    if there is not None and parent.st_mode & stat.S_ISVTX and os.geteuid() not in (0, there.st_uid, parent.st_uid):
        raise UsageError(
            f"{label}: {str(place)!r} is another user's, and only they can replace it in {str(place.parent)!r}"
        )


def describe(array: np.ndarray) -> dict[str, Any]:
    return {"datatype": DType.from_numpy(array.dtype).wire, "shape": list(array.shape)}


def strict_json(value: Any) -> str:
    """`value` as JSON on one line; what JSON has no number for (NaN, infinity) is null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        plain = json.loads(json.dumps(value), parse_constant=lambda name: None)
        return json.dumps(plain, ensure_ascii=False)


def file_name(name: str) -> str:
    return f"{name.replace('/', '_')}.npy"


def part_name(name: str) -> str:
    return f".{name}.{os.getpid()}.part"


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file that takes the place of `path` at the end of the block, or is removed when the block raises."""
    part = path.parent / part_name(path.name)
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
