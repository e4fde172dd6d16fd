"""The models of a running server: real programs on the CPU, requests without a transport, no watcher."""

import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from support.bundles import write_affine
from support.calls import FakeCall

from rsrv.bundle.digests import seal
from rsrv.core.config import EndpointsConfig, HooksConfig, RuntimeConfig, ServerConfig
from rsrv.core.config.sections import AdminConfig, AdmissionConfig, ReloadConfig
from rsrv.core.errors import (
    BundleError,
    CapacityFull,
    IncarnationChanged,
    InvalidRequest,
    ModelFailed,
    ModelUnloaded,
    NameTaken,
    ServerStopping,
    UnknownModel,
    WaitTimeout,
    WrongState,
)
from rsrv.core.wire import decode_response, encode_request, join
from rsrv.serve import register_heartbeat, serve, unregister_heartbeat
from rsrv.serve.registry import ModelState, Settings
from rsrv.serve.renaming import Move
from rsrv.serve.residency.floors import Floor

WAIT = 60
SLOW = """
import threading
entered, gate = threading.Event(), threading.Event()

def preprocess(inputs):
    entered.set()
    gate.wait(60)
    return {"x": inputs["x"] + OFFSET}
"""


def hooks(offset):
    return SLOW.replace("OFFSET", str(offset))


class World:
    def __init__(self, tmp_path, cache, **sections):
        self.tmp = tmp_path
        self.repo = tmp_path / "repo"
        self.repo.mkdir()
        self.sections = {"cache_dir": str(cache), **sections}
        self.server = None

    def bundle(self, name="m", scale=2.0, shift=1.0, hook=None, where=None):
        directory = (where or self.repo) / name
        if directory.exists():
            shutil.rmtree(directory)
        write_affine(directory, scale=scale, shift=shift, batch_sizes=(1, 4), hooks=hook)
        return directory

    def start(self):
        self.server = serve(
            ServerConfig(
                model_dirs=[str(self.repo)],
                model_control_mode="static",
                endpoints=EndpointsConfig(grpc_port=0, http_port=None, max_concurrent_requests=8),
                **self.sections,
            ),
            blocking=False,
        )
        self.do = self.server.live.registrations
        self.registry = self.server.registry
        return self

    def close(self):
        if self.server is not None:
            for entry in self.registry.entries():
                self.open_gates(entry)
            self.server.stop(5.0)

    def open_gates(self, entry):
        if entry.prepared is not None and entry.prepared.hooks.preprocess is not None:
            gate = entry.prepared.hooks.preprocess.__globals__.get("gate")
            if gate is not None:
                gate.set()

    def hook(self, name="m"):
        """What the hooks of the incarnation that serves have at module level."""
        return SimpleNamespace(**self.registry.prepared(name).hooks.preprocess.__globals__)

    def infer(self, x=1.0, model="m", **kw):
        """One request, answered; y[0]."""
        return y(FakeCall(body(x, model, **kw)).serve(self.server._inference.handle))

    def begin(self, x=1.0, model="m", deadline_ns=0, metadata=None, **kw):
        call = FakeCall(body(x, model, **kw), deadline_ns=deadline_ns)
        call.metadata = metadata or {}
        thread = threading.Thread(target=call.serve, args=(self.server._inference.handle,), kwargs={"seconds": WAIT})
        thread.start()
        call.join = thread.join
        return call

    def ready(self, name="m"):
        self.do.prepare(name).result(WAIT)
        return self.registry.find(name)

    def gone(self, name="m"):
        assert self.do.wait(name, "gone", WAIT) is None


def body(x, model, **kw):
    return join(encode_request(model, [("x", np.full((1, 3), x, np.float32))], **kw))


def y(call):
    if call.error is not None:
        raise call.error
    return float(decode_response(call.message).array("y")[0, 0])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def make(tmp_path, cache):
    worlds = []

    def make(**sections):
        worlds.append(World(tmp_path, cache, **sections))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def world(make):
    world = make()
    world.bundle()
    return world.start()


# --- registering ----------------------------------------------------------------------------------------------------


def test_a_bundle_that_is_registered_is_prepared_and_serves(world):
    entry = world.do.register("n", world.bundle("n", scale=5, where=world.tmp), settings=Settings(weight=3.0))
    assert (entry.state, entry.gate, entry.source) == (ModelState.PREPARING, "open", "api")
    assert world.ready("n").incarnation == entry.incarnation > world.registry.find("m").incarnation
    assert world.infer(2, "n") == 2 * 5 + 1
    assert world.server.scheduler.stats()["n"].weight == 3.0


def test_registered_drained_means_that_nothing_but_the_manifest_is_read(world):
    directory = world.bundle("n", where=world.tmp)
    for file in directory.iterdir():
        if file.name != "manifest.yaml":
            file.unlink()
    entry = world.do.register("n", directory, admission="drained")
    assert (entry.state, entry.gate) == (ModelState.REGISTERED, "drained")
    assert entry.manifest.executable_inputs[0].name == "x"
    world.bundle("n", scale=7, where=world.tmp)
    assert world.do.undrain("n").state is ModelState.PREPARING
    world.ready("n")
    assert world.infer(1, "n") == 8


@pytest.mark.parametrize(
    ("name", "directory", "error", "text"),
    [
        ("m", "repo/m", NameTaken, "a model 'm' is registered already"),
        ("n", "nowhere/n", InvalidRequest, "there is no manifest.yaml"),
        ("n", "repo/m", InvalidRequest, "a model has the name of its directory"),
        ("a/b", "repo/a/b", BundleError, "a/b"),
    ],
)
def test_what_cannot_be_registered_changes_nothing(world, name, directory, error, text):
    before = world.registry.entries()
    with pytest.raises(error, match=text):
        world.do.register(name, world.tmp / directory)
    assert world.registry.entries() == before
    assert world.infer() == 3


def test_a_broken_bundle_fails_alone_and_both_who_wait_for_it_hear_why(world):
    directory = world.bundle("n")
    (directory / "model.b1.mlir").write_bytes(b"nonsense")
    world.do.register("n", directory)
    outcomes = [world.do.prepare("n"), world.do.prepare("n")]
    for outcome in outcomes:
        with pytest.raises(ModelFailed, match=r"model 'n' failed \(digests: .*model.b1.mlir"):
            outcome.result(WAIT)
    assert world.registry.find("n").state is ModelState.FAILED
    until(lambda: world.do.failures["n"] == 1)
    assert world.infer() == 3
    world.bundle("n", scale=4)
    assert world.do.retry("n").state is ModelState.PREPARING
    world.ready("n")
    assert world.infer(1, "n") == 5
    with pytest.raises(WrongState, match="only one that failed is tried again"):
        world.do.retry("n")


def test_who_waits_hears_of_a_failure_though_the_model_is_tried_again_at_once(world):
    directory = world.bundle("n")
    (directory / "model.b1.mlir").write_bytes(b"nonsense")
    gate = threading.Event()
    world.do._posts.put(lambda: gate.wait(WAIT))  # who tells those that wait comes to it late
    outcomes = []
    for begin in (lambda: world.do.register("n", directory), lambda: world.do.retry("n")):
        begin()
        outcomes.append(world.do.prepare("n"))
        until(lambda: world.registry.find("n").state is ModelState.FAILED)
    gate.set()
    for outcome in outcomes:
        with pytest.raises(ModelFailed, match=r"model 'n' failed \(digests: .*model.b1.mlir"):
            outcome.result(WAIT)
    until(lambda: world.do.failures["n"] == 2)


def test_there_is_room_for_so_many_models_and_a_failed_one_counts(make):
    world = make(admin=AdminConfig(model_capacity=2))
    world.bundle()
    broken = world.bundle("broken")
    (broken / "model.b1.mlir").unlink()
    world.start()
    directory = world.bundle("n", where=world.tmp)
    with pytest.raises(CapacityFull, match=r"2 models are, at most 2 may be"):
        world.do.register("n", directory)
    world.do.unregister("broken")
    world.do.register("n", directory)
    assert world.ready("n").state is ModelState.READY


def test_calls_for_another_incarnation_are_refused(world):
    incarnation = world.registry.find("m").incarnation
    for method in ("drain", "undrain", "retry", "prepare", "unregister"):
        with pytest.raises(IncarnationChanged, match=f"incarnation {incarnation} now; the call is for 999"):
            getattr(world.do, method)("m", if_incarnation=999)
        with pytest.raises(UnknownModel):
            getattr(world.do, method)("nobody")
    assert world.do.drain("m", if_incarnation=incarnation).gate in ("draining", "drained")


# --- gates ----------------------------------------------------------------------------------------------------------


def test_a_gate_drains_until_the_last_of_its_requests_is_done(make):
    world = make()
    world.bundle(hook=hooks(0))
    world.start()
    calls = [world.begin(x) for x in (1, 2)]
    entry = world.registry.find("m")
    while entry.accepted < 2:
        pass
    assert world.do.drain("m").gate == "draining"
    assert world.do.drain("m").gate == "draining"
    assert world.registry.find("m").reason == "draining"
    with pytest.raises(WaitTimeout, match=r"is not drained yet: it is ready, its gate draining, with 2 requests"):
        world.do.wait("m", "drained", 0.05)
    world.hook().gate.set()
    assert world.do.wait("m", "drained", WAIT).gate == "drained"
    for call in calls:
        call.join(WAIT)
    assert sorted(map(y, calls)) == [3, 5]
    assert world.do.undrain("m").gate == "open"
    assert world.do.undrain("m").gate == "open"
    assert world.infer(4) == 9


def test_a_request_whose_caller_is_gone_is_counted_until_its_hook_has_ended(make):
    world = make()
    world.bundle(hook=hooks(0))
    world.start()
    call = world.begin()
    assert world.hook().entered.wait(WAIT)
    call.cancel()
    call.join(WAIT)
    assert world.do.drain("m").gate == "draining"
    world.hook().gate.set()
    assert world.do.wait("m", "drained", WAIT).gate == "drained"


@pytest.mark.parametrize(("asks", "error"), [({}, None), ({"rsrv_hold": False}, "admission_closed")])
def test_requests_wait_at_a_closed_gate_unless_they_say_otherwise(world, asks, error):
    world.do.drain("m")
    call = world.begin(5, parameters=asks)
    if error:
        call.join(WAIT)
        assert (call.reason, world.server.admission.held) == (error, 0)
        assert "rsrv ctl undrain m" in call.error.hint
        return
    until(lambda: world.server.admission.held == 1)
    assert world.server.admission.in_flight == 0
    world.do.undrain("m")
    call.join(WAIT)
    assert y(call) == 11


def test_what_a_gateway_may_send_elsewhere_waits_only_when_the_client_asks_for_it(world):
    world.do.drain("m")
    call = world.begin(5, metadata={"x-rsrv-failover": "1"})
    call.join(WAIT)
    assert call.reason == "admission_closed"
    call = world.begin(5, metadata={"x-rsrv-failover": "1"}, parameters={"rsrv_hold": True})
    until(lambda: world.server.admission.held == 1)
    world.do.undrain("m")
    call.join(WAIT)
    assert y(call) == 11


def test_requests_for_a_model_that_is_only_registered_wait_for_its_preparation(world):
    world.do.register("n", world.bundle("n", scale=6, where=world.tmp), admission="drained")
    call = world.begin(1, "n")
    until(lambda: world.server.admission.held == 1)
    world.do.undrain("n")
    call.join(WAIT)
    assert y(call) == 7


def test_those_that_wait_hear_that_the_preparation_failed(world):
    directory = world.bundle("n", where=world.tmp)
    (directory / "weights.safetensors").unlink()
    world.do.register("n", directory, admission="drained")
    call = world.begin(1, "n")
    until(lambda: world.server.admission.held == 1)
    world.do.undrain("n")
    call.join(WAIT)
    assert (call.reason, "weights.safetensors" in call.error.message) == ("failed", True)
    with pytest.raises(WrongState) as refused:
        world.do.undrain("n")
    assert refused.value.reason == "failed"


def test_those_that_wait_hear_that_the_model_is_removed(world):
    world.do.drain("m")
    calls = [world.begin(), world.begin(parameters={"rsrv_hold": True})]
    until(lambda: world.server.admission.held == 2)
    world.do.unregister("m")
    for call in calls:
        call.join(WAIT)
        assert call.reason == "removing"
    world.gone()


def test_as_many_wait_as_there_are_places(make):
    world = make(admission=AdmissionConfig(held_requests=1))
    world.bundle()
    world.start()
    world.do.drain("m")
    first = world.begin()
    until(lambda: world.server.admission.held == 1)
    second = world.begin()
    second.join(WAIT)
    assert second.reason == "held_full"
    first.cancel()
    first.join(WAIT)
    assert world.server.admission.held == 0


def test_a_request_that_waits_keeps_its_deadline(world):
    world.do.drain("m")
    call = world.begin(parameters={"rsrv_timeout_ns": 30_000_000})
    call.join(WAIT)
    assert (call.reason, "waited for model 'm'" in call.error.message) == ("deadline", True)


def test_requests_for_a_model_that_is_being_prepared_are_refused_unless_they_are_to_wait(make, monkeypatch):
    from rsrv.serve.loading import Loader

    gate, compile_model = threading.Event(), Loader._compile
    world = make(admission=AdmissionConfig(hold="always"))
    world.bundle()
    world.start()
    monkeypatch.setattr(Loader, "_compile", lambda *args: gate.wait(WAIT) and compile_model(*args))
    world.do.register("n", world.bundle("n", scale=9, where=world.tmp))
    refused = world.begin(1, "n", parameters={"rsrv_hold": False})
    refused.join(WAIT)
    assert refused.reason == "preparing"
    held = world.begin(1, "n")
    until(lambda: world.server.admission.held == 1)
    gate.set()
    held.join(WAIT)
    assert y(held) == 10


# --- reloading ------------------------------------------------------------------------------------------------------


def test_a_reload_serves_what_the_directory_has_now(world):
    before = world.registry.find("m")
    world.bundle(scale=10)
    entry = world.do.reload("m").result(WAIT)
    assert entry.incarnation > before.incarnation
    assert world.infer(1) == 11
    assert world.do.reloads["m"] == 1
    until(lambda: not world.do._retirements.count("m"))
    assert before.prepared.model.weights.buffers == ()


def test_programs_that_did_not_change_are_not_compiled_and_weights_that_did_not_are_not_read(world, caplog):
    before = world.registry.prepared("m").model
    (world.repo / "m" / "model.py").write_text("def postprocess(outputs): return {'y': outputs['y'] + 100}\n")
    caplog.set_level("INFO")
    world.do.reload("m").result(WAIT)
    after = world.registry.prepared("m").model
    assert world.infer(1) == 103
    assert after.weights is before.weights
    assert after.programs[()][1] is before.programs[()][1]
    assert "programs=shared:2" in caplog.text
    assert "compiling" not in caplog.text
    until(lambda: not world.do._retirements.count("m"))
    assert world.infer(2) == 105


@pytest.mark.parametrize("file", ["manifest.yaml", "model.b4.mlir", "weights.safetensors", "model.py"])
def test_a_reload_that_fails_leaves_what_serves_and_says_why(world, file):
    before = world.registry.find("m")
    good = world.tmp / "good"
    shutil.copytree(world.repo / "m", good)
    (world.repo / "m" / file).write_text("not: [a")
    with pytest.raises(Exception, match=r"."):
        world.do.reload("m").result(WAIT)
    entry = world.registry.find("m")
    assert (entry.state, entry.incarnation, world.infer(1)) == (ModelState.READY, before.incarnation, 3)
    assert file in entry.pending.message
    assert (entry.reason, world.do.failures["m"]) == ("", 1)
    shutil.rmtree(world.repo / "m")
    shutil.copytree(good, world.repo / "m")
    world.do.reload("m").result(WAIT)
    assert world.registry.find("m").pending is None


def test_requests_finish_on_the_version_that_prepared_them(make):
    world = make()
    world.bundle(scale=2, hook=hooks(100))
    world.start()
    old = world.hook()
    call = world.begin(1)
    assert old.entered.wait(WAIT)
    world.bundle(scale=3, hook=hooks(1000))
    world.do.reload("m").result(WAIT)
    world.hook().gate.set()
    assert world.infer(1) == 1001 * 3 + 1
    assert world.do._retirements.count("m") == 1
    old.gate.set()
    call.join(WAIT)
    assert y(call) == 101 * 2 + 1
    until(lambda: not world.do._retirements.count("m"))


def test_a_request_of_the_first_version_finishes_though_later_ones_with_the_same_weights_ended_before_it(make):
    world = make()
    world.bundle(hook=hooks(0))
    world.start()
    first, weights = world.hook(), world.registry.prepared("m").model.weights
    call = world.begin(5)
    assert first.entered.wait(WAIT)
    for number in (1, 2):
        (world.repo / "m" / "model.py").write_text(f"def postprocess(outputs): return {{'y': outputs['y'] + {number}}}")
        world.do.reload("m").result(WAIT)
        assert world.registry.prepared("m").model.weights is weights
    world.bundle(scale=7)
    world.do.reload("m").result(WAIT)
    until(lambda: world.do._retirements.count("m") == 1)
    assert world.infer(1) == 8
    first.gate.set()
    call.join(WAIT)
    assert y(call) == 11
    until(lambda: not world.do._retirements.count("m"))
    assert weights.buffers == ()


def test_a_model_is_gone_when_the_last_request_is_done_though_that_is_one_of_the_version_before(make):
    world = make()
    world.bundle(hook=hooks(0))
    world.start()
    first, weights = world.hook(), world.registry.prepared("m").model.weights
    call = world.begin(5)
    assert first.entered.wait(WAIT)
    (world.repo / "m" / "model.py").unlink()
    world.do.reload("m").result(WAIT)
    world.do.unregister("m")
    until(lambda: world.do._retirements.count("m") == 1)
    first.gate.set()
    call.join(WAIT)
    assert y(call) == 11
    world.gone()
    assert weights.buffers == ()


def test_files_that_differ_from_their_manifest_are_told_for_every_version_and_of_that_alone(world):
    (world.repo / "m" / "model.py").write_text("def postprocess(outputs): return {'y': outputs['y'] + 4}\n")
    world.do.reload("m").result(WAIT)
    until(lambda: world.registry.find("m").modified == ("model.py",))
    seal(world.repo / "m")
    world.do.reload("m").result(WAIT)
    assert world.registry.find("m").modified == ()
    world.do.register("n", world.bundle("n", where=world.tmp))
    (world.tmp / "n" / "vocab.txt").write_text("new")
    world.ready("n")
    until(lambda: world.registry.find("n").modified == ("vocab.txt",))
    assert world.registry.find("m").modified == ()


@pytest.mark.parametrize("file", ["manifest.yaml", "model.b4.mlir", "weights.safetensors", "model.py", "vocab.txt"])
def test_files_of_two_versions_never_make_one_model(world, monkeypatch, file):
    """A writer comes back while the bundle is read, after the programs and before the hooks."""
    from rsrv.serve.loading import Loader

    directory, compile_model = world.repo / "m", Loader._compile
    (directory / "vocab.txt").write_text("one")
    seal(directory)

    def write_and_compile(self, opened, *args):
        (directory / "next").write_bytes((directory / file).read_bytes() if (directory / file).exists() else b"")
        (directory / "next").replace(directory / file)
        return compile_model(self, opened, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Loader, "_compile", write_and_compile)
        with pytest.raises(BundleError, match=f"{file} changed while the bundle was being read"):
            world.do.reload("m").result(WAIT)
    assert world.registry.find("m").pending.phase == "hooks"
    assert world.infer(1) == 3
    (directory / "model.py").unlink(missing_ok=True)
    seal(directory)
    world.do.reload("m").result(WAIT)
    assert world.registry.find("m").pending is None


def test_hooks_may_write_files_beside_those_of_the_bundle_and_a_backup_may_link_to_them(world):
    writes = "import os, pathlib\nhere = pathlib.Path(__file__).parent\n(here / 'log.txt').write_text('x')\n"
    writes += f"os.link(here / 'weights.safetensors', {str(world.tmp / 'backup')!r})\n"
    (world.repo / "m" / "model.py").write_text(writes + "def postprocess(outputs): return {'y': outputs['y'] + 4}\n")
    world.do.reload("m").result(WAIT)
    assert world.infer(1) == 7


def test_with_the_policy_reject_requests_of_the_old_version_are_refused(make):
    world = make(reload=ReloadConfig(policy="reject"))
    world.bundle(scale=2, hook=hooks(100))
    world.start()
    old = world.hook()
    call = world.begin(1)
    assert old.entered.wait(WAIT)
    world.bundle(scale=3, hook=hooks(1000))
    world.do.reload("m").result(WAIT)
    old.gate.set()
    call.join(WAIT)
    assert call.reason == "unloaded"
    world.hook().gate.set()
    assert world.infer(1) == 1001 * 3 + 1


def test_with_the_policy_evict_first_the_old_weights_are_freed_before_the_new_ones_come(make, monkeypatch):
    world = make(reload=ReloadConfig(policy="evict_first"))
    world.bundle()
    world.start()
    old, seen = world.registry.prepared("m").model.weights, []
    residency = world.server.residency
    open_weights = residency.open

    def open_and_look(*args, **kw):
        seen.append(old.buffers)
        return open_weights(*args, **kw)

    assert old.buffers
    monkeypatch.setattr(residency, "open", open_and_look)
    world.bundle(scale=8)
    world.do.reload("m").result(WAIT)
    assert seen == [()]
    assert world.infer(1) == 9


def test_a_reload_at_a_closed_gate_leaves_it_closed(world):
    world.do.drain("m")
    world.bundle(scale=4)
    world.do.reload("m").result(WAIT)
    assert world.registry.find("m").gate == "drained"
    call = world.begin(1, parameters={"rsrv_hold": False})
    call.join(WAIT)
    assert call.reason == "admission_closed"
    world.do.undrain("m")
    assert world.infer(1) == 5


def test_the_floor_and_the_weight_of_a_registration_outlive_a_reload(world):
    world.do.register("n", world.bundle("n", where=world.tmp), settings=Settings(weight=2.5, max_batch_size=1))
    world.ready("n")
    world.bundle("n", scale=4, where=world.tmp)
    world.do.reload("n").result(WAIT)
    stats = world.server.scheduler.stats()["n"]
    assert (stats.weight, stats.max_batch_size, world.infer(1, "n")) == (2.5, 1, 5)


def test_a_floor_that_was_set_by_hand_outlives_a_reload(make):
    world = make(runtime=RuntimeConfig(backend="cpu", device_memory_bytes=1 << 20))
    world.bundle()
    world.start()
    residency = world.server.residency
    assert residency.model("m").floor is Floor.UNPINNED
    residency.set_floor("m", Floor.DEVICE)
    world.bundle(scale=4)
    world.do.reload("m").result(WAIT)
    assert residency.model("m").floor is Floor.DEVICE
    assert world.infer(1) == 5


def test_bundles_whose_hooks_hang_at_import_hold_up_no_other(world):
    gate = world.tmp / "gate"
    hanging = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    hanging += "def preprocess(inputs): return inputs\n"
    for name in ("a", "b", "c", "d"):
        world.do.register(name, world.bundle(name, hook=hanging, where=world.tmp))
    world.bundle(scale=5)
    world.do.reload("m").result(30)
    assert world.infer(1) == 6
    assert {world.registry.find(name).state for name in "abcd"} == {ModelState.PREPARING}
    gate.touch()
    for name in "abcd":
        world.ready(name)


# --- renaming -------------------------------------------------------------------------------------------------------


def test_a_model_gets_another_name_with_everything_that_it_has(make):
    world = make()
    world.bundle(hook=hooks(0))
    world.start()
    before = world.registry.find("m")
    queued = world.begin(1)
    assert world.hook().entered.wait(WAIT)
    (world.repo / "m").rename(world.repo / "n")
    entry = world.do.rename("m", "n", world.repo / "n")
    assert (entry.incarnation, entry.path) == (before.incarnation, world.repo / "n")
    assert entry.prepared.model.programs is before.prepared.model.programs
    assert entry.prepared.model.weights is before.prepared.model.weights
    with pytest.raises(UnknownModel):
        world.infer()
    world.hook("n").gate.set()
    queued.join(WAIT)
    assert (y(queued), decode_response(queued.message).model_name) == (3, "m")
    assert world.infer(2, "n") == 5
    assert world.server.counters.snapshot("n").success_count == 2
    assert "m" not in world.server.scheduler.stats()
    world.bundle("n", scale=6)
    world.do.reload("n").result(WAIT)
    assert world.infer(1, "n") == 7


def test_a_name_that_is_taken_is_not_given_again(world):
    world.do.register("n", world.bundle("n", scale=4, where=world.tmp))
    world.ready("n")
    with pytest.raises(NameTaken, match="a model 'n' is registered already"):
        world.do.rename("m", "n", world.repo / "n")
    with pytest.raises(UnknownModel):
        world.do.rename("nobody", "x", world.repo / "x")
    assert (world.infer(1), world.infer(1, "n")) == (3, 5)


def test_those_that_wait_at_the_gate_come_along_with_the_name(world):
    world.do.drain("m")
    call = world.begin(1)
    until(lambda: world.server.admission.held == 1)
    world.do.rename("m", "n", world.repo / "n")
    assert world.registry.find("n").gate == "drained"
    world.do.undrain("n")
    call.join(WAIT)
    assert y(call) == 3


@pytest.mark.parametrize(
    ("moves", "scales"),
    [
        ([("m", "old"), ("n", "m")], {"old": 2, "m": 5}),
        ([("m", ".m"), ("n", "m"), (".m", "n")], {"n": 2, "m": 5}),
    ],
    ids=["promotion", "swap"],
)
def test_a_name_that_goes_from_one_model_to_another_is_known_all_the_time(world, monkeypatch, moves, scales):
    world.do.register("n", world.bundle("n", scale=5, where=world.tmp))
    world.ready("n")
    assert [world.infer(1), world.infer(1, "n"), world.infer(1, "n")] == [3, 6, 6]
    before = {entry.incarnation: entry for entry in world.registry.entries()}
    rename, known = world.server.scheduler.rename, []

    def rename_and_look(old, model):
        rename(old, model)
        known.append(sorted(entry.name for entry in world.registry.entries()))
        # What is asked now is answered by the model that had the name, of which nobody knows yet that it has another.
        assert [world.infer(1), world.infer(1, "n")] == [3, 6]

    monkeypatch.setattr(world.server.scheduler, "rename", rename_and_look)
    world.do.rename_all([Move(old, new, world.repo / new) for old, new in moves])
    assert known == [["m", "n"]] * len(moves)
    assert {entry.name: entry.path for entry in world.registry.entries()} == {n: world.repo / n for n in scales}
    for name, scale in scales.items():
        assert world.infer(1, name) == scale + 1
        entry = world.registry.find(name)
        assert entry.prepared.model.weights is before[entry.incarnation].prepared.model.weights
        assert world.server.residency.model(name) is not None
    told = [
        (event.model, event.old, event.new) for event in world.server.live.events.read(0)[0] if event.type == "name"
    ]
    assert sorted(told) == sorted(
        (new, old, new) for old, new in {"m": "old" if "old" in scales else "n", "n": "m"}.items()
    )


def test_of_several_renames_none_happens_when_the_last_one_finds_its_weights_name_taken(world, monkeypatch):
    world.do.register("n", world.bundle("n", scale=5, where=world.tmp))
    world.ready("n")
    assert (world.infer(1), world.infer(1, "n")) == (3, 6)
    rename = world.server.residency.rename

    def taken(weights, name, **kw):
        if weights.name == "n":
            raise NameTaken("weights of that name are there")
        rename(weights, name, **kw)

    before = world.registry.entries()
    with monkeypatch.context() as patch:
        patch.setattr(world.server.residency, "rename", taken)
        with pytest.raises(NameTaken, match="weights of that name"):
            world.do.rename_all([Move("m", "old", world.repo / "old"), Move("n", "m", world.repo / "m")])
    assert world.registry.entries() == before
    assert (world.infer(1), world.infer(1, "n")) == (3, 6)
    assert set(world.server.scheduler.stats()) == {"m", "n"}
    assert [world.server.counters.snapshot(name).success_count for name in "mn"] == [2, 2]
    world.do.rename_all([Move("m", "old", world.repo / "old"), Move("n", "m", world.repo / "m")])
    assert (world.infer(1, "old"), world.infer(1)) == (3, 6)


@pytest.mark.parametrize("last", [("nobody", "x"), ("n", "m"), ("n", "a/b")])
def test_of_several_renames_none_happens_when_one_is_not_possible(world, last):
    world.do.register("n", world.bundle("n", scale=5, where=world.tmp))
    world.ready("n")
    before = world.registry.entries()
    moves = [("m", "a"), ("a", "m"), last]
    with pytest.raises((UnknownModel, NameTaken, BundleError)):
        world.do.rename_all([Move(old, new, world.repo / new) for old, new in moves])
    assert world.registry.entries() == before
    assert (world.infer(1), world.infer(1, "n")) == (3, 6)
    assert set(world.server.scheduler.stats()) == {"m", "n"}


# --- removing -------------------------------------------------------------------------------------------------------


def test_a_model_that_is_removed_finishes_its_requests_and_frees_everything(make):
    world = make()
    world.bundle(hook=hooks(0))
    world.start()
    call = world.begin(1)
    assert world.hook().entered.wait(WAIT)
    weights, gate = world.registry.prepared("m").model.weights, world.hook().gate
    entry = world.do.unregister("m")
    assert (entry.state, entry.gate) == (ModelState.RETIRING, "removing")
    late = world.begin(1)
    late.join(WAIT)
    assert late.reason == "removing"
    for refused in (world.do.drain, world.do.undrain, world.do.retry, world.do.prepare):
        with pytest.raises(WrongState):
            refused("m")
    with pytest.raises(NameTaken):
        world.do.register("m", world.repo / "m")
    gate.set()
    call.join(WAIT)
    assert y(call) == 3
    world.gone()
    assert weights.buffers == ()
    assert world.registry.entries() == []
    assert world.server.residency.model("m") is None
    assert "m" not in world.server.scheduler.stats()
    world.do.register("m", world.bundle(scale=9))
    world.ready()
    assert world.infer(1) == 10


def test_who_waits_until_a_model_is_gone_waits_for_its_account_and_its_counters_too(world):
    leaving, let_go, told, on_gone = threading.Event(), threading.Event(), threading.Event(), world.do.on_gone

    def slowly(name):
        leaving.set()
        assert let_go.wait(WAIT)
        on_gone(name)

    world.do.on_gone = slowly
    gone = world.do.gone("m")
    gone.add_done_callback(lambda gone: told.set())
    waiting = threading.Thread(target=lambda: (world.gone(), told.set()))
    waiting.start()
    world.do.unregister("m")
    try:
        assert leaving.wait(WAIT)
        assert world.registry.entries() == []
        assert not told.wait(0.1)
    finally:
        let_go.set()
    gone.result(WAIT)
    waiting.join(WAIT)
    assert not waiting.is_alive()


def test_a_removal_can_be_made_an_abort(make):
    world = make()
    world.bundle(hook=hooks(0))
    world.start()
    call = world.begin(1)
    assert world.hook().entered.wait(WAIT)
    gate = world.hook().gate
    world.do.unregister("m")
    world.do.unregister("m", mode="abort")
    call.join(WAIT)
    assert call.reason == "unloaded"
    world.do.unregister("m")  # not back
    gate.set()
    world.gone()


def test_a_model_that_is_removed_while_it_is_prepared_never_serves(world, monkeypatch):
    from rsrv.serve.loading import Loader

    gate, entered, compile_model = threading.Event(), threading.Event(), Loader._compile

    def gated(*args):
        entered.set()
        gate.wait(WAIT)
        return compile_model(*args)

    monkeypatch.setattr(Loader, "_compile", gated)
    directory = world.bundle("n", scale=4, where=world.tmp)
    first = world.do.register("n", directory)
    outcome = world.do.prepare("n")
    assert entered.wait(WAIT)
    world.do.unregister("n")
    assert world.registry.get("n") is None
    with pytest.raises(ModelUnloaded):
        outcome.result(WAIT)
    again = world.do.register("n", directory)
    assert again.incarnation > first.incarnation
    gate.set()
    assert world.ready("n").incarnation == again.incarnation
    assert world.infer(1, "n") == 5


def test_a_release_that_fails_keeps_the_model_for_another_try(world, monkeypatch):
    residency = world.server.residency
    close = residency.close_model
    monkeypatch.setattr(residency, "close_model", lambda weights: (_ for _ in ()).throw(OSError("busy")))
    world.do.unregister("m")
    entry = world.do.wait("m", "gone", WAIT)
    assert (entry.state, entry.failure.phase) == (ModelState.RELEASE_FAILED, "release")
    assert "busy" in entry.reason
    with pytest.raises(WrongState):
        world.do.drain("m")
    monkeypatch.setattr(residency, "close_model", close)
    assert world.do.unregister("m").state is ModelState.RETIRING
    world.gone()


def test_hooks_that_hang_too_often_fail_the_model_and_a_retry_serves_again(make):
    world = make(hooks=HooksConfig(timeout_seconds=0.05, max_lost=1))
    world.bundle(hook=hooks(0))
    world.start()
    hung = world.hook().gate
    call = world.begin(1)
    call.join(WAIT)
    until(lambda: world.registry.find("m").state is ModelState.FAILED)
    assert "did not return in time" in world.registry.find("m").reason
    (world.repo / "m" / "model.py").unlink()
    world.do.retry("m")
    world.ready()
    assert world.infer(1) == 3
    hung.set()


# --- what is told ---------------------------------------------------------------------------------------------------


def test_heartbeats_and_events_tell_what_happened(world):
    told = []
    register_heartbeat(heartbeat := lambda event, detail: told.append((event, detail)))
    try:
        world.do.register("n", world.bundle("n", where=world.tmp))
        world.ready("n")
        until(lambda: ("load", "n") in told)
        world.do.rename("n", "o", world.tmp / "o")
        world.do.unregister("o")
        world.gone("o")
    finally:
        unregister_heartbeat(heartbeat)
    assert told == [("load", "n"), ("unload", "n"), ("load", "o"), ("unload", "o")]
    events, _ = world.server.live.events.read(0, "n")
    assert [(e.type, e.old, e.new) for e in events] == [
        ("registration", "", "preparing"),
        ("registration", "preparing", "ready"),
    ]
    events, _ = world.server.live.events.read(0, "o")
    assert [(e.type, e.old, e.new) for e in events] == [
        ("name", "n", "o"),
        ("registration", "ready", "retiring"),
        ("admission", "open", "removing"),
        ("registration", "retiring", "gone"),
    ]


def test_a_reload_that_the_stop_of_the_server_ends_is_no_failure(make, caplog):
    world = make()
    world.bundle()
    world.start()
    (world.repo / "m" / "model.py").write_text(
        "import threading\nthreading.Event().wait()\ndef preprocess(inputs): return inputs\n"
    )
    caplog.set_level("INFO")
    reloading = world.do.reload("m")
    until(lambda: any(thread.name == "rsrv-import m" for thread in threading.enumerate()))
    world.server.stop(5.0)
    with pytest.raises(ServerStopping):
        reloading.result(WAIT)
    assert world.do.failures["m"] == 0
    assert "model not reloaded name=m phase=hooks reason=stopping" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_server_that_stops_refuses_those_that_wait_and_lets_a_retiring_model_go(make):
    world = make()
    world.bundle(hook=hooks(0))
    world.bundle("n")
    world.start()
    running = world.begin(1)
    assert world.hook().entered.wait(WAIT)
    world.do.unregister("m")
    world.do.drain("n")
    waiting = world.begin(1, "n")
    until(lambda: world.server.admission.held == 1)
    world.server.stop(0.0)
    for call in (running, waiting):
        call.join(WAIT)
        assert call.reason == "stopping"


def until(condition):
    event = threading.Event()
    for _ in range(6000):
        if condition():
            return
        event.wait(0.01)
    raise AssertionError("it did not become true within a minute")
