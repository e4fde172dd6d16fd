"""Weights files for the tests of shared stores, copies of them, and what is right."""

import numpy as np
from support.weight_files import Filler, source

from rsrv.bundle.safetensors import write_weights
from rsrv.serve.residency.shared_store import SharedWeightStore

TENSORS = {
    "b": np.arange(7, dtype=np.float32),
    "w": np.arange(64, dtype=np.float32).reshape(4, 16),
    "empty": np.zeros((0, 3), np.int8),
    "flag": np.array([True, False, True]),
}


def written(path, scale=1):
    write_weights(path, [(name, value * np.asarray(scale, value.dtype)) for name, value in TENSORS.items()])
    return source(path)


def acquired(shm, file, name="m", mode=0o660, **options):
    """A copy from a store of its own, and how often it was filled."""
    fill = Filler(file, **options)
    copy = SharedWeightStore(mode, shm).acquire(name, file, fill)
    return copy, fill.calls


def regions(shm):
    return sorted(path.name for path in shm.iterdir() if not path.name.endswith(".lock"))


def region(shm):
    [name] = regions(shm)
    return shm / name


def assert_right(copy, scale=1):
    for array, wanted in zip(copy.arrays, TENSORS.values(), strict=True):
        np.testing.assert_array_equal(array, wanted * np.asarray(scale, wanted.dtype))
        assert array.dtype == wanted.dtype
        assert not array.flags.writeable
        assert not array.size or array.ctypes.data % 64 == 0
