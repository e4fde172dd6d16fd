"""`ModelIOSpec`: what callers of a model send and receive, as a server says it or a bundle on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from inspect import iscoroutinefunction
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rsrv.client.server import ModelMetadata, TensorMeta, metadata_of
from rsrv.core.errors import UsageError

if TYPE_CHECKING:
    from rsrv.client.model import KServeModel


@dataclass(frozen=True, slots=True)
class ModelIOSpec:
    """The client-facing tensors of the model `name`, by name and in the model's order."""

    name: str
    inputs: Mapping[str, TensorMeta]
    outputs: Mapping[str, TensorMeta]

    @property
    def input_order(self) -> tuple[str, ...]:
        return tuple(self.inputs)

    @property
    def output_order(self) -> tuple[str, ...]:
        return tuple(self.outputs)

    def row_axis(self, tensor: TensorMeta) -> int | None:
        """As `ModelMetadata.row_axis`."""
        return ModelMetadata(self.name, "", tuple(self.inputs.values()), tuple(self.outputs.values())).row_axis(tensor)

    @classmethod
    def of(cls, metadata: ModelMetadata) -> ModelIOSpec:
        return cls(metadata.name, _by_name(metadata.inputs), _by_name(metadata.outputs))


def model_io_spec(model: KServeModel) -> ModelIOSpec:
    """What the server says of `model`.

    Raises UnknownModel, ServerUnreachable, Unimplemented for a server that tells nothing about its models, and
    UsageError for an `AsyncKServeModel`.
    """
    if iscoroutinefunction(model.metadata):
        raise UsageError(
            f"{type(model).__name__} has to be awaited for what it knows",
            hint="pass model.model, or ModelIOSpec.of(await model.metadata())",
        )
    return ModelIOSpec.of(model.metadata())


def manifest_io_spec(path: Path | str) -> ModelIOSpec:
    """What a server would say of the bundle at `path` (its directory, or the manifest itself), without any server.

    The bundle's directory names the model. Raises ManifestError for a manifest that no server would load.
    """
    from rsrv.bundle.manifest import load_manifest
    from rsrv.core.wire.metadata import encode_metadata

    manifest = load_manifest(path)
    # By way of the message that a server sends, so that both give the same record.
    return ModelIOSpec.of(metadata_of(encode_metadata(manifest.name, "", manifest.wire_inputs, manifest.wire_outputs)))


def _by_name(tensors: Iterable[TensorMeta]) -> Mapping[str, TensorMeta]:
    return MappingProxyType({tensor.name: tensor for tensor in tensors})
