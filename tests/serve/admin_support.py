"""A server without a device for the tests of administration: real checks and faces over scripted parts."""

from __future__ import annotations

import http.client
import json
import threading
import time
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from rsrv.core.config import ServerConfig
from rsrv.core.dtypes import DType
from rsrv.core.errors import IncarnationChanged, NameTaken, UnknownModel, WaitTimeout, WrongState
from rsrv.core.status import DeviceStatus, WorkerStatus
from rsrv.rpc.http import HttpListener
from rsrv.serve.admin.events import EventLog
from rsrv.serve.admin.http import admin_http_routes, listener_threads
from rsrv.serve.admin.operations import Administration
from rsrv.serve.admin.parameters import Parameters
from rsrv.serve.admission import Admission
from rsrv.serve.gate import Accepted
from rsrv.serve.lifecycle import Lifecycle
from rsrv.serve.programs.compare import ShadowRecord
from rsrv.serve.programs.records import ProgramList, ProgramSet, Selected
from rsrv.serve.registry import Entry, Failure, ModelState, Registry
from rsrv.serve.residency.floors import Floor
from rsrv.serve.residency.operations import ParameterOperations
from rsrv.serve.residency.reclaim import Reclaimer

WAIT = 30
JSON = {"Content-Type": "application/json"}
MANIFEST = "format_version: '3.0'\n"


class ScriptedRegistrations:
    """Changes entries as the state machine says, and nothing else; `calls` has what was asked for."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.calls: list[tuple] = []
        self.preparations: dict[str, Future] = {}
        self.changed = threading.Condition()
        self.earlier = 0
        registry.on_change = self.note

    def note(self, name):
        with self.changed:
            self.changed.notify_all()

    def register(self, name, directory, *, source="api", admission="open", settings=None):
        self.calls.append(("register", name, directory, source, admission, settings))
        state = ModelState.REGISTERED if admission == "drained" else ModelState.PREPARING
        entry = Entry(
            name,
            directory,
            state,
            source=source,
            gate=admission,
            incarnation=self.registry.next_incarnation(),
            settings=settings,
        )
        if not self.registry.add(entry):
            raise NameTaken(f"a model {name!r} is registered already")
        return entry

    def prepare(self, name, *, if_incarnation=0):
        self.calls.append(("prepare", name))
        self.registry.change(name, state=ModelState.PREPARING)
        return self.preparations.setdefault(name, Future())

    def retry(self, name, *, if_incarnation=0):
        self.calls.append(("retry", name))
        again = self.registry.find(name).state is ModelState.RELEASE_FAILED
        return self.registry.change(name, state=ModelState.RETIRING if again else ModelState.PREPARING, failure=None)

    def drain(self, name, *, if_incarnation=0):
        self.calls.append(("drain", name))
        entry = self.registry.find(name)
        if entry.gate != "open":
            return entry
        return self.registry.change(name, gate="draining" if entry.accepted else "drained")

    def undrain(self, name, *, if_incarnation=0):
        self.calls.append(("undrain", name))
        entry = self.registry.find(name)
        state = ModelState.PREPARING if entry.state is ModelState.REGISTERED else entry.state
        return self.registry.change(name, gate="open", state=state)

    def unregister(self, name, *, mode="drain", if_incarnation=0):
        self.calls.append(("unregister", name, mode))
        entry = self.registry.find(name)
        if entry.state is ModelState.READY:
            return self.registry.change(name, state=ModelState.RETIRING, gate="removing")
        gone = replace(entry, gate="removing")
        if entry.state in (ModelState.REGISTERED, ModelState.PREPARING, ModelState.FAILED):
            self.registry.remove(name)
        return gone

    def accepted(self, entry):
        return entry.accepted + self.earlier

    def wait(self, name, until, timeout_s, *, if_incarnation=0):
        def there():
            entry = self.registry.get(name)
            if entry is None:
                return True
            return {
                "idle": not entry.accepted,
                "drained": entry.gate == "drained",
                "ready": entry.state in (ModelState.READY, ModelState.FAILED),
                "gone": entry.state is ModelState.RELEASE_FAILED,
            }[until]

        entry = self.registry.get(name)
        if entry is not None and if_incarnation not in (0, entry.incarnation):
            raise IncarnationChanged(f"model {name!r} has incarnation {entry.incarnation}")
        with self.changed:
            if not self.changed.wait_for(there, timeout_s):
                raise WaitTimeout(f"model {name!r} is not {until}")
        return self.registry.get(name)


class ScriptedResidency:
    """`places` has what `model` answers; what moves weights waits for `gate` and is noted in `calls`."""

    mode = "externally_managed"
    on_demand = True

    def __init__(self) -> None:
        self.places: dict[str, SimpleNamespace] = {}
        self.calls: list[tuple] = []
        self.gate = threading.Event()
        self.gate.set()

    def model(self, name):
        return self.places.get(name)

    def require_room(self, name):
        self.calls.append(("room", name))

    def activate(self, name, *, moving):
        moving()
        self._move("activate", name)
        self.places[name].device_resident = True

    def require_deactivatable(self, name):
        if not self.on_demand:
            raise WrongState("all weights stay on the device", reason="fixed")
        if self.places[name].pinned or self.places[name].floor is Floor.DEVICE:
            raise WrongState(f"model {name!r} is pinned", reason="pinned")

    def deactivate(self, name, *, host=False):
        self._move("deactivate", name, host)

    def pin(self, name):
        self.places[name].pinned = True

    def unpin(self, name):
        self.places[name].pinned = False

    def set_floor(self, name, floor):
        self._move("floor", name, floor)
        self.places[name].floor = floor
        return floor

    def trim(self, target_bytes):
        if not self.on_demand:
            raise WrongState("all weights stay on the device", reason="fixed")
        self._move("trim", target_bytes)
        return 0

    def compact(self, reload=()):
        self._move("compact")

    def _move(self, *what):
        self.calls.append(what)
        assert self.gate.wait(WAIT)


class ScriptedPrograms:
    """Program sets that are what the test says; `error` is raised by everything."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.error: BaseException | None = None
        self.sets = [ProgramSet(1, "ready", "", "f1", "", 1.0)]
        self.selected = 1

    def _note(self, *what):
        self.calls.append(what)
        if self.error is not None:
            raise self.error

    def list(self, name):
        return ProgramList(self.selected, 4, tuple(self.sets))

    def stage(self, name, *, directory, base=0, sources=None, label="", wait=True, shadow=0.0):
        self._note("stage", name, directory, base, sources, label, wait, shadow)
        made = ProgramSet(len(self.sets) + 1, "ready" if wait else "pending", label, "f2", "", 2.0)
        self.sets.append(made)
        return made

    def select(self, name, program, expected, *, require_clean=False):
        self._note("select", name, program, expected, require_clean)
        previous, self.selected = self.selected, program
        return Selected(program, previous)

    def remove(self, name, program):
        self._note("remove", name, program)
        self.sets = [made for made in self.sets if made.id != program]
        return self.list(name)

    def shadow(self, name, program, percent, tolerances=None):
        self._note("shadow", name, program, percent, tolerances)
        record = ShadowRecord(percent, 1, 4, 1, 1, 0, {"y": float("inf"), "z": 0.5}, "y differs")
        return replace(self.sets[program - 1], shadow=record)


class ScriptedWatcher:
    def __init__(self) -> None:
        self.changes: list = []
        self.buried: set[str] = set()
        self.adopted: dict = {}

    def poll_now(self):
        return self.changes

    def tombstone(self, name):
        self.buried.add(name)

    def clear_tombstone(self, name):
        self.buried.discard(name)

    def adopt(self, name, path):
        self.adopted[name] = path
        self.buried.discard(name)
        return True

    def abandon(self, name):
        del self.adopted[name]


class Site:
    """One server: `put` gives it models, `post` and `get` speak HTTP to it, `do` is its administration."""

    def __init__(self, root: Path, *, mode: str = "explicit", token=None, serve: bool = True, **config) -> None:
        self.root = root
        self.config = ServerConfig.model_validate({"model_dirs": [str(root)], "model_control_mode": mode, **config})
        self.registry = Registry()
        self.registry.announce({})
        self.registrations = ScriptedRegistrations(self.registry)
        self.residency = ScriptedResidency()
        self.programs = ScriptedPrograms()
        self.events = EventLog()
        self.admission = Admission(self.config.endpoints.max_concurrent_requests, self.config.held_requests)
        self.operations = ParameterOperations(self.residency)
        self.watcher = ScriptedWatcher() if mode == "dynamic" else None
        self.lifecycle = Lifecycle(self.registry, "any")
        self.lifecycle.enter("serving")
        self.depth = (0, 0)
        self.warmed: list[str] = []
        self.moved: list[bool] = []
        parameters = Parameters(
            registry=self.registry,
            registrations=self.registrations,
            residency=self.residency,
            operations=self.operations,
            events=self.events,
            warm=self.warmed.append,
        )
        self.do = Administration(
            self.config,
            registry=self.registry,
            registrations=self.registrations,
            scheduler=SimpleNamespace(depth=lambda model: self.depth),
            lifecycle=self.lifecycle,
            admission=self.admission,
            residency=self.residency,
            parameters=parameters,
            programs=self.programs,
            reclaimer=Reclaimer(self.residency, None),
            status=SimpleNamespace(document=self._document, device=self._device),
            watcher=self.watcher,
            on_moved=lambda: self.moved.append(True),
        )
        self.port = 0
        self._listener = None
        if serve:
            routes = admin_http_routes(self.do, self.events, self.config, token=token)
            self._listener = HttpListener("127.0.0.1", 0, routes, threads=listener_threads(self.config))
            self.port = self._listener.bind()
            self._listener.start()

    def close(self) -> None:
        self.residency.gate.set()
        for future in self.registrations.preparations.values():
            future.cancel()
        if self._listener is not None:
            self._listener.stop()
        self.operations.close()
        self.operations.join()

    def put(self, name="net", state="ready", gate="open", *, accepted=0, pinned=False, floor=Floor.UNPINNED) -> Entry:
        """Register a model that is in `state` already."""
        incarnation = self.registry.next_incarnation()
        state = ModelState(state)
        if state in (ModelState.RETIRING, ModelState.RELEASE_FAILED):
            gate = "removing"
        prepared = None
        if state in (ModelState.READY, ModelState.RETIRING):
            prepared = prepared_model(name, incarnation, accepted)
            self.residency.places[name] = SimpleNamespace(pinned=pinned, floor=floor, device_resident=False)
        failure = Failure("compile", "ProgramError", "bad op") if state is ModelState.FAILED else None
        entry = Entry(
            name,
            self.root / name,
            state,
            gate=gate,
            incarnation=incarnation,
            prepared=prepared,
            failure=failure,
            manifest=None if prepared is None else prepared.model.manifest,
        )
        assert self.registry.add(entry)
        return entry

    def entry(self, name="net") -> Entry:
        return self.registry.find(name)

    def bundle(self, name="net") -> Path:
        """A directory that looks like a bundle from outside."""
        (self.root / name).mkdir()
        (self.root / name / "manifest.yaml").write_text(MANIFEST)
        return self.root / name

    def _document(self, model=""):
        entries = [self.registry.find(model)] if model else self.registry.entries()
        return WorkerStatus.model_construct(models=[{"name": entry.name} for entry in entries])

    def _device(self):
        return DeviceStatus.model_construct(device=0, weights_bytes=5)

    # --- HTTP -----------------------------------------------------------------------------------------------------

    def call(self, method, path, body=None, headers=None):
        """Status and parsed body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        with closing(connection):
            text = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, body=text, headers={**JSON, **(headers or {})})
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def post(self, path, _headers=None, **fields):
        return self.call("POST", f"/v1/{path}", fields, _headers)

    def get(self, path):
        return self.call("GET", f"/v1/{path}")

    def until(self, condition):
        """Wait for what has no event to wait for."""
        for _ in range(WAIT * 200):
            if condition():
                return
            time.sleep(0.005)
        raise AssertionError("the condition did not come true")


def prepared_model(name, incarnation, accepted=0):
    tensor = SimpleNamespace(name="x", dtype=DType("f32"), wire_shape=(-1, 3))
    manifest = SimpleNamespace(
        kind="model", is_meta=False, wire_inputs=(tensor,), wire_outputs=(replace_name(tensor, "y"),)
    )
    model = SimpleNamespace(
        name=name,
        incarnation=incarnation,
        manifest=manifest,
        batch_keys_by_variant={(): (1, 8)},
        weights=SimpleNamespace(nbytes=24),
    )
    gate = Accepted()
    for number in range(accepted):
        gate.enter(f"request {number}")
    return SimpleNamespace(model=model, accepted=gate)


def replace_name(tensor, name):
    return SimpleNamespace(**{**vars(tensor), "name": name})


__all__ = ["JSON", "Site", "UnknownModel", "WAIT"]
