"""`validate_io`: would an IO and a model understand each other? Its methods run on a few items; nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rsrv.client.dataset.io import OutputSpec
from rsrv.client.iospec import ModelIOSpec, model_io_spec
from rsrv.client.validation.findings import Finding, Findings
from rsrv.client.validation.inputs import check_inputs
from rsrv.client.validation.outputs import check_declared, check_decode
from rsrv.core.errors import UsageError

if TYPE_CHECKING:
    from rsrv.client.dataset.io import InferenceIO
    from rsrv.client.model import KServeModel

_METHODS = ("__len__", "item_input_bytes", "encode_chunk", "decode_chunk")


def validate_io(
    spec_or_model: ModelIOSpec | KServeModel, io: InferenceIO, items: int = 1, *, random: bool = False
) -> list[Finding]:
    """Run the methods of `io` on its first `items` items, and compare what they do with the model's tensors.

    `encode_chunk` runs twice, each time over other leftovers, between guard bytes; `decode_chunk` runs once, on an
    answer of zeros, or with `random` of random numbers (floats below 1, integers below 10). What it stores is made up:
    validate before the results of a run are there.

    Args:
        spec_or_model: a `KServeModel`, whose server is asked for the tensors, or a `ModelIOSpec`.

    Returns the warnings, which are logged, too.

    Raises:
        IOMismatch: something does not fit; everything that was found is in the message.
        UsageError: `items` is less than 1.
        Exception: what a method of `io` raises, with notes that say which call it was and what was found before.
    """
    if items < 1:
        raise UsageError(f"items={items} leaves nothing to try; want 1 or more")
    spec = spec_or_model if isinstance(spec_or_model, ModelIOSpec) else model_io_spec(spec_or_model)
    findings = Findings(spec.name)
    missing = [method for method in _METHODS if not callable(getattr(io, method, None))]
    if missing:
        findings.error(
            type(io).__name__, f"has no method {', '.join(missing)}", "derive it from rsrv.client.InferenceIO"
        )
        return findings.report()
    with findings.calling("len(io)", "it is the number of items"):
        rows = range(min(items, len(io)))
    if not rows:
        findings.warning("len(io)", "is 0: there is nothing to send, and nothing was tried")
        return findings.report()
    declared = _declared_outputs(io, findings)
    check_declared(spec, declared, findings)
    with findings.calling("item_input_bytes()", "it is the bytes of one item, all inputs together"):
        item_bytes: Any = io.item_input_bytes()
    if not isinstance(item_bytes, (int, np.integer)) or item_bytes <= 0:
        findings.error("item_input_bytes", f"returned {item_bytes!r}, want the bytes of one item, an integer above 0")
        return findings.report()
    check_inputs(spec, io, rows, int(item_bytes), findings)
    check_decode(spec, io, rows, declared, findings, random=random)
    return findings.report()


def _declared_outputs(io: InferenceIO, findings: Findings) -> Sequence[OutputSpec]:
    """What `output_specs()` lists, if there is that method, as far as it can be used."""
    declare: Any = getattr(io, "output_specs", None)
    if declare is None:
        return []
    with findings.calling("output_specs()", "it lists the outputs that decode_chunk reads"):
        listed = list(declare())
    usable = [output for output in listed if isinstance(output, OutputSpec)]
    for output in listed:
        if not isinstance(output, OutputSpec):
            findings.error("output_specs", f"lists {output!r}", "want OutputSpec(name, dtype, per_item_dims)")
    return usable
