"""Reads tensors of a weights file, in parts on two threads, into memory that the caller gives.

Which bytes of the file belong to which tensor is for the header reader to say; nothing here parses.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from rsrv.bundle.safetensors import WeightEntry, ordered
from rsrv.core.errors import WeightsError
from rsrv.serve.residency.content import go_on
from rsrv.serve.residency.memory import Piece, allocate, discard, free_pieces

if TYPE_CHECKING:
    from rsrv.serve.residency.content import WeightsFile

T = TypeVar("T")

_READERS = 2
_PART_BYTES = 8 << 20
_MAX_VIEWS = 512
"""Of one part; the kernel takes 1024."""
_BLOCK_BYTES = 4 << 20
"""Of a tensor that is transposed: all the memory that a reader needs beside the tensor itself."""
_BLOCK_RUN = 64
"""Elements in a row that a block writes at least, where the tensor has them: whole cache lines."""
_COMPARED_BYTES = 1 << 20
"""Read, and compared while still in the processor's cache."""


class _Block(NamedTuple):
    """A part of a tensor of a column-major file: where it starts and how far it goes, along the axes as stored."""

    entry: WeightEntry
    view: memoryview
    starts: tuple[int, ...]
    extents: tuple[int, ...]


class _Part(NamedTuple):
    """Bytes of the file from `source` on that belong into `views`, one after the other."""

    source: int
    views: list[memoryview]


def read_tensors(
    file: WeightsFile, targets: Sequence[tuple[WeightEntry, memoryview]], check: Callable[[], None] = go_on
) -> None:
    """Read tensors of `file` into writable views of bytes, each as large as its tensor, C order.

    A tensor of a column-major file is transposed on the way. Raises WeightsError when the file cannot be read or ends
    too early; whether it is still the same file is for the caller to ask. Raises what `check` raises, which is called
    before each part.
    """
    targets = [target for target in targets if target[0].nbytes]
    if file.column_major:
        _read_turned(file, targets, check)
        return
    parts = _parts(file.header.data_offset, targets)

    def read(part: _Part) -> None:
        check()
        _read_part(file, part)

    try:
        _reading(file, read, parts)
    finally:
        for part in parts:  # those that an error left; memory with views cannot be unmapped
            _drop(part.views)


def fill_views(file: WeightsFile, check: Callable[[], None], views: Sequence[memoryview]) -> None:
    """Write the tensors of `file` into `views`, in argument order, and keep none of them: the `Fill` of a WeightStore.

    Raises WeightsError, also when the file is not the one that was opened, and as `read_tensors`.
    """
    targets = [*zip(ordered(file.header), views, strict=True)]
    read_tensors(file, targets, check)
    file.confirm(lambda: ((entry, np.frombuffer(view, np.uint8)) for entry, view in targets if entry.nbytes), check)


def is_equal(file: WeightsFile, entry: WeightEntry, array: np.ndarray, check: Callable[[], None] = go_on) -> bool:
    """Whether the bytes of a tensor of `file` are those of `array`, which holds bytes and has the same size.

    Raises as `read_tensors`.
    """
    scratch = np.empty(min(_COMPARED_BYTES, array.nbytes), np.uint8)
    source = file.header.data_offset + entry.begin
    for start in range(0, array.nbytes, _COMPARED_BYTES):
        check()
        wanted = array[start : start + _COMPARED_BYTES]
        found = scratch[: wanted.nbytes]
        _read_part(file, _Part(source + start, [found.data]))
        if not _same(found, wanted):
            return False
    return True


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    whole = one.nbytes // 8 * 8
    words = np.array_equal(one[:whole].view(np.uint64), other[:whole].view(np.uint64))
    return words and np.array_equal(one[whole:], other[whole:])


def side_by_side(work: Callable[[T], object], items: Iterable[T]) -> None:
    """Call `work` with each of `items`, on this thread and, when there are several, on one more.

    Raises the first error, once both threads have ended.
    """
    pending = [*items][::-1]
    errors: list[BaseException] = []

    def run() -> None:
        while not errors:
            try:
                item = pending.pop()
            except IndexError:
                return
            try:
                work(item)
            except BaseException as error:
                errors.append(error)

    # A read that hangs must not keep the process from ending.
    helpers = [
        threading.Thread(target=run, name="rsrv-weights", daemon=True) for _ in range(min(_READERS, len(pending)) - 1)
    ]
    for helper in helpers:
        helper.start()
    run()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors.pop()


def _reading(file: WeightsFile, work: Callable[[T], object], items: Iterable[T]) -> None:
    try:
        side_by_side(work, items)
    except OSError as error:
        raise file.unreadable(error) from error


def _parts(data_offset: int, targets: Iterable[tuple[WeightEntry, memoryview]]) -> list[_Part]:
    """`targets` in the order of the file; tensors that are neighbours there are read together."""
    parts: list[_Part] = []
    room = end = 0
    for entry, view in sorted(targets, key=lambda target: target[0].begin):
        source = data_offset + entry.begin
        done = 0
        while done < entry.nbytes:
            if source + done != end or not room or len(parts[-1].views) == _MAX_VIEWS:
                parts.append(_Part(source + done, []))
                room = _PART_BYTES
            n = min(room, entry.nbytes - done)
            parts[-1].views.append(view[done : done + n])
            done += n
            room -= n
            end = source + done
    return parts


def _read_part(file: WeightsFile, part: _Part) -> None:
    source, views = part
    try:
        while views:
            n = os.preadv(file.fileno(), views, source)
            if n == 0:
                raise WeightsError(
                    f"{file.path} ends at byte {source}, {sum(map(len, views))} bytes before a tensor does; "
                    "it was truncated while it was read",
                    rule="B-60",
                    file=file.path.name,
                )
            source += n
            full = 0
            while full < len(views) and n >= len(views[full]):
                n -= len(views[full])
                full += 1
            if n:
                views[full] = views[full][n:]
            del views[:full]
    finally:
        _drop(views)


def _read_turned(
    file: WeightsFile, targets: Sequence[tuple[WeightEntry, memoryview]], check: Callable[[], None]
) -> None:
    """In blocks: a second copy of a large tensor, even for a moment, would exceed what the budget allows."""
    blocks = [block for entry, view in targets for block in _blocks(entry, view)]
    if not blocks:
        return
    size = max(_nbytes(block) for block in blocks)
    pieces = allocate([size] * min(_READERS, len(blocks)))
    spare = [*pieces]

    def read(block: _Block) -> None:
        check()
        piece = spare.pop()
        try:
            _turn(file, block, piece)
        finally:
            spare.append(piece)

    try:
        _reading(file, read, blocks)
    except BaseException as error:
        discard(pieces, error)
        raise
    free_pieces(pieces)


def _blocks(entry: WeightEntry, view: memoryview) -> Iterator[_Block]:
    """The parts of a tensor: along the first axis as stored, which is the last of the program's argument, no fewer
    elements than fill cache lines, along the others as many as there is room for."""
    stored = entry.shape[::-1]
    if not stored:
        yield _Block(entry, view, (), ())
        return
    itemsize = entry.dtype.itemsize
    extents = [*stored]
    extents[0] = min(stored[0], max(_BLOCK_RUN, _BLOCK_BYTES // (prod(stored[1:]) * itemsize)))
    for axis in range(1, len(stored)):
        others = prod(extents[:axis] + extents[axis + 1 :]) * itemsize
        room = max(1, _BLOCK_BYTES // others)
        # Were it a power of two, all rows of the block would want the same few lines of the cache.
        extents[axis] = min(stored[axis], room - 16 if room > 64 else room)
    for starts in itertools.product(*map(range, (0,) * len(stored), stored, extents)):
        ends = [min(start + extent, n) for start, extent, n in zip(starts, extents, stored, strict=True)]
        yield _Block(entry, view, starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))


def _nbytes(block: _Block) -> int:
    return prod(block.extents) * block.entry.dtype.itemsize


def _turn(file: WeightsFile, block: _Block, piece: Piece) -> None:
    entry, view, starts, extents = block
    stored = entry.shape[::-1]
    itemsize = entry.dtype.itemsize
    read = piece.bytes()[: _nbytes(block)]
    # What lies together in the file: whole axes, and a part of the one before them.
    cut = len(stored) - 1
    while cut > 0 and extents[cut] == stored[cut]:
        cut -= 1
    length = prod(extents[cut:]) * itemsize
    strides = [prod(stored[axis + 1 :]) * itemsize for axis in range(len(stored))]
    base = file.header.data_offset + entry.begin + sum(map(int.__mul__, starts, strides))
    for number, index in enumerate(itertools.product(*map(range, extents[:cut]))):
        source = base + sum(map(int.__mul__, index, strides))
        _read_part(file, _Part(source, [read[number * length : (number + 1) * length].data]))
    kind = entry.dtype.numpy
    turned = np.frombuffer(view, np.uint8).view(kind).reshape(entry.shape)
    where = tuple(slice(start, start + n) for start, n in zip(starts, extents, strict=True))[::-1]
    turned[where] = read.view(kind).reshape(extents).T


def _drop(views: list[memoryview]) -> None:
    while views:
        views.pop().release()
