"""The operations of live administration, one method each, whichever face asks (spec worker 11.4).

They check who may do what in which state, and leave the doing to registrations, residency and program sets. Calls are
quick but for those that say that they wait; what they began goes on when the caller is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rsrv.bundle.files import is_passing, require_name
from rsrv.core.errors import (
    BundleError,
    Cancelled,
    IncarnationChanged,
    InvalidRequest,
    RsrvError,
    Shed,
    UnknownModel,
    WaitTimeout,
    WrongState,
)
from rsrv.core.status import WorkerStatus
from rsrv.serve.admin import answers
from rsrv.serve.admin.directories import allowed_bundle, allowed_directory
from rsrv.serve.admin.matrix import NO_OP, verdict
from rsrv.serve.admin.parameters import Parameters, failure_text
from rsrv.serve.admin.requests import (
    ActivateRequest,
    Catalogue,
    DeactivateRequest,
    DrainRequest,
    EmptyRequest,
    Operation,
    PollAnswer,
    ProgramListAnswer,
    ReclaimAnswer,
    ReclaimPolicy,
    RegisterRequest,
    RemoveRequest,
    RepositoryChange,
    ResidencyAnswer,
    ResidencyRequest,
    SelectAnswer,
    SelectRequest,
    ShadowRequest,
    StageAnswer,
    StageRequest,
    StatusRequest,
    Target,
    TrimAnswer,
    TrimRequest,
    UnregisterRequest,
    WaitRequest,
)
from rsrv.serve.control import require_moves_by_hand
from rsrv.serve.registry import ModelState, Settings
from rsrv.serve.residency.floors import Floor

if TYPE_CHECKING:
    from rsrv.core.config import ServerConfig
    from rsrv.serve.admission import Admission
    from rsrv.serve.lifecycle import Lifecycle
    from rsrv.serve.programs.records import ProgramList
    from rsrv.serve.programs.sets import ProgramSets
    from rsrv.serve.registrations import Registrations
    from rsrv.serve.registry import Entry, Registry
    from rsrv.serve.repository.watcher import Watcher
    from rsrv.serve.residency.manager import Residency
    from rsrv.serve.residency.reclaim import Reclaimer
    from rsrv.serve.scheduler import Scheduler
    from rsrv.serve.status import StatusReport
    from rsrv.serve.waits import Until

MAX_MOVES = 8
"""Calls that move weights, or look through directories, at a time; each holds a thread of its face."""
_LOOK_SECONDS = 0.25
"""How often a call that waits looks whether its caller is still there."""

Gone = Callable[[], bool]


def _stays() -> bool:
    return False


class Administration:
    """Thread safe. Methods raise InvalidRequest, UnknownModel, IncarnationChanged, WrongState with the reason,
    ServerStopping, and what they say besides.

    Args:
        admission: has the places for what waits.
        status: the status document.
        watcher: None unless the models follow their directories.
        on_moved: called when weights may have been moved.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        registry: Registry,
        registrations: Registrations,
        scheduler: Scheduler,
        lifecycle: Lifecycle,
        admission: Admission[Any],
        residency: Residency,
        parameters: Parameters,
        programs: ProgramSets,
        reclaimer: Reclaimer,
        status: StatusReport,
        watcher: Watcher | None,
        on_moved: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._registry = registry
        self._registrations = registrations
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._admission = admission
        self._residency = residency
        self._parameters = parameters
        self._programs = programs
        self._reclaimer = reclaimer
        self._status = status
        self._watcher = watcher
        self._on_moved = on_moved
        self._clock = clock
        self._moves = threading.BoundedSemaphore(MAX_MOVES)

    def place(self, what: str) -> AbstractContextManager[None]:
        """A place among what waits, for as long as the context is open. Raises HeldFull."""
        return self._admission.place(what)

    def incarnation(self, model: str) -> int | None:
        """The present incarnation of a model, for those who tell of an error; None when there is no such model."""
        entry = self._registry.get(model)
        return None if entry is None else entry.incarnation

    # --- what is there ----------------------------------------------------------------------------------------------

    def get_status(self, request: StatusRequest) -> WorkerStatus:
        """Of every registered model, or of one."""
        return self._status.document(request.model)

    def list_models(self, request: EmptyRequest) -> Catalogue:
        """The prepared models, drained ones as well; none that is being removed."""
        rows = (answers.catalogue_row(entry) for entry in self._registry.entries())
        return Catalogue(models=[row for row in rows if row is not None])

    def wait_model(self, request: WaitRequest, gone: Gone = _stays) -> Operation:
        """Wait until the model is idle, drained, ready (or failed), or gone; takes a place of the held requests.

        Raises WaitTimeout, HeldFull, and Cancelled when `gone` says that nobody waits for the answer any more.
        """
        name, until = request.model, request.until
        if until == "gone" and self._registry.scanned and self._registry.get(name) is None:
            return _gone(name)
        entry = self._entry(request)
        with self.place(f"a call that waits until model {name!r} is {until}"):
            return self._wait(entry, until, request.timeout_ms / 1000, gone)

    # --- registration and admission ---------------------------------------------------------------------------------

    def register_model(self, request: RegisterRequest) -> Operation:
        """Serve a bundle under a name, or (`drained`) only take its name. Raises NameTaken and CapacityFull, too."""
        config, name = self._config, request.model
        self._lifecycle.require_running()
        self._require_changeable(name, "registered")
        try:
            require_name(name)
        except BundleError as error:
            raise InvalidRequest(error.message) from None
        if is_passing(name):
            raise InvalidRequest(f"no model can be called {name!r}: such files are hidden, or still being written")
        directory = allowed_bundle(request.directory, config.model_dirs, external=config.admin.allow_external_dirs)
        # Before the directories were looked through, a name is neither free nor taken.
        taken = self._registry.get(name) or (None if self._registry.scanned else self._registry.find(name))
        if request.if_incarnation not in (0, 0 if taken is None else taken.incarnation):
            raise IncarnationChanged(
                f"model {name!r} has not the incarnation {request.if_incarnation}",
                hint="it was removed, or loaded again",
            )
        # Before it is read, so that an edit made meanwhile is seen as one.
        adopted = self._watcher is not None and taken is None and self._watcher.adopt(name, directory)
        try:
            entry = self._registrations.register(
                name, directory, source="api", admission=request.admission, settings=_settings(request)
            )
        except BaseException:
            if adopted and self._watcher is not None:
                self._watcher.abandon(name)
            raise
        return self._operation(entry, underway=entry.state is ModelState.PREPARING)

    def retry_model(self, request: Target) -> Operation:
        """Prepare a model again that failed, or free one again that could not be."""
        verdict("retry", self._changeable(request))
        entry = self._registrations.retry(request.model, if_incarnation=request.if_incarnation)
        return self._operation(entry, underway=True)

    def drain_model(self, request: DrainRequest, gone: Gone = _stays) -> Operation:
        """Close the gate. With `wait_ms` it returns when what was accepted is done, or after that time."""
        name, wait_s = request.model, request.wait_ms / 1000
        entry = self._changeable(request)
        if verdict("drain", entry) == NO_OP:
            return self._operation(entry)
        if not wait_s:
            return self._operation(self._registrations.drain(name, if_incarnation=request.if_incarnation))
        # The place comes first: a call that is refused has changed nothing.
        with self.place(f"a call that waits until model {name!r} is drained"):
            entry = self._registrations.drain(name, if_incarnation=request.if_incarnation)
            try:
                return self._wait(entry, "drained", wait_s, gone)
            except WaitTimeout:
                return self._operation(self._registry.get(name) or entry)

    def undrain_model(self, request: Target) -> Operation:
        """Open the gate; a model that is only registered is prepared."""
        verdict("undrain", self._changeable(request))
        return self._operation(self._registrations.undrain(request.model, if_incarnation=request.if_incarnation))

    def unregister_model(self, request: UnregisterRequest) -> Operation:
        """Remove a model, after its requests or (`abort`) at once; `drain` may be made `abort`, not the reverse."""
        self._lifecycle.require_running()
        self._require_changeable(request.model, "unregistered")
        verdict("unregister", self._entry(request))
        if self._watcher is not None:  # before, so that no look in between finds a bundle that nobody serves
            self._watcher.tombstone(request.model)
        try:
            entry = self._registrations.unregister(
                request.model, mode=request.mode, if_incarnation=request.if_incarnation
            )
        except RsrvError:
            if self._watcher is not None:
                self._watcher.clear_tombstone(request.model)
            raise
        return self._operation(entry, underway=True)

    def poll_repository(self, request: EmptyRequest) -> PollAnswer:
        """Look through the model directories now; returns what has changed there."""
        self._lifecycle.require_running()
        if self._watcher is None:
            mode = self._config.model_control_mode
            raise WrongState(
                f"the models of this server do not follow their directories (model_control_mode: {mode})",
                reason="static" if mode == "static" else "not_dynamic",
            )
        with self._move("a look through the model directories"):
            return PollAnswer(
                changes=[
                    RepositoryChange.model_validate(
                        {"name": each.name, "action": each.action, "directory": str(each.path), "from": each.source}
                    )
                    for each in self._watcher.poll_now()
                ]
            )

    # --- weights ----------------------------------------------------------------------------------------------------

    def activate_model(self, request: ActivateRequest) -> Operation:
        """Prepare a model if it is not, bring its weights to the device and run each program once."""
        entry = self._changeable(request)
        self._parameters.activate(entry, allow_open=request.allow_open)
        return self._operation(self._registry.get(entry.name) or entry, underway=True)

    def deactivate_model(self, request: DeactivateRequest) -> Operation:
        """Free the device memory of its weights, and with `host` the copy of them; programs stay."""
        entry = self._changeable(request)
        self._parameters.deactivate(entry, host=request.host)
        return self._operation(entry, underway=True)

    def pin_model(self, request: Target) -> Operation:
        """Never evict its weights from the device, once they are there."""
        return self._pin(request, True)

    def unpin_model(self, request: Target) -> Operation:
        """Let its weights be evicted again."""
        return self._pin(request, False)

    def set_residency(self, request: ResidencyRequest) -> ResidencyAnswer:
        """Change the floor of a model and move its weights there. Raises ResidencyRefused where weights are not moved
        by hand, DeviceOutOfMemory, and Shed."""
        self._lifecycle.require_running()
        require_moves_by_hand(self._residency)
        entry = self._registry.find(request.model, request.if_incarnation)
        self._registry.prepared(request.model)
        with self._move(f"a change of the floor of model {request.model!r}"):
            reached = self._parameters.set_floor(entry, Floor(request.floor))
            self._on_moved()
        return ResidencyAnswer(model=entry.name, incarnation=entry.incarnation, floor=reached.value)

    def get_reclaim(self, request: EmptyRequest) -> ReclaimAnswer:
        """The idle times after which memory is given back."""
        policy = self._reclaimer.policy
        return ReclaimAnswer(
            parameter_idle_ms=policy.parameter_idle_ms,
            workspace_idle_ms=policy.workspace_idle_ms,
            host_idle_ms=policy.host_idle_ms,
        )

    def set_reclaim(self, request: ReclaimPolicy) -> ReclaimAnswer:
        """Change those that are given, from now on; returns all."""
        changes = request.model_dump(exclude_none=True)
        if changes:
            self._lifecycle.require_running()
            self._reclaimer.set_policy(**changes)
        return self.get_reclaim(EmptyRequest())

    def trim_device(self, request: TrimRequest) -> TrimAnswer:
        """Free weights that may leave: down to `target_bytes`, or (`compact`) all of them. Raises Shed."""
        self._lifecycle.require_running()
        if request.device != 0:
            raise UnknownModel(f"unknown device: {request.device}; wanted 0, the only one", reason="unknown_device")
        with self._move("a trim"):
            if request.compact:
                self._parameters.compact()
            else:
                self._parameters.trim(request.target_bytes)
            self._on_moved()
        return TrimAnswer(device=self._status.device())

    # --- program sets -----------------------------------------------------------------------------------------------

    def stage_program(self, request: StageRequest) -> StageAnswer:
        """Compile other programs for the weights of a model; a set that does not compile is a set, too, a failed one.

        Raises InvalidRequest for programs that do not fit the model, CapacityFull, and (`wait`) HeldFull.
        """
        self._lifecycle.require_running()
        entry = self._registry.find(request.model, request.if_incarnation)
        verdict("stage", entry)
        config = self._config
        directory = allowed_directory(
            request.base_directory, config.model_dirs, external=config.admin.allow_external_dirs
        )
        place = self.place(f"a call that waits for programs of model {entry.name!r}") if request.wait else nullcontext()
        with place:
            made = self._programs.stage(
                entry.name,
                directory=directory,
                base=request.base,
                sources=request.sources or None,
                label=request.label,
                wait=request.wait,
                shadow=request.shadow_percent,
            )
        return StageAnswer(
            model=entry.name,
            incarnation=entry.incarnation,
            program=answers.program(made),
            underway=made.phase == "pending",
        )

    def list_programs(self, request: Target) -> ProgramListAnswer:
        """The program sets of a model; none of one that is not prepared."""
        entry = self._entry(request)
        return self._program_list(entry, self._programs.list(entry.name))

    def select_program(self, request: SelectRequest) -> SelectAnswer:
        """Let another set answer from the next batch on; weights stay. Raises ExpectedMismatch, too."""
        entry = self._changeable(request)
        verdict("select", entry)
        done = self._programs.select(entry.name, request.program, request.expected, require_clean=request.require_clean)
        return SelectAnswer(
            model=entry.name, incarnation=entry.incarnation, selected=done.selected, previous=done.previous
        )

    def remove_program(self, request: RemoveRequest) -> ProgramListAnswer:
        """Forget a set that neither answers nor is being compiled; returns those that are left."""
        entry = self._changeable(request)
        verdict("remove", entry)
        return self._program_list(entry, self._programs.remove(entry.name, request.program))

    def set_shadow(self, request: ShadowRequest) -> StageAnswer:
        """Give a set a copy of `percent` of the batches, and compare what it makes of them; 0 ends that."""
        entry = self._changeable(request)
        verdict("stage", entry)
        made = self._programs.shadow(entry.name, request.program, request.percent, request.tolerances or None)
        return StageAnswer(model=entry.name, incarnation=entry.incarnation, program=answers.program(made))

    # --- small parts ------------------------------------------------------------------------------------------------

    def _changeable(self, target: Target) -> Entry:
        self._lifecycle.require_running()
        return self._entry(target)

    def _entry(self, target: Target) -> Entry:
        if target.component:
            self._registry.find(target.model)
            raise InvalidRequest(
                f"component {target.component!r} of model {target.model!r}: a component needs meta models, of which "
                "this version serves none"
            )
        return self._registry.find(target.model, target.if_incarnation)

    def _require_changeable(self, name: str, verb: str) -> None:
        if self._config.model_control_mode == "static":
            raise WrongState(
                f"model {name!r} cannot be {verb}: the set of models is fixed (model_control_mode: static)",
                reason="static",
                hint="start the server with --control-mode dynamic or explicit",
            )

    def _wait(self, entry: Entry, until: Until, timeout_s: float, gone: Gone) -> Operation:
        """In slices, so that a caller who leaves, and a server that stops, end it."""
        name, end = entry.name, self._clock() + timeout_s
        while True:
            left = end - self._clock()
            try:
                now = self._registrations.wait(name, until, max(0.0, min(left, _LOOK_SECONDS)))
            except WaitTimeout as error:
                self._lifecycle.require_running()
                if gone():
                    raise Cancelled("the caller went away before what it waited for had happened") from None
                seen = self._registry.get(name)
                if until == "gone" and (seen is None or seen.incarnation != entry.incarnation):
                    return _gone(name)
                if left <= _LOOK_SECONDS:
                    raise WaitTimeout(f"{error.message} (waited {timeout_s:g} s)") from None
            else:
                return _gone(name) if now is None else self._operation(now)

    def _pin(self, request: Target, pinned: bool) -> Operation:
        entry = self._changeable(request)
        self._parameters.pin(entry, pinned)
        return self._operation(self._registry.get(entry.name) or entry)

    def _operation(self, entry: Entry, *, underway: bool = False) -> Operation:
        name = entry.name
        return Operation(
            model=name,
            incarnation=entry.incarnation,
            registration=entry.state.value,
            admission=entry.gate,
            accepted=answers.accepted(entry, self._scheduler, self._registrations.accepted(entry)),
            parameter_operation=self._parameters.operation(name),
            pinned=self._parameters.pinned(entry),
            error=failure_text(entry.failure) or failure_text(entry.pending) or self._parameters.error(name),
            underway=underway,
        )

    def _program_list(self, entry: Entry, programs: ProgramList) -> ProgramListAnswer:
        return ProgramListAnswer(
            model=entry.name,
            incarnation=entry.incarnation,
            selected=programs.selected,
            capacity=programs.capacity,
            programs=[answers.program(made) for made in programs.programs],
        )

    @contextmanager
    def _move(self, what: str) -> Iterator[None]:
        if not self._moves.acquire(blocking=False):
            raise Shed(f"{what} is refused: {MAX_MOVES} calls that move weights or read directories are open")
        try:
            yield
        finally:
            self._moves.release()


def _gone(name: str) -> Operation:
    return Operation(model=name, incarnation=0, registration="gone", admission="removing")


def _settings(request: RegisterRequest) -> Settings:
    return Settings(
        residency=None if request.residency is None else Floor(request.residency),
        weight=request.weight,
        max_batch_size=request.max_batch_size,
        pinned=request.pinned,
    )
