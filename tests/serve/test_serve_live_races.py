"""What goes wrong only when two things happen at once to a model of a running server; here they do, by arrangement."""

import ast
import threading
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest
from support.calls import FakeCall
from test_serve_registrations import WAIT, World, body, hooks, y

from rsrv.bundle import hookfile
from rsrv.core.config import RuntimeConfig
from rsrv.core.config.sections import FakeDeviceConfig, ReloadConfig
from rsrv.core.errors import HookError, ModelUnloaded, NameTaken, ServerStopping, UnknownModel, WaitTimeout, WrongState
from rsrv.serve.gate import Accepted
from rsrv.serve.loading.warmup import Warmup
from rsrv.serve.registry import ModelState

BUDGET = {"runtime": RuntimeConfig(device_memory_bytes=1 << 20)}
X = {"x": np.ones((1, 3), np.float32)}


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


@pytest.fixture(params=[{}, BUDGET], ids=["resident", "budget"])
def world(make, request):
    world = make(**request.param)
    world.bundle()
    return world.start()


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_request_that_is_cancelled_while_it_enters_leaves_its_model(world, monkeypatch):
    world.do.drain("m")
    call = FakeCall(body(1, "m", parameters={"rsrv_hold": True}))
    thread = threading.Thread(target=call.serve, args=(world.server._inference.handle,))
    thread.start()
    while not world.server.admission.held:
        pass
    enter = Accepted.enter

    def cancelled(accepted, request):
        entered = enter(accepted, request)
        if entered:
            call.cancel()
        return entered

    monkeypatch.setattr(Accepted, "enter", cancelled)
    world.do.undrain("m")
    thread.join(WAIT)
    assert call.cancelled
    assert call.ends == 0
    assert world.registry.find("m").accepted == 0
    world.do.unregister("m")
    world.gone()


def test_a_request_that_is_aborted_while_it_is_queued_leaves_its_model(world, monkeypatch):
    scheduler, accepted = world.server.scheduler, world.registry.prepared("m").accepted

    def submit(*_):
        for request in accepted.requests():
            request.fail(ModelUnloaded("aborted"))
        raise ModelUnloaded("its queue is closed")

    monkeypatch.setattr(scheduler, "submit", submit)
    with pytest.raises(ModelUnloaded, match="aborted"):
        world.infer()
    assert len(accepted) == 0


# --- the end of incarnations ------------------------------------------------------------------------------------------


def test_a_removed_model_is_gone_also_when_the_version_before_ends_last(world):
    world.bundle(hook=hooks(10))
    world.do.reload("m").result(WAIT)
    before = world.hook()
    call = world.begin()
    assert before.entered.wait(WAIT)
    world.bundle(scale=5)
    world.do.reload("m").result(WAIT)
    world.do.unregister("m")
    while world.do._retirements.count("m") > 1:
        pass
    before.gate.set()
    call.join(WAIT)
    assert y(call) == (1 + 10) * 2 + 1
    world.gone()
    assert world.server.residency.resident_bytes == 0


def test_weights_are_not_freed_while_a_warm_up_runs_on_them(world):
    weights = world.registry.prepared("m").model.weights
    assert world.infer() == 3  # so they are there
    assert world.server.scheduler.hold(weights)
    world.do.unregister("m")
    with pytest.raises(WaitTimeout):
        world.do.wait("m", "gone", 0.1)
    assert weights.placed is not None
    assert not world.server.scheduler.hold(weights)
    world.server.scheduler.release(weights)
    world.gone()
    assert weights.placed is None


def test_who_comes_too_late_for_weights_that_were_removed_is_refused(world):
    model = world.registry.prepared("m").model
    world.do.unregister("m")
    world.gone()
    # Another model has the name by now.
    world.do.register("m", world.bundle(scale=9))
    world.ready()
    scheduler, results = world.server.scheduler, SimpleQueue()
    late = replace(model, name="m/late", incarnation=-(1 << 50))
    scheduler.add(late)
    scheduler.submit(late, X, 1, (), 0, results.put)
    assert isinstance(results.get(timeout=WAIT).error, ModelUnloaded)
    scheduler.remove(late.name)
    assert world.infer() == 10


def test_a_model_whose_hooks_are_lost_after_it_was_renamed_is_failed(world):
    incarnation = world.registry.find("m").incarnation
    world.do.rename("m", "n", world.bundle("n"))
    world.do.fail_hooks(incarnation, HookError("lost"))
    assert world.registry.find("n").state is ModelState.FAILED


def test_a_rename_to_a_name_whose_weights_are_still_on_their_way_out_changes_nothing(world, monkeypatch):
    def taken(*_, **__):
        raise NameTaken("weights of that name are there")

    with monkeypatch.context() as patch:
        patch.setattr(world.server.residency, "rename", taken)
        with pytest.raises(NameTaken):
            world.do.rename("m", "n", world.bundle("n"))
    assert world.infer() == 3
    assert [*world.server.scheduler.stats()] == ["m"]
    world.do.rename("m", "n", world.bundle("n"))
    assert world.infer(model="n") == 3


def test_after_a_reload_that_evicted_first_the_weights_have_the_name_of_the_model(make):
    world = make(reload=ReloadConfig(policy="evict_first"), **BUDGET)
    world.bundle()
    world.start()
    world.bundle(scale=5)
    world.do.reload("m").result(WAIT)
    assert world.server.residency.model("m") is not None
    world.server.residency.deactivate("m")
    world.server.residency.activate("m")
    world.server.residency.pin("m")
    assert world.infer() == 6


# --- program sets -----------------------------------------------------------------------------------------------------


def test_a_set_that_is_selected_while_its_model_is_removed_is_refused(world, monkeypatch):
    programs = world.server.live.programs
    made = programs.stage("m", directory=world.bundle(where=world.tmp))
    monkeypatch.setattr(programs, "_reserve", lambda model: world.do.unregister("m"))
    with pytest.raises((WrongState, UnknownModel)):
        programs.select("m", made.id, 1)
    world.gone()


def test_a_set_of_the_version_before_is_not_selected_for_the_next_one(world, monkeypatch):
    programs = world.server.live.programs
    made = programs.stage("m", directory=world.bundle(where=world.tmp))
    world.do.on_ending = lambda name, incarnation: None  # so late that nobody has heard of the reload
    ready = programs._ready

    def reloaded(name):
        found = ready(name)
        world.bundle(scale=7)
        world.do.reload("m").result(WAIT)
        return found

    before = world.registry.find("m").incarnation
    with monkeypatch.context() as patch:
        patch.setattr(programs, "_ready", reloaded)
        with pytest.raises(WrongState, match="loaded again"):
            programs.select("m", made.id, 1)
    entry = world.registry.find("m")
    assert entry.incarnation > before
    assert world.infer() == 8
    assert programs.list("m").selected == 1


def test_the_end_of_a_version_does_not_drop_the_sets_of_the_next_one(world):
    programs = world.server.live.programs
    programs.stage("m", directory=world.bundle(where=world.tmp))
    incarnation = world.registry.find("m").incarnation
    programs.drop("m", incarnation + 1)
    assert [each.id for each in programs.list("m").programs] == [1, 2]
    programs.drop("m", incarnation)
    assert [each.id for each in programs.list("m").programs] == [1]


# --- small parts ------------------------------------------------------------------------------------------------------


def test_a_model_may_be_warmed_up_twice_at_a_time(make, monkeypatch):
    # Where the device is a card, warm-ups are stand-ins in the scheduler.
    monkeypatch.setenv("RSRV_ALLOW_FAKE", "1")
    world = make(runtime=RuntimeConfig(backend="fake", fake=FakeDeviceConfig(memory_bytes=1 << 20)))
    world.bundle()
    world.start()
    world.infer()  # so that the weights are there
    model = world.registry.prepared("m").model
    warmup = Warmup(world.server.scheduler, world.server.device)
    run, inner = Warmup._run_in_turn, []

    def twice(self, *args):
        if not inner:
            inner.append(True)
            warmup._measure_in_turn(model)
        return run(self, *args)

    monkeypatch.setattr(Warmup, "_run_in_turn", twice)
    monkeypatch.setattr(world.server.scheduler, "warmed", lambda *_: False)
    warmup._measure_in_turn(model)
    assert inner
    assert [*world.server.scheduler.stats()] == ["m"]


def test_hook_files_are_parsed_one_at_a_time(monkeypatch):
    parse = ast.parse

    def alone(*args, **kw):
        assert hookfile._parsing.locked()
        return parse(*args, **kw)

    monkeypatch.setattr(ast, "parse", alone)
    assert hookfile.parse_hooks(b"def preprocess(inputs):\n    return inputs\n", file="model.py").functions


def test_a_server_stops_while_an_operator_waits_for_a_preparation_that_ends_because_of_that(world, monkeypatch):
    world.do.register("n", world.bundle("n", where=world.tmp), admission="drained")
    loader, entered, stopping = world.server._loader, threading.Event(), world.server._stopping

    def compile_(*_):
        entered.set()
        assert stopping.wait(WAIT)
        raise ServerStopping("the server is stopping")

    monkeypatch.setattr(loader, "_compile", compile_)
    world.server.live.parameters.activate(world.registry.find("n"), allow_open=False)
    assert entered.wait(WAIT)
    stop = threading.Thread(target=world.server.stop, args=(1.0,), daemon=True)
    stop.start()
    stop.join(WAIT)
    assert not stop.is_alive()
    with pytest.raises(ServerStopping):
        world.do._preparations.settled(world.registry.find("n")).result(WAIT)


def test_a_server_does_not_wait_for_programs_that_are_being_compiled_for_a_set(world, monkeypatch):
    pool, entered, source = world.server.pool, threading.Event(), world.server.live.programs._source

    def load(*_):
        entered.set()
        while not pool._closed:
            pass
        raise ServerStopping("the compile pool is closed")

    monkeypatch.setattr(source, "load", load)
    world.server.live.programs.stage("m", directory=world.bundle(where=world.tmp), wait=False)
    assert entered.wait(WAIT)
    stop = threading.Thread(target=world.server.stop, args=(1.0,), daemon=True)
    stop.start()
    stop.join(WAIT)
    assert not stop.is_alive()


def test_reloads_that_had_no_turn_before_the_end_are_refused(world, monkeypatch):
    entered, stopping = threading.Event(), world.server._stopping

    def run(*_):
        entered.set()
        assert stopping.wait(WAIT)
        raise ServerStopping("the server is stopping")

    monkeypatch.setattr(world.do._exchange, "run", run)
    outcomes = [world.do.reload("m") for _ in range(world.do._threads._max_workers + 1)]
    assert entered.wait(WAIT)
    world.server.stop(1.0)
    for outcome in outcomes:
        assert isinstance(outcome.exception(WAIT), (ServerStopping, WrongState))
