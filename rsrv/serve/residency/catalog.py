"""Which tensors are in memory, by content, and who uses them: bookkeeping only, it moves no bytes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rsrv.serve.residency.content import WeightsFile, content_key

if TYPE_CHECKING:
    from rsrv.bundle.safetensors import WeightEntry
    from rsrv.runtime.device import Buffer
    from rsrv.serve.residency.memory import Piece

_MAX_CANDIDATES = 4
"""With how many tensors that declare one digest another one is compared: a file may lie about all of its digests."""

_serial = itertools.count(1)
"""Of contents whose digest was not computed. One for all catalogs: a file knows its contents from any of them."""


class Tensor:
    """A tensor that several models may use.

    Attributes:
        key: stands for its content, see `content_key`; one whose digest was not computed has a serial number in it.
        file, entry, digest: where it came from, and what is declared of it there.
        users: how many weights it belongs to, and loads that compare with it.
        piece: the memory that `buffer` is an alias of; None when it has memory of its own, on a card.
    """

    __slots__ = ("buffer", "digest", "entry", "file", "key", "piece", "users")

    def __init__(self, file: WeightsFile, entry: WeightEntry, buffer: Buffer, piece: Piece | None) -> None:
        self.key = ""
        self.file = str(file.path)
        self.entry = entry
        self.digest = file.header.tensor_digests[entry.name]
        self.buffer = buffer
        self.piece = piece
        self.users = 1

    @property
    def nbytes(self) -> int:
        return self.entry.nbytes


class Catalog:
    """All tensors that may be shared. Thread safe; whoever gets a tensor here has a share in it until `release`.

    Attributes:
        resident_bytes: of these tensors, each counted once, and of what else was counted with `count`.
    """

    def __init__(self) -> None:
        self.resident_bytes = 0
        self._lock = threading.Lock()
        self._by_key: dict[str, Tensor] = {}
        # Only those whose bytes can be compared: by the digest that they declare.
        self._by_digest: dict[str, list[Tensor]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, key: str | None) -> Tensor | None:
        """The tensor with this content."""
        with self._lock:
            tensor = None if key is None else self._by_key.get(key)
            if tensor is not None:
                tensor.users += 1
            return tensor

    def alike(self, entry: WeightEntry, digest: str) -> list[Tensor]:
        """Those whose bytes may be the same, as far as it is declared; a few."""
        with self._lock:
            found = [
                tensor
                for tensor in self._by_digest.get(digest, ())
                if (tensor.entry.dtype, tensor.entry.shape) == (entry.dtype, entry.shape)
            ][:_MAX_CANDIDATES]
            for tensor in found:
                tensor.users += 1
            return found

    def keep(self, tensor: Tensor) -> None:
        """Take one more share in a tensor that the caller has a share in."""
        with self._lock:
            tensor.users += 1

    def enter(self, tensor: Tensor, key: str | None) -> None:
        """From now on `tensor` is there for others; `key` is what its content is known by, None = by nothing yet."""
        with self._lock:
            if key is None or key in self._by_key:
                key = f"{content_key(tensor.entry, tensor.digest)}#{next(_serial)}"
            tensor.key = key
            self._by_key[key] = tensor
            if tensor.piece is not None:
                self._by_digest.setdefault(tensor.digest, []).append(tensor)
            self.resident_bytes += tensor.nbytes

    def learn(self, tensor: Tensor, key: str) -> Tensor:
        """The content of `tensor` is known by another key now. The tensor that is to be used: another one, when that
        content was there already."""
        with self._lock:
            other = self._by_key.get(key)
            if other is not None:
                other.users += 1
                return other
            del self._by_key[tensor.key]
            tensor.key = key
            self._by_key[key] = tensor
            return tensor

    def release(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Give up a share in each of `tensors`; those that nobody uses any more, for the caller to free."""
        gone: list[Tensor] = []
        with self._lock:
            for tensor in tensors:
                tensor.users -= 1
                if tensor.users:
                    continue
                gone.append(tensor)
                self.resident_bytes -= tensor.nbytes
                del self._by_key[tensor.key]
                if tensor.piece is not None:
                    same = self._by_digest[tensor.digest]
                    same.remove(tensor)
                    if not same:
                        del self._by_digest[tensor.digest]
        return gone

    def count(self, nbytes: int) -> None:
        """Bytes of tensors that came, or went when negative, and that are not kept here."""
        with self._lock:
            self.resident_bytes += nbytes
