"""What a repack learns, places and tells, and what stays of the counters beneath it."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packing_fleet import AT_ONCE, NEVER, PackedFleet, Reporting, knobs

from rsrv.gateway.scheduling.repack import moves, plan, preconditions, retired_labels
from rsrv.gateway.scheduling.reports import RepackReport
from rsrv.gateway.workers.poll import Poll


def report_of(fleet: PackedFleet) -> RepackReport:
    report = fleet.packing.status().repack
    assert report is not None
    return report


def one_each(**homes: str) -> dict[str, tuple[tuple[str, float], ...]]:
    return {model: tuple((url, 1 / len(urls.split())) for url in urls.split()) for model, urls in homes.items()}


# --- demand -------------------------------------------------------------------------------------------------------


def test_rates_and_costs_are_averages_over_device_time() -> None:
    fleet = PackedFleet(1, "ab", rebalance_compute_seconds=300, first_rebalance_compute_seconds=0).start()
    fleet.workers["w0"].serve("a", 300.0, 600)
    fleet.arrive("a", 30)
    fleet.tick(10)
    report = report_of(fleet)
    assert report.compute == 300.0
    assert report.rates["a"] == pytest.approx(1.5)  # ewma(0, 3, 300, 300)
    assert report.costs == {"a": 0.5}
    assert report.utilization == {"a": pytest.approx(0.75), "b": 0.0}
    fleet.workers["w0"].serve("a", 300.0, 200)
    fleet.tick(10)
    report = report_of(fleet)
    assert report.rates["a"] == pytest.approx(0.75)  # nothing came: ewma(1.5, 0, 300, 300)
    assert report.costs["a"] == pytest.approx(1.0)  # ewma(0.5, 1.5, 300, 300)


def test_a_changed_halflife_holds_from_the_next_repack_on() -> None:
    fleet = PackedFleet(1, "a", rebalance_compute_seconds=300, first_rebalance_compute_seconds=0).start()
    fleet.packing.change(ema_halflife_compute_seconds=150.0)
    fleet.workers["w0"].serve("a", 300.0, 600)
    fleet.arrive("a", 40)
    fleet.tick(10)
    assert report_of(fleet).rates["a"] == pytest.approx(3.0)  # ewma(0, 4, 300, 150)


def test_a_repack_of_an_idle_fleet_keeps_the_arrivals_for_the_next_one() -> None:
    fleet = PackedFleet(1, "a", rebalance_compute_seconds=300, first_rebalance_compute_seconds=0).start()
    fleet.arrive("a", 20)
    fleet.packing.request_repack()
    fleet.tick(10)
    assert report_of(fleet).trigger == "operator"
    assert report_of(fleet).rates == {}
    fleet.arrive("a", 20)
    fleet.workers["w0"].serve("a", 300.0, 100)
    fleet.tick(10)
    # 40 requests in the 20 s since the start, not in the 10 s since the repack.
    assert report_of(fleet).rates["a"] == pytest.approx(1.0)
    assert report_of(fleet).wall == 10.0


def test_a_restart_leaves_costs_as_they_were() -> None:
    fleet = PackedFleet(2, "a", **AT_ONCE)
    fleet.workers["w0"].serve("a", 10.0, 5)
    fleet.start()
    assert report_of(fleet).costs["a"] == 2.0
    fleet.workers["w0"].restart()
    fleet.workers["w0"].serve("a", 0.5, 1)
    fleet.workers["w1"].serve("a", 1e-3, 0)
    fleet.tick()
    assert report_of(fleet).trigger == "compute"
    assert report_of(fleet).costs["a"] == 2.0


def test_requests_for_models_that_no_worker_lists_are_not_remembered() -> None:
    fleet = PackedFleet(1, "a", **AT_ONCE).start()
    for number in range(100):
        fleet.arrive(f"gone{number}", 1)
    fleet.workers["w0"].serve("a", 1.0)
    fleet.tick()
    assert set(report_of(fleet).rates) <= {"a"}


# --- placements ---------------------------------------------------------------------------------------------------


def busy(fleet: PackedFleet, needs: dict[str, float]) -> None:
    """Let the next repack see these device seconds a second: a fleet's first one sees half of what arrived."""
    for model, need in needs.items():
        fleet.workers["w0"].serve(model, 200.0 * need, 200)
        fleet.arrive(model, 2000)


def test_the_heaviest_model_has_a_worker_of_its_own() -> None:
    fleet = PackedFleet(2, "abc", rebalance_compute_seconds=100, first_rebalance_compute_seconds=0).start()
    busy(fleet, {"a": 0.5, "b": 0.4, "c": 0.1})
    fleet.tick(10)
    assert report_of(fleet).trigger == "compute"
    assert fleet.homes("b") == fleet.homes("c") != fleet.homes("a")


def members(u: dict[str, dict[str, int]], budgets: dict[str, int] | None = None) -> Poll:
    """Worker → model → bytes as a poll."""
    workers = {}
    for url, models in u.items():
        one = Reporting(())
        one.budget = (budgets or {}).get(url, 0)
        for model, mem in models.items():
            one.load(model, mem)
        workers[url] = one.report(url)
    return Poll(workers)


def test_a_home_that_is_as_good_is_kept_and_counted_as_held() -> None:
    poll = members({"w0": {"a": 0}, "w1": {"a": 0}})
    found = plan(poll, {"a": 0.5}.__getitem__, one_each(a="w1"), knobs())
    assert found.assignment == one_each(a="w1")
    assert (found.held, found.best_improvement, found.moved, found.changed) == (1, 0.0, (), ())


def test_hysteresis_is_part_of_the_placement_and_of_its_report() -> None:
    poll = members({"w0": {"hot": 0, "a": 0}, "w1": {"hot": 0, "a": 0}})
    found = plan(poll, {"hot": 0.7, "a": 0.3}.__getitem__, one_each(hot="w1", a="w1"), knobs(hysteresis=0.1))
    assert found.assignment == one_each(hot="w1", a="w0")
    assert found.best_improvement == pytest.approx(1.0 / 0.3 - 1)
    assert (found.moved, found.changed, found.held) == (("a",), ("w0", "w1"), 1)
    held = plan(poll, {"hot": 0.7, "a": 0.6}.__getitem__, one_each(hot="w1", a="w0"), knobs(hysteresis=0.9))
    assert held.moved == ()


def test_a_model_that_not_all_have_is_spread_over_those_that_do_and_charged_there() -> None:
    poll = members({"w0": {"a": 1, "b": 1, "d": 1}, "w1": {"a": 1, "b": 1}, "w2": {"a": 1, "b": 1, "d": 1}})
    needs = {"a": 0.1, "b": 0.05, "d": 1.0}
    found = plan(poll, needs.__getitem__, {}, knobs())
    assert found.drifted == {"d": ("w0", "w2")}
    assert found.assignment["d"] == (("w0", 0.5), ("w2", 0.5))
    # Both go to w1, since the drifted model takes half a device on each of the others.
    assert found.assignment["a"] == found.assignment["b"] == (("w1", 1.0),)


def test_the_weights_of_a_drifted_model_take_memory_from_others() -> None:
    budgets = {"w0": 10, "w1": 10}
    poll = members({"w0": {"a": 6, "d": 6}, "w1": {"a": 6}}, budgets)
    found = plan(poll, {"a": 0.0, "d": 0.0}.__getitem__, {}, knobs())
    assert found.assignment == {"a": (("w1", 1.0),), "d": (("w0", 1.0),)}


def test_drift_is_told_once_and_again_when_it_changes() -> None:
    fleet = PackedFleet(2, "a", **NEVER)
    fleet.workers["w0"].load("d")
    fleet.start()
    assert sum("model d" in text for text in fleet.notes) == 1
    fleet.packing.request_repack()
    fleet.tick()
    assert not any("model d" in text for text in fleet.notes)
    fleet.workers["w0"].unload("d")
    fleet.workers["w1"].load("d")
    fleet.tick(30)
    assert sum("model d" in text and "w1" in text for text in fleet.notes) == 1


def test_each_repack_is_one_line_and_a_worker_without_room_a_warning() -> None:
    fleet = PackedFleet(1, "ab", mem=6, budget=10, **NEVER).start()
    notes = fleet.packing.take_notes()
    assert [level for level, _ in notes] == [logging.INFO, logging.WARNING]
    assert "trigger=startup models=2 moved=0" in notes[0][1]
    assert "worker w0" in notes[1][1]
    assert "12 bytes" in notes[1][1]
    row = fleet.packing.status().workers[0]
    assert (row.assigned_bytes, row.budget_bytes, row.oversubscribed) == (12, 10, True)
    assert fleet.packing.take_notes() == []


def test_moves_are_models_in_both_placements_whose_workers_differ() -> None:
    before = one_each(stays="w0", moves="w0", spreads="w0 w1", gone="w2")
    after = one_each(stays="w0", moves="w1", spreads="w1 w3", new="w4")
    assert moves(before, after) == (("moves", "spreads"), ("w0", "w1", "w2", "w3"))
    assert moves(after, after) == ((), ())


def test_a_replica_that_is_no_more_is_shown_until_the_next_repack_or_while_workers_list_its_model() -> None:
    poll = members({"w0": {"a": 0}, "w1": {"a": 0}})
    first = retired_labels(frozenset(), one_each(a="w0", b="w0"), one_each(a="w1"), poll)
    assert first == {("a", "w0"), ("b", "w0")}
    assert retired_labels(first, one_each(a="w1"), one_each(a="w1"), poll) == {("a", "w0")}
    assert retired_labels(first, one_each(a="w1"), one_each(a="w0"), poll) == {("a", "w1")}


# --- counters -----------------------------------------------------------------------------------------------------


def test_counters_of_replicas_that_stay_go_on_over_a_repack() -> None:
    fleet = PackedFleet(3, "m", work_basis="items", default_replicas=2, **NEVER)
    fleet.down = {"w2"}
    fleet.start()
    packing = fleet.packing
    assert fleet.homes("m") == ("w0", "w1")
    held = [packing.select("m", 8, ["w0", "w1"], ()) for _ in range(2)]
    assert {choice.urls[0] for choice in held if choice} == {"w0", "w1"}
    fleet.down = {"w0"}
    fleet.tick()
    assert fleet.homes("m") == ("w1", "w2")
    rows = {row.worker: row for row in packing.status().models[0].replicas}
    assert (rows["w1"].outstanding, rows["w1"].routed, rows["w2"].outstanding) == (8, 1, 0)
    later = [packing.select("m", 8, ["w1", "w2"], ()) for _ in range(4)]
    assert {choice.urls[0] for choice in later if choice} == {"w1", "w2"}
    for choice in [*held, *later]:
        assert choice is not None
        packing.release(choice.reservation)
    assert all(row.outstanding == 0 for row in packing.status().models[0].replicas)
    work = packing.inflight_work()
    assert work is not None
    assert set(work[1].values()) == {0.0}


def test_a_model_without_a_place_goes_to_whoever_has_it_and_is_not_counted() -> None:
    fleet = PackedFleet(2, "a", **NEVER).start()
    choice = fleet.packing.select("new", 4, ["w1", "w0"], {"w1"})
    assert choice is not None
    assert choice == (("w0", "w1"), None)
    fleet.packing.release(choice.reservation)
    assert fleet.packing.select("new", 4, [], ()) is None


def test_a_place_where_the_last_look_did_not_find_the_model_comes_last() -> None:
    fleet = PackedFleet(2, "a", **NEVER).start()
    home = fleet.homes("a")[0]
    other = "w1" if home == "w0" else "w0"
    choice = fleet.packing.select("a", 1, [other], ())
    assert choice is not None
    assert choice.urls == (other, home)
    fleet.packing.release(choice.reservation)
    assert fleet.packing.select("a", 1, [home, other], ()).urls == (home, other)  # type: ignore[union-attr]


def test_a_worker_that_left_for_good_is_routed_to_no_longer() -> None:
    fleet = PackedFleet(2, "a", default_replicas="all", **NEVER).start()
    fleet.packing.forget("w0")
    assert fleet.packing.select("a", 1, ["w1"], ()).urls == ("w1",)  # type: ignore[union-attr]
    assert fleet.homes("a") == ("w1",)
    del fleet.workers["w0"]
    fleet.tick()
    assert fleet.triggers["membership"] == 1
    assert [row.worker for row in fleet.packing.status().workers] == ["w1"]


def test_a_work_basis_changed_live_mixes_no_units() -> None:
    fleet = PackedFleet(1, "am", **NEVER)
    fleet.workers["w0"].serve("a", 4.0, 1, rows=8)  # 0.5 an item, 4 a request
    fleet.workers["w0"].serve("m", 4.0, 1, rows=8)
    fleet.start()
    packing = fleet.packing
    first = packing.select("a", 6, ["w0"], ())
    assert packing.inflight_work() == ("compute", {"w0": 3.0})
    before = packing.knobs
    with pytest.raises(Exception, match="work_basis: 'bytes' is not accepted"):
        packing.change(work_basis="bytes")
    assert packing.knobs is before
    packing.change(work_basis="requests")
    second = packing.select("m", 6, ["w0"], ())
    assert packing.inflight_work() == ("requests", {"w0": 7.0})
    packing.change(work_basis="items")
    assert packing.inflight_work() in (None, ("items", {"w0": 0.0}))
    third = packing.select("m", 6, ["w0"], ())
    assert packing.inflight_work() == ("items", {"w0": 6.0})
    for choice in (first, second, third):
        assert choice is not None
        packing.release(choice.reservation)
    for basis in ("compute", "items", "requests"):
        packing.change(work_basis=basis)
        assert packing.inflight_work() == (basis, {"w0": 0.0})


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_whatever_comes_and_goes_shares_sum_to_one_and_counters_come_back_to_zero(data: st.DataObject) -> None:
    names = ["a", "b", "c"]
    fleet = PackedFleet(3, names, mem=3, budget=10, **AT_ONCE).start()
    open_requests = []
    for _ in range(data.draw(st.integers(0, 12))):
        match data.draw(st.sampled_from(["tick", "down", "model", "ask", "end", "replicas", "operator"])):
            case "tick":
                fleet.workers["w0"].serve("a", 1.0, 2)
                fleet.tick(data.draw(st.sampled_from([1.0, 31.0])), data.draw(st.sets(st.sampled_from(["w0", "w1"]))))
            case "down":
                fleet.down = data.draw(st.sets(st.sampled_from(["w0", "w1", "w2"])))
            case "model":
                worker = fleet.workers[data.draw(st.sampled_from(["w1", "w2"]))]
                name = data.draw(st.sampled_from(names))
                worker.unload(name) if name in worker.mem else worker.load(name, 3)
            case "ask":
                name = data.draw(st.sampled_from(names))
                fleet.packing.record_arrival(name)
                choice = fleet.packing.select(name, data.draw(st.integers(1, 40)), ["w0", "w1", "w2"], fleet.down)
                assert choice is not None
                assert len(set(choice.urls)) == len(choice.urls)
                open_requests.append(choice.reservation)
            case "end" if open_requests:
                fleet.packing.release(open_requests.pop())
            case "replicas":
                fleet.packing.change(default_replicas=data.draw(st.sampled_from([1, 2, 9, "all"])))
            case "operator":
                fleet.packing.request_repack()
        status = fleet.packing.status()
        assert status.completed <= status.requested
        for row in status.models:
            if row.replicas:
                assert sum(one.weight for one in row.replicas) == pytest.approx(1.0)
                assert len({one.worker for one in row.replicas}) == len(row.replicas)
        if status.repack is not None and status.repack.assignment:
            homes = {url for shares in status.repack.assignment.values() for url, _ in shares}
            assert homes <= set(status.repack.polled)
    for reservation in open_requests:
        fleet.packing.release(reservation)
    assert all(one.outstanding == 0 for row in fleet.packing.status().models for one in row.replicas)
    work = fleet.packing.inflight_work()
    assert work is None or set(work[1].values()) == {0.0}


# --- preconditions ------------------------------------------------------------------------------------------------


def test_fair_workers_and_differing_models_are_told_at_the_start_and_stop_nothing() -> None:
    fleet = PackedFleet(2, "a", **NEVER)
    fleet.workers["w1"].discipline = "fair"
    fleet.workers["w0"].load("only0")
    fleet.start()
    assert fleet.triggers == {"startup": 1}
    notes = fleet.notes
    assert any("worker w1" in text and "fifo" in text for text in notes)
    assert any("worker w1" in text and "only0" in text for text in notes)
    assert preconditions(PackedFleet(2, "a").poll()) == []
