"""Staging, selecting, rolling back and removing program sets, with a compiler that a test writes as it likes."""

import gc
import hashlib
import json
import threading
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
from programs_support import LONG, Gate, World, send

from rsrv.bundle.blocks import BatchingSpec
from rsrv.core.errors import (
    CapacityFull,
    DeviceError,
    ExpectedMismatch,
    InvalidRequest,
    ServerStopping,
    UnknownModel,
    WrongState,
)
from rsrv.serve.registry import ModelState, Renamed
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


def in_threads(*calls):
    """Run them side by side; what each returned or raised."""
    found = [None] * len(calls)

    def run(at, call):
        try:
            found[at] = call()
        except Exception as error:
            found[at] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    return found


def is_gone(alive):
    """Wait for that: the thread that compiled it has it for a moment longer than whoever waited for the set."""
    for _ in range(6000):
        gc.collect()
        if alive() is None:
            return True
        time.sleep(0.01)
    return False


# --- staging ----------------------------------------------------------------------------------------------------------


def test_a_model_has_the_set_that_it_was_loaded_with(world):
    w = world(capacity=3)
    listed = w.sets.list("m")
    assert (listed.selected, listed.capacity, len(listed.programs)) == (1, 3, 1)
    (original,) = listed.programs
    assert (original.id, original.phase, original.label, original.created_unix) == (1, "ready", "original", 1000.0)
    assert original.shadow is None
    assert w.sets.retained("m") == (1, 1)
    with pytest.raises(UnknownModel):
        w.sets.list("other")
    assert w.sets.retained("other") == (0, 0)


def test_a_staged_set_is_compiled_beside_what_serves_and_changes_nothing(world):
    w = world()
    staged = w.stage("triple", label="faster")
    assert (staged.id, staged.phase, staged.label) == (2, "ready", "faster")
    assert staged.diagnostics == "batch 1: compiled in 0.25 s\nbatch 4: compiled in 0.25 s"
    assert sorted(w.source.loads) == ["triple 1", "triple 4"]
    np.testing.assert_array_equal(w.ask(ONE), [[2, 4]])
    listed = w.sets.list("m")
    assert (listed.selected, [made.id for made in listed.programs]) == (1, [1, 2])
    assert w.sets.retained("m") == (1, 2)
    assert w.told("program") == [
        ("", "pending", f"program 2: of {w.root / 'triple'}"),
        ("pending", "ready", "program 2"),
    ]


def test_the_fingerprint_is_of_shapes_sizes_and_digests_and_equal_for_equal_programs(world):
    w = world()
    first, again = w.stage("triple"), w.stage("triple")
    rows = [[[], size, hashlib.sha256(f"triple {size}".encode()).hexdigest()] for size in (1, 4)]
    expected = hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
    assert first.fingerprint == again.fingerprint == expected
    assert w.sets.list("m").programs[0].fingerprint not in ("", expected)
    assert (first.id, again.id) == (2, 3)


def test_without_waiting_a_set_is_pending_until_it_is_compiled(world):
    w = world()
    w.source.gate.clear()
    staged = w.stage("triple", wait=False)
    assert staged.phase == "pending"
    assert w.source.entered.wait(LONG)
    for call, reason in (
        (lambda: w.sets.select("m", 2, 1), "not_ready"),
        (lambda: w.sets.remove("m", 2), "pending"),
        (lambda: w.sets.shadow("m", 2, 10), "not_ready"),
        (lambda: w.stage("double", name="next", base=2), "not_ready"),
    ):
        with pytest.raises(WrongState) as caught:
            call()
        assert caught.value.reason == reason
    np.testing.assert_array_equal(w.ask(ONE), [[2, 4]])  # inference continues
    made = w.sets._retained[1].sets[2]
    w.source.gate.set()
    assert made.done.wait(LONG)
    assert w.sets.list("m").programs[1].phase == "ready"


def test_a_failed_compile_is_a_set_with_diagnostics_that_counts(world):
    w = world(capacity=2)
    failed = w.stage("triple", "bad")
    assert failed.phase == "failed"
    assert failed.diagnostics.splitlines()[0] == "batch 4: the compiler gave up"
    with pytest.raises(WrongState) as caught:
        w.sets.select("m", 2, 1)
    assert caught.value.reason == "not_ready"
    with pytest.raises(CapacityFull, match=r"has 2 program sets, as many as it may have .*program_capacity: 2") as full:
        w.stage("triple")
    assert full.value.reason == "program_capacity"
    assert [made.id for made in w.sets.remove("m", 2).programs] == [1]
    assert w.stage("triple").id == 3  # numbers are not used again
    assert w.told("program")[1] == ("pending", "failed", "program 2: batch 4: the compiler gave up")
    np.testing.assert_array_equal(w.ask(ONE), [[2, 4]])


def test_diagnostics_are_kept_up_to_a_bound(world):
    w = world()

    def verbose(job, found):
        raise ValueError("ä" * 100_000)

    w.source.load = verbose
    failed = w.stage("triple")
    assert failed.phase == "failed"
    assert len(failed.diagnostics.encode()) <= 64 << 10
    assert failed.diagnostics.startswith("batch 1: ValueError: ää")
    assert failed.diagnostics.endswith("… (cut)")


def test_programs_that_break_the_contract_are_refused_before_anything_is_compiled(world):
    w = world()
    with pytest.raises(InvalidRequest, match=r"batch 1: result 0 \(output 'y'\) is f32\[1,3\], wanted f32\[1,2\]"):
        w.stage("wide")
    with pytest.raises(InvalidRequest, match=r"model\.b4\.mlir: program cannot be read"):
        w.stage("triple", "unreadable")
    with pytest.raises(InvalidRequest, match="is not a directory"):
        w.sets.stage("m", directory=w.root / "nowhere")
    assert w.source.loads == []
    assert w.sets.retained("m") == (1, 1)


def test_sources_are_taken_from_the_directory_and_the_rest_from_the_base(world):
    w = world()
    assert w.stage("triple").id == 2
    w.source.loads.clear()
    part = w.stage("nearly", sources=["model.b4.mlir"], base=2)
    assert w.source.loads == ["nearly 4"]
    w.sets.select("m", part.id, 1)
    np.testing.assert_array_equal(w.ask(ONE), [[3, 6]])
    np.testing.assert_allclose(w.ask(ONE * 4), np.float32(ONE * 4) * 2.001, rtol=1e-6)
    assert w.serving().numerics == "numerics of triple; numerics of nearly"
    again = w.stage("double", sources=["model.b1.mlir"])  # base 0: what serves, which is the mixture
    w.sets.select("m", again.id, part.id)
    np.testing.assert_array_equal(w.ask(ONE), [[2, 4]])
    np.testing.assert_allclose(w.ask(ONE * 4), np.float32(ONE * 4) * 2.001, rtol=1e-6)


def test_a_base_that_is_not_there_is_unknown(world):
    w = world()
    for call in (
        lambda: w.stage("triple", base=7),
        lambda: w.sets.select("m", 7, 1),
        lambda: w.sets.remove("m", 7),
        lambda: w.sets.shadow("m", 7, 1),
    ):
        with pytest.raises(UnknownModel, match="has no program set 7; it has 1") as caught:
            call()
        assert caught.value.reason == "unknown_program"


def test_a_model_that_is_not_ready_has_no_sets(world):
    w = world()
    w.registry.change("m", state=ModelState.PREPARING, prepared=None)
    assert w.sets.list("m").programs == ()
    for call in (
        lambda: w.stage("triple"),
        lambda: w.sets.select("m", 1, 1),
        lambda: w.sets.remove("m", 1),
        lambda: w.sets.shadow("m", 1, 1),
    ):
        with pytest.raises(WrongState, match="is preparing") as caught:
            call()
        assert caught.value.reason == "not_ready"


def test_two_that_stage_at_once_do_not_get_past_the_capacity(world):
    w = world(capacity=2)
    w.write("triple", name="one")
    calls = [lambda: w.sets.stage("m", directory=w.root / "one")] * 4
    found = in_threads(*calls)
    assert sorted(type(each).__name__ for each in found) == ["CapacityFull"] * 3 + ["ProgramSet"]
    assert w.sets.retained("m") == (1, 2)


def test_one_symbolic_program_becomes_a_set_of_all_sizes(world):
    w = world()
    manifest = replace(w.model.manifest, batching=BatchingSpec((1, 4), dynamic=True))
    prepared = w.serving()
    w.registry.change("m", prepared=replace(prepared, model=replace(prepared.model, manifest=manifest)))
    directory = w.root / "symbolic"
    directory.mkdir()
    (directory / "model.mlir").write_text("triple")
    assert w.sets.stage("m", directory=directory).phase == "ready"
    assert w.source.loads == ["triple", "triple"]
    w.sets.select("m", 2, 1)
    np.testing.assert_array_equal(w.ask(ONE * 4), np.float32(ONE * 4) * 3)


# --- selecting --------------------------------------------------------------------------------------------------------


def test_a_selected_set_serves_and_a_roll_back_gives_the_same_bits_without_a_weight_load(world):
    w = world(fn=lambda x, w: np.sin(x) * w)
    x = np.float32([[0.1, 0.7]])
    before = w.ask(x)
    put = w.device.live_buffers
    w.stage("triple")
    w.sets.select("m", 2, 1)
    np.testing.assert_array_equal(w.ask(x), x * 3)
    assert w.serving().numerics == "numerics of triple"
    assert w.serving().model.weights is w.model.weights
    assert w.sets.list("m").selected == 2
    selected = w.sets.select("m", 1, 2)
    assert (selected.selected, selected.previous) == (1, 2)
    assert w.ask(x).tobytes() == before.tobytes()
    assert w.serving().numerics == "as it was"
    assert w.serving().model.programs is w.model.programs
    assert w.device.live_buffers == put
    assert w.told("selected_program") == [("1", "2", ""), ("2", "1", "original")]


def test_a_stale_expectation_changes_nothing_and_says_what_is_selected(world):
    w = world()
    w.stage("triple")
    w.stage("nearly")
    w.sets.select("m", 2, 1)
    with pytest.raises(ExpectedMismatch, match="is served by program set 2, not 1") as caught:
        w.sets.select("m", 3, 1)
    assert caught.value.selected == 2
    with pytest.raises(ExpectedMismatch):
        w.sets.select("m", 2, 1)
    np.testing.assert_array_equal(w.ask(ONE), [[3, 6]])
    again = w.sets.select("m", 2, 2)
    assert (again.selected, again.previous) == (2, 2)
    assert len(w.told("selected_program")) == 1


def test_of_two_that_select_with_the_same_expectation_one_wins(world):
    w = world()
    w.stage("triple")
    w.stage("nearly")
    found = in_threads(lambda: w.sets.select("m", 2, 1), lambda: w.sets.select("m", 3, 1))
    (lost,) = [each for each in found if isinstance(each, ExpectedMismatch)]
    (won,) = [each for each in found if not isinstance(each, Exception)]
    assert lost.selected == won.selected == w.sets.list("m").selected


def test_requests_that_wait_run_on_the_new_set_and_no_answer_mixes_two(world, monkeypatch):
    monkeypatch.setattr(dispatch, "QUICK_NS", 0)
    gate = Gate(lambda x, w: x * 2)
    w = world(fn=gate)
    w.stage("triple")
    first = send(w.scheduler, w.model, np.float32(ONE))
    gate.wait_entered()
    waiting = [send(w.scheduler, w.model, np.float32(ONE)) for _ in range(3)]
    w.sets.select("m", 2, 1)
    gate.open()
    np.testing.assert_array_equal(first.outputs()["y"], [[2, 4]])
    for reply in waiting:
        np.testing.assert_array_equal(reply.outputs()["y"], [[3, 6]])
    # Also one that was prepared before, and comes now.
    np.testing.assert_array_equal(send(w.scheduler, w.model, np.float32(ONE)).outputs()["y"], [[3, 6]])


def test_under_an_open_gate_nothing_is_run_beforehand_and_costs_are_kept_for_each_set(world):
    w = world()
    w.scheduler.seed_cost("m", (), 1, 0.5)
    w.stage("triple")
    w.sets.select("m", 2, 1)
    assert w.device.launched == []
    assert w.scheduler.stats()["m"].costs == {}
    w.sets.select("m", 1, 2)
    assert w.scheduler.stats()["m"].costs == {((), 1): 0.5}


def test_at_a_closed_gate_each_program_is_run_before_the_set_serves(world):
    w = world()
    seen = []
    w.source.functions["triple"] = lambda x, weight: (seen.append(w.serving().model.programs is w.model.programs), x)[1]
    w.stage("triple")
    w.registry.change("m", gate="drained")
    w.sets.select("m", 2, 1)
    assert w.device.launched == ["triple"] * 4  # twice for each size
    assert seen == [True] * 4
    costs = w.scheduler.stats()["m"].costs
    assert set(costs) == {((), 1), ((), 4)}
    assert set(w.scheduler.stats()) == {"m"}
    w.sets.select("m", 1, 2)
    w.sets.select("m", 2, 1)
    assert len(w.device.launched) == 4


def test_a_set_that_cannot_run_does_not_get_to_serve_at_a_closed_gate(world):
    w = world()
    w.stage("broken")
    w.registry.change("m", gate="draining")
    with pytest.raises(DeviceError, match="on fire"):
        w.sets.select("m", 2, 1)
    assert w.sets.list("m").selected == 1
    np.testing.assert_array_equal(w.ask(ONE), [[2, 4]])


def test_weights_that_are_elsewhere_are_not_brought_for_a_run_beforehand(world):
    w = world()
    w.stage("triple")
    w.registry.change("m", gate="drained")
    w.model.weights.resident = False
    w.sets.select("m", 2, 1)
    assert w.device.launched == []
    assert w.sets.list("m").selected == 2


def test_room_for_the_scratch_of_a_set_is_made_before_it_serves(world):
    reserved = []
    w = world(reserve=reserved.append)
    w.stage("triple")
    assert reserved == []
    w.sets.select("m", 2, 1)
    assert [model.programs for model in reserved] == [w.serving().model.programs]


# --- removing ---------------------------------------------------------------------------------------------------------


def test_a_removed_set_is_gone_with_its_executables_and_the_selected_one_stays(world):
    w = world()
    w.stage("triple")
    w.sets.select("m", 2, 1)
    with pytest.raises(WrongState, match="is selected") as caught:
        w.sets.remove("m", 2)
    assert caught.value.reason == "selected"
    del caught  # its traceback holds the set
    w.sets.select("m", 1, 2)
    executable = weakref.ref(w.sets._retained[1].sets[2].programs[()][4])
    listed = w.sets.remove("m", 2)
    assert [made.id for made in listed.programs] == [1]
    assert is_gone(executable)
    assert w.told("program")[-1] == ("ready", "removed", "program 2")


def test_the_original_can_be_removed_when_another_serves(world):
    w = world()
    w.stage("triple")
    w.sets.select("m", 2, 1)
    assert [made.id for made in w.sets.remove("m", 1).programs] == [2]
    np.testing.assert_array_equal(w.ask(ONE), [[3, 6]])
    with pytest.raises(UnknownModel):
        w.sets.select("m", 1, 2)


# --- reloads, renames, removals ---------------------------------------------------------------------------------------


def test_a_reload_drops_all_sets_and_begins_again_with_the_new_original(world):
    w = world()
    w.stage("triple")
    w.sets.select("m", 2, 1)
    executable = weakref.ref(w.sets._retained[1].sets[2].programs[()][4])
    old = w.serving().model
    w.reload()
    w.sets.drop("m")
    assert w.scheduler.retire(old, timeout=LONG)
    del old
    assert is_gone(executable)
    listed = w.sets.list("m")
    assert (listed.selected, [made.id for made in listed.programs]) == (1, [1])
    np.testing.assert_array_equal(w.ask(ONE), [[2, 4]])
    with pytest.raises(UnknownModel):
        w.sets.select("m", 2, 1)
    assert w.stage("nearly").id == 2


def test_sets_of_an_incarnation_that_is_gone_are_forgotten_even_if_nobody_says_so(world):
    w = world()
    w.stage("triple")
    w.reload()
    assert w.sets.retained("m") == (1, 1)
    assert [made.id for made in w.sets.list("m").programs] == [1]
    assert list(w.sets._retained) == [2]


def test_a_set_that_is_compiled_for_an_incarnation_that_goes_away_is_never_selected(world):
    w = world()
    w.source.gate.clear()
    w.write("triple")
    replies = []
    waiting = threading.Thread(target=lambda: replies.append(w.sets.stage("m", directory=w.root / "other")))
    waiting.start()
    assert w.source.entered.wait(LONG)
    w.reload()
    w.sets.drop("m")
    waiting.join(LONG)
    assert replies[0].phase == "failed"
    assert replies[0].diagnostics == "the model was loaded again or removed"
    w.source.gate.set()
    assert [made.id for made in w.sets.list("m").programs] == [1]


def test_a_reload_while_a_set_is_being_selected_is_not_undone(world):
    w = world()
    w.stage("triple")
    fresh = []
    w.sets._reserve = lambda model: fresh.append(w.reload())
    with pytest.raises(UnknownModel, match="loaded again, renamed or removed meanwhile"):
        w.sets.select("m", 2, 1)
    assert w.serving().model is fresh[0]
    np.testing.assert_array_equal(w.ask(ONE), [[2, 4]])


def test_a_rename_takes_the_sets_along_and_a_new_model_of_the_old_name_has_none_of_them(world):
    w = world()
    w.stage("triple")
    w.sets.select("m", 2, 1)
    prepared = w.serving()
    renamed = replace(prepared.model, name="n")
    w.scheduler.rename("m", renamed)
    w.registry.rename_all({"n": Renamed("m", w.registry.find("m"), {"prepared": replace(prepared, model=renamed)})})
    listed = w.sets.list("n")
    assert (listed.selected, [made.id for made in listed.programs]) == (2, [1, 2])
    w.sets.drop("m")
    assert w.sets.retained("n") == (2, 2)
    with pytest.raises(UnknownModel):
        w.sets.list("m")
    w.sets.select("n", 1, 2)
    reply = send(w.scheduler, w.registry.get("n").prepared.model, np.float32(ONE))
    np.testing.assert_array_equal(reply.outputs()["y"], [[2, 4]])


def test_a_server_that_stops_ends_what_is_compiled_and_takes_no_more(world):
    w = world()
    w.source.gate.clear()
    w.stage("triple", wait=False)
    assert w.source.entered.wait(LONG)
    closing = threading.Thread(target=w.sets.close)
    closing.start()
    made = w.sets._retained[1].sets[2]
    assert made.done.wait(LONG)
    assert (made.phase, made.diagnostics) == ("failed", "the server is stopping")
    w.source.gate.set()
    closing.join(LONG)
    assert not closing.is_alive()
    with pytest.raises(ServerStopping):
        w.stage("triple")
