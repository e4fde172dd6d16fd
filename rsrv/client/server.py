"""What a server says about itself and its models: liveness, the list of models, their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rsrv.client.connection import Connection, Handle, message_of


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
    """A tensor of a model: KServe datatype and wire shape, row-major, with -1 for batch and variable axes."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def describe(self) -> str:
        """``x FP32[-1,3]``"""
        return f"{self.name} {self.datatype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The tensors that callers of a model see, in order."""

    name: str
    platform: str
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]


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
    answer = ask(connection, "ModelMetadata", timeout, name=name)
    return ModelMetadata(answer.name, answer.platform, _tensors(answer.inputs), _tensors(answer.outputs))


def _tensors(messages: Sequence[Any]) -> tuple[TensorMeta, ...]:
    return tuple(TensorMeta(message.name, message.datatype, tuple(message.shape)) for message in messages)
