"""POSIX shared memory: the regions that clients register with a server, and the regions that we create ourselves.

`multiprocessing.shared_memory` is not used, because its resource tracker unlinks regions that it only attached to.
"""

from rsrv._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "BufferPool": ".pool",
        "Lease": ".registry",
        "OwnedRegion": ".owned",
        "PoolSlot": ".slot",
        "Region": ".registry",
        "RegionRegistry": ".registry",
        "RegionStatus": ".registry",
        "RegionTensor": ".tensor",
        "Tensor": ".tensor",
        "same_ipc_namespace": ".objects",
    },
)
