"""Weight residency of a worker, as the rest of it sees it: models are opened and closed, floors set, memory compacted.

Without an arena, or with `runtime.weight_cache_fraction: 0`, weights are loaded once, for good. Otherwise `moves` lets
them come and go on the scheduler's dispatch thread, and what is asked for here is an order to it, which is waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, cast

from rsrv.core.errors import NameTaken, RsrvError, ServerStopping, UnknownModel, WrongState
from rsrv.serve.residency.copies import Copies
from rsrv.serve.residency.digests import Verifier
from rsrv.serve.residency.floors import Floor, is_reserved, resolve_floor
from rsrv.serve.residency.handle import ModelWeights
from rsrv.serve.residency.leaving import Resident, idles, lingers, require_unpinned
from rsrv.serve.residency.moves import Mode, Moves
from rsrv.serve.residency.orders import Orders
from rsrv.serve.residency.report import Compacted, ModelResidency, residency_of, tell_of_budget
from rsrv.serve.residency.snapshot import State
from rsrv.serve.residency.tensors import TensorPool, WeightsFile

if TYPE_CHECKING:
    from rsrv.runtime.device import Device
    from rsrv.serve.residency.ledger import Ledger
    from rsrv.serve.residency.snapshot import LedgerSnapshot
    from rsrv.serve.residency.store import WeightStore
    from rsrv.serve.scheduler import Scheduler

__all__ = ["Compacted", "ModelResidency", "Residency"]

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.01


class Residency:
    """The weights of all models of a worker. Its methods block where they move weights; not for the dispatch thread.

    Args:
        device: where the weights are used.
        scheduler: whose dispatch thread decides; not started yet when there is a `ledger`.
        ledger: the bookkeeping; None = every model is resident for good.
        pool: brings tensors to the device.
        store: where host copies are kept; None = a model has none.
        mode: who decides what is loaded; `externally_managed` refuses requests for weights that are elsewhere.
        compaction_interval: compact by itself after so many loads for requests; 0 = never.
        on_load: told of each load within the budget, on the dispatch thread: model, seconds.
        clock: monotonic nanoseconds.
    """

    def __init__(
        self,
        device: Device,
        scheduler: Scheduler,
        ledger: Ledger | None,
        pool: TensorPool,
        *,
        store: WeightStore | None = None,
        mode: Mode = "self_managed",
        compaction_interval: int = 0,
        on_load: Callable[[str, float], None] = lambda name, seconds: None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.mode = mode
        self._scheduler = scheduler
        self._pool = pool
        self._unified = device.unified
        self._ledger = ledger
        self._clock = clock
        self._lock = threading.Lock()
        self._by_name: dict[str, ModelWeights] = {}
        self._copies = Copies(device, pool, store)
        # Where device memory is host memory, what is there twice is found while it is read.
        self._verifier = None if self._unified else Verifier(self._on_verified)
        self._moves: Moves | None = None
        self._orders: Orders | None = None
        if ledger is None:
            scheduler.attach(Resident(scheduler))
        else:
            self._moves = moves = Moves(
                scheduler,
                ledger,
                self._copies,
                self._by_name,
                self._lock,
                mode=mode,
                compaction_interval=compaction_interval,
                on_load=on_load,
                clock=clock,
            )
            self._orders = Orders(moves, ledger, self._by_name, self._lock)
            scheduler.attach(moves)

    @property
    def on_demand(self) -> bool:
        """Whether weights come and go."""
        return self._ledger is not None

    def start(self) -> None:
        if self._moves is not None:
            self._moves.start()
        if self._verifier is not None:
            self._verifier.start()

    def close(self) -> None:
        """Begin nothing more: the server stops."""
        self._copies.close()
        if self._verifier is not None:
            self._verifier.close()
        if self._moves is not None:
            self._moves.close()

    def stop(self) -> None:
        """End the transfer thread, once the scheduler has stopped; what was asked for and not begun is refused."""
        if self._moves is not None:
            self._moves.stop()

    def free(self) -> None:
        """Free all weights, once nothing runs any more; none while some are being moved, in a read that hangs."""
        if self._moves is not None and self._moves.hangs:
            log.warning("weights are not freed, as some are still being moved")
            return
        with self._lock:
            several = [*self._by_name.values()]
            self._by_name.clear()
        for weights in several:
            self._copies.free(weights)
            weights.file.close()

    # --- models come and go -------------------------------------------------------------------------------------------

    def open(
        self,
        name: str,
        file: WeightsFile,
        *,
        floor: Floor | None,
        scratch_bytes: int,
        pinned: bool = False,
        model: str | None = None,
    ) -> ModelWeights:
        """Register the weights of a model, and bring them to where its floor is.

        `floor` None = the default of this device; `scratch_bytes` is what the largest of its programs needs beside the
        weights. A version that is to take the place of another one has a `name` of its own until `exchange`; `model` is
        that of both. Raises WeightsError, DeviceOutOfMemory, DeviceError or ServerStopping, and then nothing is
        registered.
        """
        resolved = resolve_floor(floor, on_demand=self.on_demand, unified=self._unified)
        footprint = self._pool.footprint(file)
        weights = ModelWeights(name, file, resolved, footprint, model=model, pinned=pinned, clock=self._clock)
        ledger, orders = self._ledger, self._orders
        if ledger is None or orders is None:
            self._copies.bring(weights)
            weights.resident = True
            weights.touch()
            with self._lock:
                self._by_name[name] = weights
        else:
            with self._lock:
                ledger.add(name, weights.footprint, floor=resolved, scratch_bytes=scratch_bytes)
                ledger.flag(name, pinned)
                self._by_name[name] = weights
            try:
                if resolved is Floor.SYSTEM and not self._unified:
                    self._copies.keep_host(weights)
                if is_reserved(resolved, unified=self._unified):
                    orders.load(weights).result()
                orders.shrink().result()
            except BaseException:
                self.close_model(weights)
                raise
        if self._verifier is not None:
            self._verifier.add(name, file)
        return weights

    def close_model(self, weights: ModelWeights) -> None:
        """Forget the weights of a model that is not scheduled any more, and free them."""
        if self._verifier is not None:
            self._verifier.remove(weights.name)
        if self._orders is not None:
            # A server that stops frees them with all others.
            with suppress(ServerStopping):
                self._orders.remove(weights).result()
            return
        with self._lock:
            if self._by_name.get(weights.name) is weights:
                del self._by_name[weights.name]
        self._scheduler.expel([weights])
        while weights.uses:  # a warm-up runs on them
            time.sleep(_LOOK_SECONDS)
        self._copies.free(weights)
        weights.file.close()

    def exchange(self, old: ModelWeights, new: ModelWeights, aside: str) -> None:
        """`new` is the next version of `old`: it has its name from now on, and `old`, which still serves, is `aside`.

        Pin flag, statistics of use and the place in the order of eviction go to the next version; where the other one
        is on the device, or on its way there, it is brought there, too, which is not waited for. Moves no bytes itself,
        so any thread may call it. Raises UnknownModel when one of them was closed, NameTaken when `aside` is a name.
        """
        with self._lock:
            for weights in (old, new):
                self._require_known(weights)
            self._require_free(aside)
            name, before = old.name, new.name
            there = old.resident
            if self._ledger is not None:
                there = self._ledger.state(name) is not State.COLD
                self._ledger.exchange(name, before, aside)
            del self._by_name[before]
            old.name, new.name, new.model = aside, name, old.model
            self._by_name[aside], self._by_name[name] = old, new
            new.pinned, old.pinned = old.pinned, False
            if old.idle_since_ns is not None:
                new.idle_since_ns = max(old.idle_since_ns, new.idle_since_ns or old.idle_since_ns)
        if self._verifier is not None:
            self._verifier.rename(name, aside)
            self._verifier.rename(before, name)
        if there and self._orders is not None:
            self._orders.load(new).add_done_callback(partial(_tell_of_next, name))

    def rename(self, weights: ModelWeights, name: str, *, floor: Floor | None) -> None:
        """From now on the model of `weights` is `name`; then its floor is the one of that name, None = the default.

        A floor that cannot be had is a warning, and stays what it was. Raises UnknownModel when the weights were
        closed, NameTaken when the name is taken; nothing is changed then.
        """
        with self._lock:
            self._require_known(weights)
            self._require_free(name)
            old = weights.name
            if self._ledger is not None:
                self._ledger.rename(old, name)
            del self._by_name[old]
            weights.name = weights.model = name
            self._by_name[name] = weights
        if self._verifier is not None:
            self._verifier.rename(old, name)
        resolved = resolve_floor(floor, on_demand=self.on_demand, unified=self._unified)
        if resolved is weights.floor:
            return
        try:
            self._set_floor(weights, resolved)
        except RsrvError as error:
            log.warning(
                "floor of a renamed model stays model=%s floor=%s wanted=%s why=%s",
                name,
                weights.floor.value,
                resolved.value,
                error.message,
            )

    def _require_known(self, weights: ModelWeights) -> None:
        if self._by_name.get(weights.name) is not weights:
            raise UnknownModel(f"model {weights.model!r} has no such weights on this server any more")

    def _require_free(self, name: str) -> None:
        if name in self._by_name:
            raise NameTaken(f"model {name!r} has weights on this server already")

    # --- what operators ask, and status -------------------------------------------------------------------------------

    def snapshot(self) -> LedgerSnapshot | None:
        """The counters; None when all weights are resident for good."""
        if self._ledger is None:
            return None
        with self._lock:
            return self._ledger.snapshot(self._clock())

    def model(self, name: str) -> ModelResidency | None:
        """Where the weights of `name` are; None when it has none here."""
        with self._lock:
            weights = self._by_name.get(name)
            if weights is None:
                return None
            releasing = self._is_releasing(weights)
        return residency_of(weights, self._clock(), releasing=releasing)

    @property
    def releasing_bytes(self) -> int:
        """Bytes in the device's memory that are free by the books, and will be once nothing uses them any more."""
        with self._lock:
            leaving = [weights.placed for weights in self._by_name.values() if self._is_releasing(weights)]
        return sum(placed.nbytes for placed in leaving if placed is not None)

    def _is_releasing(self, weights: ModelWeights) -> bool:
        # Those that only change places are leaving, too, but the books still have them.
        return weights.leaving and self._ledger is not None and self._ledger.state(weights.name) is State.COLD

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights in the device's memory; what models share counts once, as does what is yet to be freed."""
        return self._pool.resident_bytes

    def set_floor(self, name: str, floor: Floor) -> Floor:
        """Change the floor of a model, and move its weights there (4.3); returns the resulting floor.

        Raises UnknownModel, DeviceOutOfMemory when there is no room to pin it, WeightsUnavailable, or ServerStopping;
        then the floor is what it was.
        """
        return self._set_floor(self._find(name), floor)

    def _find(self, name: str) -> ModelWeights:
        with self._lock:
            weights = self._by_name.get(name)
        if weights is None:
            raise UnknownModel(f"model {name!r} has no weights on this server")
        return weights

    def _set_floor(self, weights: ModelWeights, floor: Floor) -> Floor:
        if self._orders is None:
            weights.floor = floor
            return floor
        reached = cast("Floor", self._orders.set_floor(weights, floor).result())
        self.report_budget()
        return reached

    def require_room(self, name: str) -> None:
        """Raises DeviceOutOfMemory when the weights of `name` can never come, UnknownModel when it has none here."""
        weights = self._find(name)
        ledger = self._ledger
        if ledger is None:
            return
        with self._lock:
            self._require_known(weights)
            if ledger.state(weights.name) is State.COLD:
                ledger.plan_load(weights.name, in_use=_no, protected=_no, forced=True)

    def activate(self, name: str, *, moving: Callable[[], None] = lambda: None) -> None:
        """Bring the weights of `name` to the device, and others leave for them; those there already have come.

        Waits for room that running work, or a release, will give; `moving` is called, on another thread, when it is
        there. Raises UnknownModel, DeviceOutOfMemory when they can never fit, WeightsUnavailable, DeviceError, or
        ServerStopping.
        """
        weights = self._find(name)
        if self._orders is not None:
            self._orders.load(weights, moving).result()

    def require_deactivatable(self, name: str) -> None:
        """Raises what `deactivate` would raise at once: UnknownModel, or WrongState."""
        weights = self._find(name)
        self._require_on_demand(f"the weights of model {name!r}")
        require_unpinned(weights, unified=self._unified)

    def deactivate(self, name: str, *, host: bool = False) -> None:
        """Free the device weights of `name`, once nothing uses them, and with `host` the copy in host memory, too.

        Counts as no eviction. Programs stay, and so does the floor: the next load makes the host copy anew. Raises
        UnknownModel, ServerStopping, or WrongState: ``fixed`` where weights do not come and go, ``pinned``.
        """
        self.require_deactivatable(name)
        _, orders = self._require_on_demand(f"the weights of model {name!r}")
        orders.leave(self._find(name), host=host).result()

    def pin(self, name: str) -> None:
        """Never evict the weights of `name`, once they are on the device. Raises UnknownModel."""
        self._flag(name, pinned=True)

    def unpin(self, name: str) -> None:
        """Undo `pin`; the weights begin to be idle now. Raises UnknownModel."""
        self._flag(name, pinned=False)

    def _flag(self, name: str, *, pinned: bool) -> None:
        weights = self._find(name)
        with self._lock:
            self._require_known(weights)
            if weights.pinned and not pinned and weights.idle_since_ns is not None:
                weights.touch()
            weights.pinned = pinned
            if self._ledger is not None:
                self._ledger.flag(weights.name, pinned)

    def trim(self, target_bytes: int) -> int:
        """Evict, the least recently used first, until at most `target_bytes` of weights are on the device.

        Never what is pinned or in use, so more may stay; returns the bytes that do. The budget does not change. Raises
        WrongState, reason ``fixed``, where weights do not come and go, or ServerStopping.
        """
        _, orders = self._require_on_demand("weights")
        orders.trim(target_bytes).result()
        return self.resident_bytes

    def reclaim(self, *, parameter_idle_s: float, host_idle_s: float) -> list[str]:
        """Free weights that nobody has used for `parameter_idle_s` seconds, and host copies of those off the device for
        `host_idle_s`; 0 = never. Neither pinned nor used ones. Returns the names.

        The dispatch thread hears of it only when there is something to free. Raises ServerStopping.
        """
        if self._orders is None:
            return []
        idle_ns, host_idle_ns = round(parameter_idle_s * 1e9), round(host_idle_s * 1e9)
        now_ns, unified = self._clock(), self._unified
        with self._lock:
            known = [*self._by_name.values()]
        if not any(
            idles(each, now_ns, idle_ns, unified=unified) or lingers(each, now_ns, host_idle_ns, unified=unified)
            for each in known
        ):
            return []
        freed = cast("list[ModelWeights]", self._orders.reclaim(idle_ns, host_idle_ns).result())
        return [weights.name for weights in freed]

    def _require_on_demand(self, what: str) -> tuple[Ledger, Orders]:
        if self._ledger is None or self._orders is None:
            raise WrongState(
                f"{what} stay on the device: they do not come and go on this server",
                reason="fixed",
                hint="set runtime.device_memory_bytes, or a runtime.weight_cache_fraction above 0",
            )
        return self._ledger, self._orders

    def compact(self, reload: Sequence[str] = ()) -> Compacted:
        """Free all that may leave, so that the device's holes merge, then load `reload` again, in that order.

        Names that are unknown, pinned or resident are skipped, and all of them when an operator moves the weights. What
        cannot be loaded is skipped with a warning. Ends early before one of them would have to leave for the next. Only
        what this call brought, and what is there at its end, counts as reloaded. Raises ServerStopping.
        """
        ledger, orders = self._ledger, self._orders
        if ledger is None or orders is None:
            return Compacted(0, 0)
        orders.compact().result()
        brought: list[ModelWeights] = []

        def remaining() -> int:
            return sum(self._by_name.get(each.name) is each and ledger.is_resident(each.name) for each in brought)

        for name in dict.fromkeys(reload) if self.mode == "self_managed" else ():
            with self._lock:
                # Where requests, or an out-of-memory, have taken the place of one, the next would only do the same.
                if remaining() < len(brought):
                    break
                weights = self._by_name.get(name)
            if weights is None:
                continue
            try:
                outcome = orders.reload(weights, tuple(brought)).result()
            except ServerStopping:
                raise
            except UnknownModel:  # removed meanwhile
                continue
            except RsrvError as error:
                log.warning("model not loaded again after a compaction model=%s why=%s", name, error.message)
                continue
            if outcome == "no room":
                break
            if outcome == "came":
                brought.append(weights)
        with self._lock:
            reloaded, after = remaining(), ledger.snapshot(self._clock()).resident_bytes
        log.debug("memory compacted reloaded=%d requested=%d resident_bytes=%d", reloaded, len(reload), after)
        return Compacted(reloaded, after)

    def report_budget(self) -> None:
        """Log what there is for weights, and warn of what it cannot hold (4.4)."""
        snapshot = self.snapshot()
        if snapshot is None:
            return
        tell_of_budget(snapshot)

    def note_scratch(self, nbytes: int) -> None:
        """A probe found that one execution needs that much beside the weights; the budget follows."""
        if self._ledger is not None and self._orders is not None:
            with self._lock:
                self._ledger.note_scratch(nbytes)
            self._orders.shrink().result()

    def _on_verified(self, name: str) -> None:
        """Digests of tensors of `name` were verified: those that another model has, too, are held once from now on."""
        with self._lock:
            weights = self._by_name.get(name)
        if weights is not None and self._orders is not None:
            self._orders.share(weights)


def _no(name: str) -> bool:
    return False


def _tell_of_next(name: str, load: Future[object]) -> None:
    error = load.exception()
    if error is not None and not isinstance(error, (ServerStopping, UnknownModel)):
        # The next request asks for them again, and is told.
        log.warning("weights of the next version are not on the device model=%s why=%s", name, error)
