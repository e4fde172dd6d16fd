"""Makes torchvision importable beside a PyTorch that its binary extension was not built for."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path

import torch

_EXTENSION = "_C.so"

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""What torchvision registers shape functions for when it is imported, with or without its extension. Nothing here calls
them: the models of the zoo end before boxes are chosen."""

_declared: list[torch.library.Library] = []


def declare() -> None:
    """Call before the first import of torchvision: declares its operators, unless its own extension does.

    The wheel that PyPI has is built against PyTorch with CUDA. Beside the CPU build its extension does not load, and
    the import then ends with ``operator torchvision::nms does not exist``. The layers themselves are plain Python.
    """
    if _declared or hasattr(torch.ops.torchvision, "nms"):
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is not None and spec.origin is not None:
        with contextlib.suppress(OSError):
            torch.ops.load_library(Path(spec.origin).with_name(_EXTENSION))
            return
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _declared.append(library)  # its operators go when it goes
