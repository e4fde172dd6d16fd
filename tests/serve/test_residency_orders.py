"""What operators and the loader ask for while requests go on: floors, compaction, removal, and the end of a server."""

import contextlib
import os

import pytest
from residency_support import LONG, NBYTES, Gate, Site, affine, in_background

from rsrv.core.errors import (
    DeviceOutOfMemory,
    ModelUnloaded,
    NotResident,
    ServerStopping,
    UnknownModel,
    WeightsUnavailable,
)
from rsrv.serve.residency.floors import Floor
from rsrv.serve.residency.manager import Compacted
from rsrv.serve.residency.tensors import open_weights
from rsrv.serve.residency.times import LoadTimes

# --- compaction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reload", "there", "reloaded"),
    [([], "p", 0), (["a"], "ap", 1), (["p", "nobody", "b", "b"], "bp", 1)],
)
def test_compaction_frees_all_but_pinned_weights_and_loads_what_is_named(either, reload, there, reloaded):
    here = either()
    here.add("p", floor=Floor.DEVICE)
    here.add("a", "b")
    here.serve("a")
    assert here.residency.compact(reload) == Compacted(reloaded, reloaded * NBYTES)
    assert here.resident == there
    assert here.residency.snapshot().compactions == 1
    assert here.counted[1] == 0, "no eviction"
    here.is_consistent()
    here.serve("a", "b", "p")


def test_compaction_waits_for_running_work_and_for_what_was_loaded_to_be_used(either):
    here = either()
    running = Gate(affine)
    here.add("a", fn=running)
    here.add("b")
    first = here.ask("a")
    running.wait_entered()
    fresh = here.ask("b")
    while here.resident != "ab":
        here.settle()
    compacted = in_background(here.residency.compact)
    here.settle()
    assert here.device.weight_bytes == 2 * NBYTES
    running.open()
    here.is_answered(first, fresh)
    assert compacted() == Compacted(0, 0)
    here.is_consistent()


def test_memory_is_compacted_after_every_second_load(site, caplog):
    caplog.set_level("DEBUG")
    here = site(compaction_interval=2)
    here.add("a", "b", "c")
    here.serve("a")
    assert (here.resident, here.residency.snapshot().compactions) == ("a", 0)
    here.serve("b")
    here.serve("c")
    assert (here.resident, here.residency.snapshot().compactions) == ("c", 1)
    (line,) = [each for each in caplog.records if "memory compacted" in each.message]
    assert (line.levelname, line.message) == (
        "DEBUG",
        "memory compacted reloaded=0 why=scheduler.compaction_interval",
    )
    here.is_consistent()


def test_compaction_after_every_load_lets_every_request_have_its_turn(site):
    here = site(compaction_interval=1)
    here.add("a", "b")
    for _ in range(5):
        here.is_answered(*[here.ask(name) for name in "ab"])
    here.residency.compact()
    here.is_consistent()


def test_a_card_in_one_piece_is_not_compacted(site):
    here = site(8, unified=False, compaction_interval=2)
    here.add("a", "b", "c")
    here.serve("a", "b", "c")
    assert (here.resident, here.residency.snapshot().compactions) == ("abc", 0)


def test_every_name_is_loaded_once_and_what_was_there_is_not_counted(either):
    here = either()
    here.add("p", floor=Floor.DEVICE)
    here.add("a", "b")
    assert here.residency.compact(["a", "b", "a", "p", "a", "b"]) == Compacted(2, 2 * NBYTES)
    assert here.counted == (3, 0), "p, a and b"


def test_reloading_ends_before_one_has_to_leave_for_the_next(either):
    here = either(2.5)
    here.add("a", "b", "c", "d")
    here.serve("d")
    assert here.residency.compact(["a", "b", "c", "d"]) == Compacted(2, 2 * NBYTES)
    assert (here.resident, here.counted) == ("ab", (3, 0))
    here.is_consistent()


def test_a_model_larger_than_the_budget_is_reloaded_when_it_is_first_and_then_alone(either):
    here = either(2)
    here.add("big", nbytes=3 * NBYTES)
    here.add("a")
    assert here.residency.compact(["big", "a"]) == Compacted(1, 3 * NBYTES)
    assert here.residency.compact(["a", "big"]) == Compacted(1, NBYTES)
    here.is_consistent()


def test_what_cannot_be_loaded_is_skipped_with_a_warning_and_the_others_come(either, caplog):
    here = either()
    here.add("a", "broken", "b", floor=Floor.UNPINNED)
    os.truncate(here.path("broken"), 300)
    assert here.residency.compact(["a", "broken", "b"]) == Compacted(2, 2 * NBYTES)
    assert here.resident == "ab"
    (line,) = [each.message for each in caplog.records if "not loaded again" in each.message]
    assert line.startswith("model not loaded again after a compaction model=broken why=the weights of model 'broken'")
    here.is_consistent()


def test_an_out_of_memory_that_sends_the_reloaded_away_ends_the_reloading(site):
    here = site(unified=False)
    here.add("a", "b", "c")
    here.device.failures = [None, DeviceOutOfMemory("no room"), None]
    assert here.residency.compact(["a", "b", "c"]) == Compacted(1, NBYTES)
    assert here.resident == "b"
    here.is_consistent()


def test_what_requests_bring_while_others_are_reloaded_is_not_counted(either):
    here = either()
    here.add("a", "b", "c")
    with here.device.held_transfers() as gate:
        compacted = in_background(here.residency.compact, ["a", "b"])
        gate.wait_entered()
        first = here.ask("c")
        here.settle()
        here.residency._orders.load(here.models["b"].weights)
    here.is_answered(first)
    assert compacted().reloaded == 1
    assert here.resident == "abc"


@pytest.mark.parametrize("interval", [1, 2])
def test_what_an_operator_reloads_is_not_compacted_away_by_the_interval(site, interval):
    here = site(compaction_interval=interval)
    here.add("a", "b", "c")
    assert here.residency.compact(["a", "b", "c"]) == Compacted(3, 3 * NBYTES)
    here.serve("a", "b", "c")
    assert (here.resident, here.residency.snapshot().compactions) == ("abc", 1)
    here.device.failures = [DeviceOutOfMemory("no room")]
    assert here.residency.compact(["a"]) == Compacted(1, NBYTES), "also after a second try"
    here.serve("a")
    assert (here.resident, here.residency.snapshot().compactions) == ("a", 2)
    here.is_consistent()


# --- floors -----------------------------------------------------------------------------------------------------------


def test_a_floor_moves_weights_and_makes_room_for_them(either):
    here = either(2)
    here.add("a", "b", "c")
    here.serve("a", "b")
    assert here.residency.set_floor("c", Floor.DEVICE) is Floor.DEVICE
    assert here.resident == "bc"
    assert here.residency.snapshot().pinned_bytes == NBYTES
    here.serve("a", "c", "b")
    assert here.resident == "bc"
    assert here.residency.set_floor("c", Floor.UNPINNED) is Floor.UNPINNED
    assert here.resident == "bc", "it may leave, but nobody needs the room"
    here.serve("a")
    assert here.resident == "ac"
    assert not here.residency.model("c").host_resident
    here.is_consistent()


def test_a_floor_that_does_not_fit_changes_nothing(either):
    here = either(2)
    here.add("p", floor=Floor.DEVICE)
    here.add("a", nbytes=NBYTES + 256)
    before = here.residency.model("a")
    with pytest.raises(DeviceOutOfMemory):
        here.residency.set_floor("a", Floor.DEVICE)
    assert here.residency.model("a") == before
    here.is_consistent()


def test_a_floor_whose_weights_cannot_be_read_stays_what_it_was(site):
    here = site()
    here.add("a")
    os.truncate(here.path("a"), 300)
    with pytest.raises(WeightsUnavailable):
        here.residency.set_floor("a", Floor.DEVICE)
    assert here.residency.model("a").floor is Floor.UNPINNED
    assert here.residency.snapshot().pinned_bytes == 0
    here.is_consistent()


def test_a_host_copy_that_cannot_be_made_leaves_weights_where_they_are(site):
    here = site(unified=False, mode="externally_managed")
    here.add("a", floor=Floor.UNPINNED)
    here.residency.set_floor("a", Floor.DEVICE)
    os.truncate(here.path("a"), 300)
    with pytest.raises(WeightsUnavailable):
        here.residency.set_floor("a", Floor.SYSTEM)
    assert here.residency.model("a").floor is Floor.DEVICE
    here.serve("a")
    here.is_consistent()


def test_two_changes_of_a_floor_are_carried_out_one_after_the_other(either):
    here = either()
    here.add("a", "b")
    orders, weights = here.residency._orders, here.models["a"].weights
    with here.device.held_transfers() as gate:
        other = here.ask("b")
        gate.wait_entered()
        up, down = orders.set_floor(weights, Floor.DEVICE), orders.set_floor(weights, Floor.UNPINNED)
    assert (up.result(LONG), down.result(LONG)) == (Floor.DEVICE, Floor.UNPINNED)
    here.is_answered(other)
    assert here.resident == "ab"
    assert not here.residency.snapshot().models["a"].reserved
    here.is_consistent()


def test_a_budget_that_shrinks_sends_away_what_does_not_fit(either):
    here = either(3)
    here.add("a", "b")
    here.serve("a", "b")
    here.residency.note_scratch(2 * NBYTES)
    assert here.resident == "b"
    assert here.residency.snapshot().evicts["budget"] == 1
    here.add("c", scratch=2 * NBYTES + 1)
    here.serve("a", "b", "c")
    here.is_consistent()


def test_requests_wait_while_tensors_are_shared_and_then_go_on(site):
    here = site(unified=False)
    running = Gate(affine)
    here.add("a", fn=running)
    first = here.ask("a")
    running.wait_entered()
    shared = here.residency._orders.share(here.models["a"].weights)
    here.settle()
    second = here.ask("a", 2)
    here.settle()
    assert not shared.done()
    running.open(2)
    here.is_answered(first, second)
    assert shared.result(LONG) == 0
    assert here.counted == (1, 0)
    here.is_consistent()


# --- models that go away ----------------------------------------------------------------------------------------------


def test_a_model_is_removed_while_it_is_loaded_and_while_others_wait(either):
    here = either(1)
    here.add("a", "b")
    with here.device.held_transfers() as gate:
        gone = here.ask("a")
        gate.wait_entered()
        waits = here.ask("b")
        removed = in_background(here.remove, "a")
        assert isinstance(gone.error(), ModelUnloaded)
    removed()
    here.is_answered(waits)
    assert sorted(here.residency.snapshot().models) == ["b"]
    here.is_consistent()
    here.add("a")
    here.serve("a")


def test_a_model_is_removed_while_it_waits_for_the_load_of_another(either):
    here = either(1)
    here.add("a", "b")
    with here.device.held_transfers() as gate:
        waits = here.ask("a")
        gate.wait_entered()
        gone = here.ask("b")
        here.settle()
        removed = in_background(here.remove, "b")
        assert isinstance(gone.error(), ModelUnloaded)
    removed()
    here.is_answered(waits)
    assert here.counted == (1, 0)
    here.is_consistent()


def test_what_is_asked_for_a_model_that_is_gone_is_an_error_and_removing_it_again_is_not(site):
    here = site()
    a = here.add("a").weights
    here.remove("a")
    here.residency.close_model(a)
    orders = here.residency._orders
    for future in (orders.load(a), orders.set_floor(a, Floor.DEVICE)):
        with pytest.raises(UnknownModel):
            future.result(LONG)
    assert orders.share(a).result(LONG) == 0
    with pytest.raises(UnknownModel):
        here.residency.set_floor("a", Floor.DEVICE)


def test_a_model_that_cannot_be_pinned_leaves_nothing_behind(either):
    here = either(1)
    here.add("a")
    here.serve("a")
    here.device.failures = [DeviceOutOfMemory("no room"), DeviceOutOfMemory("still none")]
    with pytest.raises(DeviceOutOfMemory):
        here.add("b", floor=Floor.DEVICE)
    assert sorted(here.residency.snapshot().models) == ["a"]
    here.is_consistent()
    here.serve("a")


# --- hold and release -------------------------------------------------------------------------------------------------


def test_weights_that_somebody_holds_do_not_leave_before_they_are_released(either):
    here = either(1)
    here.add("a", "b")
    weights = here.models["a"].weights
    assert not here.scheduler.hold(weights)
    here.serve("a")
    assert here.scheduler.hold(weights)
    before = weights.buffers
    waits = here.ask("b")
    here.settle()
    assert weights.buffers == before
    assert not here.scheduler.hold(weights), "they are about to go"
    here.scheduler.release(weights)
    here.is_answered(waits)
    assert weights.buffers == ()
    here.is_consistent()


# --- the end of a server ----------------------------------------------------------------------------------------------


def load_under_way(here, gate):
    here.ask("a")
    gate.wait_entered()
    here.ask("b")


def requests_cold(here, gate):
    load_under_way(here, gate)
    here.ask("c")
    here.ask("a", 2)
    here.settle()


def order_under_way(here, gate):
    moved = in_background(here.residency.set_floor, "a", Floor.DEVICE)
    gate.wait_entered()
    return [moved]


def orders_waiting(here, gate):
    load_under_way(here, gate)
    orders = [
        in_background(here.residency.set_floor, "b", Floor.DEVICE),
        in_background(here.residency.compact, ["b"]),
    ]
    here.settle()
    return orders


def second_try_waiting(here, gate):
    here.device.failures = [DeviceOutOfMemory("no room")]
    return order_under_way(here, gate)


def floor_waiting_for_fresh_weights(here, gate):
    here.ask("a")
    gate.wait_entered()
    moved = in_background(here.residency.set_floor, "b", Floor.DEVICE)
    here.settle()
    return [moved]


@pytest.mark.parametrize(
    "moment",
    [
        load_under_way,
        requests_cold,
        order_under_way,
        orders_waiting,
        second_try_waiting,
        floor_waiting_for_fresh_weights,
    ],
)
def test_a_server_stops_at_every_moment(either, moment):
    here = either(2)
    here.add("a", "b", "c")
    with here.device.held_transfers() as gate:
        asked = moment(here, gate) or []
        here.residency.close()
        closed = in_background(here.scheduler.stop)
    closed()
    here.residency.stop()
    for reply in here.replies:
        error = reply.wait().error
        assert error is None or isinstance(error, ServerStopping)
    for wait in asked:
        with contextlib.suppress(ServerStopping):
            wait()
    with pytest.raises(ServerStopping):
        here.residency.compact()


def test_a_server_stops_while_a_victim_is_in_use(either):
    here = either(1)
    running = Gate(affine)
    here.add("a", fn=running)
    here.add("b")
    first = here.ask("a")
    running.wait_entered()
    waits = here.ask("b")
    here.settle()
    here.residency.close()
    stopped = in_background(here.scheduler.stop)
    assert isinstance(waits.error(), ServerStopping)
    running.open()
    stopped()
    here.is_answered(first)


def test_weights_that_are_held_or_removed_while_a_server_stops_are_freed(either):
    here = either(2)
    a, b = here.add("a").weights, here.add("b").weights
    here.serve("a", "b")
    assert here.scheduler.hold(a)
    here.models.pop("a")
    assert here.scheduler.remove("a", timeout=LONG)
    removed = in_background(here.residency.close_model, a)
    here.settle()
    here.residency.close()
    here.scheduler.stop()
    here.scheduler.release(a)
    here.residency.stop()
    removed()
    here.residency.close_model(b)


def test_weights_that_are_not_on_demand_are_loaded_for_good(tmp_path):
    here = Site(tmp_path, NBYTES)
    try:
        fixed = type(here.residency)(here.device, here.scheduler, None, here.pool)
        here.write("a")
        weights = fixed.open("a", open_weights(here.path("a")), floor=None, scratch_bytes=0)
        assert fixed.model("a").device_resident
        assert (fixed.snapshot(), fixed.compact(["a"])) == (None, Compacted(0, 0))
        fixed.close_model(weights)
        assert fixed.model("a") is None
    finally:
        here.close()


def test_explicit_pins_at_start_and_compaction_reloads_nothing(site):
    here = site(mode="externally_managed")
    here.add("p", floor=Floor.DEVICE)
    here.add("a")
    assert here.residency.compact(["a"]) == Compacted(0, 0)
    here.serve("p")
    assert isinstance(here.ask("a").error(), NotResident)


def test_in_explicit_mode_all_counters_of_loads_agree_and_floors_that_free_are_counted(site):
    times = LoadTimes()
    here = site(mode="externally_managed", on_load=times.record)
    here.add("p", floor=Floor.DEVICE)
    here.add("a", "b")
    for _ in range(5):
        here.residency.set_floor("a", Floor.DEVICE)
        here.serve("a", "p")
        here.residency.set_floor("a", Floor.UNPINNED)
    here.residency.set_floor("b", Floor.UNPINNED)
    seen = here.residency.snapshot()
    assert sum(times.snapshot().counts) == seen.loads == sum(model.loads for model in seen.models.values()) == 6
    assert times.snapshot().total_ns == round(seen.load_seconds * 1e9)
    assert (seen.evicts["floor"], seen.evictions, seen.models["a"].evicts) == (5, 5, 5)
    here.is_consistent()
