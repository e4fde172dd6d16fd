"""Host copies of this process in which a tensor that several models have is held once: the store beside a card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from rsrv.runtime.device import FREED
from rsrv.serve.residency.store import Fill, HostCopy, Source
from rsrv.serve.residency.tensors import DeviceWeights, TensorPool, WeightsFile
from rsrv.stablehlo.signature import element_type, tensor_type

if TYPE_CHECKING:
    from rsrv.runtime.device import Buffer


class _HostBuffer:
    """A tensor where it is."""

    __slots__ = ("array", "dtype", "nbytes", "shape", "type")

    def __init__(self, array: np.ndarray) -> None:
        self.array: np.ndarray | None = array
        self.type = tensor_type(element_type(array.dtype), array.shape)
        self.shape = array.shape
        self.dtype = array.dtype
        self.nbytes = array.nbytes


class _HostMemory:
    unified = True

    def put(self, array: np.ndarray, *, alias: bool = False) -> Buffer:
        array.setflags(write=False)
        return _HostBuffer(array)

    def free(self, buffers: Sequence[Buffer]) -> None:
        for buffer in cast("Sequence[_HostBuffer]", buffers):
            buffer.array, buffer.type = None, FREED


class _PooledCopy(HostCopy):
    """Tensors of a pool that others may use, too."""

    def __init__(self, weights: DeviceWeights) -> None:
        buffers = cast("Sequence[_HostBuffer]", weights.buffers)
        self.arrays = tuple(buffer.array for buffer in buffers if buffer.array is not None)
        self.nbytes = weights.nbytes
        self.shared = False
        self._weights = weights

    def release(self) -> None:
        self.arrays = ()
        self._weights.free()


class PooledWeightStore:
    """As `PrivateWeightStore`, but tensors with equal bytes are there once. Safe to call from any thread.

    What it finds to be equal is shared on the device, too, as it is known of the file then.
    """

    def __init__(self) -> None:
        self._pool = TensorPool(_HostMemory())

    @property
    def resident_bytes(self) -> int:
        """In host memory; what several models use counts once."""
        return self._pool.resident_bytes

    def close(self) -> None:
        """End what is being loaded."""
        self._pool.close()

    def acquire(self, name: str, file: Source, fill: Fill) -> HostCopy:
        """As `WeightStore.acquire`, for a WeightsFile; `fill` is not needed, as parts of it may be there already."""
        assert isinstance(file, WeightsFile), f"the weights of {name!r} are no WeightsFile"
        return _PooledCopy(self._pool.load(file))
