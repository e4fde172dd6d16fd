"""Weights on demand: loads for requests, who leaves for whom, what runs meanwhile, and loads that fail."""

import os

import pytest
from residency_support import NBYTES, Device, Gate, affine, in_background

from rsrv.core.errors import (
    Cancelled,
    DeadlineExceeded,
    DeviceOutOfMemory,
    InvalidRequest,
    ModelUnloaded,
    NotResident,
    WeightsUnavailable,
)
from rsrv.serve.residency.floors import Floor
from rsrv.serve.scheduler.policy import ModelPolicy, Policy

# --- loads and evictions ----------------------------------------------------------------------------------------------


def test_a_cold_model_is_loaded_once_and_not_again(either):
    here = either()
    here.add("a")
    assert here.resident == ""
    here.serve("a", "a", "a")
    assert (here.resident, here.counted) == ("a", (1, 0))
    assert here.device.transfers == [NBYTES]
    here.is_consistent()


def test_with_a_budget_for_one_the_first_leaves_before_the_second_comes(either):
    here = either(1)
    here.add("a", "b")
    here.serve("a", "b")
    assert (here.resident, here.counted) == ("b", (2, 1))
    assert here.device.weight_bytes == here.device.most_weight_bytes == NBYTES
    here.is_consistent()


def test_the_least_recently_used_leaves(either):
    here = either(3)
    here.add("a", "b", "c", "d")
    here.serve("a", "b", "c", "a", "d")
    assert here.resident == "acd"
    here.serve("b")
    assert here.resident == "abd"
    here.is_consistent()


def test_cost_keeps_what_is_asked_for_most(site):
    loads = []
    here = site(2, eviction="cost", on_load=lambda name, seconds: loads.append(name))
    clock = here.clock

    class Slow(Device):
        def put(self, array, *, alias=False):
            clock.advance(0.001)
            return super().put(array, alias=alias)

    here.device.__class__ = Slow
    here.add("a", "b", "c")
    here.serve("a", "a", "a", "b", "c", "b", "c")
    assert loads == ["a", "b", "c", "b", "c"], "LRU would have evicted a"
    assert here.resident == "ac"


def test_pinned_weights_are_not_touched_and_their_load_is_counted(either):
    here = either(2)
    here.add("p", floor=Floor.DEVICE)
    here.add("q", "r")
    assert here.resident == "p"
    here.serve("q", "p", "r", "p")
    assert (here.resident, here.counted) == ("pr", (3, 1))
    assert here.residency.snapshot().pinned_bytes == NBYTES
    here.is_consistent()


def test_a_model_larger_than_the_budget_is_served_alone_with_a_warning(site, caplog):
    here = site(2, unified=False, wiggle=0.9)
    here.add("a", nbytes=NBYTES)
    here.add("b", nbytes=NBYTES // 16)
    here.serve("b", "a")
    assert here.resident == "a"
    assert "model exceeds budget name=a" in caplog.text
    here.serve("b")
    assert here.resident == "b"
    here.is_consistent()


def test_with_a_host_copy_a_load_does_not_need_the_file(site):
    here = site(1, unified=False)
    here.add("a", "b")
    assert here.residency.model("a").host_resident
    here.path("a").write_bytes(b"\xff" * here.path("a").stat().st_size)
    here.serve("a", "b", "a")
    assert here.counted == (3, 2)


# --- what runs meanwhile ----------------------------------------------------------------------------------------------


def test_others_are_answered_while_a_load_is_under_way(either):
    here = either()
    here.add("a", "b")
    here.serve("a")
    with here.device.held_transfers() as gate:
        cold = here.ask("b")
        gate.wait_entered()
        here.serve("a", "a", "a")
        assert not cold.settled
    here.is_answered(cold)


def test_a_load_begins_while_an_execution_runs(either):
    here = either()
    running = Gate(affine)
    here.add("a", fn=running)
    here.add("b")
    first = here.ask("a")
    running.wait_entered()
    with here.device.held_transfers() as gate:
        second = here.ask("b")
        gate.wait_entered()
        assert not first.settled
    running.open()
    here.is_answered(first, second)


def test_requests_that_come_while_their_model_loads_run_as_one_batch(either):
    here = either()
    here.add("a")
    with here.device.held_transfers() as gate:
        replies = [here.ask("a", 0)]
        gate.wait_entered()
        replies += [here.ask("a", value) for value in range(1, 8)]
    here.is_answered(*replies)
    assert here.scheduler.stats()["a"].batch_keys == {8: 1}
    assert here.counted == (1, 0)


def test_a_batching_window_does_not_delay_what_waited_for_its_weights(site):
    policy = Policy(discipline="fifo", models={"a": ModelPolicy(max_wait_ns=10**15)})
    here = site(policy=policy)
    here.add("a")
    full = [here.ask("a", value) for value in range(8)]
    here.is_answered(*full)
    here.add("b")
    here.serve("b")
    with here.device.held_transfers():
        here.residency.compact()
        again = [here.ask("a", value) for value in range(8)]
        more = here.ask("a", 8)
    here.is_answered(*again)
    here.scheduler.hurry()
    here.is_answered(more)


def test_nobody_wakes_for_a_window_that_closes_while_a_batch_is_staged(site, monkeypatch):
    here = site(policy=Policy(discipline="fifo", models={"w": ModelPolicy(max_wait_ns=1000)}))
    running = Gate(affine)
    here.add("a", fn=running)
    here.add("b", "w")
    here.serve("b")
    here.residency.set_floor("w", Floor.DEVICE)
    replies = [here.ask("a")]
    running.wait_entered()
    replies.append(here.ask("b"))
    here.settle()
    until, sleep = [], here.scheduler._dispatcher._sleep
    monkeypatch.setattr(
        here.scheduler._dispatcher, "_sleep", lambda until_ns: until.append(until_ns) or sleep(until_ns)
    )
    replies.append(here.ask("w"))
    here.scheduler.command(lambda: here.clock.advance(1))
    here.settle()
    assert set(until) <= {None}
    running.open()
    here.is_answered(*replies)


@pytest.mark.parametrize("discipline", ["fifo", "edf", "fair"])
def test_two_models_with_constant_traffic_share_a_budget_for_one(either, discipline):
    here = either(1, policy=Policy(discipline=discipline))
    here.add("a", "b")
    for _ in range(15):
        here.is_answered(*[here.ask(name, value) for value in range(5) for name in "ab"])
    assert here.device.most_weight_bytes == NBYTES
    assert here.counted[0] <= 2 * 15 + 2
    here.is_consistent()


def test_a_victim_leaves_when_its_last_batch_has_ended_and_gets_no_new_one(either):
    here = either(1)
    running = Gate(affine)
    here.add("a", fn=running)
    here.add("b")
    first = here.ask("a")
    running.wait_entered()
    other = here.ask("b")
    here.settle()
    assert here.resident == ""
    late = here.ask("a", 5)
    here.settle()
    assert not here.scheduler.hold(here.models["a"].weights)
    assert here.device.transfers == [NBYTES], "the load waits"
    assert here.device.weight_bytes == NBYTES
    running.open(2)
    here.is_answered(first, other, late)
    assert here.device.launched == ["a", "b", "a"]
    assert here.device.most_weight_bytes == NBYTES
    here.is_consistent()


def test_what_was_loaded_stays_until_it_was_used(site):
    here = site(1, policy=Policy(discipline="edf"))
    running = Gate(affine)
    here.add("p", fn=running, floor=Floor.DEVICE, nbytes=16)
    here.add("a", "b", nbytes=NBYTES - 16)
    first = here.ask("p")
    running.wait_entered()
    fresh = here.ask("a")
    here.settle()
    while here.resident != "ap":
        here.settle()
    # Staged behind the running batch; b has to wait for both.
    blocked = here.ask("b")
    here.settle()
    running.open()
    here.is_answered(first, fresh, blocked)
    assert here.device.launched == ["p", "a", "b"]
    assert here.counted == (3, 1)


# --- requests that go away --------------------------------------------------------------------------------------------


def test_a_cancelled_and_an_expired_request_leave_while_their_weights_come(site):
    here = site()
    here.add("a", "b")
    with here.device.held_transfers() as gate:
        dropped = here.ask("a", 1)
        gate.wait_entered()
        expired = here.ask("a", 2, deadline_ns=here.clock.ns + 1000)
        stays = here.ask("a", 3)
        dropped.ticket.cancel()
        here.clock.advance(1)
        here.scheduler.hurry()
        here.settle()
        assert isinstance(dropped.error(), Cancelled)
        assert isinstance(expired.error(), DeadlineExceeded)
    here.is_answered(stays)
    assert here.scheduler.stats()["a"].dropped["deadline"] == 1


def test_the_deadline_of_a_request_for_cold_weights_passes_on_an_idle_server(site, monkeypatch):
    here = site()
    here.add("a")
    with here.device.held_transfers() as gate:
        here.ask("a", 1).ticket  # noqa: B018
        gate.wait_entered()
        asleep, sleep = [], here.scheduler._dispatcher._sleep

        def passing(until_ns):
            if until_ns is not None:
                asleep.append(until_ns)
                here.clock.ns = until_ns
            sleep(until_ns)

        monkeypatch.setattr(here.scheduler._dispatcher, "_sleep", passing)
        expired = here.ask("a", 2, deadline_ns=here.clock.ns + 10**9)
        assert isinstance(expired.error(), DeadlineExceeded)
        assert len(asleep) == 1


@pytest.mark.parametrize("way", ["cancel", "expire", "remove"])
def test_protection_ends_when_nobody_wants_the_loaded_weights_any_more(site, way):
    here = site(1)
    running = Gate(affine)
    here.add("p", fn=running, floor=Floor.DEVICE, nbytes=16)
    here.add("s", floor=Floor.DEVICE, nbytes=16)
    here.add("a", "b", nbytes=NBYTES - 32)
    first = here.ask("p")
    running.wait_entered()
    with here.device.held_transfers() as gate:
        gone = here.ask("a", deadline_ns=here.clock.ns + 1000)
        gate.wait_entered()
        staged = here.ask("s")  # takes the slot before the device, so that a stays unused
        here.settle()
    while "a" not in here.resident:
        here.settle()
    wants = here.ask("b")
    if way == "remove":
        here.remove("a")
        assert isinstance(gone.error(), ModelUnloaded)
    elif way == "cancel":
        gone.ticket.cancel()
    else:
        here.clock.advance(1)
    running.open()
    here.is_answered(first, staged, wants)
    if way != "remove":
        assert isinstance(gone.error(), Cancelled if way == "cancel" else DeadlineExceeded)
    assert "a" not in here.device.launched


@pytest.mark.parametrize("discipline", ["fifo", "edf", "fair"])
@pytest.mark.parametrize("cancelled", [False, True])
def test_requests_to_be_run_alone_wait_for_weights_that_left_meanwhile(site, discipline, cancelled):
    here = site(1, policy=Policy(discipline=discipline))

    def poisonous(x, w):
        if (x == 13).any():
            raise InvalidRequest("unlucky number")
        return affine(x, w)

    running = Gate(poisonous)
    here.add("a", fn=running, keys=(4,))
    here.add("b")
    head = here.ask("a", 1)
    running.wait_entered()
    together = [here.ask("a", value) for value in (2, 13, 3)]
    running.open()
    running.wait_entered()
    other = here.ask("b")
    here.settle()
    with here.device.held_transfers() as gate:
        running.open()  # the batch of three fails, b comes, and the three have to wait
        gate.wait_entered()
        if cancelled:
            for reply in together:
                reply.ticket.cancel()
        gate.open()
        here.is_answered(head, other)
    running.open(3)
    if cancelled:
        assert all(isinstance(reply.error(), Cancelled) for reply in together)
        assert here.resident == "b"
    else:
        here.is_answered(together[0], together[2])
        assert isinstance(together[1].error(), InvalidRequest)
    here.is_consistent()


# --- loads that fail --------------------------------------------------------------------------------------------------


def truncate(path):
    os.truncate(path, path.stat().st_size - 100)


def rewrite(path):
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content[:-8] + b"\x00" * 8)


@pytest.mark.parametrize("spoil", [truncate, rewrite])
def test_a_file_that_was_spoilt_fails_the_requests_of_its_model_alone(site, spoil):
    here = site(2)
    here.add("a", "b")
    here.serve("a", "b")
    here.residency.compact()
    spoil(here.path("a"))
    with here.device.held_transfers():
        bad = [here.ask("a", value) for value in range(3)]
        good = here.ask("b")
    for reply in bad:
        assert isinstance(reply.error(), WeightsUnavailable)
        assert "model 'a'" in str(reply.error())
    here.is_answered(good)
    assert here.resident == "b"
    here.is_consistent()
    assert isinstance(here.ask("a").error(), WeightsUnavailable), "it was tried again"
    here.serve("b")
    here.is_consistent()


def test_a_file_that_was_deleted_or_replaced_still_serves_the_version_that_was_opened(site):
    here = site(1)
    here.add("a", "b")
    old = here.values["a"]
    here.path("a").rename(here.directory / "elsewhere")
    here.write("a", seed=1)
    here.values["a"] = old
    here.serve("a", "b")
    here.path("a").unlink()
    (here.directory / "elsewhere").unlink()
    here.serve("a")


def test_out_of_memory_once_evicts_all_and_tries_again(either, caplog):
    here = either(3)
    here.add("a", "b", "c")
    here.serve("a", "b")
    here.device.failures = [DeviceOutOfMemory("no room")]
    here.serve("c")
    assert here.resident == "c"
    assert here.residency.snapshot().evicts["oom"] == 2
    assert "device out of memory model=c" in caplog.text
    here.is_consistent()


def test_out_of_memory_twice_fails_these_requests_and_the_next_one_tries_again(either):
    here = either(3)
    here.add("a", "b", "c")
    here.serve("a", "b")
    here.device.failures = [DeviceOutOfMemory("no room"), DeviceOutOfMemory("still none")]
    assert isinstance(here.ask("c").error(), DeviceOutOfMemory)
    assert here.resident == ""
    here.is_consistent()
    here.serve("c", "a")
    here.is_consistent()


def test_a_fragmented_card_is_made_whole_when_a_load_finds_no_block(site):
    here = site(8, unified=False, spare=512)
    here.add(*"abcdefgh")
    here.add("l", nbytes=2 * NBYTES)
    here.serve(*"abcdefgh")
    here.residency.set_floor("b", Floor.DEVICE)
    here.serve("a", "d", "e", "f", "g", "h", "c", "a", "l")
    assert here.resident == "bl" or "l" in here.resident
    here.is_consistent()


def test_when_pinned_models_leave_no_room_the_request_is_told_so(site):
    here = site(2)
    here.add("p", floor=Floor.DEVICE, nbytes=NBYTES + 400)
    here.add("a")
    assert isinstance(here.ask("a").error(), DeviceOutOfMemory)
    here.serve("p")
    here.is_consistent()


def test_a_bug_in_the_choice_fails_those_who_wait_and_nobody_else(site, monkeypatch, caplog):
    here = site()
    here.add("a", "b")
    here.serve("b")
    monkeypatch.setattr(here.ledger, "plan_load", lambda name, **more: 1 / 0)
    assert isinstance(here.ask("a").error(), ZeroDivisionError)
    here.serve("b")
    monkeypatch.undo()
    here.serve("a")
    assert "load could not begin model=a" in caplog.text
    here.is_consistent()


def test_memory_that_something_still_looks_at_does_not_fail_the_next_load(site, monkeypatch, caplog):
    here = site(1)
    here.add("a", "b")
    here.serve("a")
    placed = here.models["a"].weights.placed
    free = placed.free

    def looked_at():
        free()
        raise BufferError("cannot close exported pointers exist")

    monkeypatch.setattr(placed, "free", looked_at)
    here.serve("b", "a")
    assert "memory stays mapped while something looks at it model=a" in caplog.text


# --- explicit ---------------------------------------------------------------------------------------------------------


def test_in_explicit_mode_an_operator_moves_weights_and_nobody_else(site):
    here = site(3, unified=False, mode="externally_managed")
    here.add("a")
    place = here.residency.model
    assert isinstance(here.ask("a").error(), NotResident)
    assert here.residency.set_floor("a", Floor.DEVICE) is Floor.DEVICE
    here.serve("a")
    assert here.residency.snapshot().lru == ()
    assert (place("a").device_resident, place("a").host_resident) == (True, True)
    assert here.residency.set_floor("a", Floor.SYSTEM) is Floor.SYSTEM
    assert (place("a").device_resident, place("a").host_resident) == (False, True)
    assert here.residency.set_floor("a", Floor.UNPINNED) is Floor.UNPINNED
    assert (place("a").device_resident, place("a").host_resident) == (False, False)
    assert isinstance(here.ask("a").error(), NotResident)
    assert here.counted == (1, 1)
    here.is_consistent()


def test_in_explicit_mode_a_request_is_refused_at_once_while_other_weights_move(site):
    here = site(3, mode="externally_managed")
    here.add("a", "b")
    with here.device.held_transfers() as gate:
        moved = in_background(here.residency.set_floor, "a", Floor.DEVICE)
        gate.wait_entered()
        assert isinstance(here.ask("b").error(), NotResident)
        coming = here.ask("a")
        here.settle()
        assert not coming.settled, "those are on their way"
    assert moved() is Floor.DEVICE
    here.is_answered(coming)
