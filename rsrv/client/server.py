"""What a server says about itself and its models: liveness, the list of models, their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rsrv.client.connection import Connection, Handle, message_of
from rsrv.core.dtypes import DType
from rsrv.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """Name, version and the protocol extensions that the server implements."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of the server's model list: `state` is READY or UNAVAILABLE, `reason` says why it is not ready."""

    name: str
    version: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """How many rows a model has answered since the server started, and in how many executions."""

    rows: int
    executions: int


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor of a model: KServe datatype and wire shape, row-major, with -1 for batch and variable axes.

    `batch_axis` is the axis of `shape` that counts rows, None when there is none or the server does not say.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    batch_axis: int | None = None

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """None for a datatype that only other servers have."""
        try:
            return DType.from_wire(self.datatype).numpy
        except InvalidRequest:
            return None

    def describe(self) -> str:
        """``x FP32[-1,3]``"""
        return f"{self.name} {self.datatype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The tensors that callers of a model see, in order.

    `batch_sizes` are the numbers of rows that the server has programs for, ascending; other numbers are padded or
    refused. Empty when the model takes any, has no rows, or the server does not say.
    """

    name: str
    platform: str
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    batch_sizes: tuple[int, ...] = ()

    @property
    def tells_rows(self) -> bool:
        """Whether the server says which axes count rows; only rsrv's do."""
        return any(tensor.batch_axis is not None for tensor in (*self.inputs, *self.outputs))

    def row_axis(self, tensor: TensorMeta) -> int | None:
        """The axis of `tensor` that counts rows: an open axis 0 where the server says it of no tensor at all."""
        if self.tells_rows:
            return tensor.batch_axis
        return 0 if tensor.shape[:1] == (-1,) else None


class Server(Handle):
    """A server by its URL, for questions that concern no single request. See `KServeModel` for the options.

    `timeout` bounds each call, in seconds; 10 by default.
    """

    def live(self) -> bool:
        return bool(self._ask("ServerLive").live)

    def ready(self) -> bool:
        return bool(self._ask("ServerReady").ready)

    def metadata(self) -> ServerMetadata:
        answer = self._ask("ServerMetadata")
        return ServerMetadata(answer.name, answer.version, tuple(answer.extensions))

    def models(self, *, ready: bool = False) -> list[ModelEntry]:
        """All models of the server, or only those that are ready."""
        answer = self._ask("RepositoryIndex", ready=ready)
        return [ModelEntry(model.name, model.version, model.state, model.reason) for model in answer.models]

    def model_ready(self, name: str) -> bool:
        return bool(self._ask("ModelReady", name=name).ready)

    def model_metadata(self, name: str) -> ModelMetadata:
        """Raises UnknownModel for a name that the server does not know."""
        return model_metadata(self._connection, name, self._timeout)

    def model_counts(self, name: str) -> ModelCounts:
        """Raises Unimplemented when the server keeps no statistics."""
        (stats,) = self._ask("ModelStatistics", name=name).model_stats
        return ModelCounts(stats.inference_count, stats.execution_count)

    def _ask(self, method: str, **fields: Any) -> Any:
        return ask(self._connection, method, self._timeout, **fields)


def ask(connection: Connection, method: str, timeout: float | None, **fields: Any) -> Any:
    """Call the unary `method` with a ``{method}Request`` of `fields`; returns the ``{method}Response`` message."""
    from rsrv.protos import inference

    request = getattr(inference, f"{method}Request")(**fields)
    answer = connection.call(method, request.SerializeToString(), timeout)
    return message_of(getattr(inference, f"{method}Response"), answer)


def model_metadata(connection: Connection, name: str, timeout: float | None) -> ModelMetadata:
    return metadata_of(ask(connection, "ModelMetadata", timeout, name=name))


def metadata_of(answer: Any) -> ModelMetadata:
    """What a ModelMetadataResponse says."""
    return ModelMetadata(
        answer.name,
        answer.platform,
        _tensors(answer.inputs),
        _tensors(answer.outputs),
        tuple(sorted({size for size in answer.batch_sizes if size > 0})),
    )


def _tensors(messages: Sequence[Any]) -> tuple[TensorMeta, ...]:
    return tuple(
        TensorMeta(tensor.name, tensor.datatype, tuple(tensor.shape), _batch_axis(tensor)) for tensor in messages
    )


def _batch_axis(tensor: Any) -> int | None:
    """None also for an axis that the shape does not have."""
    known = tensor.HasField("batch_axis") and 0 <= tensor.batch_axis < len(tensor.shape)
    return int(tensor.batch_axis) if known else None
