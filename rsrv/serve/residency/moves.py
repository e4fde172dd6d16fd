"""What the dispatch thread does about weights: it decides who leaves and who comes, and hands the bytes to a thread.

A model whose weights are elsewhere when it is chosen is out of the choice until they have come; meanwhile the others go
on. One job moves bytes at a time. Orders (floors, compaction, pinned models) go before loads for requests, and those in
the order in which the discipline chose the models, under `edf` by deadline. What was loaded for requests stays until a
batch has used it; whoever needs its place sees to it that this batch is the next one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from rsrv.core.errors import (
    BundleError,
    DeviceLost,
    DeviceOutOfMemory,
    ModelUnloaded,
    NotResident,
    RsrvError,
    ServerStopping,
    WeightsUnavailable,
)
from rsrv.serve.residency.transfer import Job, Outcome, Then, Transfer

if TYPE_CHECKING:
    from rsrv.serve.residency.copies import Copies
    from rsrv.serve.residency.handle import ModelWeights
    from rsrv.serve.residency.ledger import Ledger
    from rsrv.serve.scheduler import Scheduler
    from rsrv.serve.scheduler.model import Weights
    from rsrv.serve.scheduler.queue import ModelQueue

log = logging.getLogger(__name__)

Mode = Literal["self_managed", "externally_managed"]


class Order(NamedTuple):
    """Something that is done in its turn.

    Attributes:
        begin: begins it; False = not now, it is called again when something changed.
        then: told what `begin` raised, or ServerStopping when it was never begun; else whoever `begin` told is.
    """

    begin: Callable[[], bool]
    then: Then


class Moves:
    """Sees to it that weights are on the device when a batch needs them: the scheduler's `Mover`.

    Args:
        lock: guards `ledger` and `by_name`, which other threads read.
        compaction_interval: compact by itself after so many loads for requests; 0 = never.
        on_load: told of each load: model, seconds.
        clock: monotonic nanoseconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        ledger: Ledger,
        copies: Copies,
        by_name: dict[str, ModelWeights],
        lock: threading.Lock,
        *,
        mode: Mode,
        compaction_interval: int = 0,
        on_load: Callable[[str, float], None] = lambda name, seconds: None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.copies = copies
        self._scheduler = scheduler
        self._ledger = ledger
        self._by_name = by_name
        self._lock = lock
        self._mode = mode
        self._interval = compaction_interval
        self._loads_since_compaction = 0
        self._on_load = on_load
        self._clock = clock
        self._transfer = Transfer(scheduler.command)
        self._closed = False
        self._job: Job | None = None
        self._orders: deque[Order] = deque()
        # Those that somebody ordered to the device, once for each order.
        self._expected: list[ModelWeights] = []
        self._wanted: deque[ModelWeights] = deque()
        self._queues: dict[ModelWeights, list[ModelQueue]] = {}
        # Loaded for these queues and not used yet: evicting them now would have been work for nothing.
        self._fresh: dict[ModelWeights, list[ModelQueue]] = {}
        self._blocked = False

    def start(self) -> None:
        self._transfer.start()

    def close(self) -> None:
        """Begin nothing more."""
        self._closed = True

    def stop(self) -> None:
        """End the transfer thread, once the scheduler has stopped; what was asked for and not begun is refused."""
        self.close()
        self._transfer.stop()  # what hangs is left alone
        stopping = ServerStopping("the server is stopping")
        if self._job is not None:
            self._job.then(stopping)
        while self._orders:
            self._orders.popleft().then(stopping)

    def now_ns(self) -> int:
        """On the clock of all times here."""
        return self._clock()

    @property
    def hangs(self) -> bool:
        """Bytes are being moved still, although it was stopped."""
        return self._transfer.left and self._transfer.is_alive

    def order(self, begin: Callable[[Future[object]], bool], *, brings: ModelWeights | None = None) -> Future[object]:
        """Have something done in its turn, which resolves the future in the end; see `Order`. From any thread.

        Requests for the weights that it `brings` wait for it, whoever moves weights.
        """
        future: Future[object] = Future()
        order = Order(partial(begin, future), partial(resolve, future, None))

        def put() -> None:
            if self._closed:
                order.then(ServerStopping("the server is stopping"))
                return
            if brings is not None:
                self._expected.append(brings)
                future.add_done_callback(lambda future: self._expected.remove(brings))
            self._orders.append(order)
            self.advance()

        self._scheduler.command(put)
        return future

    def order_next(self, begin: Callable[[], bool], then: Then) -> None:
        """The next part of the job that ends now, before anything else."""
        self._orders.appendleft(Order(begin, then))

    # --- what the scheduler tells -------------------------------------------------------------------------------------

    def used(self, weights: Weights) -> None:
        known = cast("ModelWeights", weights)
        with self._lock:
            if self._by_name.get(known.name) is known:
                self._ledger.touch(known.name, self._clock())
        if self._fresh and self._fresh.pop(known, None) is not None and self._blocked:
            self.advance()

    def look(self, wanted: Sequence[ModelQueue], released: Sequence[Weights]) -> None:
        for queue in wanted:
            self._want(queue)
        job = self._job
        if job is not None and not job.running and not any(weights.uses for weights in job.waits):
            self._transfer.put(job)
        self.advance()

    def _want(self, queue: ModelQueue) -> None:
        weights = cast("ModelWeights", queue.model.weights)
        queues = self._queues.setdefault(weights, [])
        if queue not in queues:
            queues.append(queue)
        coming = weights.resident or weights in self._expected
        coming = coming or (self._job is not None and self._job.target is weights)
        if self._mode == "externally_managed" and not coming:
            # Nobody has to wait for the end of a job to hear this.
            self.arrived(weights, _not_resident(weights.model))
        elif weights not in self._wanted:
            self._wanted.append(weights)

    def advance(self) -> None:
        """Begin what can be begun. On the dispatch thread."""
        self._blocked = False
        while self._job is None and not self._closed:
            if self._orders:
                order = self._orders.popleft()
                try:
                    begun = order.begin()
                except BaseException as error:
                    order.then(error)
                    continue
                if not begun:
                    self._orders.appendleft(order)
            elif self._wanted:
                weights = self._next_wanted()
                self._wanted.remove(weights)
                try:
                    begun = self._begin_wanted(weights)
                except BaseException as error:
                    # A bug. Those who wait for these weights are told, and the others go on.
                    log.exception("load could not begin model=%s", weights.model)
                    self.arrived(weights, error)
                    continue
                if not begun:
                    self._wanted.appendleft(weights)
            else:
                return
            if not begun:
                self._blocked = True
                return

    def _is_known(self, weights: ModelWeights) -> bool:
        with self._lock:
            return self._by_name.get(weights.name) is weights

    def _next_wanted(self) -> ModelWeights:
        if self._scheduler.policy.discipline != "edf" or len(self._wanted) == 1:
            return self._wanted[0]
        return min(self._wanted, key=self._deadline_ns)

    def _deadline_ns(self, weights: ModelWeights) -> float:
        """The earliest deadline of those who wait for `weights`."""
        return min([queue.urgent_ns for queue in self._queues.get(weights, ()) if queue.urgent_ns], default=inf)

    def _begin_wanted(self, weights: ModelWeights) -> bool:
        """Load `weights` for the requests that wait for them."""
        if not any(map(self._scheduler.wants, self._queues.get(weights, []))):
            self.forget(weights)
        elif not self._is_known(weights):
            # A warm-up did not hear of the end in time; by now another model may have the name.
            self.arrived(weights, ModelUnloaded(f"the weights of model {weights.model!r} were removed"))
        elif weights.resident:
            self.arrived(weights, None)
        elif self._mode == "externally_managed":
            self.arrived(weights, _not_resident(weights.model))
        elif (error := self.copies.known_failure(weights)) is not None:
            # Nobody leaves for weights that will not come.
            self.arrived(weights, unavailable(weights.model, error))
        else:
            return self.begin_load(weights, partial(self.arrived, weights))
        return True

    def arrived(self, weights: ModelWeights, outcome: Outcome) -> None:
        """`weights` are on the device, or will not come: those who wait for them go on, or are told why."""
        queues = self._queues.pop(weights, [])
        if weights in self._wanted:
            self._wanted.remove(weights)
        if outcome is not None:
            for queue in queues:
                self._scheduler.refuse(queue, outcome)
        elif queues:
            self._fresh[weights] = queues
        self._scheduler.warm(queues)

    def forget(self, weights: ModelWeights) -> None:
        """Nobody waits for `weights` any more."""
        self._scheduler.warm(self._queues.pop(weights, []))
        self._fresh.pop(weights, None)
        if weights in self._wanted:
            self._wanted.remove(weights)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def begin(
        self,
        move: Callable[[], None],
        then: Then,
        leaving: Iterable[ModelWeights] = (),
        *,
        target: ModelWeights | None = None,
    ) -> None:
        """Have `move` run on the transfer thread, once nobody uses the weights that are `leaving`, then `then` here.

        No batch is made with those any more. `target` will be on the device afterwards. Only when no other job is
        there, which is so when an order begins.
        """
        job = Job(move, partial(self._end, then), [*leaving], target)
        self._job = job
        for weights in job.waits:
            # Somebody ordered them away although they were not used yet: whoever waits asks for them anew.
            self._fresh.pop(weights, None)
        self._scheduler.expel(job.waits)
        if not any(weights.uses for weights in job.waits):
            self._transfer.put(job)

    def _end(self, then: Then, outcome: Outcome) -> None:
        job, self._job = self._job, None
        assert job is not None
        now_ns = self._clock()
        for weights in job.waits:
            weights.leaving = False
            weights.left_ns = now_ns
        try:
            then(outcome)
        finally:
            self.advance()

    def begin_load(
        self,
        weights: ModelWeights,
        then: Then,
        *,
        forced: bool = False,
        again: bool = False,
        moving: Callable[[], None] = lambda: None,
    ) -> bool:
        """Bring `weights` to the device, others leave for them; False when those in the way have not been used yet.

        `forced`: ordered, not for requests, so also where an operator moves weights. `again`: the device ran out of
        memory, so all that may leave does. `moving` is called, on the transfer thread, when bytes begin to move.
        `then` is told an RsrvError, or None.
        """
        if weights.resident:
            then(None)
            return True
        try:
            with self._lock:
                plan = self._ledger.plan_load(
                    weights.name, in_use=self.in_use, protected=self.is_fresh, everything=again, forced=forced
                )
                if not plan.blocked:
                    self._ledger.begin(weights.name, plan, reason="oom" if again else "room")
                blocked = [self._by_name[name] for name in plan.blocked]
                victims = [self._by_name[name] for name in plan.victims]
                budget = self._ledger.budget()
        except RsrvError as error:
            then(error)
            return True
        if blocked:
            self._let_run(blocked)
            return False
        if plan.exceeds and not weights.warned:
            weights.warned = True
            log.warning("model exceeds budget name=%s bytes=%d budget=%d", weights.model, plan.need, budget.on_demand)
        began_ns = 0

        def move() -> None:
            nonlocal began_ns
            moving()
            self.copies.drop(victims)
            began_ns = self._clock()
            self.copies.bring(weights)

        def ended(outcome: Outcome) -> None:
            if outcome is None:
                self._loaded(weights, began_ns, for_requests=not forced)
                # Requests may wait for what somebody ordered, too, and further orders may wait for those.
                self.arrived(weights, None)
                then(None)
                return
            with self._lock:
                self._ledger.fail(weights.name)
            if isinstance(outcome, DeviceLost):
                self._scheduler.lose(outcome)
            if isinstance(outcome, DeviceOutOfMemory) and not again:
                log.warning("device out of memory model=%s; all leaves for it why=%s", weights.model, outcome.message)
                self.order_next(partial(self.begin_load, weights, then, forced=forced, again=True), then)
            else:
                if not isinstance(outcome, ServerStopping):
                    log.warning("weights could not be loaded model=%s why=%s", weights.model, outcome)
                then(unavailable(weights.model, outcome))

        self.begin(move, ended, victims, target=weights)
        return True

    def _loaded(self, weights: ModelWeights, began_ns: int, *, for_requests: bool) -> None:
        now_ns = self._clock()
        seconds = (now_ns - began_ns) / 1e9
        assert weights.placed is not None
        with self._lock:
            self._ledger.commit(weights.name, seconds, now_ns)
            self._ledger.share(weights.name, weights.placed.digests)
        weights.resident = True
        weights.touch()
        self._on_load(weights.model, seconds)
        # What somebody ordered, perhaps just after a compaction, is not to be compacted away because of that.
        self._loads_since_compaction += for_requests
        if for_requests and self._loads_since_compaction >= self._interval > 0:
            self._loads_since_compaction = 0
            self._orders.append(Order(self._begin_compaction_by_itself, _tell_of_compaction))

    # --- compaction ---------------------------------------------------------------------------------------------------

    def begin_compaction(self, then: Then) -> bool:
        """Free all that may leave, which makes one hole of many; not before the latest loads were used."""
        fresh = [weights for weights in [*self._fresh] if self._is_fresh(weights)]
        if fresh:
            self._let_run(fresh)
            return False
        with self._lock:
            victims = [self._by_name[name] for name in self._ledger.compacted()]
        self._loads_since_compaction = 0
        self.begin(partial(self.copies.drop, victims), then, victims)
        return True

    def _begin_compaction_by_itself(self) -> bool:
        stats = self.copies.device.memory()
        if stats is not None and stats.bytes_limit is not None and stats.largest_free_block_bytes is not None:
            free = stats.bytes_limit - stats.bytes_in_use
            if stats.largest_free_block_bytes >= free - self._ledger.wiggle_bytes:
                return True  # nothing to gain
        return self.begin_compaction(_tell_of_compaction)

    # --- what the ledger asks, with its lock held ---------------------------------------------------------------------

    def in_use(self, name: str) -> bool:
        return self._by_name[name].uses > 0

    def is_fresh(self, name: str) -> bool:
        return self._is_fresh(self._by_name[name])

    def _let_run(self, fresh: Iterable[ModelWeights]) -> None:
        """Somebody needs the place of weights that were not used yet: those who wait for them are the next to run."""
        self._scheduler.prefer([queue for weights in fresh for queue in self._fresh.get(weights, ())])

    def _is_fresh(self, weights: ModelWeights) -> bool:
        if any(map(self._scheduler.wants, self._fresh.get(weights, ()))):
            return True
        self._fresh.pop(weights, None)
        return False


def resolve(future: Future[object], result: object, outcome: Outcome) -> None:
    if outcome is None:
        future.set_result(result)
    else:
        future.set_exception(outcome)


def unavailable(name: str, error: BaseException) -> BaseException:
    """What requests are told of a load that failed."""
    if isinstance(error, BundleError):
        return WeightsUnavailable(f"the weights of model {name!r} cannot be loaded: {error.message}", hint=error.hint)
    if isinstance(error, OSError):
        return WeightsUnavailable(f"the weights of model {name!r} cannot be loaded: {error.strerror or error}")
    return error


def _not_resident(name: str) -> NotResident:
    return NotResident(
        f"the weights of model {name!r} are not on the device, and an operator moves them "
        "(model_control_mode: explicit)",
        hint=f"rsrv ctl residency {name} device",
    )


def _tell_of_compaction(outcome: Outcome) -> None:
    if outcome is None:
        log.debug("memory compacted reloaded=0 why=scheduler.compaction_interval")
    elif not isinstance(outcome, ServerStopping):
        log.warning("automatic compaction failed why=%s", outcome)
