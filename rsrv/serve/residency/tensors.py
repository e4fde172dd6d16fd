"""Weights on the device: from the file to buffers in argument order, and away again. What models share is held once.

A declared digest is a hint and no more. Where device memory is the host's, a tensor is compared with one that declares
the same digest while it is read; on a card only digests that were computed here (`digests`) count. What is known of a
tensor holds for the version of the file that it was read from, so an edited bundle never feeds another model.
"""

from __future__ import annotations

import errno
import logging
import mmap
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rsrv.bundle.safetensors import WeightEntry, ordered
from rsrv.core.errors import DeviceOutOfMemory, ServerStopping
from rsrv.core.memory import ALIGNMENT, aligned_empty
from rsrv.serve.budget import GRANULE_BYTES
from rsrv.serve.residency.catalog import Catalog, Tensor
from rsrv.serve.residency.content import ContentToken, WeightsFile, open_weights
from rsrv.serve.residency.memory import Piece, allocate, discard, free_pieces, stack, trim
from rsrv.serve.residency.reading import fill_views, is_equal, read_tensors, side_by_side

if TYPE_CHECKING:
    from rsrv.runtime.device import Buffer
    from rsrv.serve.residency.store import HostCopy, WeightStore

__all__ = ["DeviceWeights", "Memory", "TensorPool", "WeightsFile", "open_weights", "trim"]

log = logging.getLogger(__name__)


class Memory(Protocol):
    """What a pool needs of a `Device`."""

    @property
    def unified(self) -> bool: ...
    def put(self, array: np.ndarray, *, alias: bool = False) -> Buffer: ...
    def free(self, buffers: Sequence[Buffer]) -> None: ...


class DeviceWeights:
    """The weights of one model on its device, until `free`. Made by a TensorPool.

    Attributes:
        buffers: in argument order.
        nbytes: of all tensors, those that other models use too included.
    """

    def __init__(self, device: Memory, catalog: Catalog, file: WeightsFile) -> None:
        self.buffers: tuple[Buffer, ...] = ()
        self.nbytes = 0
        self._device = device
        self._catalog = catalog
        self._file = file
        self._token: ContentToken | None = None
        # By position among the arguments; both together are all of them.
        self._shared: dict[int, Tensor] = {}
        self._own: dict[int, Buffer] = {}
        self._counted = 0
        self._pieces: list[Piece] = []
        self._mapping: mmap.mmap | None = None

    @property
    def digests(self) -> dict[str, int]:
        """Bytes of the tensors that are held once for all models that have them, by a key for their content."""
        return {tensor.key: tensor.nbytes for tensor in self._shared.values()}

    def free(self) -> None:
        """Free what nobody else uses and unmap its memory; only when no launch uses it. A second call does nothing.

        Raises BufferError when something still holds a view of the memory: then that stays mapped until a call after
        the view is gone.
        """
        self.buffers, self.nbytes = (), 0
        shared, self._shared = self._shared, {}
        own, self._own = self._own, {}
        gone = self._catalog.release(shared.values())
        counted, self._counted = self._counted, 0
        self._catalog.count(-counted)
        self._device.free([*own.values(), *(tensor.buffer for tensor in gone)])
        self._pieces += [tensor.piece for tensor in gone if tensor.piece is not None]
        del shared, own, gone
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
        free_pieces(self._pieces)
        self._pieces.clear()

    def _drop(self, tensors: Sequence[Tensor]) -> int:
        """Give up a share in `tensors`; the bytes that were freed."""
        gone = self._catalog.release(tensors)
        self._device.free([tensor.buffer for tensor in gone])
        self._dismiss([tensor.piece for tensor in gone if tensor.piece is not None])
        return sum(tensor.nbytes for tensor in gone)

    def _dismiss(self, pieces: Sequence[Piece]) -> None:
        """Free `pieces`, which nothing uses; one that something still looks at is kept, and freed with the rest."""
        try:
            free_pieces(pieces)
        except BufferError:
            self._pieces += pieces

    def _settle(self) -> None:
        """All arguments are there."""
        n = len(self._shared) + len(self._own)
        self.buffers = tuple(self._shared[i].buffer if i in self._shared else self._own[i] for i in range(n))
        self.nbytes = sum(buffer.nbytes for buffer in self.buffers)


class TensorPool:
    """All weights on a device. Safe to use from several threads; loads take turns.

    Args:
        device: where they go.
        map_weights: map the file instead of reading it; nothing is shared then, and whoever rewrites the file in place
            changes answers or ends the process. A column-major file is read all the same.
    """

    def __init__(self, device: Memory, *, map_weights: bool = False) -> None:
        self.device = device
        self._map_weights = map_weights
        self._catalog = Catalog()
        self._loading = threading.Lock()
        self._closed = threading.Event()
        self._reported: set[tuple[str, str]] = set()

    @property
    def resident_bytes(self) -> int:
        """On the device; what several models use counts once."""
        return self._catalog.resident_bytes

    def footprint(self, file: WeightsFile) -> int:
        """Bytes that the tensors of `file` take on the device when they share nothing, in its allocator's granules."""
        granule = 1 if self.device.unified else GRANULE_BYTES
        return sum(-(-entry.nbytes // granule) * granule for entry in file.header.tensors.values())

    def host_copy(self, store: WeightStore, name: str, file: WeightsFile) -> HostCopy:
        """The weights of the model `name` in host memory. Raises WeightsError and ServerStopping as `load` does, and
        OSError."""
        copy = store.acquire(name, file, partial(fill_views, file, self._go_on))
        try:
            file.remember(lambda: _bytes_of_copy(ordered(file.header), copy), self._go_on)
        except BaseException as error:
            discard((), error)
            copy.release()
            raise
        return copy

    def close(self) -> None:
        """End what is being loaded, with its next part. What is there stays until it is freed. From any thread."""
        self._closed.set()

    def _go_on(self) -> None:
        if self._closed.is_set():
            raise ServerStopping("the server is stopping; weights are not loaded any more")

    def load(self, file: WeightsFile, host: HostCopy | None = None) -> DeviceWeights:
        """Bring the tensors of `file` to the device; from `host`, its copy in host memory, when there is one.

        A unified device uses the memory of `host` itself, which must stay until the weights are freed. Without it every
        tensor starts on a 64-byte boundary of anonymous memory, wherever it lies in the file, so none is copied.

        Raises:
            WeightsError: the file cannot be read, is truncated, or is not the one that was opened any more.
            DeviceError, DeviceOutOfMemory: the device refused a tensor. Nothing stays behind.
            ServerStopping: `close` was called.
        """
        with self._loading:
            weights = DeviceWeights(self.device, self._catalog, file)
            try:
                self._go_on()
                if host is not None:
                    self._place_copy(weights, file, host)
                elif self._map_weights and file.header.data_bytes and not file.column_major:
                    self._place_mapped(weights, file)
                else:
                    self._place(weights, file)
                weights._settle()
                return weights
            except BaseException as error:
                discard((), error)
                try:
                    weights.free()
                except BufferError as problem:
                    log.debug("memory stays until the error is forgotten path=%s why=%s", file.path, problem)
                raise

    def share(self, weights: DeviceWeights) -> int:
        """Use tensors of other models in place of those of `weights` whose digests were verified since the load.

        Only when no launch uses `weights`. Returns the bytes that were freed. Does nothing where device memory is the
        host's: what is there twice was found when it was read.
        """
        file, entries = weights._file, ordered(weights._file.header)
        if self.device.unified or file.token != weights._token:
            return 0
        known = file.contents()
        freed = 0
        for index, tensor in [*weights._shared.items()]:
            key = known.get(entries[index].name, tensor.key)
            if key != tensor.key and (other := self._catalog.learn(tensor, key)) is not tensor:
                weights._shared[index] = other
                freed += weights._drop([tensor])
        weights._settle()
        return freed

    # --- ways to load -------------------------------------------------------------------------------------------------

    def _place(self, weights: DeviceWeights, file: WeightsFile) -> None:
        """Read what is not there yet."""
        device, entries = self.device, ordered(file.header)
        known = file.contents()
        token = file.token
        self._join(weights, file, entries, known)
        missing = [index for index in range(len(entries)) if index not in weights._shared]
        memory, pieces = self._memory(weights, file, entries, missing)
        targets = [(entries[index], array.data) for index, array in memory.items()]
        try:
            read_tensors(file, targets, self._go_on)
        finally:
            for _, view in targets:
                view.release()
        unchanged = file.confirm(lambda: _bytes_of(weights, entries, memory), self._go_on)
        fresh: dict[int, Tensor] = {}
        for index in missing:
            self._go_on()
            entry = entries[index]
            if entry.nbytes:
                array = memory.pop(index).view(entry.dtype.numpy).reshape(entry.shape)
            else:
                array = np.empty(entry.shape, entry.dtype.numpy)
            buffer = weights._own[index] = device.put(array, alias=device.unified)
            del array
            if index in pieces:
                fresh[index] = Tensor(file, entry, buffer, pieces[index] if device.unified else None)
        held, weights._pieces = weights._pieces, []
        if device.unified:
            passed_on = set(pieces.values())
            weights._pieces = [piece for piece in held if piece not in passed_on]
        else:
            weights._dismiss(held)
        self._enter(weights, fresh, known if unchanged else {})
        weights._token = file.token
        if unchanged:
            file.learn({entries[i].name: tensor.key for i, tensor in weights._shared.items()}, token)

    def _memory(
        self, weights: DeviceWeights, file: WeightsFile, entries: Sequence[WeightEntry], missing: Sequence[int]
    ) -> tuple[dict[int, np.ndarray], dict[int, Piece]]:
        """Bytes for those of `entries` that are `missing`, and the pieces of those that others may share."""
        large = [index for index in missing if file.is_shareable(entries[index])]
        small = [index for index in missing if entries[index].nbytes and not file.is_shareable(entries[index])]
        starts, end = stack([entries[index].nbytes for index in small])
        sizes = [entries[index].nbytes for index in large]
        try:
            pieces = allocate([*sizes, end] if end else sizes)
        except OSError as error:
            if error.errno != errno.ENOMEM or not self.device.unified:
                raise
            raise DeviceOutOfMemory(
                f"{sum(sizes) + end} bytes for the weights of {file.path} cannot be mapped: {error.strerror}"
            ) from error
        weights._pieces += pieces
        alone = dict(zip(large, pieces, strict=False))
        memory = {index: piece.bytes() for index, piece in alone.items()}
        for index, start in zip(small, starts, strict=True):
            memory[index] = pieces[-1].bytes()[start : start + entries[index].nbytes]
        return memory, alone

    def _place_copy(self, weights: DeviceWeights, file: WeightsFile, host: HostCopy) -> None:
        """From a copy in host memory. On a unified device its store decides what is shared, not this pool."""
        device, entries = self.device, ordered(file.header)
        known: Mapping[str, str] = {}
        if not device.unified:
            known = file.contents()
            self._join(weights, file, entries, known)
        fresh: dict[int, Tensor] = {}
        for index, (entry, array) in enumerate(zip(entries, host.arrays, strict=True)):
            if index in weights._shared:
                continue
            self._go_on()
            buffer = weights._own[index] = device.put(array, alias=device.unified)
            if not device.unified and file.is_shareable(entry):
                fresh[index] = Tensor(file, entry, buffer, None)
        self._enter(weights, fresh, known)
        weights._token = file.token

    def _place_mapped(self, weights: DeviceWeights, file: WeightsFile) -> None:
        """From a mapping of the file itself; a tensor that lies unaligned in it is copied."""
        device, header, entries = self.device, file.header, ordered(file.header)
        file.contents()  # a file that became shorter cannot be mapped
        mapping = mmap.mmap(file.fileno(), header.data_offset + header.data_bytes, prot=mmap.PROT_READ)
        weights._mapping = mapping
        arrays = [_mapped(mapping, header.data_offset, entry) for entry in entries]
        file.confirm(
            lambda: ((e, a.reshape(-1).view(np.uint8)) for e, a in zip(entries, arrays, strict=True) if e.nbytes),
            self._go_on,
        )
        for index in range(len(entries)):
            weights._own[index] = device.put(arrays[index], alias=device.unified)
        arrays.clear()
        if not device.unified:
            mapping.close()
            weights._mapping = None
        self._enter(weights, {}, {})

    # --- tensors that several models use ------------------------------------------------------------------------------

    def _join(
        self, weights: DeviceWeights, file: WeightsFile, entries: Sequence[WeightEntry], known: Mapping[str, str]
    ) -> None:
        """Take part in those tensors of other models that are the same as ours."""
        unsure: list[tuple[int, list[Tensor]]] = []
        for index, entry in enumerate(entries):
            if not file.is_shareable(entry):
                continue
            tensor = self._catalog.find(known.get(entry.name))
            if tensor is not None:
                weights._shared[index] = tensor
            elif alike := self._catalog.alike(entry, file.header.tensor_digests[entry.name]):
                unsure.append((index, alike))

        def compare(one: tuple[int, list[Tensor]]) -> None:
            index, alike = one
            for tensor in alike:
                assert tensor.piece is not None
                if is_equal(file, entries[index], tensor.piece.bytes(), self._go_on):
                    self._catalog.keep(tensor)
                    weights._shared[index] = tensor
                    return
                self._report(file, entries[index], tensor)

        try:
            side_by_side(compare, unsure)
        except OSError as error:
            raise file.unreadable(error) from error
        finally:
            # Their last users may have gone meanwhile.
            weights._drop([tensor for _, alike in unsure for tensor in alike])

    def _enter(self, weights: DeviceWeights, fresh: Mapping[int, Tensor], known: Mapping[str, str]) -> None:
        """From now on `fresh` are there for others; `known` are keys by which their content was known before."""
        for index, tensor in fresh.items():
            self._catalog.enter(tensor, known.get(tensor.entry.name))
            del weights._own[index]
            weights._shared[index] = tensor
        weights._counted = sum(buffer.nbytes for buffer in weights._own.values())
        self._catalog.count(weights._counted)

    def _report(self, file: WeightsFile, entry: WeightEntry, other: Tensor) -> None:
        if (str(file.path), entry.name) in self._reported:
            return
        self._reported.add((str(file.path), entry.name))
        log.warning(
            "tensors differ that declare one digest, one of them wrongly; they are not shared model=%s tensor=%r "
            "digest=%s other=%s other_tensor=%r",
            file.model,
            entry.name,
            other.digest,
            other.file,
            other.entry.name,
        )


def _bytes_of(
    weights: DeviceWeights, entries: Sequence[WeightEntry], memory: Mapping[int, np.ndarray]
) -> Iterator[tuple[WeightEntry, np.ndarray]]:
    """All that was read of a file or compared with it."""
    for index, array in memory.items():
        yield entries[index], array
    for index, tensor in weights._shared.items():
        if tensor.piece is not None:
            yield entries[index], tensor.piece.bytes()


def _bytes_of_copy(entries: Sequence[WeightEntry], copy: HostCopy) -> Iterator[tuple[WeightEntry, np.ndarray]]:
    for entry, array in zip(entries, copy.arrays, strict=True):
        if entry.nbytes:
            yield entry, array.reshape(-1).view(np.uint8)


def _mapped(mapping: mmap.mmap, data_offset: int, entry: WeightEntry) -> np.ndarray:
    kind = entry.dtype.numpy
    if not entry.nbytes:
        return np.empty(entry.shape, kind)
    start = data_offset + entry.begin
    if start % ALIGNMENT:
        array = aligned_empty(entry.shape, kind)
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(mapping, np.uint8, entry.nbytes, start)
        return array
    return np.frombuffer(mapping, kind, prod(entry.shape), start).reshape(entry.shape)
