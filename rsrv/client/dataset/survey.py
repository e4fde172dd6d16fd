"""What is asked before a dataset starts: how tensors travel, how many rows a request may have, what the model takes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rsrv.client.budget import Budget
from rsrv.client.model import whole_or_auto
from rsrv.client.server import ModelMetadata
from rsrv.client.steps import Aside, Steps
from rsrv.client.transport.pools import inline_pool, shared_pool
from rsrv.client.windows import OutOfSharedMemory
from rsrv.core.errors import RsrvError, Unimplemented, UnknownModel
from rsrv.core.shm.pool import BufferPool

if TYPE_CHECKING:
    from rsrv.client.model import KServeModel

log = logging.getLogger(__name__)

Batch = int | Literal["auto"] | None
"""The most items of a request: a number, what the server says, or None for the `max_batch_size` of the handle."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a course has to know before it starts: its first pool, and what the server says of the model. With `no_room`
    there is none for a pool in shared memory, and looking again is no use."""

    no_room: bool
    pool: BufferPool
    limit: int
    metadata: ModelMetadata | None


def survey(model: KServeModel, batch: Batch = None) -> Steps[Survey]:
    """Ask the server, where it has to be asked. Raises what makes every request fail: no server, no shared memory in
    the mode ``"on"``."""
    limit = checked_batch(batch)
    budget = Budget(model.deadline)
    return (yield from model.exchange.prepare(lambda: _survey(model, limit, budget), budget))


def _survey(model: KServeModel, batch: Batch, budget: Budget) -> Survey:
    endpoint = model.endpoint
    pool = inline_pool()
    no_room = False
    if endpoint.uses_shared_memory(model.mode, budget):
        try:
            pool = shared_pool(endpoint, budget)
        except OutOfSharedMemory as error:
            if model.mode == "on":
                raise
            log.warning("model=%s event=shm_full using=inline %s", model.model_name, error)
            no_room = True
    metadata = known_metadata(model)  # first: it may have the limit, too
    limit = batch if isinstance(batch, int) else model.batch_limit(budget, batch)
    return Survey(no_room, pool, limit, metadata)


def checked_batch(batch: Batch) -> Batch:
    """`batch`, when it is one; raises UsageError."""
    return None if batch is None else whole_or_auto("batch", batch)


def naming_metadata(model: KServeModel, found: ModelMetadata | None, data: Any) -> Steps[ModelMetadata | None]:
    """`found`, or, when there is nothing but `data` without a name, a last question, whose errors are raised: without
    an answer nobody knows what the input is called. None for a server that has no such method."""
    if found is not None or isinstance(data, Mapping):
        return found
    try:
        asked: ModelMetadata = yield Aside(model.metadata)
    except Unimplemented:
        return None
    return asked


def known_metadata(model: KServeModel, *, remembered: bool = False) -> ModelMetadata | None:
    """What the server says of the model, or None when it does not say: then the requests themselves will tell.

    With `remembered`, what it said before will do. Raises UnknownModel.
    """
    if remembered and (before := model.facts.metadata) is not None:
        return before
    try:
        return model.metadata()
    except UnknownModel:
        raise
    except RsrvError as error:
        log.debug("model=%s event=no_metadata %s", model.model_name, error)
        return None
