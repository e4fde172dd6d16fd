"""Answers about models: ModelMetadata and RepositoryIndex."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rsrv.core.tensors import TensorSpec
from rsrv.core.wire.encode import wire_name
from rsrv.protos import inference


class IndexRow(NamedTuple):
    """A model in the repository index; `state` is ``READY`` or ``UNAVAILABLE``, `reason` says why it is not ready."""

    name: str
    state: str
    reason: str = ""


def encode_metadata(
    name: str,
    platform: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    batch_sizes: Iterable[int] = (),
) -> inference.ModelMetadataResponse:
    """Shapes are row-major, with -1 for batch and variable axes. Raises InvalidRequest for an 8-bit float tensor.

    `batch_sizes` are the numbers of rows that programs exist for, ascending; they and the batch axes are extensions of
    rsrv, in fields that other clients skip.
    """
    return inference.ModelMetadataResponse(
        name=name,
        platform=platform,
        inputs=map(_tensor, inputs),
        outputs=map(_tensor, outputs),
        batch_sizes=batch_sizes,
    )


def encode_index(rows: Iterable[IndexRow | tuple[str, str, str]]) -> inference.RepositoryIndexResponse:
    """The rows in the order given; models have no versions here."""
    index = inference.RepositoryIndexResponse.ModelIndex
    return inference.RepositoryIndexResponse(
        models=[index(name=name, state=state, reason=reason) for name, state, reason in rows]
    )


def _tensor(spec: TensorSpec) -> inference.ModelMetadataResponse.TensorMetadata:
    return inference.ModelMetadataResponse.TensorMetadata(
        name=spec.name,
        datatype=wire_name(spec.name, spec.dtype),
        shape=spec.wire_shape,
        batch_axis=spec.batch_axis,
    )
