"""The scheduler with its threads, on the fake device: what runs together, what is dropped, what becomes of failures."""

import dataclasses
import random
import threading
import time

import numpy as np
import pytest
from sched_support import LONG, Clock, FakeDevice, Gate, Reply, blocked, double, model, poisonous, rows_of, send, spec

from rsrv.core.errors import (
    Cancelled,
    DeadlineExceeded,
    DeviceError,
    DeviceOutOfMemory,
    InvalidRequest,
    ModelUnloaded,
    QueueFull,
    ServerStopping,
)
from rsrv.serve.scheduler import Policy, Scheduler, batch, dispatch, settle
from rsrv.serve.scheduler.costs import Costs


@pytest.fixture
def device():
    device = FakeDevice()
    yield device
    assert device.most_at_once <= 1


@pytest.fixture(autouse=True)
def no_small(monkeypatch):
    """Even the smallest batch lies in a pooled block, where a mistake in giving it back shows."""
    monkeypatch.setattr(batch, "SMALL_BYTES", 0)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def scheduler(device, clock):
    scheduler = Scheduler(device, Policy(discipline="fifo", max_queue_depth=64), clock=clock)
    yield scheduler
    scheduler.stop()
    assert scheduler._dispatcher.pool.lent == 0, "a staged block was not given back"
    assert [t.name for t in threading.enumerate() if t.name in ("rsrv-dispatch", "rsrv-device", "rsrv-watchdog")] == []


@pytest.fixture
def staged(monkeypatch):
    """A semaphore that counts the batches that were merged."""
    counter, stage = threading.Semaphore(0), dispatch.stage

    def counting(*args):
        try:
            return stage(*args)
        finally:
            counter.release()

    monkeypatch.setattr(dispatch, "stage", counting)
    return counter


# --- what runs together -------------------------------------------------------------------------------------------


def test_four_requests_of_one_row_run_as_one_dispatch_and_each_gets_its_own_row(scheduler, device):
    m = model(device, lambda x, w: x @ w, keys=(1, 4), weights=[[[1, 2], [3, 4]]])
    scheduler.add(m)
    replies = [send(scheduler, m, rows_of(value)) for value in (1, 2, 3, 4)]
    scheduler.start()
    for value, reply in zip((1, 2, 3, 4), replies, strict=True):
        assert reply.outputs()["y"].tolist() == [[4 * value, 6 * value]]
        result = reply.wait()
        assert (result.batch_key, result.batch_rows) == (4, 4)
    stats = scheduler.stats()["m"]
    assert (stats.dispatch_count, stats.requests_served, stats.rows_served) == (1, 4, 4)
    assert (stats.batch_keys, stats.padding_rows, stats.queue_depth) == ({4: 1}, 0, 0)
    assert len(device.launched) == 1


def test_a_row_that_is_padded_comes_back_without_its_padding(scheduler, device):
    seen = []
    m = model(device, lambda x: seen.append(x.copy()) or double(x), keys=(4,))
    scheduler.add(m)
    scheduler.start()
    assert send(scheduler, m, rows_of(7)).outputs()["y"].tolist() == [[14, 14]]
    assert seen[0].tolist() == [[7, 7], [0, 0], [0, 0], [0, 0]]
    assert scheduler.stats()["m"].padding_rows == 3


def test_variants_never_share_a_dispatch(scheduler, device):
    m = model(
        device,
        lambda x, s: (x.sum(1) + s.sum(0),),
        inputs=(spec("x", "n", "?"), spec("s", 2, "n")),
        outputs=(spec("y", "n"),),
        keys=(1, 2),
        variants=((3,), (5,)),
    )
    scheduler.add(m)
    replies = []
    for width, value in ((3, 1), (3, 2), (5, 3)):
        reply = Reply()
        inputs = {"x": np.full((1, width), value, np.float32), "s": np.full((2, 1), 100 * value, np.float32)}
        scheduler.submit(m, inputs, 1, (width,), 0, reply)
        replies.append(reply)
    scheduler.start()
    assert [reply.outputs()["y"].tolist() for reply in replies] == [[203], [406], [615]]
    assert scheduler.stats()["m"].batch_keys == {2: 1, 1: 1}


def test_the_model_with_the_oldest_request_runs_first(scheduler, device, clock):
    ran = []
    models = {n: model(device, lambda x, n=n: ran.append(n) or double(x), name=n, keys=(1, 4)) for n in "abc"}
    for m in models.values():
        scheduler.add(m)
    replies = []
    for n in "cbcab":
        replies.append(send(scheduler, models[n], rows_of(1, 1)))
        clock.advance(1)
    scheduler.start()
    for reply in replies:
        reply.outputs()
    assert ran == ["c", "b", "a"]


def test_a_model_without_inputs_runs_on_its_weights(scheduler, device):
    m = model(device, lambda w: w + 1, inputs=(), outputs=(spec("y", 2),), keys=(0,), weights=[[1, 2]])
    scheduler.add(m)
    scheduler.start()
    reply = Reply()
    scheduler.submit(m, {}, 1, (), 0, reply)
    assert reply.outputs()["y"].tolist() == [2, 3]


def test_the_next_batch_is_staged_while_a_launch_is_outstanding(scheduler, device, staged):
    m, gate, first = blocked(scheduler, device, keys=(4,))
    staged.acquire()
    second = send(scheduler, m, rows_of(1))
    assert staged.acquire(timeout=LONG), "nothing was staged behind the running launch"
    assert not first.settled
    gate.open(2)
    assert second.outputs()["y"].tolist() == [[2, 2]]


def test_a_request_that_arrives_between_the_offer_and_the_launch_is_staged_during_the_launch(scheduler, device, staged):
    m, gate, first = blocked(scheduler, device)
    gate.open()
    first.outputs()
    assert scheduler.drain(LONG)
    staged.acquire()
    replies = [Reply(), Reply()]
    with scheduler._lock:
        # As if the first was offered before the second came, and the device thread was slow to wake.
        backlog = scheduler._backlog
        backlog.accept(m, {"x": rows_of(1)}, 1, (), 0, replies[0], 0)
        offered = backlog.next(0)
        offered.staged = batch.stage(m, offered.tickets, 1, scheduler._dispatcher.pool)
        scheduler._dispatcher.launcher.offer(offered)
        backlog.accept(m, {"x": rows_of(2)}, 1, (), 0, replies[1], 0)
        scheduler._dispatcher.pending += 2
    gate.wait_entered()
    assert staged.acquire(timeout=LONG)
    gate.open(2)
    assert [reply.outputs()["y"][0, 0] for reply in replies] == [2, 4]


def test_requests_that_arrive_behind_a_staged_batch_join_it(scheduler, device, staged):
    m, gate, first = blocked(scheduler, device, keys=(1, 4))
    staged.acquire()
    replies = [send(scheduler, m, rows_of(1))]
    assert staged.acquire(timeout=LONG)
    replies += [send(scheduler, m, rows_of(value)) for value in (2, 3, 4, 5)]
    gate.open(3)
    assert [reply.outputs()["y"][0, 0] for reply in (first, *replies)] == [0, 2, 4, 6, 8, 10]
    assert [len(call[0]) for call in gate.calls] == [1, 4, 1]
    assert scheduler.stats()["m"].batch_keys == {1: 2, 4: 1}


def test_a_staged_batch_is_launched_even_when_what_waited_behind_it_is_gone(scheduler, device):
    m = model(device, double, keys=(1, 4))
    scheduler.add(m)
    scheduler.start()
    send(scheduler, m, rows_of(1)).outputs()
    assert scheduler.drain(LONG)
    reply = Reply()
    with scheduler._lock:
        # As after a launch during which a request waited behind the staged batch, and expired before the device slept.
        backlog = scheduler._backlog
        backlog.accept(m, {"x": rows_of(2)}, 1, (), 0, reply, 0)
        staged_batch = backlog.next(0)
        staged_batch.staged = batch.stage(m, staged_batch.tickets, 1, scheduler._dispatcher.pool)
        scheduler._dispatcher.pending += 1
        scheduler._dispatcher.launcher.staged = staged_batch
        scheduler._dispatcher.wake()
    assert reply.outputs()["y"][0, 0] == 4


def test_a_staged_batch_that_is_full_is_not_merged_again(scheduler, device, staged):
    m, gate, first = blocked(scheduler, device, keys=(1, 2))
    staged.acquire()
    replies = [send(scheduler, m, rows_of(value, value)) for value in (1, 2, 3)]
    gate.open(4)
    for value, reply in enumerate((first, *replies)):
        assert reply.outputs()["y"][0, 0] == 2 * value
    assert all(staged.acquire(blocking=False) for _ in range(3))
    assert not staged.acquire(blocking=False)


def test_a_quick_program_runs_on_the_dispatch_thread_once_it_is_known_to_be_quick(scheduler, device, clock):
    threads, seconds = [], [0.0]

    def fn(x):
        threads.append(threading.current_thread().name)
        clock.advance(seconds[0])
        return x * 2

    m = model(device, fn)
    scheduler.add(m)
    scheduler.start()
    for took in (1.0, 0.0001, 0.0001, 1.0, 1.0):
        seconds[0] = took
        assert send(scheduler, m, rows_of(3)).outputs()["y"].tolist() == [[6, 6]]
    # Unknown, known to be slow, quick, quick; one slow run among quick ones is noise.
    assert threads == ["rsrv-device"] * 2 + ["rsrv-dispatch"] * 3
    assert scheduler.stats()["m"].total_compute_seconds == pytest.approx(3.0002)


def test_a_quick_program_waits_behind_a_slow_one_in_the_slot(scheduler, device):
    quick = model(device, double, name="quick")
    scheduler.add(quick)
    _, gate, slow = blocked(scheduler, device)
    waiting = send(scheduler, quick, rows_of(1))
    assert not scheduler.drain(0)
    gate.open()
    slow.outputs()
    assert waiting.outputs()["y"][0, 0] == 2


@pytest.mark.parametrize(
    ("took", "expected"),
    [
        (0.0, "run run run run reply reply reply reply"),
        (0.0003, "run run reply reply run run reply reply"),
    ],
)
def test_replies_of_quick_full_batches_go_out_together_but_not_late(scheduler, device, clock, took, expected):
    events, seconds = [], [0.0]

    def fn(x):
        events.append("run")
        clock.advance(seconds[0])
        return x * 2

    m = model(device, fn)
    scheduler.add(m)
    scheduler.start()
    for _ in range(2):
        send(scheduler, m, rows_of(1)).outputs()
    seconds[0] = took
    last = Reply()

    def submit_four(result):
        events.clear()
        for value in range(4):
            done = last if value == 3 else lambda result: None
            reply = lambda result, done=done: (events.append("reply"), done(result))  # noqa: E731
            scheduler.submit(m, {"x": rows_of(value)}, 1, (), 0, reply)

    scheduler.submit(m, {"x": rows_of(0)}, 1, (), 0, submit_four)
    assert last.outputs()["y"][0, 0] == 6
    assert events == expected.split()


def test_nothing_is_staged_behind_a_quick_program(scheduler, device, staged):
    gate = Gate(double)
    quick = model(device, gate, name="quick")
    scheduler.add(quick)
    slow, slow_gate, running = blocked(scheduler, device)
    staged.acquire()
    scheduler.seed_cost("quick", (), 1, 0.0)
    replies = [send(scheduler, quick, rows_of(1))]
    assert staged.acquire(timeout=LONG)
    slow_gate.open()
    gate.wait_entered()
    replies.append(send(scheduler, slow, rows_of(2)))
    for i in range(5):
        scheduler.add(model(device, double, name=f"other{i}"))
        scheduler.remove(f"other{i}")
    assert not staged.acquire(blocking=False)
    gate.open()
    slow_gate.open()
    assert [running.outputs()["y"][0, 0], *(reply.outputs()["y"][0, 0] for reply in replies)] == [0, 2, 4]


def test_a_program_that_turns_slow_goes_back_to_the_device_thread():
    costs = Costs(0.2)
    costs.measured((), 1, 100, 0)
    for _ in range(200):
        costs.measured((), 1, 10**9, 0)
    assert costs.fastest_ns((), 1) == 10**9
    costs.measured((), 1, 500, 0)
    assert costs.fastest_ns((), 1) == 500


# --- deadlines and cancellation -----------------------------------------------------------------------------------


def test_a_request_that_expires_in_the_queue_is_dropped_and_its_neighbours_run(scheduler, device, clock, staged):
    m, gate, first = blocked(scheduler, device, keys=(1, 4))
    staged.acquire()
    behind = send(scheduler, m, rows_of(1, 1, 1, 1))
    assert staged.acquire(timeout=LONG)
    late = send(scheduler, m, rows_of(2), deadline_ns=clock() + 1000)
    patient = send(scheduler, m, rows_of(3), deadline_ns=clock() + 10**12)
    clock.advance(1)
    gate.open(3)
    assert isinstance(late.error(), DeadlineExceeded)
    assert late.wait().queue_ns == 10**9
    for reply in (first, behind, patient):
        reply.outputs()
    assert [len(call[0]) for call in gate.calls] == [1, 4, 1]
    assert scheduler.stats()["m"].dropped == {"deadline": 1}


def test_a_request_that_expires_after_staging_is_dropped_at_the_launch(scheduler, device, clock, staged):
    m, gate, _ = blocked(scheduler, device, keys=(1, 4))
    staged.acquire()
    late = send(scheduler, m, rows_of(2, 2), deadline_ns=clock() + 1000)
    assert staged.acquire(timeout=LONG)
    patient = send(scheduler, m, rows_of(3, 3))
    clock.advance(1)
    gate.open(2)
    assert isinstance(late.error(), DeadlineExceeded)
    assert patient.outputs()["y"].tolist() == [[6, 6], [6, 6]]
    stats = scheduler.stats()["m"]
    assert (stats.requests_served, stats.rows_served, stats.dropped) == (2, 3, {"deadline": 1})


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
def test_a_batch_that_nobody_waits_for_does_not_touch_the_device(scheduler, device, clock, staged, how):
    m, gate, first = blocked(scheduler, device)
    staged.acquire()
    gone = send(scheduler, m, rows_of(2), deadline_ns=clock() + 1000 if how == "deadline" else 0)
    assert staged.acquire(timeout=LONG)
    if how == "deadline":
        clock.advance(1)
    else:
        gone.ticket.cancel()
    gate.open()
    assert isinstance(gone.error(), DeadlineExceeded if how == "deadline" else Cancelled)
    first.outputs()
    assert scheduler.drain(LONG)
    assert len(gate.calls) == 1
    assert scheduler.stats()["m"].dropped == {how: 1}


def test_a_cancelled_request_is_dropped_from_the_queue_and_settled(scheduler, device):
    m = model(device, double, keys=(1, 4))
    scheduler.add(m)
    kept, gone = send(scheduler, m, rows_of(1)), send(scheduler, m, rows_of(2))
    gone.ticket.cancel()
    scheduler.start()
    assert isinstance(gone.error(), Cancelled)
    assert kept.outputs()["y"].tolist() == [[2, 2]]
    assert scheduler.stats()["m"].batch_keys == {1: 1}


def test_cancelling_a_running_or_settled_request_changes_nothing(scheduler, device):
    m, gate, first = blocked(scheduler, device)
    first.ticket.cancel()
    gate.open()
    first.outputs()
    first.ticket.cancel()
    assert send_and_open(scheduler, m, gate).outputs()["y"].tolist() == [[2, 2]]


def send_and_open(scheduler, m, gate):
    gate.open()
    return send(scheduler, m, rows_of(1))


def test_a_deadline_that_has_passed_is_refused_at_once(scheduler, device, clock):
    m = model(device, double)
    scheduler.add(m)
    with pytest.raises(DeadlineExceeded):
        send(scheduler, m, rows_of(1), deadline_ns=clock() - 1)


def test_waits_are_counted_from_acceptance_to_launch(scheduler, device, clock, staged):
    m, gate, first = blocked(scheduler, device)
    staged.acquire()
    second = send(scheduler, m, rows_of(1))
    assert staged.acquire(timeout=LONG)
    clock.advance(3)
    gate.open(2)
    assert first.wait().queue_ns == 0
    assert second.wait().queue_ns == 3 * 10**9
    stats = scheduler.stats()["m"]
    assert (stats.queue_wait_seconds[0.5], stats.queue_wait_seconds[0.99]) == (0, 3)
    assert stats.total_compute_seconds == 3


# --- limits -------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_without_touching_other_models(device):
    scheduler = Scheduler(device, Policy(max_queue_depth=2))
    a, b = model(device, double, name="a"), model(device, double, name="b")
    scheduler.add(a)
    scheduler.add(b)
    queued = [send(scheduler, a, rows_of(1)) for _ in range(2)]
    with pytest.raises(QueueFull, match="'a' is full"):
        send(scheduler, a, rows_of(1))
    queued.append(send(scheduler, b, rows_of(1)))
    assert scheduler.stats()["a"].dropped == {"queue_full": 1}
    scheduler.stop()
    assert all(isinstance(reply.error(), ServerStopping) for reply in queued)


def test_a_request_that_no_program_takes_is_refused_at_once(scheduler, device):
    m = model(device, double, keys=(1, 4))
    scheduler.add(m)
    with pytest.raises(InvalidRequest, match="1 to 4"):
        send(scheduler, m, rows_of(*range(5)))
    with pytest.raises(InvalidRequest, match="no program"):
        send(scheduler, m, rows_of(1), variant=(9,))
    with pytest.raises(InvalidRequest, match="float64"):
        send(scheduler, m, rows_of(1).astype(np.float64))


# --- failures -----------------------------------------------------------------------------------------------------


def test_one_poisonous_request_fails_alone(scheduler, device):
    gate = Gate(poisonous)
    gate.open(100)
    m = model(device, gate, keys=(1, 4))
    scheduler.add(m)
    replies = {value: send(scheduler, m, rows_of(value)) for value in (1, 13, 3, 4)}
    scheduler.start()
    for value, reply in replies.items():
        if value == 13:
            assert isinstance(reply.error(), InvalidRequest)
        else:
            assert reply.outputs()["y"].tolist() == [[2 * value, 2 * value]]
    assert [len(call[0]) for call in gate.calls] == [4, 1, 1, 1, 1]
    stats = scheduler.stats()["m"]
    assert (stats.dispatch_count, stats.requests_served, stats.errors) == (3, 3, {"invalid": 2})


def test_a_request_that_expired_is_not_run_again_alone(scheduler, device, clock):
    gate = Gate(poisonous)
    m = model(device, gate, keys=(1, 2))
    scheduler.add(m)
    poison = send(scheduler, m, rows_of(13))
    late = send(scheduler, m, rows_of(1), deadline_ns=clock() + 1000)
    scheduler.start()
    gate.wait_entered()
    clock.advance(1)
    gate.open(3)
    assert isinstance(poison.error(), InvalidRequest)
    assert isinstance(late.error(), DeadlineExceeded)
    assert len(gate.calls) == 2


@pytest.mark.parametrize("error", [DeviceError("broken"), DeviceOutOfMemory("full")])
def test_a_device_error_is_everybodys_and_nothing_runs_again(scheduler, device, error):
    calls = []

    def fail(x):
        calls.append(len(x))
        raise error

    m = model(device, fail, keys=(1, 4))
    scheduler.add(m)
    replies = [send(scheduler, m, rows_of(value)) for value in range(4)]
    scheduler.start()
    assert [reply.error() for reply in replies] == [error] * 4
    assert calls == [4]
    assert scheduler.stats()["m"].errors == {error.reason: 1}
    assert scheduler.stats()["m"].dispatch_count == 0


def test_a_batch_that_cannot_be_merged_is_run_one_by_one(scheduler, device, monkeypatch):
    stage, sizes = dispatch.stage, []

    def failing(model_, tickets, key, pool):
        sizes.append(len(tickets))
        if len(tickets) > 1 or tickets[0].inputs["x"][0, 0] == 2:
            raise RuntimeError("cannot merge")
        return stage(model_, tickets, key, pool)

    monkeypatch.setattr(dispatch, "stage", failing)
    m = model(device, double, keys=(1, 4))
    scheduler.add(m)
    replies = [send(scheduler, m, rows_of(value)) for value in (1, 2, 3, 4)]
    scheduler.start()
    assert isinstance(replies[1].error(), RuntimeError)
    assert [replies[i].outputs()["y"][0, 0] for i in (0, 2, 3)] == [2, 6, 8]
    assert sizes == [4, 1, 1, 1, 1]


def test_results_that_are_not_as_declared_are_a_device_error(scheduler, device):
    m = model(device, double, keys=(4,))
    declared = dataclasses.replace(m.manifest, executable_outputs=(spec("y", "n", 2), spec("z", "n", 2)))
    wrong = dataclasses.replace(m, manifest=declared)
    scheduler.add(wrong)
    scheduler.start()
    error = send(scheduler, wrong, rows_of(1)).error()
    assert isinstance(error, DeviceError)
    assert "returned 1 results, not 2" in str(error)


def test_a_failing_callback_hurts_nobody_else(scheduler, device, caplog):
    m = model(device, double, keys=(1, 4))
    scheduler.add(m)

    def broken(result):
        raise RuntimeError("callback broke")

    before = send(scheduler, m, rows_of(1))
    scheduler.submit(m, {"x": rows_of(2)}, 1, (), 0, broken)
    after = send(scheduler, m, rows_of(3))
    scheduler.start()
    assert (before.outputs()["y"][0, 0], after.outputs()["y"][0, 0]) == (2, 6)
    assert scheduler.drain(LONG)
    assert "done callback failed model=m" in caplog.text
    assert send(scheduler, m, rows_of(4)).outputs()["y"][0, 0] == 8


def test_the_loop_survives_a_bug_and_nobody_waits_for_ever(scheduler, device, monkeypatch, caplog):
    m = model(device, double)
    scheduler.add(m)
    victim = send(scheduler, m, rows_of(1))
    original, broken = scheduler._dispatcher._choose, threading.Event()

    def choose():
        if not broken.is_set():
            broken.set()
            raise SystemError("a bug")
        return original()

    monkeypatch.setattr(scheduler._dispatcher, "_choose", choose)
    scheduler.start()
    assert isinstance(victim.error(), SystemError)
    assert send(scheduler, m, rows_of(2)).outputs()["y"][0, 0] == 4
    assert "dispatch iteration failed" in caplog.text


def test_a_batch_that_cannot_be_settled_fails_and_the_next_one_runs(scheduler, device, monkeypatch, caplog):
    m = model(device, double, keys=(1, 2))
    scheduler.add(m)
    original, broken = settle.split, threading.Event()

    def split(*args):
        if not broken.is_set():
            broken.set()
            raise SystemError("a bug")
        return original(*args)

    monkeypatch.setattr(settle, "split", split)
    victims = [send(scheduler, m, rows_of(1)), send(scheduler, m, rows_of(2))]
    scheduler.start()
    assert all(isinstance(victim.error(), SystemError) for victim in victims)
    assert send(scheduler, m, rows_of(2)).outputs()["y"][0, 0] == 4
    assert "could not be settled model=m" in caplog.text


def test_inputs_that_cannot_be_freed_cost_their_blocks_but_not_the_results(device, monkeypatch, caplog):
    scheduler = Scheduler(device)
    m = model(device, double, keys=(4,))
    scheduler.add(m)
    scheduler.start()
    with monkeypatch.context() as patch:
        patch.setattr(device, "free", lambda buffers: (_ for _ in ()).throw(DeviceError("stuck")))
        assert send(scheduler, m, rows_of(1)).outputs()["y"][0, 0] == 2
    assert "could not be freed model=m key=4" in caplog.text
    scheduler.stop()
    assert scheduler._dispatcher.pool.lent == 1
    assert scheduler._dispatcher.pool.idle_bytes == 0


def test_input_buffers_are_freed_after_success_and_after_failure(scheduler, device):
    m = model(device, poisonous, keys=(1, 4), weights=[])
    scheduler.add(m)
    scheduler.start()
    send(scheduler, m, rows_of(1)).outputs()
    assert isinstance(send(scheduler, m, rows_of(13)).error(), InvalidRequest)
    assert scheduler.drain(LONG)
    assert (device.live_buffers, device.live_bytes) == (0, 0)


def test_the_observer_is_told_of_every_dispatch_and_may_fail(device, caplog):
    reports, told = [], threading.Semaphore(0)

    def observe(report):
        reports.append(report)
        told.release()
        raise RuntimeError("observer broke")

    scheduler = Scheduler(device, clock=Clock(), on_batch=observe)
    m = model(device, poisonous, keys=(1, 4))
    scheduler.add(m)
    replies = [send(scheduler, m, rows_of(value)) for value in (1, 2, 3)]
    scheduler.start()
    replies[0].outputs()
    bad = send(scheduler, m, rows_of(13))
    error = bad.error()
    for _ in range(4):
        assert told.acquire(timeout=LONG)
    scheduler.stop()
    assert [(r.model, r.batch_key, r.requests, r.rows, r.error) for r in reports] == [
        ("m", 1, 1, 1, None),
        ("m", 1, 1, 1, None),
        ("m", 1, 1, 1, None),
        ("m", 1, 1, 1, error),
    ]
    assert "batch observer failed model=m" in caplog.text


# --- lifecycle ----------------------------------------------------------------------------------------------------


def test_stop_rejects_what_is_queued_and_finishes_what_runs(scheduler, device, staged):
    m, gate, running = blocked(scheduler, device)
    staged.acquire()
    ahead = send(scheduler, m, rows_of(1))
    assert staged.acquire(timeout=LONG)
    queued = send(scheduler, m, rows_of(2))
    stopper = threading.Thread(target=scheduler.stop)
    stopper.start()
    assert isinstance(ahead.error(), ServerStopping)
    assert isinstance(queued.error(), ServerStopping)
    assert not running.settled
    gate.open()
    assert running.outputs()["y"][0, 0] == 0
    stopper.join(LONG)
    assert not stopper.is_alive()
    assert len(gate.calls) == 1
    assert scheduler.stats()["m"].dropped == {"stopping": 2}
    with pytest.raises(ServerStopping):
        send(scheduler, m, rows_of(1))
    with pytest.raises(ServerStopping):
        scheduler.add(model(device, double, name="late"))
    with pytest.raises(ServerStopping):
        scheduler.start()
    scheduler.stop()


def test_stop_with_grace_serves_everything_that_was_accepted(scheduler, device):
    m, gate, first = blocked(scheduler, device)
    replies = [first, *(send(scheduler, m, rows_of(value)) for value in (1, 2, 3))]
    stopper = threading.Thread(target=scheduler.stop, args=(LONG,))
    stopper.start()
    gate.open(4)
    assert [reply.outputs()["y"][0, 0] for reply in replies] == [0, 2, 4, 6]
    stopper.join(LONG)
    assert not stopper.is_alive()


def test_a_merged_batch_that_fails_after_the_end_of_grace_is_not_run_again(scheduler, device):
    gate = Gate(poisonous)
    m = model(device, gate, keys=(2,))
    scheduler.add(m)
    replies = [send(scheduler, m, rows_of(13)), send(scheduler, m, rows_of(1))]
    scheduler.start()
    gate.wait_entered()
    rejected = threading.Event()
    reject = scheduler._dispatcher.revoke
    scheduler._dispatcher.revoke = lambda *args: (reject(*args), rejected.set())
    stopper = threading.Thread(target=scheduler.stop)
    stopper.start()
    assert rejected.wait(LONG)
    gate.open()
    stopper.join(LONG)
    assert all(isinstance(reply.error(), InvalidRequest) for reply in replies)
    assert len(gate.calls) == 1


def test_stop_releases_the_requests_of_a_scheduler_that_never_started(scheduler, device):
    m = model(device, double)
    scheduler.add(m)
    queued = send(scheduler, m, rows_of(1))
    scheduler.stop(grace=LONG)
    assert isinstance(queued.error(), ServerStopping)


def test_drain_waits_for_accepted_requests_and_says_when_time_ran_out(scheduler, device):
    assert scheduler.drain(0)
    m, gate, first = blocked(scheduler, device)
    second = send(scheduler, m, rows_of(1))
    assert not scheduler.drain(0)
    gate.open(2)
    assert scheduler.drain(LONG)
    assert first.settled
    assert second.settled


def test_reject_all_settles_what_waits_and_goes_on_serving(scheduler, device, staged):
    m, gate, running = blocked(scheduler, device)
    staged.acquire()
    waiting = [send(scheduler, m, rows_of(1))]
    assert staged.acquire(timeout=LONG)
    waiting.append(send(scheduler, m, rows_of(2)))
    scheduler.reject_all(ModelUnloaded("all gone"))
    assert all(isinstance(reply.error(), ModelUnloaded) for reply in waiting)
    gate.open(2)
    running.outputs()
    assert send(scheduler, m, rows_of(4)).outputs()["y"][0, 0] == 8


def test_removing_a_model_drops_what_waits_for_it_and_waits_for_its_launch(scheduler, device, staged):
    m, gate, running = blocked(scheduler, device)
    other = model(device, double, name="other")
    scheduler.add(other)
    staged.acquire()
    ahead = send(scheduler, m, rows_of(1))
    assert staged.acquire(timeout=LONG)
    queued = send(scheduler, m, rows_of(2))
    neighbour = send(scheduler, other, rows_of(3))
    assert not scheduler.remove("m", timeout=0)
    assert isinstance(ahead.error(), ModelUnloaded)
    assert isinstance(queued.error(), ModelUnloaded)
    assert "m" not in scheduler.stats()
    with pytest.raises(ModelUnloaded):
        send(scheduler, m, rows_of(1))
    gate.open()
    assert running.outputs()["y"][0, 0] == 0
    assert neighbour.outputs()["y"][0, 0] == 6
    assert len(gate.calls) == 1


def test_remove_returns_only_when_the_running_launch_has_ended(scheduler, device):
    m, gate, running = blocked(scheduler, device)
    other = model(device, double, name="other")
    scheduler.add(other)
    queued = send(scheduler, m, rows_of(1))
    settled = []
    remover = threading.Thread(target=lambda: settled.append((scheduler.remove("m"), running.settled)))
    remover.start()
    assert isinstance(queued.error(), ModelUnloaded)
    # Commands run in order: when the next one has been carried out, the removal has been, too.
    marker = send(scheduler, other, rows_of(1))
    scheduler.reject_all(Cancelled("marker"))
    assert isinstance(marker.error(), Cancelled)
    with scheduler._lock:
        assert len(running.ticket.queue.settled) == 1, "the removal does not wait for the launch"
    gate.open()
    remover.join(LONG)
    assert settled == [(True, True)]


def test_a_removed_models_merged_failure_is_not_run_again(scheduler, device):
    gate = Gate(poisonous)
    m = model(device, gate, keys=(2,))
    scheduler.add(m)
    replies = [send(scheduler, m, rows_of(13)), send(scheduler, m, rows_of(1))]
    scheduler.start()
    gate.wait_entered()
    assert not scheduler.remove("m", timeout=0)
    gate.open()
    assert all(isinstance(reply.error(), InvalidRequest) for reply in replies)
    assert len(gate.calls) == 1


def test_an_idle_model_is_removed_at_once_and_may_come_back(scheduler, device):
    m = model(device, double)
    scheduler.add(m)
    scheduler.start()
    assert scheduler.remove("nobody")
    assert scheduler.remove("m")
    again = model(device, lambda x: x * 3)
    scheduler.add(again)
    assert send(scheduler, again, rows_of(1)).outputs()["y"][0, 0] == 3
    with pytest.raises(ModelUnloaded, match=f"incarnation {m.incarnation}"):
        send(scheduler, m, rows_of(1))


def test_a_model_is_removed_before_the_scheduler_starts(scheduler, device):
    m = model(device, double)
    scheduler.add(m)
    queued = send(scheduler, m, rows_of(1))
    assert scheduler.remove("m", timeout=LONG)
    assert isinstance(queued.error(), ModelUnloaded)


# --- everything at once -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        Policy(max_queue_depth=50),
        Policy(discipline="fifo", max_wait_ns=200_000),
        Policy(discipline="edf", split_oversize=True),
    ],
    ids=["fair", "fifo_with_windows", "edf_in_pieces"],
)
def test_under_load_every_request_is_settled_once_with_its_own_rows(device, policy):
    scheduler = Scheduler(device, policy)

    def fn(x, t):
        if (x == 13).any():
            raise InvalidRequest("unlucky")
        return x * 2, t + 1

    options = {
        "inputs": (spec("x", "n", 2), spec("t", 2, "n")),
        "outputs": (spec("y", "n", 2), spec("u", 2, "n")),
        "keys": (1, 4, 8),
    }
    models = [model(device, fn, name=name, **options) for name in ("a", "b")]
    for m in models:
        scheduler.add(m)
    scheduler.start()
    problems, served, owed = [], set(), set()

    def client(seed):
        rng = random.Random(seed)
        for i in range(150):
            value = 10_000 * (seed + 1) + i
            rows = rng.choice([1, 1, 1, 2, 3, 11 if policy.split_oversize else 4])
            # The deadlines of some pass in the queue; all that matters here is that nothing goes wrong then.
            deadline = time.monotonic_ns() + rng.randrange(1, 10**8) if rng.random() < 0.2 else 0
            poison = rng.random() < 0.1
            x = rows_of(*[13 if poison else value] * rows)
            reply = Reply()
            try:
                ticket = scheduler.submit(rng.choice(models), {"x": x, "t": x.T.copy()}, rows, (), deadline, reply)
            except DeadlineExceeded:
                continue
            if rng.random() < 0.1:
                ticket.cancel()
            elif not (deadline or poison):
                owed.add(value)
            result = reply.wait()
            if result.error is not None:
                if not isinstance(result.error, Cancelled | DeadlineExceeded) and not (
                    poison and isinstance(result.error, InvalidRequest)
                ):
                    problems.append(result.error)
            elif poison:
                problems.append(f"{value} was poisonous and served")
            else:
                served.add(value)
                if not (np.array_equal(result.outputs["y"], x * 2) and np.array_equal(result.outputs["u"], x.T + 1)):
                    problems.append(f"{value} got somebody else's rows")

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    assert scheduler.drain(LONG)
    stats = scheduler.stats().values()
    scheduler.stop()
    assert problems == []
    assert len(owed) > 600
    assert owed <= served
    # A piece counts as a request, also when another piece of the same request failed.
    total = sum(s.requests_served for s in stats)
    assert total > len(served) if policy.split_oversize else total == len(served)
    assert (device.live_buffers, scheduler._dispatcher.pool.lent) == (0, 0)
