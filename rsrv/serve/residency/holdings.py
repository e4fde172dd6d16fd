"""Bytes on a device, counted once however many models use them: what is held, what would leave, what would be missing.

A model's footprint is its private bytes and tensors that it shares with others by digest. A shared tensor is in the
pinned reserve as long as one model of the reserve uses it, otherwise among the on-demand weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False)
class Footprint:
    """What a model takes on the device.

    Attributes:
        nbytes: all of it.
        shared: digest -> bytes of the tensors that may be held for several models.
        private: the rest.
        backbone: the digests of `shared`, None without any: models that share the same ones are fine-tunes of one.

    Raises ValueError when more is shared than there is.
    """

    nbytes: int
    shared: Mapping[str, int] = field(default_factory=dict)
    private: int = field(init=False)
    backbone: frozenset[str] | None = field(init=False)

    def __post_init__(self) -> None:
        private = self.nbytes - sum(self.shared.values())
        if private < 0 or min(self.shared.values(), default=0) < 0:
            raise ValueError(f"shared tensors of {sum(self.shared.values())} bytes in weights of {self.nbytes}")
        object.__setattr__(self, "private", private)
        object.__setattr__(self, "backbone", frozenset(self.shared) or None)


NO_FOOTPRINT = Footprint(0)


@dataclass(slots=True)
class _Tensor:
    nbytes: int
    reserved: int = 0
    on_demand: int = 0


class Holdings:
    """The sums: `reserved` bytes of the pinned reserve, and `on_demand` bytes of all others."""

    def __init__(self) -> None:
        self.reserved = 0
        self.on_demand = 0
        self.tensors: dict[str, _Tensor] = {}

    def require_consistent(self, shared: Mapping[str, int]) -> None:
        """Raises ValueError when a held tensor of the same digest has another size."""
        for digest, nbytes in shared.items():
            tensor = self.tensors.get(digest)
            if tensor is not None and tensor.nbytes != nbytes:
                raise ValueError(f"tensor {digest} has {nbytes} bytes here and {tensor.nbytes} in another model")

    def hold(self, footprint: Footprint, *, reserved: bool) -> None:
        if reserved:
            self.reserved += footprint.private
        else:
            self.on_demand += footprint.private
        for digest, nbytes in footprint.shared.items():
            tensor = self.tensors.get(digest)
            if tensor is None:
                tensor = self.tensors[digest] = _Tensor(nbytes)
            if reserved:
                if not tensor.reserved:
                    self.reserved += nbytes
                    if tensor.on_demand:
                        self.on_demand -= nbytes
                tensor.reserved += 1
            else:
                if not tensor.reserved and not tensor.on_demand:
                    self.on_demand += nbytes
                tensor.on_demand += 1

    def release(self, footprint: Footprint, *, reserved: bool) -> None:
        if reserved:
            self.reserved -= footprint.private
        else:
            self.on_demand -= footprint.private
        for digest, nbytes in footprint.shared.items():
            tensor = self.tensors[digest]
            if reserved:
                tensor.reserved -= 1
                if not tensor.reserved:
                    self.reserved -= nbytes
                    if tensor.on_demand:
                        self.on_demand += nbytes
            else:
                tensor.on_demand -= 1
                if not tensor.reserved and not tensor.on_demand:
                    self.on_demand -= nbytes
            if not tensor.reserved and not tensor.on_demand:
                del self.tensors[digest]

    def freed(self, footprint: Footprint) -> int:
        """What a held on-demand model alone keeps on the device."""
        nbytes = footprint.private
        for digest, size in footprint.shared.items():
            tensor = self.tensors[digest]
            if tensor.on_demand == 1 and not tensor.reserved:
                nbytes += size
        return nbytes

    def kept(self, footprints: Iterable[Footprint]) -> int:
        """What these held on-demand models keep on the device together."""
        nbytes, counted = 0, set()
        for footprint in footprints:
            nbytes += footprint.private
            for digest, size in footprint.shared.items():
                if digest not in counted and not self.tensors[digest].reserved:
                    counted.add(digest)
                    nbytes += size
        return nbytes


class Trial:
    """The sums as they would be with one more footprint, and without some of the on-demand ones.

    Attributes:
        reserved, on_demand: as in `Holdings`.
    """

    def __init__(self, holdings: Holdings, arriving: Footprint = NO_FOOTPRINT, *, reserved: bool = False) -> None:
        self._tensors = holdings.tensors
        self._arriving = arriving
        self._gone: Counter[str] = Counter()
        self.reserved, self.on_demand = holdings.reserved, holdings.on_demand
        if reserved:
            self.reserved += arriving.private
        else:
            self.on_demand += arriving.private
        for digest, nbytes in arriving.shared.items():
            tensor = self._tensors.get(digest)
            if tensor is not None and tensor.reserved:
                continue
            if reserved:
                self.reserved += nbytes
                if tensor is not None:
                    self.on_demand -= nbytes
            elif tensor is None:
                self.on_demand += nbytes

    def without(self, footprint: Footprint) -> None:
        """A held on-demand model leaves; what arrives keeps the tensors that both use."""
        self.on_demand -= footprint.private
        for digest, nbytes in footprint.shared.items():
            tensor = self._tensors[digest]
            self._gone[digest] += 1
            if self._gone[digest] == tensor.on_demand and not tensor.reserved and digest not in self._arriving.shared:
                self.on_demand -= nbytes

    def missing(self) -> int:
        """What of the arriving footprint is not on the device once the others left."""
        nbytes = self._arriving.private
        for digest, size in self._arriving.shared.items():
            tensor = self._tensors.get(digest)
            if tensor is None or tensor.reserved + tensor.on_demand == self._gone[digest]:
                nbytes += size
        return nbytes
