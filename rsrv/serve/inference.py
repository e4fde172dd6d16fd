"""ModelInfer: the handler, the requests that wait for a model, and hooks that hang. The life of one is in `request`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rsrv.core.errors import ModelFailed, Removing, RsrvError
from rsrv.serve.request import Request

if TYPE_CHECKING:
    from rsrv.core.shm import RegionRegistry
    from rsrv.rpc.call import Call
    from rsrv.serve.admission import Admission
    from rsrv.serve.counters import ServerCounters
    from rsrv.serve.hook_pool import HookPool
    from rsrv.serve.registry import Entry, Prepared, Registry
    from rsrv.serve.scheduler import Scheduler


class Inference:
    """The handler of ModelInfer.

    Args:
        admission: how many requests there may be, and where they wait.
        on_hooks_lost: called with a model's name and incarnation, and how many of its hooks hung, when that were too
            many; the model is to be failed.
        hold_unprepared: requests wait for a model that is being prepared, too, unless they say otherwise.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        scheduler: Scheduler,
        hook_pool: HookPool,
        counters: ServerCounters,
        admission: Admission[Request],
        regions: RegionRegistry | None,
        max_lost: int,
        on_hooks_lost: Callable[[str, int, int], None],
        hold_unprepared: bool = False,
    ) -> None:
        self.registry = registry
        self.scheduler = scheduler
        self.hook_pool = hook_pool
        self.counters = counters
        self.admission = admission
        self.regions = regions
        self._max_lost = max_lost
        self._on_hooks_lost = on_hooks_lost
        self._hold_unprepared = hold_unprepared
        self._lost: dict[tuple[str, int], int] = {}
        self._given_up: set[tuple[str, int]] = set()
        self._lost_lock = threading.Lock()

    def handle(self, call: Call) -> None:
        request = Request(self, call, time.monotonic_ns())
        try:
            self.admission.enter(request)
        except RsrvError as error:
            request.refuse(error)
            return
        try:
            request.start()
        except BaseException as error:
            request.fail(error)

    def reject_all(self, error: RsrvError) -> None:
        """Fail every request that is still open."""
        for request in self.admission.requests():
            request.fail(error)

    def reject_waiting(self, error: RsrvError) -> None:
        """Fail those that wait for a model."""
        for request in self.admission.waiting():
            request.fail(error)

    # --- waiting for a model --------------------------------------------------------------------------------------

    def may_wait(self, entry: Entry, asked: object, *, elsewhere: bool = False) -> bool:
        """Whether a request waits for a model that does not take it now; `asked` is its parameter, if it has one.

        `elsewhere`: a gateway has another worker for it, which is better than to wait unless somebody said otherwise.
        """
        if elsewhere and asked is None and not self._hold_unprepared:
            return False
        if entry.failure is not None or entry.gate == "removing" or asked is False or not self.admission.held_limit:
            return False
        return entry.gate != "open" or asked is True or self._hold_unprepared

    def look_again(self, name: str) -> None:
        """The entry of `name` has changed: those that wait for it go on, or are told why there is nothing to wait for.

        Called after every change, and by whoever begins to wait, because the change may have come just before.
        """
        if not self.admission.waits_for(name):
            return
        entry = self.registry.get(name)
        if entry is not None and entry.refusal() is not None and entry.failure is None and entry.gate != "removing":
            return
        for request in self.admission.release(name):
            if entry is None or entry.gate == "removing":
                request.fail(Removing(f"model {name!r} was removed while the request waited for it"))
            else:
                request.call.defer(request.resume)

    # --- hooks that hang ------------------------------------------------------------------------------------------

    def hook_lost(self, prepared: Prepared) -> None:
        """A hook of this incarnation hung and its thread was written off."""
        key = prepared.model.name, prepared.model.incarnation
        with self._lost_lock:
            lost = self._lost[key] = self._lost.get(key, 0) + 1
        if lost == max(self._max_lost, 1):
            self._given_up.add(key)
            self._on_hooks_lost(*key, lost)

    def require_hooks(self, prepared: Prepared) -> None:
        """Raises ModelFailed when the hooks of this incarnation hung too often: a request that was accepted before must
        not cost a thread any more."""
        if self._given_up and (prepared.model.name, prepared.model.incarnation) in self._given_up:
            raise ModelFailed(f"model {prepared.model.name!r} failed: too many of its hooks did not return in time")
