"""What the loader, operators and the verifier ask of the dispatch thread: each in its turn, as one job or two."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Literal

from rsrv.core.errors import ServerStopping, UnknownModel
from rsrv.serve.residency.floors import Floor
from rsrv.serve.residency.leaving import idles, lingers, require_unpinned
from rsrv.serve.residency.moves import Moves, resolve, unavailable
from rsrv.serve.residency.tensors import trim

if TYPE_CHECKING:
    from rsrv.serve.residency.handle import ModelWeights
    from rsrv.serve.residency.ledger import Ledger
    from rsrv.serve.residency.transfer import Outcome, Then

log = logging.getLogger(__name__)

Reloaded = Literal["came", "there", "no room"]


class Orders:
    """The futures end with what a method says, or with an error; ServerStopping when the server stops before, and
    UnknownModel when the model has been removed.

    `lock` guards `ledger` and `by_name`. All methods may be called from any thread but the dispatch thread.
    """

    def __init__(self, moves: Moves, ledger: Ledger, by_name: dict[str, ModelWeights], lock: threading.Lock) -> None:
        self._moves = moves
        self._copies = moves.copies
        self._ledger = ledger
        self._by_name = by_name
        self._lock = lock

    def load(self, weights: ModelWeights, moving: Callable[[], None] = lambda: None) -> Future[object]:
        """Bring them to the device, although nobody asks for it. Errors as `TensorPool.load`, and DeviceOutOfMemory.

        `moving` is called, on the transfer thread, once there is room.
        """
        return self._moves.order(partial(self._begin_load, weights, moving), brings=weights)

    def reload(self, weights: ModelWeights, keeping: Collection[ModelWeights]) -> Future[object]:
        """Like `load`, unless one of `keeping` had to leave for them: whether they came, were `there`, or have no room
        beside those."""
        return self._moves.order(partial(self._begin_reload, weights, keeping))

    def remove(self, weights: ModelWeights) -> Future[object]:
        """Free everything that a model has, and forget it; it is not scheduled any more. A second time does nothing."""
        return self._moves.order(partial(self._begin_removal, weights))

    def shrink(self) -> Future[object]:
        """Evict what does not fit any more since the budget became smaller."""
        return self._moves.order(self._begin_shrink)

    def leave(self, weights: ModelWeights, *, host: bool) -> Future[object]:
        """Free them on the device, once no batch uses them, and with `host` their copy in host memory, too.

        Ends with WrongState, and nothing happened, when they are pinned by then.
        """
        return self._moves.order(partial(self._begin_leaving, weights, host))

    def trim(self, target: int) -> Future[object]:
        """Evict what may leave and nobody uses, until at most `target` bytes are taken."""
        return self._moves.order(partial(self._begin_trim, target))

    def reclaim(self, idle_ns: int, host_idle_ns: int) -> Future[object]:
        """Free what nobody has used for so long, and host copies of what was off the device for so long; 0 = never.

        Whose were freed: a list of ModelWeights.
        """
        return self._moves.order(partial(self._begin_reclaim, idle_ns, host_idle_ns))

    def compact(self) -> Future[object]:
        """Free all that may leave."""
        return self._moves.order(lambda future: self._moves.begin_compaction(partial(resolve, future, None)))

    def set_floor(self, weights: ModelWeights, floor: Floor) -> Future[object]:
        """The resulting floor; after an error it is what it was."""
        return self._moves.order(partial(self._begin_floor, weights, floor))

    def share(self, weights: ModelWeights) -> Future[object]:
        """Use the tensors of other models in place of equal ones; the bytes that were freed."""
        return self._moves.order(partial(self._begin_sharing, weights))

    # --- on the dispatch thread ---------------------------------------------------------------------------------------

    def _is_known(self, weights: ModelWeights) -> bool:
        return self._by_name.get(weights.name) is weights

    def _require_known(self, weights: ModelWeights) -> None:
        if not self._is_known(weights):
            raise UnknownModel(f"model {weights.model!r} has been removed")

    def _begin_load(self, weights: ModelWeights, moving: Callable[[], None], future: Future[object]) -> bool:
        self._require_known(weights)
        return self._moves.begin_load(weights, partial(resolve, future, None), forced=True, moving=moving)

    def _begin_reload(self, weights: ModelWeights, keeping: Collection[ModelWeights], future: Future[object]) -> bool:
        def reloaded(what: Reloaded, outcome: Outcome = None) -> None:
            resolve(future, what, outcome)

        self._require_known(weights)
        if weights.resident:
            reloaded("there")
            return True
        with self._lock:
            plan = self._ledger.plan_load(weights.name, in_use=self._moves.in_use, protected=self._moves.is_fresh)
            # Those that block leave last, so all others would have to leave with them.
            leaving = self._ledger.compactable() if plan.blocked else plan.victims
        if any(self._is_known(each) and each.name in leaving for each in keeping):
            reloaded("no room")
            return True
        return self._moves.begin_load(weights, partial(reloaded, "came"), forced=True)

    def _begin_removal(self, weights: ModelWeights, future: Future[object]) -> bool:
        self._moves.forget(weights)
        if not self._is_known(weights):
            future.set_result(None)
            return True

        def ended(outcome: Outcome) -> None:
            if not isinstance(outcome, ServerStopping):
                with self._lock:
                    self._ledger.remove(weights.name)
                    del self._by_name[weights.name]
                weights.file.close()
            resolve(future, None, outcome)

        self._moves.begin(partial(self._copies.free, weights), ended, [weights])
        return True

    def _begin_shrink(self, future: Future[object]) -> bool:
        with self._lock:
            names = self._ledger.plan_shrink(in_use=self._moves.in_use, protected=self._moves.is_fresh)
            victims = [self._by_name[name] for name in self._ledger.evict(names, "budget")]
        return self._begin_drop(victims, future)

    def _begin_drop(self, victims: list[ModelWeights], future: Future[object]) -> bool:
        if victims:
            self._moves.begin(partial(self._copies.drop, victims), partial(resolve, future, None), victims)
        else:
            future.set_result(None)
        return True

    def _begin_trim(self, target: int, future: Future[object]) -> bool:
        with self._lock:
            names = self._ledger.plan_trim(target, in_use=self._moves.in_use, protected=self._moves.is_fresh)
            victims = [self._by_name[name] for name in self._ledger.evict(names, "trim")]
        return self._begin_drop(victims, future)

    def _begin_leaving(self, weights: ModelWeights, host: bool, future: Future[object]) -> bool:
        self._require_known(weights)
        require_unpinned(weights, unified=self._copies.device.unified)
        with self._lock:
            leaving = bool(self._ledger.evict([weights.name], "deactivate"))

        def move() -> None:
            if leaving:
                self._copies.drop([weights])
            if host:
                self._copies.drop_host(weights)

        if leaving or (host and weights.host is not None):
            self._moves.begin(move, partial(resolve, future, None), [weights] if leaving else [])
        else:
            future.set_result(None)
        return True

    def _begin_reclaim(self, idle_ns: int, host_idle_ns: int, future: Future[object]) -> bool:
        unified = self._copies.device.unified
        with self._lock:
            now_ns, known = self._moves.now_ns(), [*self._by_name.values()]
            idle = [each.name for each in known if idles(each, now_ns, idle_ns, unified=unified)]
            names = [name for name in idle if not self._moves.is_fresh(name)]
            victims = [self._by_name[name] for name in self._ledger.evict(names, "idle")]
            hosts = [each for each in known if lingers(each, now_ns, host_idle_ns, unified=unified)]

        def move() -> None:
            self._copies.drop(victims)
            for each in hosts:
                self._copies.drop_host(each)

        if victims or hosts:
            self._moves.begin(move, partial(resolve, future, [*victims, *hosts]), victims)
        else:
            future.set_result([])
        return True

    def _begin_floor(self, weights: ModelWeights, floor: Floor, future: Future[object]) -> bool:
        """The file, which may be unreadable, then the budget, which may refuse, then what cannot fail (spec 4.3)."""
        self._require_known(weights)
        then = partial(resolve, future, floor)
        if floor is not Floor.SYSTEM or self._copies.device.unified or weights.host is not None:
            return self._begin_change(weights, floor, then)

        def kept(outcome: Outcome) -> None:
            if outcome is None:
                self._moves.order_next(partial(self._begin_change, weights, floor, then), then)
            else:
                then(unavailable(weights.model, outcome))

        self._moves.begin(partial(self._copies.keep_host, weights), kept)
        return True

    def _begin_change(self, weights: ModelWeights, floor: Floor, then: Then) -> bool:
        with self._lock:
            change = self._ledger.set_floor(weights.name, floor)
        weights.floor = floor

        def ended(outcome: Outcome) -> None:
            if outcome is None:
                log.debug("floor changed model=%s from=%s to=%s", weights.model, change.old.value, floor.value)
                self.shrink()
            else:
                with self._lock:
                    self._ledger.set_floor(weights.name, change.old)
                weights.floor = change.old
            then(outcome)

        def free() -> None:
            if change.host == "drop":
                self._copies.drop_host(weights)
            if change.free:
                self._copies.drop([weights])

        if change.load:
            self._moves.order_next(partial(self._moves.begin_load, weights, ended, forced=True), ended)
        elif change.free or change.host == "drop":
            self._moves.begin(free, ended, [weights] if change.free else [])
        else:
            ended(None)
        return True

    def _begin_sharing(self, weights: ModelWeights, future: Future[object]) -> bool:
        """No batch may use the weights meanwhile."""
        if not weights.resident or not self._is_known(weights):
            future.set_result(0)
            return True
        saved = 0

        def move() -> None:
            nonlocal saved
            if weights.placed is not None:
                saved = self._copies.pool.share(weights.placed)
                trim()

        def ended(outcome: Outcome) -> None:
            if weights.placed is not None:
                with self._lock:
                    self._ledger.share(weights.name, weights.placed.digests)
            weights.resident = True
            self._moves.arrived(weights, None)
            log.debug("weights shared model=%s saved_bytes=%d", weights.model, saved)
            resolve(future, saved, outcome)

        self._moves.begin(move, ended, [weights], target=weights)
        return True
