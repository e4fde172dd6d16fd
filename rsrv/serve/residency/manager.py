"""Weight residency of a worker, as the rest of it sees it: models are opened and closed, floors set, memory compacted.

Without an arena, or with `runtime.weight_cache_fraction: 0`, weights are loaded once, for good. Otherwise `moves` lets
them come and go on the scheduler's dispatch thread, and what is asked for here is an order to it, which is waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from rsrv.core.errors import RsrvError, ServerStopping, UnknownModel
from rsrv.serve.residency.copies import Copies
from rsrv.serve.residency.digests import Verifier
from rsrv.serve.residency.floors import Floor, is_reserved, resolve_floor
from rsrv.serve.residency.handle import ModelWeights
from rsrv.serve.residency.moves import Mode, Moves
from rsrv.serve.residency.orders import Orders
from rsrv.serve.residency.tensors import TensorPool, WeightsFile

if TYPE_CHECKING:
    from rsrv.runtime.device import Device
    from rsrv.serve.residency.ledger import Ledger
    from rsrv.serve.residency.snapshot import LedgerSnapshot
    from rsrv.serve.residency.store import WeightStore
    from rsrv.serve.scheduler import Scheduler

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelResidency:
    """Where the weights of one model are.

    Attributes:
        floor: what they are never below.
        device_resident, host_resident: whether they are on the device, and whether a host copy is kept.
        nbytes: bytes that the budget counts for them.
        host_shared: that copy is in memory that other workers of the node use, too.
    """

    floor: Floor
    device_resident: bool
    host_resident: bool
    nbytes: int
    host_shared: bool = False


@dataclass(frozen=True, slots=True)
class Compacted:
    """What `Residency.compact` did: models that it loaded again, and bytes of on-demand weights after it."""

    reloaded: int
    resident_bytes: int


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
        if ledger is not None:
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

    def open(self, name: str, file: WeightsFile, *, floor: Floor | None, scratch_bytes: int) -> ModelWeights:
        """Register the weights of a model, and bring them to where its floor is.

        `floor` None = the default of this device; `scratch_bytes` is what the largest of its programs needs beside the
        weights. Raises WeightsError, DeviceOutOfMemory, DeviceError or ServerStopping, and then nothing is registered.
        """
        resolved = resolve_floor(floor, on_demand=self.on_demand, unified=self._unified)
        weights = ModelWeights(name, file, resolved, self._pool.footprint(file))
        ledger, orders = self._ledger, self._orders
        if ledger is None or orders is None:
            self._copies.bring(weights)
            weights.resident = True
            with self._lock:
                self._by_name[name] = weights
        else:
            with self._lock:
                ledger.add(name, weights.footprint, floor=resolved, scratch_bytes=scratch_bytes)
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
        self._copies.free(weights)
        weights.file.close()

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
        host = weights.host
        return ModelResidency(
            weights.floor, weights.resident, host is not None, weights.footprint, host is not None and host.shared
        )

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights in the device's memory; what models share counts once, as does what is yet to be freed."""
        return self._pool.resident_bytes

    def set_floor(self, name: str, floor: Floor) -> Floor:
        """Change the floor of a model, and move its weights there (4.3); returns the resulting floor.

        Raises UnknownModel, DeviceOutOfMemory when there is no room to pin it, WeightsUnavailable, or ServerStopping;
        then the floor is what it was.
        """
        with self._lock:
            weights = self._by_name.get(name)
        if weights is None:
            raise UnknownModel(f"model {name!r} has no weights on this server")
        if self._orders is None:
            weights.floor = floor
            return floor
        reached = cast("Floor", self._orders.set_floor(weights, floor).result())
        self.report_budget()
        return reached

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
        budget = snapshot.budget
        movable = [model for model in snapshot.models.values() if not model.reserved]
        if budget.over_commit:
            log.warning(
                "pinned weights exceed the pool pinned=%d pool=%d arena=%d hint=pin fewer models, or raise "
                "runtime.device_memory_bytes",
                budget.pinned,
                budget.weight_pool,
                budget.arena,
            )
        elif movable and not budget.on_demand:
            log.warning("no budget for weights that come and go: %d models load for every dispatch", len(movable))
        log.info(
            "weight budget resolved arena=%d scratch=%d pool=%d pinned=%d budget=%d eviction=%s",
            budget.arena,
            budget.max_scratch,
            budget.weight_pool,
            budget.pinned,
            budget.on_demand,
            snapshot.policy,
        )

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
