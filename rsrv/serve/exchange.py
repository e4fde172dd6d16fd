"""A reload: the next incarnation of a model is prepared beside the one that serves, then takes its place at once.

Preparing touches nothing that serves. The exchange itself moves no bytes: the scheduler gets another queue under the
name, the budget another entry, and whoever looks up the name finds the new one. The old one ends in `retirement`.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from rsrv.core.errors import ModelUnloaded, ServerStopping, WrongState
from rsrv.serve.loading.steps import Steps
from rsrv.serve.registry import Entry, ModelState, Prepared

if TYPE_CHECKING:
    from rsrv.serve.loading import Loader
    from rsrv.serve.registry import Registry
    from rsrv.serve.residency.handle import ModelWeights
    from rsrv.serve.residency.manager import Residency
    from rsrv.serve.retirement import Retirements
    from rsrv.serve.scheduler import Scheduler

log = logging.getLogger(__name__)

Policy = Literal["drain", "reject", "evict_first"]


class ReloadFailed(Exception):
    """What a reload ended with, in which phase, and whether what was there before still serves."""

    def __init__(self, entry: Entry, phase: str, cause: BaseException, *, serves: bool) -> None:
        super().__init__(str(cause))
        self.entry = entry
        self.phase = phase
        self.cause = cause
        self.serves = serves


class Exchange:
    """Reloads one model at a time, or several of different names. `policy` is ``reload.policy``."""

    def __init__(
        self,
        registry: Registry,
        scheduler: Scheduler,
        residency: Residency,
        loader: Loader,
        retirements: Retirements,
        policy: Policy,
        stopping: threading.Event,
    ) -> None:
        self._registry = registry
        self._scheduler = scheduler
        self._residency = residency
        self._loader = loader
        self._retirements = retirements
        self._policy = policy
        self._stopping = stopping

    def run(self, entry: Entry, path: Path) -> Entry:
        """Prepare what is in `path`, and have it serve in the place of what `entry` has. Blocks while it compiles.

        Raises ReloadFailed when it cannot be prepared, ModelUnloaded or WrongState when the model was removed, renamed
        or reloaded meanwhile, ServerStopping when the server stops before.
        """
        steps, made_room = Steps(self._stopping, entry.dropped), False
        old = entry.prepared
        assert old is not None

        def make_room() -> None:
            nonlocal made_room
            self._evict(entry, old)
            made_room = True

        try:
            prepared, compiled = self._loader.reload(
                entry, path, steps, make_room=make_room if self._policy == "evict_first" else None
            )
        except BaseException as error:
            if entry.dropped.is_set():
                raise ModelUnloaded(f"model {entry.name!r} was removed while it was being reloaded") from error
            if self._stopping.is_set():
                log.info("model not reloaded name=%s phase=%s reason=stopping", entry.name, steps.phase)
                raise ServerStopping(f"the server stopped while model {entry.name!r} was being reloaded") from error
            raise ReloadFailed(entry, steps.phase, error, serves=not made_room) from error
        try:
            with self._registry.changing:
                if made_room:
                    self._require_wanted(entry)
                    # They came beside those that are gone by now.
                    weights = cast("ModelWeights", prepared.model.weights)
                    self._residency.rename(weights, entry.name, floor=weights.floor)
                    self._loader.add(entry, prepared)
                else:
                    self._take_over(entry, old, prepared)
                reloaded = self._registry.change(entry.name, path=path)
        except BaseException:
            self._loader.hooks.drop(prepared.model.incarnation)
            if prepared.model.weights is not old.model.weights:
                self._residency.close_model(cast("ModelWeights", prepared.model.weights))
            raise
        assert reloaded is not None
        self._loader.tell_loaded(reloaded, prepared, compiled)
        return reloaded

    def _take_over(self, entry: Entry, old: Prepared, prepared: Prepared) -> None:
        """With `changing` held."""
        name = entry.name
        current = self._require_same(entry)
        before = cast("ModelWeights", old.model.weights)
        after = cast("ModelWeights", prepared.model.weights)
        if after is not before:
            self._residency.exchange(before, after, aside=f"{name}#{old.model.incarnation}")
        if current.gate != "open":
            prepared.accepted.close()
        # The queue first: a request that finds the new incarnation must find its queue, too.
        self._scheduler.replace(prepared.model)
        self._registry.set_ready(name, prepared, of=entry.incarnation)
        refusal = None
        if self._policy == "reject":
            refusal = ModelUnloaded(f"model {name!r} was reloaded while the request waited (reload.policy: reject)")
        self._retirements.begin(name, old, keep=after, refusal=refusal)

    def _evict(self, entry: Entry, old: Prepared) -> None:
        """Free what serves, so that there is room for what comes; until then the model is preparing."""
        name = entry.name
        with self._registry.changing:
            self._require_same(entry)
            self._registry.change(name, state=ModelState.PREPARING, prepared=None)
        refusal = ModelUnloaded(f"model {name!r} was reloaded while the request waited (reload.policy: evict_first)")
        self._retirements.begin(name, old, refusal=refusal)
        self._retirements.wait(name, Steps(self._stopping, entry.dropped).require_running)

    def _require_wanted(self, entry: Entry) -> Entry:
        current = self._registry.get(entry.name)
        if current is None or entry.dropped.is_set():
            raise ModelUnloaded(f"model {entry.name!r} was removed while it was being reloaded")
        return current

    def _require_same(self, entry: Entry) -> Entry:
        current = self._require_wanted(entry)
        if current.incarnation != entry.incarnation or current.state is not ModelState.READY:
            raise WrongState(
                f"model {entry.name!r} was changed while it was being reloaded: it is {current.state.value}, "
                f"incarnation {current.incarnation}",
                reason="changed",
            )
        return current
