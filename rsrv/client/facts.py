"""What a server says of one model, remembered: its tensors, the most rows of a request, the bytes of its outputs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from math import prod

import numpy as np

from rsrv.client.budget import SETUP_SECONDS, Budget
from rsrv.client.connection import Connection
from rsrv.client.server import ModelMetadata, TensorMeta, ask, model_metadata
from rsrv.core.errors import Unimplemented

log = logging.getLogger(__name__)


class ModelFacts:
    """What is asked about the model `model_name`, once and again after `forget`. Thread safe."""

    def __init__(self, connection: Connection, model_name: str) -> None:
        self._connection = connection
        self._model_name = model_name
        self._lock = threading.Lock()
        self._config_rows: int | None = None
        self._sizing: tuple[ModelMetadata | None, bool] | None = None  # and whether open row axes can be filled in
        self.metadata: ModelMetadata | None = None
        """What the server said last; None before, and after `forget`."""

    def ask(self, timeout: float | None) -> ModelMetadata:
        """The metadata, asked anew whatever is remembered. Raises UnknownModel."""
        found = self.metadata = model_metadata(self._connection, self._model_name, timeout)
        return found

    def most_rows(self, budget: Budget) -> int:
        """The most rows of a request; 0 for a server that cannot say, and for requests that have no rows."""
        known = self.metadata
        return known.batch_sizes[-1] if known is not None and known.batch_sizes else self._ask_config(budget)

    @property
    def sizes_known(self) -> bool:
        """Whether `output_sizes` answers from memory."""
        return self._sizing is not None

    def learn_sizes(self, budget: Budget) -> None:
        """Ask what `output_sizes` needs, unless that was done; concurrent calls wait for the first."""
        with self._lock:
            if self._sizing is None:
                self._sizing = self._learn(budget)

    def output_sizes(
        self, requested: Sequence[str] | None, inputs: Sequence[tuple[str, np.ndarray]]
    ) -> dict[str, int | None]:
        """Bytes by name, in the order in which outputs are asked for; None where only the server knows.

        Without `learn_sizes`, or when a refusal to another call has just made this forget, no size is known.
        """
        metadata, has_rows = self._sizing or (None, False)
        sizes: dict[str, int | None] = {}
        if metadata is not None:
            rows = _rows(metadata, inputs) if has_rows else None
            sizes = {output.name: _n_bytes(output, metadata.row_axis(output), rows) for output in metadata.outputs}
        return sizes if requested is None else {name: sizes.get(name) for name in requested}

    def forget(self) -> None:
        """After a refusal: the model may have been replaced by one with other tensors."""
        self.metadata = self._config_rows = self._sizing = None

    def _learn(self, budget: Budget) -> tuple[ModelMetadata | None, bool]:
        try:
            metadata = self.metadata or self.ask(budget.at_most(SETUP_SECONDS))
        except Unimplemented:
            return None, False
        if metadata.tells_rows or all(min(output.shape, default=0) >= 0 for output in metadata.outputs):
            return metadata, metadata.tells_rows
        # A positive max_batch_size promises that axis 0 of every tensor is the batch; without it nobody can tell a
        # batch axis from one whose extent depends on the data.
        return metadata, self._ask_config(budget) > 0

    def _ask_config(self, budget: Budget) -> int:
        rows = self._config_rows
        if rows is None:
            try:
                answer = ask(self._connection, "ModelConfig", budget.at_most(SETUP_SECONDS), name=self._model_name)
                rows = max(0, answer.config.max_batch_size)
            except Unimplemented:
                log.info("model=%s event=batch_size_unknown hint=max_batch_size", self._model_name)
                rows = 0
            self._config_rows = rows
        return rows


def _rows(metadata: ModelMetadata, inputs: Sequence[tuple[str, np.ndarray]]) -> int | None:
    """How many rows a request with `inputs` has."""
    axes = {tensor.name: tensor.batch_axis for tensor in metadata.inputs}
    told = metadata.tells_rows
    for name, array in inputs:
        axis = axes.get(name) if told else 0
        if axis is not None and axis < array.ndim:
            rows: int = array.shape[axis]
            return rows
    return None


def _n_bytes(output: TensorMeta, row_axis: int | None, rows: int | None) -> int | None:
    dtype, shape = output.dtype, list(output.shape)
    if rows is not None and row_axis is not None:
        shape[row_axis] = rows
    return None if dtype is None or min(shape, default=0) < 0 else prod(shape) * dtype.itemsize
