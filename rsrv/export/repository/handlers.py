"""Handlers: the user's own Python files that make the bundles of some models (X-48)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from rsrv.core.errors import ExportError
from rsrv.export.factory import load_factory
from rsrv.export.repository.report import short_error
from rsrv.export.repository.triton import (
    CONFIG,
    TritonTensor,
    batch_ladder,
    parse_max_batch_size,
    read_triton_model,
)
from rsrv.export.repository.worklist import present
from rsrv.export.usercode import user_code


def example_input(tensor: TritonTensor, batch: int | None = 1, *, dynamic: int = 512) -> np.ndarray:
    """An example for `tensor` as every front end takes it: floats from 0 to 1, zeros else; C order, row-major.

    Args:
        batch: rows, as a first axis; None: without that axis.
        dynamic: size of axes that the configuration leaves open.

    Raises ExportError for a type that arrays cannot hold (TYPE_STRING).
    """
    if tensor.dtype is None:
        raise ExportError(f"tensor {tensor.name!r} is {tensor.data_type}, which has no example")
    shape = tuple(size if size >= 0 else dynamic for size in tensor.dims)
    if batch is not None:
        shape = (batch, *shape)
    if tensor.data_type.startswith("TYPE_FP"):
        values = np.linspace(0, 1, max(1, math.prod(shape)))[: math.prod(shape)]
        return values.reshape(shape).astype(tensor.dtype.numpy)
    return np.zeros(shape, tensor.dtype.numpy)


def _tools() -> SimpleNamespace:
    return SimpleNamespace(
        batch_ladder=batch_ladder,
        parse_max_batch_size=parse_max_batch_size,
        example_input=example_input,
        short_error=short_error,
    )


@dataclass(frozen=True)
class HandlerContext:
    """What a handler gets.

    Attributes:
        source: the model's directory; None when the model has none.
        model: the model's name.
        bundle_name: name of the bundle.
        out_dir: where the bundle goes, ``export_bundle(…, dir=ctx.out_dir)``: a place beside the other bundles from
            which it is moved when the handler returns. Further bundles go beside it, ``ctx.out_dir.parent / "other"``.
        config_text: the text of ``config.pbtxt``; empty without one.
        inputs, outputs: the tensors that it declares, in its order.
        ladder: batch sizes that it asks for, ascending; ``(1,)`` without it, empty when nothing is batched.
        options: the options of the handler in the configuration.
        utils: ``batch_ladder``, ``parse_max_batch_size``, ``example_input`` and ``short_error``.
    """

    source: Path | None
    model: str
    bundle_name: str
    out_dir: Path
    config_text: str = ""
    inputs: tuple[TritonTensor, ...] = ()
    outputs: tuple[TritonTensor, ...] = ()
    ladder: tuple[int, ...] = (1,)
    options: Mapping[str, Any] = field(default_factory=dict)
    utils: SimpleNamespace = field(default_factory=_tools)


def run_handler(file: Path, context: HandlerContext) -> list[int]:
    """Call the handler in `file`; the batch sizes that it wrote. Raises ExportError with the user's own traceback."""
    handler: Callable[..., Any] = load_factory(f"{file}:handler")
    with user_code(f"the handler {file.name}"):
        returned = handler(context)
    sizes = _checked(file.name, returned)
    bundle = present(context.out_dir)
    if bundle is None:
        raise ExportError(
            f"the handler {file.name} returned {sizes} and wrote no bundle {context.bundle_name!r}",
            hint="export to ctx.out_dir",
        )
    compiled = bundle.manifest.batching.compiled_batch_sizes
    if compiled and sorted(sizes) != sorted(compiled):
        raise ExportError(f"the handler {file.name} returned {sizes}, but the bundle has programs for {list(compiled)}")
    return sizes


def context_of(
    *, source: Path | None, model: str, bundle_name: str, out_dir: Path, options: Mapping[str, Any]
) -> HandlerContext:
    """The context for a model, with what its ``config.pbtxt`` says, if it has one. Raises ExportError."""
    if source is None or not (source / CONFIG).is_file():
        return HandlerContext(source, model, bundle_name, out_dir, options=options)
    found = read_triton_model(source)
    return HandlerContext(
        source, model, bundle_name, out_dir, found.text, found.inputs, found.outputs, found.ladder, options
    )


def _checked(file: str, returned: Any) -> list[int]:
    if not isinstance(returned, (list, tuple)) or any(
        not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in returned
    ):
        raise ExportError(
            f"the handler {file} returned {str(repr(returned))[:100]}, want a list of the batch sizes that it wrote",
            hint="return [1, 8], or [] for a bundle without a batch axis",
        )
    return list(returned)
