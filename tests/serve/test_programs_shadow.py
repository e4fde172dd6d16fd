"""A set in the shadow of what serves: it gets copies, its answers are compared, and no client notices."""

import logging
import threading
import time

import numpy as np
import pytest
from programs_support import LONG, Gate, World, send

from rsrv.core.errors import InvalidRequest, WrongState
from rsrv.serve.programs import shadow as shadows
from rsrv.serve.scheduler import dispatch

ONE = [[1, 2]]


@pytest.fixture
def world(tmp_path):
    worlds = []

    def make(**options):
        worlds.append(World(tmp_path, **options))
        worlds[-1].scheduler.start()
        return worlds[-1]

    yield make
    for each in worlds:
        each.close()


def record(w, program=2):
    (made,) = [made for made in w.sets.list("m").programs if made.id == program]
    return made.shadow


def wait_for(w, wanted, program=2):
    """The record when `wanted` holds for it; the shadow has a thread of its own."""
    for _ in range(6000):
        found = record(w, program)
        if wanted(found):
            return found
        time.sleep(0.01)
    raise AssertionError(f"the shadow did not get there: {found}")


def done(n):
    return lambda r: r.batches + r.skipped + r.errors >= n


def test_a_set_that_does_the_same_gets_a_clean_record_and_may_then_be_selected(world):
    w = world()
    w.stage("double-again")
    with pytest.raises(WrongState, match="was not compared with set 1, which serves") as caught:
        w.sets.select("m", 2, 1, require_clean=True)
    assert caught.value.reason == "not_clean"
    assert w.sets.shadow("m", 2, 100).shadow.percent == 100
    for n in range(3):
        np.testing.assert_array_equal(w.ask(ONE), [[2, 4]])
        wait_for(w, done(n + 1))
    found = record(w)
    assert (found.batches, found.mismatches, found.errors, found.against) == (3, 0, 0, 1)
    assert found.largest == {"y": 0.0}
    assert found.clean
    w.sets.select("m", 2, 1, require_clean=True)
    assert record(w).percent == 0  # what serves is nobody's shadow
    assert record(w).batches == 3


def test_a_set_that_computes_something_else_is_found_out_and_not_selected(world):
    w = world()
    w.stage("nearly", shadow=100.0)
    np.testing.assert_array_equal(w.ask([[1, 2], [3, 4]]), [[2, 4], [6, 8]])
    found = wait_for(w, done(1))
    assert (found.batches, found.mismatches) == (1, 1)
    assert found.largest["y"] == pytest.approx(0.0005, rel=1e-3)  # 2.001 for 2
    assert found.first_mismatch.startswith("batch 4: output 'y': rel 0.0005 is above 1e-05")
    with pytest.raises(WrongState, match="of 1 batches 1 differed") as caught:
        w.sets.select("m", 2, 1, require_clean=True)
    assert caught.value.reason == "not_clean"
    w.sets.shadow("m", 2, 100, {"f32": 0.001})
    assert record(w).batches == 0  # a new record
    w.ask(ONE)
    assert wait_for(w, done(1)).clean
    w.sets.select("m", 2, 1, require_clean=True)


def test_a_share_of_the_batches_is_copied_evenly(world):
    w = world()
    w.stage("double-again", shadow=25.0)
    for _ in range(12):
        w.ask(ONE)
    assert wait_for(w, done(3)).batches + record(w).skipped == 3
    assert w.sets.shadow("m", 2, 0).shadow.percent == 0
    for _ in range(8):
        w.ask(ONE)
    assert record(w).batches + record(w).skipped == 3


def test_a_program_that_fails_in_the_shadow_is_counted_and_no_request_suffers(world, caplog):
    w = world()
    w.stage("broken", shadow=100.0)
    for n in range(2):
        np.testing.assert_array_equal(w.ask(ONE), [[2, 4]])
        wait_for(w, done(n + 1))
    found = record(w)
    assert (found.batches, found.errors) == (0, 2)
    assert found.first_error == "batch 1: the device is on fire"
    assert not found.clean
    assert set(w.scheduler.stats()["m"].errors) == set()
    assert "shadow did not run model=m program=batch 1" in caplog.text


def test_what_the_shadow_cannot_keep_up_with_is_dropped_and_counted(world, monkeypatch):
    monkeypatch.setattr(dispatch, "QUICK_NS", 0)
    w = world()
    gate = Gate(lambda x, weight: x * 2)
    w.source.functions["slow"] = gate
    w.stage("slow", shadow=100.0)
    ran = shadows.Shadow._compare
    held, go = threading.Event(), threading.Event()

    def compare(self, sample):
        held.set()
        assert go.wait(LONG)
        ran(self, sample)

    monkeypatch.setattr(shadows.Shadow, "_compare", compare)
    w.ask(ONE)
    assert held.wait(LONG)
    for _ in range(shadows.WAITING + 3):
        np.testing.assert_array_equal(w.ask(ONE), [[2, 4]])
    assert record(w).skipped == 3
    gate.open(shadows.WAITING + 1)
    go.set()
    found = wait_for(w, lambda r: r.batches == shadows.WAITING + 1)
    assert (found.skipped, found.clean) == (3, True)


def test_weights_are_not_brought_back_for_the_shadow(world, monkeypatch):
    w = world()
    w.stage("double-again", shadow=100.0)
    ran = shadows.Shadow._compare

    def compare(self, sample):
        w.model.weights.resident = False
        try:
            ran(self, sample)
        finally:
            w.model.weights.resident = True

    monkeypatch.setattr(shadows.Shadow, "_compare", compare)
    w.ask(ONE)
    found = wait_for(w, done(1))
    assert (found.batches, found.skipped) == (0, 1)
    assert w.device.launched.count("double-again") == 0


def test_a_bug_in_the_comparison_is_an_error_of_the_shadow_alone(world, monkeypatch, caplog):
    def raises(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(shadows, "compare_rows", raises)
    w = world()
    w.stage("double-again", shadow=100.0)
    np.testing.assert_array_equal(w.ask(ONE), [[2, 4]])
    assert wait_for(w, done(1)).first_error == "batch 1: a bug"
    assert [r.levelno for r in caplog.records if r.message.startswith("shadow failed")] == [logging.ERROR]
    np.testing.assert_array_equal(w.ask(ONE), [[2, 4]])
    wait_for(w, done(2))


def test_the_set_that_serves_cannot_be_its_own_shadow_and_percents_and_tolerances_are_checked(world):
    w = world()
    w.stage("double-again")
    with pytest.raises(WrongState, match="cannot be its own shadow") as caught:
        w.sets.shadow("m", 1, 10)
    assert caught.value.reason == "selected"
    for percent in (-1, 101, float("nan")):
        with pytest.raises(InvalidRequest, match="wanted is a number from 0 to 100"):
            w.sets.shadow("m", 2, percent)
    with pytest.raises(InvalidRequest, match="neither a float dtype nor an output"):
        w.sets.shadow("m", 2, 10, {"q": 1.0})
    with pytest.raises(InvalidRequest):
        w.stage("double", name="another", shadow=200.0)
    assert record(w) is None
    assert w.sets.retained("m") == (1, 2)


def test_one_set_at_a_time_gets_copies_and_a_record_counts_for_the_set_it_was_compared_with(world):
    w = world()
    w.stage("double-again", shadow=100.0)
    w.ask(ONE)
    wait_for(w, done(1))
    w.stage("triple", shadow=100.0)
    assert (record(w, 2).percent, record(w, 3).percent) == (0, 100)
    w.ask(ONE)
    assert wait_for(w, done(1), 3).mismatches == 1
    assert record(w, 2).batches == 1
    w.sets.select("m", 3, 1)
    assert record(w, 3).percent == 0
    with pytest.raises(WrongState, match="not compared with set 3, which serves"):
        w.sets.select("m", 2, 3, require_clean=True)


def test_a_batch_that_another_set_ran_is_no_reference(world, monkeypatch):
    monkeypatch.setattr(dispatch, "QUICK_NS", 0)
    gate = Gate(lambda x, weight: x * 2)
    w = world(fn=gate)
    w.stage("triple")
    running = send(w.scheduler, w.model, np.float32(ONE))
    gate.wait_entered()
    w.sets.select("m", 2, 1)
    w.sets.shadow("m", 1, 100)
    gate.open(2)
    np.testing.assert_array_equal(running.outputs()["y"], [[2, 4]])
    np.testing.assert_array_equal(w.ask(ONE), [[3, 6]])
    found = wait_for(w, done(1), program=1)
    assert (found.batches, found.mismatches, found.skipped, found.against) == (1, 1, 0, 2)


def test_a_removed_set_and_a_reload_end_the_shadow(world):
    w = world()
    w.stage("double-again", shadow=100.0)
    w.ask(ONE)
    wait_for(w, done(1))
    w.sets.remove("m", 2)
    assert set(w.scheduler.stats()) == {"m"}
    assert not any(thread.name == "rsrv-shadow" for thread in threading.enumerate())
    w.stage("double-again", shadow=100.0)
    old = w.serving().model
    w.reload()
    w.sets.drop("m")
    assert w.scheduler.retire(old, timeout=LONG)
    np.testing.assert_array_equal(w.ask(ONE), [[2, 4]])
    assert set(w.scheduler.stats()) == {"m"}
    assert not any(thread.name == "rsrv-shadow" for thread in threading.enumerate())


def test_a_shadow_ends_while_one_of_its_runs_is_on_the_device(world, monkeypatch):
    monkeypatch.setattr(dispatch, "QUICK_NS", 0)
    w = world()
    gate = Gate(lambda x, weight: x * 2)
    w.source.functions["slow"] = gate
    w.stage("slow", shadow=100.0)
    w.ask(ONE)
    gate.wait_entered()
    ended = threading.Thread(target=w.sets.shadow, args=("m", 2, 0))
    ended.start()
    gate.open()
    ended.join(LONG)
    assert not ended.is_alive()
    assert set(w.scheduler.stats()) == {"m"}


def test_requests_that_wait_go_before_the_copies_that_wait(world, monkeypatch):
    monkeypatch.setattr(dispatch, "QUICK_NS", 0)
    w = world(keys=(1,))
    gate = Gate(lambda x, weight: x * 2)
    w.source.functions["slow"] = gate
    w.stage("slow", shadow=100.0)
    w.ask(ONE)
    gate.wait_entered()
    replies = [send(w.scheduler, w.model, np.float32(ONE)) for _ in range(4)]
    gate.open(5)
    for reply in replies:
        np.testing.assert_array_equal(reply.outputs()["y"], [[2, 4]])
    assert wait_for(w, done(5)).mismatches == 0
    assert w.device.launched[:6] == ["program", "slow", *["program"] * 4]


def test_a_program_without_a_batch_size_is_compared_too(world):
    w = world(keys=(0,))
    directory = w.root / "single"
    directory.mkdir()
    (directory / "model.mlir").write_text("double-again 1")
    made = w.sets.stage("m", directory=directory, shadow=100.0)
    assert made.shadow.percent == 100
    w.ask(ONE)
    assert wait_for(w, done(1)).clean
