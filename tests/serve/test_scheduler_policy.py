"""What the operator sets and sees: policies, batching windows, pieces of large requests, the watchdog. Fake device."""

import threading

import numpy as np
import pytest
from sched_support import LONG, Clock, FakeDevice, Gate, Reply, blocked, double, model, poisonous, rows_of, send, spec

from rsrv.core.config import ServerConfig
from rsrv.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelUnloaded,
    QueueFull,
    ServerStopping,
    UnknownModel,
)
from rsrv.serve.scheduler import ModelPolicy, Policy, Scheduler, batch, dispatch


@pytest.fixture
def device():
    device = FakeDevice()
    yield device
    assert device.most_at_once <= 1


@pytest.fixture(autouse=True)
def no_small(monkeypatch):
    monkeypatch.setattr(batch, "SMALL_BYTES", 0)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def scheduler(device, clock):
    scheduler = Scheduler(device, clock=clock)
    yield scheduler
    scheduler.stop()
    assert scheduler._dispatcher.pool.lent == 0, "a staged block was not given back"


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


def test_the_configuration_says_what_the_policy_is():
    config = ServerConfig.model_validate(
        {
            "model_dirs": ["/m"],
            "scheduler": {
                "discipline": "edf",
                "variant_overtakes": 3,
                "models": {"m": {"weight": 2, "max_wait_ms": 1.5, "max_batch_size": 8}, "n": {}},
            },
            "batching": {"max_wait_ms": 4, "split_oversize": True},
        }
    )
    policy = Policy.of(config)
    assert (policy.discipline, policy.variant_overtakes, policy.max_wait_ns) == ("edf", 3, 4_000_000)
    assert policy.split_oversize
    assert policy.model("m") == ModelPolicy(2.0, 8, 1_500_000)
    assert policy.model("n") == policy.model("other") == ModelPolicy()


def test_the_defaults_of_the_policy_are_those_of_the_configuration():
    assert Policy.of(ServerConfig(model_dirs=["/m"])) == Policy()


# --- planned again ------------------------------------------------------------------------------------------------


def test_a_staged_batch_gives_way_to_an_earlier_deadline(device, clock, staged):
    scheduler = Scheduler(device, Policy(discipline="edf"), clock=clock)
    ran = []
    gate = Gate(double)
    blocker = model(device, gate, name="blocker")
    models = [model(device, lambda x, n=n: ran.append(n) or double(x), name=n) for n in ("patient", "urgent")]
    for m in (blocker, *models):
        scheduler.add(m)
    scheduler.start()
    send(scheduler, blocker, rows_of(0))
    gate.wait_entered()
    staged.acquire()
    patient = send(scheduler, models[0], rows_of(1), deadline_ns=clock() + 10**12)
    assert staged.acquire(timeout=LONG)
    urgent = send(scheduler, models[1], rows_of(2), deadline_ns=clock() + 10**11)
    assert staged.acquire(timeout=LONG), "the urgent request was not staged instead"
    assert not patient.settled
    gate.open()
    assert urgent.outputs()["y"][0, 0] == 4
    assert patient.outputs()["y"][0, 0] == 2
    assert ran == ["urgent", "patient"]
    scheduler.stop()
    assert scheduler._dispatcher.pool.lent == 0


def test_so_does_one_that_is_still_being_merged(device, clock, monkeypatch):
    scheduler = Scheduler(device, Policy(discipline="edf"), clock=clock)
    ran, merged, merging, go_on, stage = [], [], threading.Event(), threading.Event(), dispatch.stage
    gate = Gate(double)
    blocker = model(device, gate, name="blocker")
    models = [model(device, lambda x, n=n: ran.append(n) or double(x), name=n) for n in ("patient", "urgent")]

    def slowly(*args):
        merged.append(stage(*args))
        if len(merged) == 2:
            merging.set()
            assert go_on.wait(LONG)
        return merged[-1]

    monkeypatch.setattr(dispatch, "stage", slowly)
    for m in (blocker, *models):
        scheduler.add(m)
    scheduler.start()
    send(scheduler, blocker, rows_of(0))
    gate.wait_entered()
    patient = send(scheduler, models[0], rows_of(1), deadline_ns=clock() + 10**12)
    assert merging.wait(LONG)
    urgent = send(scheduler, models[1], rows_of(2), deadline_ns=clock() + 10**11)
    go_on.set()
    gate.open()
    assert [urgent.outputs()["y"][0, 0], patient.outputs()["y"][0, 0]] == [4, 2]
    assert ran == ["urgent", "patient"]
    scheduler.stop()
    assert scheduler._dispatcher.pool.lent == 0


def test_a_new_limit_plans_the_staged_batch_again(scheduler, device, staged):
    m, gate, _ = blocked(scheduler, device, keys=(1, 2, 4))
    staged.acquire()
    replies = [send(scheduler, m, rows_of(value)) for value in (1, 2, 3)]
    assert staged.acquire(timeout=LONG)
    scheduler.set_policy("m", max_batch_size=1)
    assert staged.acquire(timeout=LONG), "the staged batch was not planned again"
    gate.open(4)
    assert [reply.outputs()["y"][0, 0] for reply in replies] == [2, 4, 6]
    assert [len(call[0]) for call in gate.calls] == [1, 1, 1, 1]
    assert scheduler.stats()["m"].max_batch_size == 1


# --- what the operator sets ---------------------------------------------------------------------------------------


def test_a_weight_counts_at_once_and_is_shown(scheduler, device):
    scheduler.add(model(device, double))
    scheduler.set_policy("m", weight=3)
    stats = scheduler.stats()["m"]
    assert (stats.weight, stats.max_batch_size, stats.recent_seconds) == (3.0, 1, 0.0)


@pytest.mark.parametrize(
    "settings",
    [
        *[{"weight": w} for w in (0, -1, float("nan"), float("inf"))],
        *[{"max_batch_size": n} for n in (0, -1, 1.5, True)],
    ],
)
def test_settings_that_make_no_sense_are_refused_and_change_nothing(scheduler, device, settings):
    scheduler.add(model(device, double, keys=(1, 4)))
    with pytest.raises(InvalidRequest, match="wanted is"):
        scheduler.set_policy("m", **{"weight": 7.0, **settings})
    with pytest.raises(InvalidRequest):
        scheduler.set_policy("m", **settings)
    assert (scheduler.stats()["m"].weight, scheduler.stats()["m"].max_batch_size) == (1.0, 4)


def test_settings_of_a_model_that_is_not_scheduled_are_refused(scheduler):
    for change in (
        lambda: scheduler.set_policy("nobody", weight=1.0),
        lambda: scheduler.seed_cost("nobody", (), 1, 0.1),
    ):
        with pytest.raises(UnknownModel, match="'nobody' is not scheduled"):
            change()


def test_the_configured_settings_of_a_model_apply(device):
    policy = Policy(models={"m": ModelPolicy(weight=2.5, max_batch_size=3)})
    scheduler = Scheduler(device, policy)
    scheduler.add(model(device, double, keys=(1, 4, 8)))
    scheduler.add(model(device, double, name="other", keys=(1, 4, 8)))
    stats = scheduler.stats()
    assert (stats["m"].weight, stats["m"].max_batch_size) == (2.5, 3)
    assert (stats["other"].weight, stats["other"].max_batch_size) == (1.0, 8)
    scheduler.stop()


def test_costs_are_seeded_and_then_measured(scheduler, device, clock):
    m = model(device, lambda x: clock.advance(0.5) or double(x))
    scheduler.add(m)
    scheduler.seed_cost("m", (), 1, 1.0)
    assert scheduler.stats()["m"].costs == {((), 1): 1.0}
    scheduler.start()
    send(scheduler, m, rows_of(1)).outputs()
    assert scheduler.stats()["m"].costs == {((), 1): pytest.approx(0.5)}
    assert scheduler.stats()["m"].recent_seconds == pytest.approx(0.5)


def test_device_time_of_a_failed_dispatch_is_used_but_says_nothing_about_the_program(scheduler, device, clock):
    m = model(device, lambda x: clock.advance(0.5) or poisonous(x))
    scheduler.add(m)
    scheduler.start()
    assert isinstance(send(scheduler, m, rows_of(13)).error(), InvalidRequest)
    stats = scheduler.stats()["m"]
    assert (stats.costs, stats.recent_seconds) == ({}, pytest.approx(0.5))


def test_early_admission_refuses_what_submit_would_refuse(device, clock):
    scheduler = Scheduler(device, Policy(max_queue_depth=1), clock=clock)
    m = model(device, double)
    with pytest.raises(ModelUnloaded):
        scheduler.admit(m, 0)
    scheduler.add(m)
    scheduler.admit(m, 0)
    with pytest.raises(DeadlineExceeded):
        scheduler.admit(m, clock())
    send(scheduler, m, rows_of(1))
    with pytest.raises(QueueFull):
        scheduler.admit(m, 0)
    scheduler.stop()
    with pytest.raises(ServerStopping):
        scheduler.admit(m, 0)


def test_an_implicit_deadline_is_that_of_the_dispatch_timeout(device, clock):
    scheduler = Scheduler(device, Policy(implicit_deadline=True, dispatch_timeout_seconds=2), clock=clock)
    m = model(device, double)
    scheduler.add(m)
    late, own = send(scheduler, m, rows_of(1)), send(scheduler, m, rows_of(2), deadline_ns=clock() + 10**12)
    clock.advance(2)
    scheduler.start()
    assert isinstance(late.error(), DeadlineExceeded)
    assert own.outputs()["y"][0, 0] == 4
    scheduler.stop()


def test_a_window_that_closes_wakes_the_dispatch_thread(device):
    scheduler = Scheduler(device, Policy(max_wait_ns=1_000_000))
    m = model(device, double, keys=(1, 4))
    scheduler.add(m)
    scheduler.start()
    assert send(scheduler, m, rows_of(3)).outputs()["y"][0, 0] == 6
    scheduler.stop()


def test_stopping_with_grace_closes_windows(device):
    scheduler = Scheduler(device, Policy(max_wait_ns=10**15))
    m = model(device, double, keys=(1, 4))
    scheduler.add(m)
    scheduler.start()
    reply = send(scheduler, m, rows_of(3))
    scheduler.stop(grace=LONG)
    assert reply.outputs()["y"][0, 0] == 6


# --- requests with more rows than any program takes ---------------------------------------------------------------


@pytest.fixture
def splitting(device, clock):
    scheduler = Scheduler(device, Policy(split_oversize=True, max_queue_depth=4), clock=clock)
    yield scheduler
    scheduler.stop()
    assert scheduler._dispatcher.pool.lent == 0


def test_an_oversize_request_runs_in_pieces_and_comes_back_whole(splitting, device):
    m = model(
        device,
        lambda x, s: (x * 2, s + 1),
        inputs=(spec("x", "n", 2), spec("s", 3, "n")),
        outputs=(spec("y", "n", 2), spec("t", 3, "n")),
        keys=(1, 4),
    )
    splitting.add(m)
    x, s = rows_of(*range(10)), np.arange(30, dtype=np.float32).reshape(3, 10)
    reply = Reply()
    splitting.submit(m, {"x": x, "s": s}, 10, (), 0, reply)
    splitting.start()
    outputs = reply.outputs()
    assert np.array_equal(outputs["y"], x * 2)
    assert np.array_equal(outputs["t"], s + 1)
    assert not outputs["y"].flags.writeable
    assert reply.wait().batch_rows == 10
    assert splitting.stats()["m"].requests_served == 3


def test_a_piece_that_fails_fails_the_request_once_with_its_own_error(splitting, device):
    m = model(device, poisonous, keys=(2,))
    splitting.add(m)
    reply = send(splitting, m, rows_of(1, 2, 13, 4, 5, 6))
    splitting.start()
    assert isinstance(reply.error(), InvalidRequest)
    assert splitting.drain(LONG)


def test_a_request_whose_pieces_cannot_be_joined_is_told_so(splitting, device, monkeypatch):
    m = model(device, double, keys=(2,))
    splitting.add(m)
    reply = send(splitting, m, rows_of(1, 2, 3, 4))

    def fail(*_):
        raise MemoryError("no room for the whole")

    monkeypatch.setattr("rsrv.serve.scheduler.oversize.np.concatenate", fail)
    splitting.start()
    assert isinstance(reply.error(), MemoryError)
    assert splitting.drain(LONG)


def test_an_oversize_request_is_cancelled_and_refused_as_a_whole(splitting, device):
    m = model(device, double, keys=(2,))
    splitting.add(m)
    with pytest.raises(InvalidRequest, match="9 rows; at most 8 can be run in pieces of 2"):
        send(splitting, m, rows_of(*range(9)))
    assert splitting.stats()["m"].queue_depth == 0
    waits = send(splitting, m, rows_of(1))
    with pytest.raises(QueueFull, match="1 requests wait, at most 4 may, and this one is 4 pieces"):
        send(splitting, m, rows_of(*range(8)))
    assert splitting.stats()["m"].queue_depth == 1
    waits.ticket.cancel()
    gone = send(splitting, m, rows_of(*range(8)))
    gone.ticket.cancel()
    splitting.start()
    assert isinstance(gone.error(), Cancelled)
    with pytest.raises(InvalidRequest, match="float64"):
        send(splitting, m, rows_of(*range(8)).astype(np.float64))
    assert splitting.drain(LONG)


def test_a_request_that_cannot_be_cut_is_refused_even_then(splitting, device):
    m = model(device, double, keys=(2,), outputs=(spec("y", 2),))
    splitting.add(m)
    with pytest.raises(InvalidRequest, match="1 to 2 can run at once"):
        send(splitting, m, rows_of(1, 2, 3))


# --- an execution that does not return ----------------------------------------------------------------------------


def test_a_stuck_execution_is_said_once_until_it_returns(device, clock, caplog):
    scheduler = Scheduler(device, Policy(dispatch_timeout_seconds=5), clock=clock)
    changes = []
    scheduler.on_stuck(lambda: changes.append(scheduler.stuck))
    _, gate, reply = blocked(scheduler, device, keys=(4,))
    watchdog = scheduler._watchdog
    clock.advance(5)
    watchdog.look()
    assert scheduler.stuck is None
    clock.advance(2)
    watchdog.look()
    watchdog.look()
    assert str(scheduler.stuck) == "an execution of model 'm' (batch key 4) runs for 7.0 s"
    assert caplog.text.count("dispatch stuck model=m key=4 age=7.0") == 1
    gate.open()
    reply.outputs()
    assert scheduler.drain(LONG)
    watchdog.look()
    assert scheduler.stuck is None
    assert caplog.text.count("dispatch returned model=m key=4") == 1
    assert len(changes) == 2
    scheduler.stop()
