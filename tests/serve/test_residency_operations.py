"""Activate, deactivate, pin and trim: by hand, one operation per model, while requests go on."""

import threading
from collections import deque

import numpy as np
import pytest
from residency_support import LONG, NBYTES, Gate, affine, in_background

from rsrv.bundle.safetensors import write_weights
from rsrv.core.errors import DeviceOutOfMemory, NotResident, ServerStopping, UnknownModel, WrongState
from rsrv.runtime.fake import FakeDevice
from rsrv.serve.residency.floors import Floor
from rsrv.serve.residency.manager import Residency
from rsrv.serve.residency.operations import OperationError, ParameterOperations, ParameterState
from rsrv.serve.residency.tensors import TensorPool, open_weights
from rsrv.serve.scheduler import Scheduler

IDLE = ParameterState()


class Told:
    """What `on_change` was told, and a wait for the end of an operation."""

    def __init__(self):
        self.changes = deque()
        self._ended = threading.Semaphore(0)

    def __call__(self, name, old, new, error):
        self.changes.append((name, old, new, error))
        if new == "idle":
            self._ended.release()

    def wait(self):
        assert self._ended.acquire(timeout=LONG)

    @property
    def steps(self):
        return [(name, new) for name, _, new, _ in self.changes]


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def operate(told):
    made = []

    def make(here):
        made.append((ParameterOperations(here.residency, on_change=told), here))
        return made[-1][0]

    yield make
    for operations, here in made:
        operations.close()
        here.residency.close()
        here.scheduler.stop()
        here.residency.stop()
        operations.join()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("rsrv-parameters")]


@pytest.fixture
def fixed(tmp_path):
    """A residency whose weights stay for good."""
    here = FakeDevice()
    residency = Residency(here, Scheduler(here), None, TensorPool(here))
    write_weights(tmp_path / "w", [("w", np.ones(4, np.float32))])
    residency.open("a", open_weights(tmp_path / "w"), floor=None, scratch_bytes=0)
    yield residency
    residency.free()


# --- what residency does ----------------------------------------------------------------------------------------------


def test_weights_are_activated_and_others_leave_for_them(either):
    here = either(2)
    here.add("a", "b", "c")
    here.serve("a", "b")
    here.residency.activate("c")
    assert here.resident == "bc"
    here.residency.activate("c")
    assert len(here.device.transfers) == 3
    here.is_consistent()


def test_weights_that_pinned_models_leave_no_room_for_can_never_come(either):
    here = either(1)
    here.add("p", "a")
    here.residency.pin("p")
    here.residency.require_room("a")
    here.residency.activate("p")
    for call in (here.residency.activate, here.residency.require_room):
        with pytest.raises(DeviceOutOfMemory, match="'a'"):
            call("a")
    here.residency.require_room("p")
    here.is_consistent()


def test_an_activation_waits_for_the_room_that_running_work_will_give(either):
    here = either(1)
    running = Gate(affine)
    here.add("a", fn=running)
    here.add("b")
    reply = here.ask("a")
    running.wait_entered()
    moving = threading.Event()
    activated = in_background(lambda: here.residency.activate("b", moving=moving.set))
    here.settle()
    assert not moving.is_set()
    assert here.models["a"].weights.buffers, "freed under a running execution"
    running.open()
    activated()
    assert moving.is_set()
    here.is_answered(reply)
    assert here.resident == "b"
    here.is_consistent()


@pytest.mark.parametrize("host", [False, True])
def test_a_deactivated_model_leaves_the_device_and_the_next_request_brings_it_back(either, host):
    here = either()
    here.add("a", "b")
    here.serve("a", "b")
    here.residency.deactivate("a", host=host)
    seen = here.residency.model("a")
    assert (here.resident, seen.committed_bytes) == ("b", 0)
    kept = not host and not here.device.unified
    assert seen.host_bytes == (NBYTES if kept else 0)
    assert seen.floor is (Floor.UNPINNED if here.device.unified else Floor.SYSTEM), "the floor is what it was"
    assert here.counted == (2, 0), "no eviction"
    here.residency.deactivate("a", host=host)
    here.is_consistent()
    here.serve("a")
    assert here.residency.model("a").host_bytes == (0 if here.device.unified else NBYTES), "the copy is there again"
    here.is_consistent()


def test_the_host_copy_of_a_cold_model_is_dropped_by_hand(site):
    here = site(unified=False)
    here.add("a")
    assert here.residency.model("a").host_bytes == NBYTES
    here.residency.deactivate("a", host=True)
    assert here.residency.model("a").host_bytes == 0
    here.serve("a")
    here.is_consistent()


def test_a_deactivation_waits_for_the_batch_that_runs(either):
    here = either()
    running = Gate(affine)
    here.add("a", fn=running)
    reply = here.ask("a")
    running.wait_entered()
    freed = in_background(here.residency.deactivate, "a")
    while not here.residency.model("a").releasing:
        here.settle()
    assert here.models["a"].weights.buffers, "freed under a running execution"
    seen = here.residency.model("a")
    assert (seen.device_resident, seen.releasing, seen.committed_bytes) == (False, True, NBYTES)
    running.open()
    freed()
    here.is_answered(reply)
    assert here.device.weight_bytes == 0
    assert not here.residency.model("a").releasing
    here.is_consistent()


def test_pinned_weights_are_neither_deactivated_nor_evicted_until_they_are_unpinned(either):
    here = either(2)
    here.add("a", "b", "c")
    here.residency.pin("a")
    assert here.residency.model("a").pinned
    here.serve("a", "b", "c")
    assert here.resident == "ac"
    with pytest.raises(WrongState, match="'a' are pinned") as refused:
        here.residency.deactivate("a")
    assert refused.value.reason == "pinned"
    here.residency.unpin("a")
    assert not here.residency.model("a").pinned
    here.residency.deactivate("a")
    assert here.resident == "c"
    here.is_consistent()


def test_weights_with_a_floor_on_the_device_are_not_deactivated(either):
    here = either()
    here.add("a", floor=Floor.DEVICE)
    with pytest.raises(WrongState, match="floor is 'device'") as refused:
        here.residency.deactivate("a")
    assert refused.value.reason == "pinned"
    assert here.resident == "a"


def test_a_pin_that_comes_before_the_turn_of_a_deactivation_wins(either):
    here = either()
    here.add("a", "b")
    here.serve("a")
    with here.device.held_transfers() as gate:
        reply = here.ask("b")
        gate.wait_entered()
        freed = in_background(here.residency.deactivate, "a")
        while not here.residency._moves._orders:
            here.settle()
        here.residency.pin("a")
    with pytest.raises(WrongState, match="pinned"):
        freed()
    here.is_answered(reply)
    assert here.resident == "ab"
    here.is_consistent()


def test_a_model_can_be_pinned_from_the_start_and_before_it_is_on_the_device(either):
    here = either(2)
    here.add("a", "b")
    here.write("p")
    weights = here.residency.open("p", open_weights(here.path("p")), floor=None, scratch_bytes=0, pinned=True)
    assert here.residency.model("p").pinned
    assert here.residency.snapshot().models["p"].pinned
    here.residency.activate("p")
    here.serve("a", "b")
    assert here.residency.model("p").device_resident
    here.residency.close_model(weights)
    here.is_consistent()


@pytest.mark.parametrize(("target", "stay"), [(0, "pq"), (2, "pq"), (3, "dpq"), (4, "cdpq"), (9, "acdpq")])
def test_a_trim_evicts_the_least_recently_used_first_and_never_what_is_pinned(either, target, stay):
    here = either()
    here.add("p", floor=Floor.DEVICE)
    here.add("a", "q", "c", "d")
    here.residency.pin("q")
    here.serve("a", "q", "c", "d")
    left = here.residency.trim(target * NBYTES)
    assert (here.resident, left) == (stay, len(stay) * NBYTES)
    assert here.residency.snapshot().evicts["trim"] == 5 - len(stay)
    assert here.residency.snapshot().budget.arena == 10 * NBYTES
    here.is_consistent()
    here.serve("a", "c")


def test_a_trim_leaves_what_is_running_and_what_came_for_requests_that_wait(either):
    here = either()
    running = Gate(affine)
    here.add("a", fn=running)
    here.add("b", "c")
    here.serve("c")
    reply = here.ask("a")
    running.wait_entered()
    waits = here.ask("b")
    while here.resident != "abc":
        here.settle()
    assert here.residency.trim(0) == 2 * NBYTES
    assert here.resident == "ab"
    running.open()
    here.is_answered(reply, waits)
    assert here.residency.trim(0) == 0
    here.is_consistent()


def test_where_weights_stay_for_good_they_are_active_and_fixed(fixed):
    fixed.activate("a")
    fixed.require_room("a")
    fixed.pin("a")
    assert fixed.model("a").pinned
    fixed.unpin("a")
    for call in (fixed.deactivate, fixed.trim):
        with pytest.raises(WrongState, match="do not come and go") as refused:
            call("a")
        assert refused.value.reason == "fixed"
    assert fixed.model("a").device_resident
    assert fixed.reclaim(parameter_idle_s=1e-9, host_idle_s=1e-9) == []


@pytest.mark.parametrize("call", ["activate", "deactivate", "pin", "unpin", "require_room", "require_deactivatable"])
def test_nobody_moves_weights_of_a_model_that_is_not_there(either, call):
    here = either()
    with pytest.raises(UnknownModel, match="'x'"):
        getattr(here.residency, call)("x")


def test_in_explicit_mode_requests_wait_for_an_activation_and_are_refused_after_a_deactivation(site):
    here = site(mode="externally_managed")
    here.add("a")
    with here.device.held_transfers() as gate:
        activated = in_background(here.residency.activate, "a")
        gate.wait_entered()
        reply = here.ask("a")
        here.settle()
    activated()
    here.is_answered(reply)
    here.residency.deactivate("a")
    assert isinstance(here.ask("a").wait().error, NotResident)
    here.is_consistent()


# --- operations -------------------------------------------------------------------------------------------------------


def test_an_activation_goes_through_its_states_and_warms_the_model_at_the_end(either, operate, told):
    here = either(1)
    running = Gate(affine)
    here.add("a", fn=running)
    here.add("b")
    operations = operate(here)
    reply = here.ask("a")
    running.wait_entered()
    warmed = []

    def warm():
        warmed.append((here.residency.model("b").device_resident, operations.state("b").operation))

    assert operations.activate("b", warm).operation == "waiting"
    assert operations.busy("b")
    assert not operations.busy("a")
    here.settle()
    assert operations.state("b").operation == "waiting"
    running.open()
    told.wait()
    here.is_answered(reply)
    assert warmed == [(True, "activating")]
    assert operations.state("b") == IDLE
    assert told.steps == [("b", "waiting"), ("b", "activating"), ("b", "idle")]
    here.is_consistent()


def test_what_is_active_already_is_active_at_once(either, operate, told):
    here = either()
    here.add("a")
    here.serve("a")
    operate(here).activate("a", lambda: None)
    told.wait()
    assert len(here.device.transfers) == 1


def test_a_model_is_prepared_before_its_weights_are_brought(either, operate, told):
    here = either()
    operations = operate(here)
    prepared = threading.Event()

    def prepare():
        assert prepared.wait(LONG)
        here.add("a")

    operations.activate("a", lambda: None, prepare=prepare)
    assert operations.state("a").operation == "waiting"
    prepared.set()
    told.wait()
    assert here.resident == "a"


def test_a_deactivation_is_told_and_ends(either, operate, told):
    here = either()
    here.add("a")
    here.serve("a")
    operations = operate(here)
    operations.deactivate("a", host=True)
    told.wait()
    assert told.steps == [("a", "deactivating"), ("a", "idle")]
    assert (here.resident, here.residency.model("a").host_bytes) == ("", 0)
    here.is_consistent()


@pytest.mark.parametrize("first", ["activate", "deactivate"])
@pytest.mark.parametrize("second", ["activate", "deactivate"])
def test_a_model_has_one_operation_at_a_time_and_others_are_free(either, operate, told, first, second):
    here = either()
    running = Gate(affine)
    here.add("a", fn=running)
    here.add("b")
    operations = operate(here)
    calls = {
        "activate": lambda name: operations.activate(name, lambda: held.wait(LONG)),
        "deactivate": operations.deactivate,
    }
    held = threading.Event()
    reply = here.ask("a")
    running.wait_entered()
    calls[first]("a")
    with pytest.raises(WrongState, match="under way") as refused:
        calls[second]("a")
    assert refused.value.reason == "operation_pending"
    if first == "activate":
        operations.deactivate("b")
        told.wait()
    held.set()
    running.open()
    told.wait()
    here.is_answered(reply)
    calls[second]("a")
    told.wait()


@pytest.mark.parametrize("failing", ["prepare", "load", "warm"])
def test_an_operation_that_fails_is_idle_again_and_its_error_stays_until_the_next(
    either, operate, told, caplog, failing
):
    here = either()
    here.add("a")
    operations = operate(here)

    def fail():
        raise DeviceOutOfMemory(f"no room to {failing}")

    if failing == "load":
        here.device.failures = [DeviceOutOfMemory("no room to load")] * 2
    operations.activate(
        "a", fail if failing == "warm" else lambda: None, prepare=fail if failing == "prepare" else None
    )
    told.wait()
    phase = "waiting" if failing == "prepare" else "activating"
    error = OperationError(phase, "DeviceOutOfMemory", f"no room to {failing}")
    assert operations.state("a") == ParameterState("idle", error)
    assert not operations.busy("a")
    assert told.changes[-1] == ("a", phase, "idle", error)
    assert "parameter operation failed model=a" in caplog.text
    here.is_consistent()
    operations.activate("a", lambda: None)
    told.wait()
    assert operations.state("a") == IDLE
    assert here.resident == "a"


def test_what_can_never_work_is_refused_at_once_and_is_no_operation(either, operate, told, fixed):
    here = either(1)
    here.add("p", floor=Floor.DEVICE)
    here.add("a")
    operations = operate(here)
    with pytest.raises(DeviceOutOfMemory):
        operations.activate("a", lambda: None)
    with pytest.raises(WrongState, match="floor") as pinned:
        operations.deactivate("p")
    with pytest.raises(UnknownModel):
        operations.deactivate("x")
    with pytest.raises(UnknownModel):
        operations.activate("x", lambda: None)
    assert pinned.value.reason == "pinned"
    others = ParameterOperations(fixed)
    with pytest.raises(WrongState, match="come and go") as refused:
        others.deactivate("a")
    assert refused.value.reason == "fixed"
    others.close()
    others.join()
    assert not told.changes
    assert all(operations.state(name) == IDLE for name in "apx")


def test_an_operation_follows_the_name_of_its_model_and_is_forgotten_with_it(either, operate, told):
    here = either()
    m = here.add("a")
    operations, held, entered = operate(here), threading.Event(), threading.Event()

    def warm():
        entered.set()
        assert held.wait(LONG)

    operations.activate("a", warm)
    assert entered.wait(LONG)
    here.residency.rename(m.weights, "z", floor=None)
    operations.rename("a", "z")
    operations.rename("nobody", "b")
    assert operations.state("a") == IDLE
    assert operations.busy("z")
    held.set()
    told.wait()
    assert told.changes[-1][:3] == ("z", "activating", "idle")
    here.models["z"] = here.models.pop("a")
    held.clear()
    entered.clear()
    operations.activate("z", warm)
    assert entered.wait(LONG)
    operations.forget("z")
    n = len(told.changes)
    assert operations.state("z") == IDLE
    held.set()
    operations.close()
    operations.join()
    assert len(told.changes) == n


def test_a_server_that_stops_ends_its_operations_and_begins_no_others(either, operate, told):
    here = either()
    here.add(*"abcdefghijklmnopqrst")
    operations, held = operate(here), threading.Event()
    for name in here.models:
        operations.activate(name, lambda: held.wait(LONG))
    operations.close()
    here.add("new")
    with pytest.raises(ServerStopping):
        operations.activate("new", lambda: None)
    held.set()
    here.residency.close()
    here.scheduler.stop()
    here.residency.stop()
    operations.join()
    assert not any(map(operations.busy, here.models))


def test_requests_whose_weights_were_sent_away_and_ordered_back_hold_up_nobody(either):
    here = either(3)
    running = Gate(affine)
    here.add("r", fn=running)
    here.add("s", "x")
    here.add("y", nbytes=3 * NBYTES)
    replies = [here.ask("r")]
    running.wait_entered()
    replies += [here.ask("s"), here.ask("x")]
    while here.resident != "rsx":
        here.settle()
    here.residency.deactivate("x")
    with here.device.held_transfers() as gate:
        back = in_background(here.residency.activate, "x")
        gate.wait_entered()
        running.open()
        here.is_answered(*replies[:2])
        here.settle()
        other = in_background(here.residency.activate, "y")
        while not here.residency._moves._orders:
            here.settle()
    back()
    other()
    here.is_answered(*replies)
    here.is_consistent()
