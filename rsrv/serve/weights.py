"""A bundle's weights, from the file to the device: read into a mapping of our own that goes away exactly when freed.

Which bytes of the file belong to which tensor is for the header reader to say; nothing here parses.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rsrv.bundle.files import open_regular
from rsrv.bundle.safetensors import WeightEntry, WeightsHeader, ordered, read_header
from rsrv.core.errors import WeightsError
from rsrv.core.memory import ALIGNMENT, aligned_empty

if TYPE_CHECKING:
    from rsrv.runtime.device import Buffer, Device

logger = logging.getLogger(__name__)

_READERS = 2
_PART_BYTES = 8 << 20


@dataclass(eq=False)
class WeightSet:
    """The weights of one model on its device.

    Attributes:
        buffers: in argument order.
        nbytes: bytes that they hold there.
    """

    buffers: tuple[Buffer, ...]
    nbytes: int
    _device: Device = field(repr=False)
    _mapping: mmap.mmap | None = field(default=None, repr=False)

    def free(self) -> None:
        """Free the buffers and unmap their memory; only when no launch uses them. A second call does nothing.

        Raises BufferError when something else still holds a view of the memory: then it stays mapped.
        """
        buffers, self.buffers, self.nbytes = self.buffers, (), 0
        self._device.free(buffers)
        del buffers
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None


class _Extent(NamedTuple):
    """`length` bytes at `source` of the file that belong at `target` of the mapping."""

    source: int
    target: int
    length: int


def load_weights(device: Device, path: Path, header: WeightsHeader, *, map_weights: bool = False) -> WeightSet:
    """Bring the tensors of `path` to `device`, in argument order.

    The file is read into an anonymous mapping in which every tensor starts on a 64-byte boundary, wherever it lies in
    the file, so a unified device uses all of them without a copy. With `map_weights` the file itself is mapped; tensors
    that lie unaligned in it are copied, and whoever rewrites the file in place changes answers or ends the process.
    A column-major file is always read, and each of its tensors transposed once, into a mapping of the same layout.

    Raises:
        WeightsError: the file cannot be read, is truncated, or is not the one that `header` was read from.
        DeviceError: the device refused a tensor.
    """
    fd = open_regular(path, error=WeightsError, rule="B-60")
    try:
        # The offsets are those of the file that was read and checked before; another one may have taken its place.
        if read_header(fd, column_major=header.column_major) != header:
            raise WeightsError(f"{path} changed since its header was read", rule="B-60", file=path.name)
        entries = ordered(header)
        if not header.data_bytes:
            return _put(device, entries, [0] * len(entries), None)
        if map_weights and not header.column_major:
            mapping = mmap.mmap(fd, header.data_offset + header.data_bytes, prot=mmap.PROT_READ)
            starts = [header.data_offset + entry.begin for entry in entries]
        else:
            mapping, starts = _read(fd, path, header, entries)
            if header.column_major:
                mapping = _transposed(mapping, entries, starts)
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror or error}"
        raise WeightsError(problem, rule="B-60", file=path.name) from error
    finally:
        os.close(fd)
    weights = _put(device, entries, starts, mapping)
    if not device.unified:
        weights._mapping = None
        mapping.close()
    return weights


def _read(fd: int, path: Path, header: WeightsHeader, entries: Sequence[WeightEntry]) -> tuple[mmap.mmap, list[int]]:
    """Read all tensors into one anonymous mapping; the mapping, and where each of `entries` starts in it."""
    starts: dict[str, int] = {}
    extents: list[_Extent] = []
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.begin):
        start = starts[entry.name] = -(-end // ALIGNMENT) * ALIGNMENT
        length = entry.nbytes
        end = start + length
        source = header.data_offset + entry.begin
        last = extents[-1] if extents else None
        if last and (last.source + last.length, last.target + last.length) == (source, start):
            extents[-1] = _Extent(last.source, last.target, last.length + length)
        elif length:
            extents.append(_Extent(source, start, length))
    mapping = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        logger.debug("transparent huge pages are not available")
    _fill(fd, path, mapping, [*_parts(extents)])
    return mapping, [starts[entry.name] for entry in entries]


def _parts(extents: Sequence[_Extent]) -> Iterator[_Extent]:
    for extent in extents:
        for offset in range(0, extent.length, _PART_BYTES):
            yield _Extent(extent.source + offset, extent.target + offset, min(_PART_BYTES, extent.length - offset))


def _fill(fd: int, path: Path, mapping: mmap.mmap, parts: list[_Extent]) -> None:
    """Read `parts` on this thread and, when there are several, on one more."""
    parts.reverse()
    errors: list[Exception] = []

    def work() -> None:
        try:
            with memoryview(mapping) as memory:
                while parts and not errors:
                    _read_part(fd, path, memory, parts.pop())
        except IndexError:
            pass  # the other thread took the last part
        except Exception as error:
            errors.append(error)

    helpers = [threading.Thread(target=work, name="rsrv-weights") for _ in range(min(_READERS, len(parts)) - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]


def _read_part(fd: int, path: Path, memory: memoryview, part: _Extent) -> None:
    done = 0
    while done < part.length:
        with memory[part.target + done : part.target + part.length] as rest:
            n = os.preadv(fd, [rest], part.source + done)
        if n == 0:
            raise WeightsError(
                f"{path} ends at byte {part.source + done}, {part.length - done} bytes before a tensor does; "
                "it was truncated while it was read",
                rule="B-60",
                file=path.name,
            )
        done += n


def _transposed(source: mmap.mmap, entries: Sequence[WeightEntry], starts: Sequence[int]) -> mmap.mmap:
    """The tensors of `source`, whose axes are reversed there, as the program takes them; `source` is closed."""
    target = mmap.mmap(-1, len(source), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with source:
        for entry, start in zip(entries, starts, strict=True):
            if entry.nbytes:
                at = (entry.dtype.numpy, prod(entry.shape), start)
                stored = np.frombuffer(source, *at).reshape(entry.shape[::-1])
                np.copyto(np.frombuffer(target, *at).reshape(entry.shape), stored.T)
                del stored  # a mapping with views cannot be closed
    return target


def _put(device: Device, entries: Sequence[WeightEntry], starts: Sequence[int], mapping: mmap.mmap | None) -> WeightSet:
    buffers: list[Buffer] = []
    try:
        for entry, start in zip(entries, starts, strict=True):
            buffers.append(device.put(_tensor(entry, start, mapping), alias=device.unified))
    except BaseException:
        device.free(buffers)
        raise
    return WeightSet(tuple(buffers), sum(buffer.nbytes for buffer in buffers), device, mapping)


def _tensor(entry: WeightEntry, start: int, mapping: mmap.mmap | None) -> np.ndarray:
    """The tensor's bytes in the mapping; a copy when they do not start on a 64-byte boundary there."""
    array: np.ndarray
    if mapping is None or entry.begin == entry.end:
        return np.empty(entry.shape, entry.dtype.numpy)
    if start % ALIGNMENT:
        array = aligned_empty(entry.shape, entry.dtype.numpy)
        with memoryview(mapping) as memory:
            array.reshape(-1).view(np.uint8)[:] = memory[start : start + entry.nbytes]
        return array
    array = np.frombuffer(mapping, entry.dtype.numpy, count=prod(entry.shape), offset=start)
    return array.reshape(entry.shape)
