"""The second half of a dry run: declared outputs, and `decode_chunk` on a made-up answer."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from rsrv.client.dataset.answers import read_answer
from rsrv.client.shapes import Shape, fits, slip, synthetic, text, without
from rsrv.client.validation.findings import Findings
from rsrv.core.dtypes import DType
from rsrv.core.errors import InvalidRequest, InvalidResponse
from rsrv.core.wire.encode import encode_response, join
from rsrv.core.wire.response import ResponseMessage, decode_response

if TYPE_CHECKING:
    from rsrv.client.dataset.io import InferenceIO, OutputSpec
    from rsrv.client.iospec import ModelIOSpec

_SEED = 0


def check_declared(spec: ModelIOSpec, declared: Sequence[OutputSpec], findings: Findings) -> None:
    """The names, dtypes and per-item shapes of `output_specs()` against the model's outputs."""
    names: list[str] = []
    has_rows = any(spec.row_axis(tensor) is not None for tensor in spec.inputs.values())
    for output in declared:
        subject = f"output {output.name!r}"
        if output.name in names:
            findings.error(subject, "output_specs() lists it twice")
        names.append(output.name)
        tensor = spec.outputs.get(output.name)
        if tensor is None:
            findings.error(
                subject, f"the model has no output of that name; it has: {', '.join(spec.outputs) or 'none'}"
            )
            continue
        datatype = DType.from_numpy(output.dtype).wire
        if datatype != tensor.datatype:
            findings.error(subject, f"is declared as {datatype}, the model answers {tensor.datatype}")
        axis = spec.row_axis(tensor)
        if has_rows and axis is None:
            findings.error(
                subject,
                f"has no row axis ({text(tensor.shape)}): the model answers it once for a request, not for each item",
                "only outputs with rows can be declared: declare none, and all of them come inline",
            )
        else:
            _check_dims(tensor.shape, axis, output.per_item_dims, subject, findings)


def _check_dims(model: Shape, axis: int | None, dims: Shape, subject: str, findings: Findings) -> None:
    item = without(axis, model)
    # A model without rows takes one item at a time; an axis of extent 1 at its front may be the item.
    if fits(item, dims) or (axis is None and model[:1] == (1,) and fits(model[1:], dims)):
        return
    hint = "per_item_dims leaves the row axis out" if fits(model, dims) else slip(item, dims)
    findings.error(subject, f"is declared with {text(dims)} for each item, the model answers {text(item)}", hint)


def check_decode(
    spec: ModelIOSpec,
    io: InferenceIO,
    rows: range,
    declared: Sequence[OutputSpec],
    findings: Findings,
    *,
    random: bool,
) -> None:
    """Run `decode_chunk` on an answer of `rows`; its exceptions are raised with a note."""
    if any(finding.subject.startswith("output") and finding.severity == "error" for finding in findings):
        findings.warning("decode_chunk", "was not tried, because of the outputs that are declared")
        return
    try:
        message = made_up_answer(spec, len(rows), declared, random=random)
        response = read_answer(message, declared, rows, {})
    except InvalidRequest as error:  # BYTES, or what else rsrv cannot carry
        findings.warning("decode_chunk", f"was not tried: {error.message}")
        return
    except InvalidResponse as error:
        findings.error("output_specs", f"{len(rows)} item(s) cannot share a request: {error.message}", error.hint)
        return
    shapes = ", ".join(f"{name} {array.dtype}{text(array.shape)}" for name, array in response.arrays().items())
    with findings.calling(
        f"decode_chunk({rows!r}, response)",
        f"look at the names, axes and rows that it reads; the made-up answer has {shapes or 'no outputs'}",
    ):
        io.decode_chunk(rows, response)


def made_up_answer(
    spec: ModelIOSpec, rows: int, declared: Sequence[OutputSpec], *, random: bool = False
) -> ResponseMessage:
    """An answer with zeros, or random numbers, in the outputs that a request would ask for.

    Raises InvalidRequest for a model whose outputs rsrv cannot read (BYTES).
    """
    rng = np.random.default_rng(_SEED)
    wanted = {output.name: output.per_item_dims for output in declared}
    outputs = []
    for name in wanted or spec.output_order:
        tensor = spec.outputs.get(name)
        if tensor is not None:
            shape = synthetic(tensor.shape, spec.row_axis(tensor), rows, wanted.get(name))
            dtype = DType.from_wire(tensor.datatype).numpy
            outputs.append((name, random_array(rng, dtype, shape) if random else np.zeros(shape, dtype)))
    # Over the bytes of an answer, so that what reads answers reads this one, too.
    return decode_response(join(encode_response(spec.name, "", outputs)))


def random_array(rng: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Floats in [0, 1), integers from 0 to 9 and either boolean: what labels, scores and masks may look like."""
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    if np.issubdtype(dtype, np.integer):
        return rng.integers(0, 10, shape).astype(dtype)
    return rng.random(prod(shape)).reshape(shape).astype(dtype)
