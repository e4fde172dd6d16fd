"""What the parts of a server know, in the words of the answers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rsrv.serve.admin.requests import Accepted, CatalogueRow, Program, Shadow, TensorInfo
from rsrv.serve.services import PLATFORM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rsrv.core.tensors import TensorSpec
    from rsrv.serve.programs.compare import ShadowRecord
    from rsrv.serve.programs.records import ProgramSet
    from rsrv.serve.registry import Entry
    from rsrv.serve.scheduler import Scheduler


def accepted(entry: Entry, scheduler: Scheduler, total: int) -> Accepted:
    """`total` counts the requests of all incarnations of the model."""
    queued, executing = (0, 0) if entry.prepared is None else scheduler.depth(entry.prepared.model)
    own = entry.accepted
    # The numbers are read one after the other, while requests move on.
    return Accepted(
        queued=queued, executing=executing, hooks=max(0, own - queued - executing), earlier=max(0, total - own)
    )


def catalogue_row(entry: Entry) -> CatalogueRow | None:
    """None for a model that is not prepared, or is being removed."""
    if entry.prepared is None or entry.gate == "removing":
        return None
    model = entry.prepared.model
    variants, manifest = model.batch_keys_by_variant, model.manifest
    return CatalogueRow(
        name=entry.name,
        incarnation=entry.incarnation,
        kind=manifest.kind,
        admission=entry.gate,
        inputs=_tensors(manifest.wire_inputs),
        outputs=_tensors(manifest.wire_outputs),
        batch_sizes=sorted({key for keys in variants.values() for key in keys}),
        shape_variants=[list(variant) for variant in sorted(variants)],
        platform=PLATFORM,
    )


def program(made: ProgramSet) -> Program:
    return Program(
        id=made.id,
        phase=made.phase,
        label=made.label,
        fingerprint=made.fingerprint,
        diagnostics=made.diagnostics,
        created_unix=made.created_unix,
        shadow=None if made.shadow is None else _shadow(made.shadow),
    )


def _shadow(record: ShadowRecord) -> Shadow:
    return Shadow(
        percent=record.percent,
        batches=record.batches,
        skipped=record.skipped,
        mismatches=record.mismatches,
        errors=record.errors,
        largest_difference={name: value if math.isfinite(value) else None for name, value in record.largest.items()},
        first_mismatch=record.first_mismatch,
        first_error=record.first_error,
        against=record.against,
    )


def _tensors(specs: Sequence[TensorSpec]) -> list[TensorInfo]:
    return [TensorInfo(name=spec.name, datatype=spec.dtype.wire or "", shape=list(spec.wire_shape)) for spec in specs]
