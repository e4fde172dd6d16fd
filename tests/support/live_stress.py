"""Threads that operate a server at random, and others that ask its models; `Stress.run` returns what was wrong.

Whoever changes what a model answers notes it before and after, so that of every answer it is known which versions may
have given it.
"""

from __future__ import annotations

import faulthandler
import itertools
import logging
import random
import shutil
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from support.bundles import N, lower, specs
from support.calls import FakeCall

from rsrv.bundle.writer import write_bundle
from rsrv.core.errors import Code, RsrvError
from rsrv.core.wire import decode_response, encode_request, join
from rsrv.serve.admin import requests as ask

FEATURES = 4
BATCHES = (1, 2)
PROGRAMS = 3
OFFSETS = (None, 0, 3)
"""What the hook of a version adds to its input; None = it has no hook."""
HANG_SECONDS = 20.0
NAMES = tuple(f"m{i}" for i in range(5))
HOOK = """
import time

def preprocess(inputs):
    time.sleep({seconds})
    return {{"x": inputs["x"] + {offset}}}
"""
REFUSALS = {
    "UnknownModel", "ModelPreparing", "ModelFailed", "AdmissionClosed", "Removing", "HeldFull", "DeadlineExceeded",
    "Cancelled", "Shed", "QueueFull", "ServerStopping",
}  # fmt: skip
"""What a request may be told at any time; ModelUnloaded besides, where somebody aborts."""


@dataclass(frozen=True)
class Version:
    """What a bundle answers: `scale` its weight, `program` which of the programs, `offset` what its hook adds."""

    scale: int
    program: int
    offset: int | None

    def answer(self, x: float, fake: bool) -> float:
        x += self.offset or 0
        # The fake device adds up the rows of the input.
        return FEATURES * x if fake else x * self.scale + self.program


@dataclass
class Life:
    """A version under a name, from the first moment in which it may have answered to the last."""

    version: Version
    begin: float
    end: float = float("inf")


@dataclass
class Slot:
    """A name. `lock` is held by whoever changes what it answers; `lives` are all that it ever answered."""

    name: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    lives: list[Life] = field(default_factory=list)
    current: Life | None = None
    sets: dict[int, int] = field(default_factory=dict)

    def begin(self, version: Version) -> Life:
        life = Life(version, time.monotonic())
        self.lives.append(life)
        return life

    def became(self, life: Life | None) -> None:
        if self.current is not None and self.current is not life:
            self.current.end = time.monotonic()
        self.current = life

    def ended(self, life: Life) -> None:
        life.end = time.monotonic()

    def may_answer(self, x: float, began: float, ended: float, fake: bool) -> set[float]:
        lives = [*self.lives]
        return {life.version.answer(x, fake) for life in lives if life.begin <= ended and life.end >= began}


class Errors(logging.Handler):
    """Tracebacks in the log that are not of bundles that were broken on purpose."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.found = []

    def emit(self, record):
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            if not isinstance(error, RsrvError):
                self.found.append(f"{record.getMessage()}\n{''.join(traceback.format_exception(error))}")


class Bundles:
    """Writes bundles without lowering anything twice."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        shape = ((N, FEATURES), np.float32)
        self._x, self._y = specs({"x": shape}), specs({"y": shape})
        self._modules = [
            {
                rows: lower(
                    lambda x, w, p=p: (x * w + np.float32(p),),
                    [((rows, FEATURES), np.float32), ((FEATURES,), np.float32)],
                )
                for rows in BATCHES
            }
            for p in range(PROGRAMS)
        ]

    def number(self) -> int:
        with self._lock:
            return next(self._numbers)

    def write(self, name: str, version: Version, seconds: float = 0.0) -> Path:
        directory = self.root / str(self.number()) / name
        directory.parent.mkdir(parents=True)
        hooks = None if version.offset is None else HOOK.format(offset=version.offset, seconds=seconds)
        return write_bundle(
            directory,
            name=name,
            executable_inputs=self._x,
            executable_outputs=self._y,
            modules=self._modules[version.program],
            weights=[("w", np.full(FEATURES, version.scale, np.float32))],
            hooks=hooks,
        )

    def broken(self, name: str, version: Version, how: str) -> Path:
        directory = self.write(name, version)
        match how:
            case "program":
                (directory / "model.b1.mlir").write_bytes(b"nonsense")
            case "weights":
                (directory / "model.safetensors").unlink(missing_ok=True)
                (directory / "weights.safetensors").unlink(missing_ok=True)
            case "hooks":
                (directory / "model.py").write_text("def preprocess(inputs:\n")
            case "gone":
                shutil.rmtree(directory)
        return directory


class Stress:
    """`aborts`: removals may abort, so accepted requests may be refused. `loose`: several change one model at once."""

    def __init__(self, server, root: Path, *, seed: int, fake=False, aborts=False, loose=False, budget=False) -> None:
        self.server = server
        self.admin = server.faces.administration
        self.do = server.live.registrations
        self.handle = server._inference.handle
        self.bundles = Bundles(root)
        self.slots = {name: Slot(name) for name in NAMES}
        self.seed, self.fake, self.aborts, self.loose, self.budget = seed, fake, aborts, loose, budget
        self.faults: list[str] = []
        self.counts: Counter[str] = Counter()
        self.stop = threading.Event()
        self.stopping = False
        self.notes: defaultdict[str, list[str]] = defaultdict(list)
        self.busy: dict[str, tuple[str, float]] = {}
        self.errors = Errors()
        logging.getLogger("rsrv").addHandler(self.errors)

    # --- what is wrong --------------------------------------------------------------------------------------------

    def fault(self, text: str) -> None:
        self.faults.append(text)

    def watch(self, threads) -> None:
        """Look for what hangs."""
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.2)
            now = time.monotonic()
            for name, (what, since) in [*self.busy.items()]:
                if now - since > HANG_SECONDS:
                    self.fault(f"hangs: {name}: {what}")
                    faulthandler.dump_traceback(sys.stderr, all_threads=True)
                    return

    def loop(self, name: str, rng: random.Random, ops) -> None:
        names, weights = [*ops], [weight for _, weight in ops.values()]
        while not self.stop.is_set():
            what = rng.choices(names, weights)[0]
            self.busy[name] = what, time.monotonic()
            try:
                result = ops[what][0](rng)
                self.counts[f"{what} {'busy' if result is False else 'ok'}"] += 1
            except RsrvError as error:
                self.counts[f"{what} {type(error).__name__}{'.' + error.reason if error.reason else ''}"] += 1
                if error.code is Code.INTERNAL and type(error).__name__ not in ("HookError",):
                    self.fault(f"{what}: {type(error).__name__}: {error}")
            except BaseException as error:
                self.fault(f"{what}: {''.join(traceback.format_exception(error))}")
                self.counts[f"{what} {type(error).__name__}"] += 1
            finally:
                self.busy.pop(name, None)

    # --- requests -------------------------------------------------------------------------------------------------

    def infer(self, rng: random.Random) -> None:
        slot = self.slots[rng.choice(NAMES)]
        x = float(rng.randint(1, 7))
        # What may wait has a deadline: nobody opens the gates in the end.
        hold = rng.choice((None, True, False))
        options = {} if hold is None else {"parameters": {"rsrv_hold": hold}}
        deadline_ns = 0
        if hold is not False:
            deadline_ns = time.monotonic_ns() + int(rng.choice((2e6, 3e7, 1e9, 5e9)))
        rows = rng.choice(BATCHES)
        body = join(encode_request(slot.name, [("x", np.full((rows, FEATURES), x, np.float32))], **options))
        call = FakeCall(body, deadline_ns=deadline_ns)
        if rng.random() < 0.1:
            timer = threading.Timer(rng.random() * 0.02, call.cancel)
            timer.start()
        else:
            timer = None
        began = time.monotonic()
        try:
            call.serve(self.handle, seconds=HANG_SECONDS)
        except BaseException as error:
            found = [each for each in self.server.admission.requests() if each.call is call]
            state = [{key: getattr(each, key, None) for key in each.__slots__} for each in found]
            self.fault(f"a request for {slot.name} was not answered: {error!r} {state}")
            return
        finally:
            if timer is not None:
                timer.join()
        ended = time.monotonic()
        if call.ends > 1:
            self.fault(f"a request for {slot.name} ended {call.ends} times: {call.error!r}")
        if call.error is not None:
            kind = type(call.error).__name__
            allowed = kind in REFUSALS or (kind == "ModelUnloaded" and self.aborts)
            if not allowed:
                self.fault(f"a request for {slot.name} ended with {kind}: {call.error}")
            self.counts[f"infer {kind}"] += 1
        elif call.message is not None:
            values = set(decode_response(call.message).array("y").ravel().tolist())
            possible = self.possible(slot, x, began, ended)
            if len(values) != 1 or not values <= possible:
                lives = [f"{life.version} {life.begin - ended:.3f} {life.end - ended:.3f}" for life in slot.lives[-8:]]
                self.fault(
                    f"{slot.name}({x}) answered {values} after {ended - began:.3f} s; possible are {possible}; "
                    f"versions (begin and end, relative to the answer): {lives}; {self.notes[slot.name][-8:]}"
                )

    def possible(self, slot: Slot, x: float, began: float, ended: float) -> set[float]:
        """What a request may have been answered; where several change a model at once, by any mixture of versions."""
        if not self.loose:
            return slot.may_answer(x, began, ended, self.fake)
        scales = {life.version.scale for each in self.slots.values() for life in [*each.lives]}
        every = itertools.product(scales, range(PROGRAMS), OFFSETS)
        return {Version(*each).answer(x, self.fake) for each in every}

    # --- what changes answers ---------------------------------------------------------------------------------------

    def version(self, rng: random.Random, like: Version | None = None) -> Version:
        if like is not None and rng.random() < 0.4:
            return Version(like.scale, rng.randrange(PROGRAMS), rng.choice(OFFSETS))
        return Version(self.bundles.number(), rng.randrange(PROGRAMS), rng.choice(OFFSETS))

    def change(self, rng, method):
        slot = self.slots[rng.choice(NAMES)]
        if self.loose:
            return method(rng, slot)
        if not slot.lock.acquire(blocking=False):
            return False
        try:
            result = method(rng, slot)
            self.notes[slot.name].append(f"{method.__name__} ok {threading.current_thread().name}")
            return result
        except BaseException as error:
            self.notes[slot.name].append(f"{method.__name__} {error!r}")
            raise
        finally:
            slot.lock.release()

    def register(self, rng, slot) -> None:
        version = self.version(rng)
        if rng.random() < 0.15:
            directory = self.bundles.broken(slot.name, version, rng.choice(("program", "weights", "hooks")))
        else:
            directory = self.bundles.write(slot.name, version, rng.choice((0.0, 0.002, 0.02)))
        life = slot.begin(version)
        try:
            self.admin.register_model(
                ask.RegisterRequest(
                    model=slot.name,
                    directory=str(directory),
                    admission=rng.choice(("open", "open", "drained")),
                    pinned=rng.random() < 0.1,
                    weight=rng.choice((None, 2.0)),
                )
            )
        except RsrvError:
            slot.ended(life)
            raise
        slot.became(life)
        slot.sets = {}
        if rng.random() < 0.6:
            self.wait_for(slot.name, "ready", 1.0)

    def reload(self, rng, slot) -> None:
        current = slot.current
        version = self.version(rng, current.version if current is not None else None)
        if rng.random() < 0.15:
            how = rng.choice(("program", "weights", "hooks", "gone"))
            directory = self.bundles.broken(slot.name, version, how)
        else:
            directory = self.bundles.write(slot.name, version, rng.choice((0.0, 0.002, 0.02)))
        life = slot.begin(version)
        try:
            self.do.reload(slot.name, directory).result(HANG_SECONDS)
        except TimeoutError:
            raise RuntimeError(f"the reload of {slot.name} did not end") from None
        except BaseException:
            if not self.loose:
                entry = self.server.registry.get(slot.name)
                if entry is None or entry.path != directory:
                    slot.ended(life)
                else:
                    # A model that had failed is prepared from there from now on.
                    slot.became(life)
            raise
        slot.became(life)
        slot.sets = {}

    def unregister(self, rng, slot) -> None:
        mode = "abort" if self.aborts and rng.random() < 0.5 else "drain"
        self.admin.unregister_model(ask.UnregisterRequest(model=slot.name, mode=mode))
        if self.loose and rng.random() < 0.5:
            return
        self.wait_for(slot.name, "gone", HANG_SECONDS / 2)
        if not self.loose:
            slot.became(None)

    def rename(self, rng, slot) -> bool | None:
        other = self.slots[rng.choice(NAMES)]
        if not self.loose and (other is slot or not other.lock.acquire(blocking=False)):
            return False
        try:
            current = slot.current
            if current is None:
                return False
            life = other.begin(current.version)
            directory = self.bundles.write(other.name, current.version)
            try:
                self.do.rename(slot.name, other.name, directory)
            except BaseException:
                other.ended(life)
                raise
            other.became(life)
            other.sets, slot.sets = slot.sets, {}
            slot.became(None)
            return None
        finally:
            if not self.loose:
                other.lock.release()

    def select(self, rng, slot) -> bool | None:
        listed = self.admin.list_programs(ask.Target(model=slot.name))
        ready = [each.id for each in listed.programs if each.phase == "ready"]
        current = slot.current
        if not ready or current is None:
            return False
        chosen = rng.choice(ready)
        if chosen not in slot.sets and chosen != 1:
            return False
        slot.sets.setdefault(1, current.version.program)
        version = Version(current.version.scale, slot.sets[chosen], current.version.offset)
        life = slot.begin(version)
        try:
            self.admin.select_program(
                ask.SelectRequest(
                    model=slot.name, program=chosen, expected=listed.selected, require_clean=rng.random() < 0.1
                )
            )
        except RsrvError:
            slot.ended(life)
            raise
        slot.became(life)
        return None

    def stage(self, rng, slot) -> bool | None:
        if slot.current is None:
            return False
        program = rng.randrange(PROGRAMS)
        slot.sets.setdefault(1, slot.current.version.program)
        directory = self.bundles.write(slot.name, Version(1, program, None))
        answer = self.admin.stage_program(
            ask.StageRequest(
                model=slot.name,
                base_directory=str(directory),
                wait=rng.random() < 0.7,
                shadow_percent=rng.choice((0.0, 50.0)),
            )
        )
        slot.sets[answer.program.id] = program
        return None

    # --- what does not ----------------------------------------------------------------------------------------------

    def remove_set(self, rng) -> None:
        name = rng.choice(NAMES)
        sets = self.admin.list_programs(ask.Target(model=name)).programs
        if sets:
            self.admin.remove_program(ask.RemoveRequest(model=name, program=rng.choice(sets).id))

    def shadow(self, rng) -> None:
        name = rng.choice(NAMES)
        sets = self.admin.list_programs(ask.Target(model=name)).programs
        if sets:
            percent = rng.choice((0.0, 30.0, 100.0))
            self.admin.set_shadow(ask.ShadowRequest(model=name, program=rng.choice(sets).id, percent=percent))

    def drain(self, rng) -> None:
        self.admin.drain_model(ask.DrainRequest(model=rng.choice(NAMES), wait_ms=rng.choice((0, 0, 20))))

    def undrain(self, rng) -> None:
        self.admin.undrain_model(ask.Target(model=rng.choice(NAMES)))

    def retry(self, rng) -> None:
        self.admin.retry_model(ask.Target(model=rng.choice(NAMES)))

    def activate(self, rng) -> None:
        self.admin.activate_model(ask.ActivateRequest(model=rng.choice(NAMES), allow_open=rng.random() < 0.5))

    def deactivate(self, rng) -> None:
        self.admin.deactivate_model(ask.DeactivateRequest(model=rng.choice(NAMES), host=rng.random() < 0.5))

    def pin(self, rng) -> None:
        (self.admin.pin_model if rng.random() < 0.3 else self.admin.unpin_model)(ask.Target(model=rng.choice(NAMES)))

    def trim(self, rng) -> None:
        self.admin.trim_device(ask.TrimRequest(target_bytes=rng.choice((0, 64)), compact=rng.random() < 0.5))

    def policy(self, rng) -> None:
        if rng.random() < 0.5:
            self.server.scheduler.set_policy(rng.choice(NAMES), weight=rng.choice((0.5, 1.0, 3.0)), max_batch_size=2)
        self.server.scheduler.set_policy(rng.choice(NAMES), weight=2.0)

    def wait(self, rng) -> None:
        until = rng.choice(("idle", "drained", "ready", "gone"))
        self.admin.wait_model(
            ask.WaitRequest(model=rng.choice(NAMES), until=until, timeout_ms=rng.choice((0, 10, 100)))
        )

    def status(self, rng) -> None:
        self.admin.get_status(ask.StatusRequest())

    def wait_for(self, name: str, until: str, seconds: float) -> None:
        self.admin.wait_model(ask.WaitRequest(model=name, until=until, timeout_ms=int(seconds * 1000)))

    # --- all of it ----------------------------------------------------------------------------------------------------

    def run(self, seconds: float, *, operators: int = 5, clients: int = 5) -> None:
        change = lambda method: lambda rng: self.change(rng, method)  # noqa: E731
        operations = {
            "register": (change(self.register), 12),
            "reload": (change(self.reload), 12),
            "unregister": (change(self.unregister), 4),
            "rename": (change(self.rename), 5),
            "select": (change(self.select), 8),
            "stage": (change(self.stage), 6),
            "remove_set": (self.remove_set, 2),
            "shadow": (self.shadow, 2),
            "drain": (self.drain, 6),
            "undrain": (self.undrain, 20),
            "retry": (self.retry, 5),
            "activate": (self.activate, 6),
            "deactivate": (self.deactivate, 4),
            "pin": (self.pin, 4),
            "trim": (self.trim, 4),
            "policy": (self.policy, 3),
            "wait": (self.wait, 3),
            "status": (self.status, 2),
        }
        threads = [
            threading.Thread(
                target=self.loop, args=(f"op{i}", random.Random(f"{self.seed} op {i}"), operations), daemon=True
            )
            for i in range(operators)
        ]
        threads += [
            threading.Thread(
                target=self.loop,
                args=(f"client{i}", random.Random(f"{self.seed} client {i}"), {"infer": (self.infer, 1)}),
                daemon=True,
            )
            for i in range(clients)
        ]
        watch = threading.Thread(target=self.watch, args=(threads,), daemon=True)
        for thread in threads:
            thread.start()
        watch.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end and watch.is_alive() and len(self.faults) < 20:
            time.sleep(0.05)
        self.stop.set()
        for thread in threads:
            thread.join(HANG_SECONDS + 5 if watch.is_alive() else 1)
        self.faults += self.errors.found

    def settle(self) -> None:
        """Every model that is left answers right; then all are removed, and nothing is left of them."""
        rng = random.Random(self.seed)
        for entry in self.server.registry.entries():
            name = entry.name
            try:
                if entry.state.value in ("retiring", "release_failed"):
                    self.wait_for(name, "gone", 20.0)
                    continue
                if entry.state.value == "preparing":
                    self.wait_for(name, "ready", 20.0)
                if self.server.registry.find(name).state.value == "failed":
                    continue
                self.wait_for(name, "idle", 20.0)
                self.admin.undrain_model(ask.Target(model=name))
                self.wait_for(name, "ready", 20.0)
            except RsrvError as error:
                self.fault(f"{name} did not settle: {error!r}")
                continue
            found = self.server.registry.find(name)
            if found.state.value != "ready":
                continue
            x, began = 2.0, time.monotonic()
            body = join(encode_request(name, [("x", np.full((1, FEATURES), x, np.float32))]))
            call = FakeCall(body).serve(self.handle, seconds=20)
            slot = self.slots[name]
            possible = self.possible(slot, x, began, time.monotonic())
            if call.error is not None:
                self.fault(f"{name} does not answer in the end: {call.error!r}")
            elif not (values := set(decode_response(call.message).array("y").ravel().tolist())) <= possible:
                self.fault(f"{name} answers {values} in the end, wanted {possible}")
        for entry in self.server.registry.entries():
            try:
                self.admin.unregister_model(
                    ask.UnregisterRequest(model=entry.name, mode=rng.choice(("drain", "abort")))
                )
                self.wait_for(entry.name, "gone", 20.0)
            except RsrvError as error:
                self.fault(f"{entry.name} was not removed: {error!r}")
        self.nothing_left()

    def nothing_left(self) -> None:
        server = self.server
        roster = server.scheduler._backlog.roster
        left = {
            "entries": lambda: server.registry.entries(),
            "retirements": lambda: dict(self.do._retirements._open),
            "queues": lambda: [*roster.by_incarnation.values(), *roster.queues, *roster.closing],
            "accounts": lambda: dict(roster._accounts),
            "weights": lambda: dict(server.residency._by_name),
            "device bytes": lambda: server.residency.resident_bytes,
            "requests": lambda: server.admission.requests(),
            "pending": lambda: server.scheduler._dispatcher.pending,
            "held": lambda: server.admission.held,
            "sets": lambda: dict(server.live.programs._retained),
            "settling": lambda: dict(self.do._preparations._settling),
            "leaving": lambda: dict(self.do._preparations._leaving),
            "places": lambda: server.admission._places,
            "operations": lambda: {k: v.state for k, v in server.live.operations._by_name.items()},
            "hooks": lambda: dict(getattr(server._loader.hooks, "_loaded", {})),
        }
        for what, look in left.items():
            end = time.monotonic() + HANG_SECONDS
            while look() and time.monotonic() < end:
                time.sleep(0.02)
            if found := look():
                self.fault(f"left in the end: {what}: {found}")

    def close(self) -> None:
        logging.getLogger("rsrv").removeHandler(self.errors)
