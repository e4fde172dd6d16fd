"""A tensor that still lies in a client's region, read when its place in a batch is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rsrv.core.shm.registry import RegionRegistry


class RegionTensor:
    """An input in shared memory: dtype and shape are known, the bytes are read later, once, to where they are needed.

    Until then nothing of its size is allocated, so a hostile claim costs nothing before it was checked. The region is
    looked up again when it is read: one that was unregistered or truncated meanwhile fails this tensor alone.
    """

    __slots__ = ("_offset", "_region", "_regions", "dtype", "nbytes", "shape")

    def __init__(
        self,
        regions: RegionRegistry,
        region: str,
        offset: int,
        nbytes: int,
        dtype: np.dtype[np.generic],
        shape: tuple[int, ...],
    ) -> None:
        self._regions = regions
        self._region = region
        self._offset = offset
        self.nbytes = nbytes
        self.dtype = dtype
        self.shape = shape

    def read(self) -> np.ndarray:
        """A read-only, 64-byte aligned copy. Raises UnregisteredRegion, InvalidRequest or RegionLimit."""
        block = self._regions.read(self._region, self._offset, self.nbytes)
        self._normalise(block)
        block.setflags(write=False)
        return np.ndarray(self.shape, self.dtype, block)

    def read_into(self, target: np.ndarray) -> None:
        """Fill `target`, an array of this dtype and shape in C order. Raises UnregisteredRegion or InvalidRequest."""
        if target.nbytes:
            block = target.reshape(-1).view(np.uint8)
            self._regions.read_into(self._region, self._offset, block.data)
            self._normalise(block)

    def _normalise(self, block: np.ndarray) -> None:
        if self.dtype == np.bool_:  # a client may write any byte for true
            np.minimum(block, 1, out=block)


Tensor = np.ndarray | RegionTensor
"""An input of a request: an array, or one that is still in shared memory. Both have dtype, shape and nbytes."""
