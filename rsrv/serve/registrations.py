"""The models of a running server, and what may be done to each: register, drain, reload, rename, remove.

Names and gates change at once; what takes long (reading, compiling, finishing) goes on afterwards, on threads of the
server's own, whoever asked for it. Whoever follows a model compares incarnations: each load has its own.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rsrv.bundle.files import require_name
from rsrv.core.errors import (
    CapacityFull,
    HookError,
    ModelFailed,
    ModelUnloaded,
    NameTaken,
    RsrvError,
    ServerStopping,
    WrongState,
)
from rsrv.serve import observe
from rsrv.serve.exchange import Exchange, ReloadFailed
from rsrv.serve.loading.loader import MAX_PREPARING, log_failure
from rsrv.serve.loading.unopened import manifest_of, require_bundle
from rsrv.serve.preparation import Posts, Preparations, Settled, begin, copy, refuse
from rsrv.serve.registry import Entry, Failure, ModelState, Registry, Settings, Source
from rsrv.serve.renaming import Move, Renaming
from rsrv.serve.retirement import Retirement, Retirements
from rsrv.serve.waits import Until, Waits

if TYPE_CHECKING:
    from rsrv.core.config import ServerConfig
    from rsrv.serve.admin.events import EventLog
    from rsrv.serve.admission import Admission
    from rsrv.serve.counters import ServerCounters
    from rsrv.serve.inference import Inference
    from rsrv.serve.loading import Loader
    from rsrv.serve.request import Request
    from rsrv.serve.residency.manager import Residency
    from rsrv.serve.scheduler import Scheduler

log = logging.getLogger(__name__)


class Registrations:
    """Thread safe. All methods but `wait` return at once.

    Attributes:
        busy: whether a parameter operation of a model is pending, which keeps its gate closed.
        on_ending: told of name and incarnation whose end begins; may wait for what else uses its weights.
        on_gone: told of a model that was removed.
        on_renamed: told of the old and the new name.
        failures, reloads: how many preparations of a name failed, and how many took effect, while the server runs.
    """

    def __init__(
        self,
        *,
        config: ServerConfig,
        registry: Registry,
        scheduler: Scheduler,
        residency: Residency,
        loader: Loader,
        inference: Inference,
        admission: Admission[Request],
        counters: ServerCounters,
        events: EventLog,
        stopping: threading.Event,
    ) -> None:
        self._config = config
        self._registry = registry
        self._scheduler = scheduler
        self._residency = residency
        self._loader = loader
        self._inference = inference
        self._admission = admission
        self._counters = counters
        self._events = events
        self._stopping = stopping
        self.busy: Callable[[str], bool] = lambda name: False
        self.on_ending: Callable[[str, int], None] = lambda name, incarnation: None
        self.on_gone: Callable[[str], None] = lambda name: None
        self.on_renamed: Callable[[str, str], None] = lambda old, new: None
        self.failures: Counter[str] = Counter()
        self.reloads: Counter[str] = Counter()
        self._changing = registry.changing
        self._unreleased: dict[str, Retirement] = {}
        self._retirements = Retirements(
            scheduler,
            residency,
            loader,
            on_begin=lambda name, incarnation: self.on_ending(name, incarnation),
            on_end=self._retired,
            stopping=stopping,
        )
        self._waits = Waits(registry, self._retirements, lambda name: self.busy(name), stopping)
        self._exchange = Exchange(
            registry, scheduler, residency, loader, self._retirements, config.reload.policy, stopping
        )
        self._renaming = Renaming(
            config=config,
            registry=registry,
            scheduler=scheduler,
            residency=residency,
            loader=loader,
            retirements=self._retirements,
            counters=counters,
            admission=admission,
            counts=(self.failures, self.reloads),
            on_renamed=lambda old, new: self.on_renamed(old, new),
        )
        self._reloading: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._threads = ThreadPoolExecutor(MAX_PREPARING, thread_name_prefix="rsrv-prepare")
        self._posts = Posts()
        self._preparations = Preparations(
            registry, loader, self._retirements, self._threads, self._posts, on_end=self._prepared, stopping=stopping
        )
        loader.on_idle = lambda incarnation: self._posts.put(self._look_at_gates)

    def start(self) -> None:
        self._posts.start()

    def tell_started(self) -> None:
        """Tell what became of the models of the start, once they are loaded."""
        for entry in self._registry.entries():
            if entry.source == "startup":
                self.failures[entry.name] += entry.failure is not None
                self._tell(entry, "registration", "preparing", entry.state.value, str(entry.failure or ""))

    def close(self) -> None:
        """Begin nothing more, and wait for what is under way to notice that the server stops."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._retirements.join(5.0)
        self._posts.close()
        self._preparations.close()

    # --- registering ----------------------------------------------------------------------------------------------

    def register(
        self,
        name: str,
        directory: Path,
        *,
        source: Source = "api",
        admission: Literal["open", "drained"] = "open",
        settings: Settings = Settings(),  # noqa: B008
    ) -> Entry:
        """Register the bundle in `directory`, and prepare it unless it is to be `drained`: then only its manifest is
        read.

        Raises InvalidRequest for a directory that holds no such bundle, NameTaken, CapacityFull, ServerStopping.
        """
        self._require_running()
        require_name(name)
        require_bundle(name, directory)
        drained = admission == "drained"
        entry = Entry(
            name,
            directory,
            source=source,
            state=ModelState.REGISTERED if drained else ModelState.PREPARING,
            gate="drained" if drained else "open",
            incarnation=self._registry.next_incarnation(),
            manifest=manifest_of(name, directory) if drained else None,
            settings=settings,
        )
        with self._changing:
            taken, capacity = len(self._registry.entries()), self._config.admin.model_capacity
            if self._registry.get(name) is None and taken >= capacity:
                raise CapacityFull(
                    f"model {name!r} cannot be registered: {taken} models are, at most {capacity} may be "
                    "(admin.model_capacity)",
                    reason="model_capacity",
                )
            if not self._registry.add(entry):
                raise NameTaken(f"a model {name!r} is registered already", hint=f"rsrv ctl unregister {name}")
            self._tell(entry, "registration", "", entry.state.value)
        if not drained:
            self._preparations.begin(entry)
        return entry

    def prepare(self, name: str, *, if_incarnation: int = 0) -> Settled:
        """Have a model that is only registered prepared; its gate stays. Raises UnknownModel, IncarnationChanged, and
        WrongState for one that failed or is being removed."""
        with self._changing:
            entry = self._registry.find(name, if_incarnation)
            self._refuse_states(entry, "prepared", ModelState.FAILED, ModelState.RETIRING, ModelState.RELEASE_FAILED)
            if entry.state is ModelState.REGISTERED:
                entry = self._set(entry, state=ModelState.PREPARING)
                return self._preparations.begin(entry)
            return self._preparations.settled(entry)

    def retry(self, name: str, *, if_incarnation: int = 0) -> Entry:
        """Prepare a model that failed again, or try again to free one whose release failed. Raises UnknownModel,
        IncarnationChanged, WrongState."""
        with self._changing:
            entry = self._registry.find(name, if_incarnation)
            if entry.state is ModelState.RELEASE_FAILED:
                return self._release_again(entry)
            if entry.state is not ModelState.FAILED:
                raise WrongState(
                    f"model {name!r} is {entry.state.value}; only one that failed is tried again", reason="not_failed"
                )
            return self._again(entry, entry.path)

    # --- the gate -------------------------------------------------------------------------------------------------

    def drain(self, name: str, *, if_incarnation: int = 0) -> Entry:
        """Close the gate: requests that have entered finish, no other enters. Raises UnknownModel, IncarnationChanged,
        WrongState for a model that is being removed."""
        with self._changing:
            entry = self._registry.find(name, if_incarnation)
            self._refuse_states(entry, "drained", ModelState.RETIRING, ModelState.RELEASE_FAILED)
            if entry.gate != "open" or entry.state is ModelState.FAILED:
                return entry
            entry = self._set(entry, gate="draining")
            if entry.prepared is not None:
                entry.prepared.accepted.close()
            self._look_at_gates()
            return self._registry.find(name)

    def undrain(self, name: str, *, if_incarnation: int = 0) -> Entry:
        """Open the gate; one that is only registered is prepared. Requests that waited enter in their order.

        Raises UnknownModel, IncarnationChanged, and WrongState for a model that failed, is being removed, or whose
        weights are being moved by an operator.
        """
        with self._changing:
            entry = self._registry.find(name, if_incarnation)
            self._refuse_states(entry, "opened", ModelState.FAILED, ModelState.RETIRING, ModelState.RELEASE_FAILED)
            if entry.gate == "open":
                return entry
            if self.busy(name):
                raise WrongState(
                    f"the gate of model {name!r} stays closed while its weights are being moved",
                    reason="operation_pending",
                    hint=f"rsrv ctl wait {name} idle",
                )
            if entry.prepared is not None:
                entry.prepared.accepted.open()
            fresh = entry.state is ModelState.REGISTERED
            entry = self._set(entry, gate="open", state=ModelState.PREPARING if fresh else entry.state)
            if fresh:
                self._preparations.begin(entry)
            return entry

    # --- removing -------------------------------------------------------------------------------------------------

    def unregister(self, name: str, *, mode: Literal["drain", "abort"] = "drain", if_incarnation: int = 0) -> Entry:
        """Remove a model: `drain` lets its requests finish, `abort` refuses them and discards what runs for them.

        A second call may turn the first into the second, not back. Raises UnknownModel, IncarnationChanged.
        """
        with self._changing:
            entry = self._registry.find(name, if_incarnation)
            unloaded = ModelUnloaded(f"model {name!r} was removed")
            if entry.state is ModelState.RELEASE_FAILED:
                return self._release_again(entry)
            if entry.state is ModelState.RETIRING:
                if mode == "abort":
                    self._retirements.abort(name, unloaded)
                return entry
            prepared = entry.prepared
            if prepared is None and not self._retirements.count(name):
                entry.dropped.set()
                entry = self._set(entry, gate="removing")
                self._gone(entry)
                return entry
            entry.dropped.set()
            entry = self._set(entry, state=ModelState.RETIRING, gate="removing")
            if prepared is not None:
                self._retirements.begin(name, prepared)
            if mode == "abort":
                self._retirements.abort(name, unloaded)
            return entry

    def gone(self, name: str) -> Future[None]:
        """Done when the model that has the name now is removed; fails when its memory cannot be freed."""
        return self._preparations.gone(self._registry.find(name))

    # --- the directory changed ------------------------------------------------------------------------------------

    def reload(self, name: str, directory: Path | None = None) -> Settled:
        """Prepare what is in the model's directory now, or in another one, and serve that from then on.

        Until then, and when it fails, what served before goes on; requests finish on the version that they came for
        (`reload.policy`). A model that failed is prepared again, one that is only registered has its manifest read
        again. Raises UnknownModel.
        """
        self._require_running()
        settled: Settled = Future()
        with self._changing:
            entry = self._registry.find(name)
            path = directory or entry.path
            self._refuse_states(entry, "reloaded", ModelState.RETIRING, ModelState.RELEASE_FAILED)
            if entry.state is ModelState.FAILED:
                return self._preparations.settled(self._again(entry, path))
            if entry.state is ModelState.REGISTERED:
                settled.set_result(self._set(entry, manifest=manifest_of(name, path), path=path))
            elif entry.state is ModelState.PREPARING:

                def prepared(_: Settled) -> None:
                    try:
                        self.reload(name, path).add_done_callback(lambda done: copy(done, settled))
                    except RsrvError as error:
                        refuse(settled, error)

                self._preparations.settled(entry).add_done_callback(prepared)
            else:
                begin(self._threads, settled, self._reload, name, path, settled)
        return settled

    def rename(self, old: str, new: str, directory: Path) -> Entry:
        """Give a model another name, at once: programs, weights, counters and requests stay.

        Raises UnknownModel, NameTaken, and WrongState for a model that is being prepared or removed.
        """
        [renamed] = self.rename_all([Move(old, new, directory)])
        return renamed

    def rename_all(self, moves: Sequence[Move]) -> list[Entry]:
        """As `rename`, one after the other, but in one step for requests: a name that goes from one model to another is
        always known. All or none."""
        with self._changing:
            renamed = self._renaming.run(moves)
            for old, entry in renamed:
                self._tell(entry, "name", old, entry.name)
        return [entry for _, entry in renamed]

    def fail_hooks(self, incarnation: int, error: HookError) -> None:
        """The hooks of an incarnation were lost too often: it does not serve any more."""
        with self._changing:
            # By its number: it may have been renamed since its hooks were loaded.
            entry = next((each for each in self._registry.entries() if each.incarnation == incarnation), None)
            if entry is None or entry.prepared is None:
                return
            log.error("model failed name=%s phase=hooks error=%s", entry.name, error.message)
            self._set_failed(entry, "hooks", error)
            failed = ModelFailed(f"model {entry.name!r} failed (hooks: {error.message})")
            self._retirements.begin(entry.name, entry.prepared, refusal=failed)

    # --- who waits, and who looks ---------------------------------------------------------------------------------

    def wait(self, name: str, until: Until, timeout_s: float, *, if_incarnation: int = 0) -> Entry | None:
        """See `Waits.wait`; raises IncarnationChanged besides."""
        if until != "gone" or if_incarnation:
            self._registry.find(name, if_incarnation)
        return self._waits.wait(name, until, timeout_s)

    def accepted(self, entry: Entry) -> int:
        """Requests that entered and are not done, in all incarnations of a model."""
        return self._waits.accepted(entry)

    def on_change(self, name: str) -> None:
        """The registry's: an entry changed."""
        for each in [name] if name else [entry.name for entry in self._registry.entries()]:
            self._inference.look_again(each)
        self._waits.notify()
        self._preparations.entry_changed()

    # --- small parts ----------------------------------------------------------------------------------------------

    def _refuse_states(self, entry: Entry, what: str, *states: ModelState) -> None:
        if entry.state in states:
            removing = entry.state in (ModelState.RETIRING, ModelState.RELEASE_FAILED)
            reason = "removing" if removing else entry.state.value
            raise WrongState(f"model {entry.name!r} is {entry.state.value} and cannot be {what}", reason=reason)

    def _require_running(self) -> None:
        if self._stopping.is_set():
            raise ServerStopping("the server is stopping and changes nothing any more")

    def _tell(self, entry: Entry, kind: str, old: str, new: str, detail: str = "") -> None:
        self._events.append(entry.name, entry.incarnation, kind, old, new, detail)

    def _set(self, entry: Entry, **changes: Any) -> Entry:
        """Change an entry that is known to be there, and tell what changed."""
        changed = self._registry.change(entry.name, **changes)
        assert changed is not None, f"model {entry.name!r} vanished under the lock"
        if changed.state is not entry.state:
            self._tell(changed, "registration", entry.state.value, changed.state.value)
        if changed.gate != entry.gate:
            self._tell(changed, "admission", entry.gate, changed.gate)
        return changed

    def _set_failed(self, entry: Entry, phase: str, error: BaseException) -> None:
        self.failures[entry.name] += 1
        failed = self._registry.set_failed(entry.name, phase, error, of=entry.incarnation)
        if failed is not None:
            self._tell(failed, "registration", entry.state.value, failed.state.value, str(failed.failure))

    def _look_at_gates(self) -> None:
        """What was draining may be drained by now."""
        self._retirements.wake()
        with self._changing:
            for entry in self._registry.entries():
                if entry.gate == "draining" and not self.accepted(entry) and not self._retirements.count(entry.name):
                    self._set(entry, gate="drained")

    # --- preparing ------------------------------------------------------------------------------------------------

    def _again(self, entry: Entry, path: Path) -> Entry:
        """Under the lock."""
        self._preparations.ended(entry)
        incarnation = self._registry.next_incarnation()
        again = self._set(entry, state=ModelState.PREPARING, failure=None, path=path, incarnation=incarnation)
        self._preparations.begin(again)
        return again

    def _prepared(self, entry: Entry) -> None:
        """`entry` is ready, or failed; perhaps under the lock."""
        counts = self.reloads if entry.failure is None else self.failures
        counts[entry.name] += 1
        self._tell(entry, "registration", "preparing", entry.state.value, str(entry.failure or ""))
        if entry.failure is None:
            observe.beat("load", entry.name)

    # --- reloading ------------------------------------------------------------------------------------------------

    def _reload(self, name: str, path: Path, settled: Settled) -> None:
        try:
            with self._reloading[name]:
                entry = self._registry.find(name)
                if entry.state is not ModelState.READY:
                    raise WrongState(f"model {name!r} is {entry.state.value} by now", reason="not_ready")
                reloaded = self._exchange.run(entry, path)
            self.reloads[name] += 1
            self._tell(reloaded, "reload", str(entry.incarnation), str(reloaded.incarnation))
            observe.beat("load", name)
            settled.set_result(reloaded)
        except BaseException as error:
            if isinstance(error, ReloadFailed):
                self._reload_failed(error)
                error = error.cause
            refuse(settled, error)

    def _reload_failed(self, failed: ReloadFailed) -> None:
        entry, failure = failed.entry, Failure.of(failed.phase, failed.cause)
        log_failure("model reload failed", entry.name, failed.phase, failed.cause)
        self.failures[entry.name] += 1
        with self._changing:
            if failed.serves:
                self._registry.change(entry.name, of=entry.incarnation, pending=failure)
                self._tell(entry, "reload", str(entry.incarnation), "failed", str(failure))
            else:
                self._set_failed(entry, failed.phase, failed.cause)

    # --- removing ---------------------------------------------------------------------------------------------------

    def _retired(self, name: str, retirement: Retirement) -> None:
        """On the thread of a retirement: it has ended."""
        if self._stopping.is_set():
            return
        with self._changing:
            entry = self._registry.get(name)
            if entry is not None and entry.state is ModelState.RETIRING:
                if retirement.error is not None:
                    self._unreleased[name] = retirement
                    failure = Failure.of("release", retirement.error)
                    self._set(entry, state=ModelState.RELEASE_FAILED, prepared=None, failure=failure)
                elif not self._retirements.count(name):
                    # All have ended, also those of versions before; in which order they do nobody knows.
                    self._gone(entry)
        self._look_at_gates()

    def _release_again(self, entry: Entry) -> Entry:
        entry = self._set(entry, state=ModelState.RETIRING, failure=None)
        self._retirements.again(entry.name, self._unreleased.pop(entry.name))
        return entry

    def _gone(self, entry: Entry) -> None:
        name = entry.name
        self._registry.remove(name)
        # The account of the name: its share, limits that were set, what was counted.
        self._scheduler.remove(name, timeout=0)
        self._counters.forget(name)
        self.failures.pop(name, None)
        self.reloads.pop(name, None)
        self._tell(entry, "registration", entry.state.value, "gone")
        log.info("model unloaded name=%s incarnation=%d", name, entry.incarnation)
        self.on_gone(name)
        if entry.state is ModelState.RETIRING:
            observe.beat("unload", name)
