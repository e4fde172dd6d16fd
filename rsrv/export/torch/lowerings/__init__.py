"""Operators that torchax lacks or computes wrongly, written in JAX. Each takes what the ATen operator takes.

`OWN` maps an operator overload to its lowering; `KEPT` are composite operators that must reach the lowering whole.
"""

from rsrv.export.torch.lowerings import attention, convolution, filling, indexing, linalg, pooling, recurrent, resize
from rsrv.export.torch.lowerings.table import KEPT, OWN

__all__ = ["KEPT", "OWN", "attention", "convolution", "filling", "indexing", "linalg", "pooling", "recurrent", "resize"]
