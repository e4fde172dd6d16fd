"""The program sets of all models: staged from other directories, tried, selected and removed while a server runs.

A set is one executable for every shape and batch size of a model; it shares weights, manifest and hooks with the one
that the model was loaded with (spec worker 11.8). Sets belong to an incarnation: whoever loads a model again, or
removes it, calls `drop`. Nothing here decides who may do what; that is the administration's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rsrv.core.errors import (
    CapacityFull,
    ExpectedMismatch,
    InvalidRequest,
    NotResident,
    RsrvError,
    ServerStopping,
    UnknownModel,
    WrongState,
)
from rsrv.serve.programs.compare import Tally, require_tolerances
from rsrv.serve.programs.records import ProgramList, ProgramSet, Retained, Selected
from rsrv.serve.programs.retained import Build, Retention, keyed
from rsrv.serve.programs.runner import measure
from rsrv.serve.programs.shadow import Shadow
from rsrv.serve.programs.staging import Checked, check_programs, compile_programs
from rsrv.serve.registry import ModelState, Prepared
from rsrv.serve.scheduler.queue import ORIGINAL

if TYPE_CHECKING:
    from rsrv.bundle.digests import DigestsMode
    from rsrv.serve.admin.events import EventLog
    from rsrv.serve.loading.programs import ProgramSource
    from rsrv.serve.programs.contract import Key
    from rsrv.serve.registry import Registry
    from rsrv.serve.scheduler import Scheduler, ServableModel
    from rsrv.stablehlo.policy import Policy

log = logging.getLogger(__name__)

_GONE = "the model was loaded again or removed"


class ProgramSets:
    """Thread safe. Methods may wait for the dispatch thread, and `stage` for the compiler.

    Args:
        source: where executables come from.
        policy: what is done to every program before it is compiled.
        capacity: sets that a model may have, the original, pending and failed ones included.
        events: told of every set and of every selection.
        digests: how files are compared with the digests in the manifest of their directory.
        compiles: programs that are compiled side by side.
        reserve: called before programs run that did not before, so that the budget leaves room for their scratch.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        source: ProgramSource,
        policy: Policy,
        *,
        scheduler: Scheduler,
        registry: Registry,
        capacity: int,
        events: EventLog,
        digests: DigestsMode = "programs",
        compiles: int = 1,
        reserve: Callable[[ServableModel], None] = lambda model: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._source = source
        self._policy = policy
        self._scheduler = scheduler
        self._registry = registry
        self._capacity = capacity
        self._events = events
        self._digests = digests
        self._reserve = reserve
        self._clock = clock
        # Guards what is retained; never held while anybody waits.
        self._lock = threading.Lock()
        self._retained: dict[int, Retention] = {}
        self._closed = False
        self._builders: set[threading.Thread] = set()
        self._compiles = ThreadPoolExecutor(compiles, thread_name_prefix="rsrv-programs")

    def close(self) -> None:
        """End all shadows, and what compiles; after the compile pool was closed this does not wait for it."""
        with self._lock:
            self._closed = True
            retained, builders = [*self._retained.values()], [*self._builders]
        for each in retained:
            self._discard(each, "the server is stopping")
        self._compiles.shutdown(cancel_futures=True)
        for builder in builders:
            builder.join()

    # --- what there is ------------------------------------------------------------------------------------------------

    def list(self, name: str) -> ProgramList:
        """The sets of a model. Raises UnknownModel."""
        entry = self._registry.find(name)
        if entry.prepared is None or entry.state is not ModelState.READY:
            return ProgramList(0, self._capacity, ())
        retention = self._retention(name, entry.prepared)
        with self._lock:
            return ProgramList(
                retention.selected,
                self._capacity,
                tuple(made.snapshot() for _, made in sorted(retention.sets.items())),
            )

    def retained(self, name: str) -> Retained:
        """As `list`, in numbers only, and cheap: for status. (0, 0) for a model that is not prepared."""
        entry = self._registry.get(name)
        if entry is None or entry.prepared is None:
            return Retained(0, 0)
        with self._lock:
            found = self._retained.get(entry.prepared.model.incarnation)
            return Retained(ORIGINAL, 1) if found is None else Retained(found.selected, len(found.sets))

    # --- staging ------------------------------------------------------------------------------------------------------

    def stage(
        self,
        name: str,
        *,
        directory: Path,
        base: int = 0,
        sources: Sequence[str] | None = None,
        label: str = "",
        wait: bool = True,
        shadow: float = 0.0,
    ) -> ProgramSet:
        """Make a set of the programs in `directory`; one that does not compile is a set, too, a failed one.

        Args:
            base: id of the set that programs come from which `sources` leaves out; 0 = the one that serves.
            sources: names of the files to take; empty or None = all.
            wait: return when it is compiled; else it is pending.
            shadow: percent of the batches that it gets copies of as soon as it is ready.

        Raises:
            UnknownModel: no such model, or no such base (reason `unknown_program`).
            WrongState: the model, or the base, is not ready.
            CapacityFull: the model has as many sets as it may have.
            InvalidRequest: the directory cannot be used, or its programs do not fit the model.
        """
        _require_percent(shadow)
        retention, prepared = self._ready(name)
        with self._lock:
            beneath = retention.require(base or retention.selected)
            self._require_room(retention)
        checked = check_programs(
            directory, prepared.model, self._source, self._policy, sources=sources or (), digests=self._digests
        )
        with self._lock:
            if self._closed:
                raise ServerStopping("the server is stopping")
            retention.require_live()
            self._require_room(retention)
            made = retention.add(label, {**beneath.digests, **checked.digests}, self._clock())
            builder = threading.Thread(
                target=self._build, args=(retention, made, beneath, checked, shadow), name="rsrv-stage", daemon=True
            )
            self._builders.add(builder)
        self._tell(retention, made, "", detail=f"of {directory}")
        builder.start()
        if wait:
            made.done.wait()
        with self._lock:
            return made.snapshot()

    def _build(self, retention: Retention, made: Build, beneath: Build, checked: Checked, shadow: float) -> None:
        """Compile a set, and put it among those that may be selected."""
        try:
            compiled = compile_programs(checked, self._source, self._compiles)
            with self._lock:
                if retention.dropped:
                    return
                if compiled.problems:
                    made.fail(compiled.diagnostics)
                else:
                    numerics = compiled.numerics
                    if len(compiled.executables) < len(keyed(beneath.programs)):
                        numerics = (*filter(None, [beneath.numerics]), *numerics)
                    programs = compiled.onto(beneath.programs)
                    made.finish(programs, "; ".join(dict.fromkeys(numerics)), compiled.diagnostics)
            log.info("program set staged model=%s program=%d phase=%s", retention.name, made.id, made.phase)
            if compiled.problems:
                log.warning("program set failed model=%s program=%d why=%s", retention.name, made.id, made.diagnostics)
            elif shadow:
                # Whoever waits for the set finds it in the shadow already.
                try:
                    self._cast(retention, made, shadow, None)
                except RsrvError as error:
                    log.warning("shadow refused model=%s program=%d why=%s", retention.name, made.id, error.message)
            self._tell(retention, made, "pending", detail="; ".join(compiled.problems))
        except Exception as error:
            log.exception("program set failed model=%s program=%d", retention.name, made.id)
            with self._lock:
                made.fail(f"{type(error).__name__}: {error}")
        finally:
            made.done.set()
            with self._lock:
                self._builders.discard(threading.current_thread())

    # --- selecting ----------------------------------------------------------------------------------------------------

    def select(self, name: str, program: int, expected: int, *, require_clean: bool = False) -> Selected:
        """Let `program` serve, from the next dispatch on; requests that wait run on it. No weights are moved.

        At a closed gate the programs are run once before, so that the first request finds them warm.

        Args:
            expected: the id of the set that serves, as the caller believes.
            require_clean: only if it was compared with the serving set in its shadow, and differed in nothing.

        Raises:
            UnknownModel: no such model, or no such set (reason `unknown_program`).
            WrongState: the model or the set is not ready (`not_ready`), or its record is not clean (`not_clean`).
            ExpectedMismatch: another set serves.
            RsrvError: a program does not run.
        """
        retention, _ = self._ready(name)
        with retention.moving:
            prepared = self._same(retention, name)
            with self._lock:
                retention.require_live()
                made = retention.require(program)
                previous = retention.selected
                if expected != previous:
                    raise ExpectedMismatch(
                        f"model {name!r} is served by program set {previous}, not {expected}", selected=previous
                    )
                if program == previous:
                    return Selected(program, previous)
                if require_clean:
                    retention.require_clean(made)
            model = replace(prepared.model, programs=made.programs)
            self._reserve(model)
            seconds: Mapping[Key, float] = {}
            if self._registry.find(name).gate != "open" and not made.warm:
                with suppress(NotResident):
                    seconds = measure(self._scheduler, model)
            self._end_shadow(retention)
            served = replace(prepared, model=model, numerics=made.numerics)
            with self._registry.changing:
                entry = self._registry.get(name)
                if entry is None or entry.prepared is not prepared or entry.state is not ModelState.READY:
                    raise UnknownModel(f"model {name!r} was loaded again, renamed or removed meanwhile")
                self._registry.set_prepared(name, served)
                self._scheduler.set_programs(model, key=program)
            for (variant, batch_key), took in seconds.items():
                self._scheduler.seed_cost(model, variant, batch_key, max(took, 1e-6))
            with self._lock:
                retention.selected = program
                made.warm = True
        log.info("programs selected model=%s program=%d previous=%d label=%r", name, program, previous, made.label)
        self._events.append(name, model.incarnation, "selected_program", str(previous), str(program), made.label)
        return Selected(program, previous)

    def remove(self, name: str, program: int) -> ProgramList:
        """Forget a set, and free its executables; the original can be removed, too, and does not come back.

        Raises UnknownModel, and WrongState for the one that serves (`selected`) or is being compiled (`pending`).
        """
        retention, prepared = self._ready(name)
        with retention.moving:
            with self._lock:
                retention.require_live()
                made = retention.find(program)
                if program == retention.selected:
                    raise WrongState(
                        f"program set {program} of model {name!r} is selected", reason="selected", hint="select another"
                    )
                if made.phase == "pending":
                    raise WrongState(f"program set {program} of model {name!r} is being compiled", reason="pending")
            if retention.shadowed == program:
                self._end_shadow(retention)
            with self._lock:
                del retention.sets[program]
            self._scheduler.forget_programs(prepared.model, program)
        self._events.append(name, retention.incarnation, "program", made.phase, "removed", f"program {program}")
        return self.list(name)

    def drop(self, name: str, incarnation: int = 0) -> None:
        """The model was loaded again, or is being removed: forget its sets, and return when none of them runs.

        Only those of `incarnation`; 0 = of all. The programs that serve go on; they are the model's. After a reload,
        call it when the new version serves.
        """
        with self._lock:
            self._refresh()
            gone = [
                number
                for number, each in self._retained.items()
                if number == incarnation or (each.name == name and not incarnation)
            ]
            retired = [self._retained.pop(number) for number in gone]
        for each in retired:
            self._discard(each, _GONE)
        self._sweep()

    # --- shadows ------------------------------------------------------------------------------------------------------

    def shadow(
        self, name: str, program: int, percent: float, tolerances: Mapping[str, float] | None = None
    ) -> ProgramSet:
        """Give a set copies of `percent` of the batches; 0 ends that, and leaves its record.

        A model has one such set at a time: another one's turn ends. Every start begins a new record.

        Args:
            tolerances: by dtype (``f32``) or output name, what max|Δ| / max|reference| may be; those that are left out
                have their defaults (`rsrv.audit.parity.TOLERANCES`).

        Raises UnknownModel, InvalidRequest, and WrongState for a set that serves (`selected`) or is not ready.
        """
        _require_percent(percent)
        retention, _ = self._ready(name)
        with self._lock:
            made = retention.find(program)
        if percent:
            self._cast(retention, made, percent, tolerances)
        else:
            with retention.moving:
                if retention.shadowed == program:
                    self._end_shadow(retention)
        with self._lock:
            return made.snapshot()

    def _cast(self, retention: Retention, made: Build, percent: float, tolerances: Mapping[str, float] | None) -> None:
        with retention.moving:
            prepared = self._same(retention, retention.name)
            chosen = require_tolerances(tolerances, prepared.model.output_specs)
            with self._lock:
                retention.require_live()
                retention.require(made.id)
                if made.id == retention.selected:
                    raise WrongState(
                        f"program set {made.id} of model {retention.name!r} serves; it cannot be its own shadow",
                        reason="selected",
                    )
            tried = replace(prepared.model, programs=made.programs)
            self._reserve(tried)
            self._end_shadow(retention)
            tally = Tally(retention.selected)
            shadow = Shadow(self._scheduler, prepared.model, tried, share=percent / 100, tally=tally, tolerances=chosen)
            shadow.start()
            with self._lock:
                made.tally, made.percent = tally, percent
                retention.shadow, retention.shadowed = shadow, made.id
        log.info("shadow begins model=%s program=%d percent=%g", retention.name, made.id, percent)

    def _end_shadow(self, retention: Retention) -> None:
        """With `retention.moving` held."""
        with self._lock:
            shadow, retention.shadow = retention.shadow, None
            made = retention.sets.get(retention.shadowed)
            retention.shadowed = 0
        if shadow is not None:
            shadow.stop()
        if made is not None:
            with self._lock:
                made.percent = 0.0

    # --- small parts --------------------------------------------------------------------------------------------------

    def _ready(self, name: str) -> tuple[Retention, Prepared]:
        """Raises UnknownModel, and WrongState for a model that is not ready."""
        prepared = self._prepared(name)
        return self._retention(name, prepared), prepared

    def _prepared(self, name: str) -> Prepared:
        entry = self._registry.find(name)
        if entry.prepared is None or entry.state is not ModelState.READY:
            raise WrongState(
                f"model {name!r} is {entry.state.value}; programs are staged and selected for a ready one",
                reason="not_ready",
            )
        return entry.prepared

    def _same(self, retention: Retention, name: str) -> Prepared:
        """What serves, if it is the incarnation of `retention`. Raises UnknownModel or WrongState."""
        prepared = self._prepared(name)
        if prepared.model.incarnation != retention.incarnation:
            raise WrongState(f"model {name!r} was loaded again meanwhile", reason="not_ready")
        return prepared

    def _retention(self, name: str, prepared: Prepared) -> Retention:
        """What is retained for an incarnation; made when it is asked for first, while its original serves.

        Not with `moving` of any held: others are discarded on the way.
        """
        self._sweep()
        model = prepared.model
        with self._lock:
            found = self._retained.get(model.incarnation)
        if found is not None:
            return found
        programs = keyed(model.programs)
        digests = dict(zip(programs, self._source.digests(programs.values()), strict=True))
        fresh = Retention(name, model.incarnation, model.programs, prepared.numerics, digests, self._clock())
        with self._lock:
            return self._retained.setdefault(model.incarnation, fresh)

    def _refresh(self) -> set[int]:
        """Note what the models are called now; returns the incarnations that do not serve any more. Lock held."""
        entries = self._registry.entries()
        live = {each.prepared.model.incarnation: each.name for each in entries if each.prepared is not None}
        for number, each in self._retained.items():
            each.name = live.get(number, each.name)
        return self._retained.keys() - live.keys()

    def _sweep(self) -> None:
        """Discard what is retained for incarnations that do not serve any more."""
        with self._lock:
            gone = [self._retained.pop(number) for number in self._refresh()]
        for each in gone:
            self._discard(each, _GONE)

    def _discard(self, retention: Retention, why: str) -> None:
        with self._lock:
            retention.dropped = True
            for made in retention.sets.values():
                if made.phase == "pending":
                    made.fail(why)
                    made.done.set()
        with retention.moving:
            self._end_shadow(retention)

    def _require_room(self, retention: Retention) -> None:
        if len(retention.sets) >= self._capacity:
            raise CapacityFull(
                f"model {retention.name!r} has {len(retention.sets)} program sets, as many as it may have "
                f"(admin.program_capacity: {self._capacity})",
                reason="program_capacity",
                hint=f"rsrv ctl programs remove {retention.name} ID",
            )

    def _tell(self, retention: Retention, made: Build, old: str, detail: str = "") -> None:
        text = f"program {made.id}" + (f": {detail}" if detail else "")
        self._events.append(retention.name, retention.incarnation, "program", old, made.phase, text[:1000])


def _require_percent(percent: float) -> None:
    if not 0 <= percent <= 100:
        raise InvalidRequest(f"the shadow's percent is {percent!r}; wanted is a number from 0 to 100")
