"""Programs of a model that are exchanged while it runs, and copies of what ran for whoever compares them."""

import dataclasses
import threading

import numpy as np
import pytest
from sched_support import (
    LONG,
    Gate,
    blocked,
    double,
    model,
    programmed,
    renamed,
    rows_of,
    send,
    times,
    value,
)

from rsrv.core.errors import InvalidRequest, ModelUnloaded, ServerStopping, UnknownModel
from rsrv.serve.scheduler import dispatch

GONE = ModelUnloaded("it was taken away")


pytestmark = pytest.mark.usefixtures("no_small")


# --- other programs ---------------------------------------------------------------------------------------------------


def test_selected_programs_are_used_from_the_next_launch_on(scheduler, device):
    m, gate, running = blocked(scheduler, device)
    queued = [send(scheduler, m, rows_of(n)) for n in (1, 2)]
    other = programmed(device, m, times(3))
    scheduler.set_programs(other, key=2)
    late = [send(scheduler, m, rows_of(3)), send(scheduler, other, rows_of(4))]
    gate.open()
    assert [value(reply) for reply in [running, *queued, *late]] == [0, 3, 6, 9, 12]
    scheduler.set_programs(m, key=1)
    gate.open()
    assert value(send(scheduler, other, rows_of(5))) == 10
    assert scheduler.drain(LONG)
    assert scheduler.stats()["m"].requests_served == 6
    assert m.weights.uses == 0


def test_each_set_of_programs_has_costs_of_its_own(scheduler, device, clock):
    def slow(x):
        clock.advance(0.5)
        return x * 2

    m, gate, running = blocked(scheduler, device, slow)
    other = programmed(device, m, lambda x: clock.advance(0.25) or x * 3)
    scheduler.set_programs(other, key=2)
    gate.open()
    value(running)
    assert scheduler.drain(LONG)
    assert scheduler.stats()["m"].costs == {}, "what ran were the programs of before"
    scheduler.seed_cost(m, (), 1, 9.0)
    assert scheduler.stats()["m"].costs == {}, "nor were these warmed up"
    value(send(scheduler, m, rows_of(1)))
    assert scheduler.drain(LONG)
    assert scheduler.stats()["m"].costs == {((), 1): 0.25}
    scheduler.set_programs(m, key=1)
    assert scheduler.stats()["m"].costs == {}
    scheduler.seed_cost(m, (), 1, 7.0)
    scheduler.set_programs(other, key=2)
    assert scheduler.stats()["m"].costs == {((), 1): 0.25}
    scheduler.set_programs(m, key=1)
    assert scheduler.stats()["m"].costs == {((), 1): 7.0}
    scheduler.forget_programs(m, 2)
    scheduler.forget_programs(m, 1)
    scheduler.set_programs(other, key=2)
    assert scheduler.stats()["m"].costs == {}
    scheduler.set_programs(m, key=1)
    assert scheduler.stats()["m"].costs == {((), 1): 7.0}, "those that are selected stay"


def test_programs_of_other_sizes_or_weights_are_refused(scheduler, device):
    m = model(device, double, keys=(1, 4))
    scheduler.add(m)
    with pytest.raises(ValueError, match="wanted are those for"):
        scheduler.set_programs(programmed(device, m, double, keys=(1, 8)), key=2)
    with pytest.raises(ValueError, match="other weights"):
        scheduler.set_programs(model(device, double, keys=(1, 4), incarnation=m.incarnation), key=2)
    with pytest.raises(UnknownModel):
        scheduler.set_programs(model(device, double, keys=(1, 4)), key=2)
    with pytest.raises(ValueError, match="is model 'm', not 'n'"):
        scheduler.set_programs(renamed(programmed(device, m, double, keys=(1, 4)), "n"), key=2)


def test_a_program_that_the_new_version_shares_counts_as_warmed(scheduler, device):
    m = model(device, double)
    scheduler.add(m)
    assert not scheduler.warmed(m, (), 1)
    scheduler.seed_cost(m, (), 1, 0.5)
    assert scheduler.warmed(m, (), 1)
    same = dataclasses.replace(model(device, double), programs=m.programs)
    scheduler.replace(same)
    assert scheduler.warmed(same, (), 1)
    other = model(device, double)
    scheduler.replace(other)
    assert not scheduler.warmed(other, (), 1)
    with pytest.raises(UnknownModel):
        scheduler.warmed(model(device, double), (), 1)


def in_two_pieces(make, device):
    """A request of two rows, of which the first is in the program and the other waits; and other programs."""
    scheduler = make(split_oversize=True)
    gate = Gate(double)
    m = model(device, gate)
    scheduler.add(m)
    scheduler.start()
    reply = send(scheduler, m, rows_of(1, 2))
    gate.wait_entered()
    return scheduler, m, gate, reply


def test_a_request_in_pieces_runs_again_when_programs_are_exchanged_between_them(make, device):
    scheduler, m, gate, reply = in_two_pieces(make, device)
    scheduler.set_programs(programmed(device, m, times(3)), key=2)
    gate.open()
    assert reply.outputs()["y"][:, 0].tolist() == [3, 6]
    assert scheduler.drain(LONG)
    assert scheduler.stats()["m"].dispatch_count == 4
    assert m.weights.uses == 0
    assert scheduler.retire(m, timeout=LONG)


def test_also_when_the_first_programs_are_selected_again_meanwhile(make, device):
    scheduler, m, gate, reply = in_two_pieces(make, device)
    second = Gate(times(3))
    scheduler.set_programs(programmed(device, m, second), key=2)
    gate.open()
    second.wait_entered()
    scheduler.set_programs(m, key=1)
    second.open()
    gate.open(2)
    assert reply.outputs()["y"][:, 0].tolist() == [2, 4]


def test_a_request_in_pieces_that_would_run_again_ends_with_its_version(make, device):
    scheduler, m, gate, reply = in_two_pieces(make, device)
    second = Gate(times(3))
    scheduler.set_programs(programmed(device, m, second), key=2)
    gate.open()
    second.wait_entered()
    assert not scheduler.retire(m, error=GONE, timeout=0)
    second.open()
    assert reply.error() is GONE
    assert scheduler.retire(m, timeout=LONG)


def test_or_with_the_server(make, device):
    scheduler, m, gate, reply = in_two_pieces(make, device)
    second = Gate(times(3))
    scheduler.set_programs(programmed(device, m, second), key=2)
    gate.open()
    second.wait_entered()
    stopping = threading.Thread(target=scheduler.stop)
    stopping.start()
    for _ in range(100_000):
        if scheduler._dispatcher._exit:
            break
        threading.Event().wait(0.001)
    second.open()
    assert isinstance(reply.error(), ServerStopping)
    stopping.join(LONG)


# --- copies of what ran -----------------------------------------------------------------------------------------------


def test_a_tap_gets_copies_of_whole_batches_before_the_replies(scheduler, device):
    samples, order = [], []
    m = model(device, lambda x, w: x @ w, keys=(4,), weights=[[[1, 2], [3, 4]]])
    scheduler.add(m)
    scheduler.tap(m, lambda sample: (samples.append(sample), order.append("tap")), 1.0)
    answers = []
    for n in (1, 2):
        scheduler.submit(
            m, {"x": rows_of(n)}, 1, (), 0, lambda result: (answers.append(result.outputs["y"]), order.append("reply"))
        )
    scheduler.start()
    assert scheduler.drain(LONG)
    (sample,) = samples
    assert order == ["tap", "reply", "reply"]
    assert (sample.variant, sample.batch_key, sample.rows) == ((), 4, 2)
    assert sample.inputs["x"].tolist() == [[1, 1], [2, 2], [0, 0], [0, 0]]
    assert sample.outputs["y"].tolist() == [[4, 6], [8, 12], [0, 0], [0, 0]]
    for array in (sample.inputs["x"], sample.outputs["y"]):
        assert array.flags.c_contiguous
        assert array.flags.owndata
    assert not any(np.shares_memory(sample.outputs["y"], answer) for answer in answers)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.25, 5), (0.1, 2), (1.0, 20)])
def test_a_tap_gets_its_share_of_the_batches(scheduler, device, share, expected):
    samples = []
    m = model(device, double)
    scheduler.add(m)
    scheduler.tap(m, samples.append, share)
    scheduler.start()
    for n in range(20):
        value(send(scheduler, m, rows_of(n)))
    assert scheduler.drain(LONG)
    every = 20 // expected if expected else 0
    assert [sample.inputs["x"][0, 0] for sample in samples] == [every * (n + 1) - 1 for n in range(expected)]


def test_a_tap_that_fails_hurts_nobody(scheduler, device, caplog):
    m = model(device, double, keys=(2,))
    scheduler.add(m)

    def fails(sample):
        raise MemoryError("no room")

    scheduler.tap(m, fails, 1.0)
    scheduler.start()
    assert value(send(scheduler, m, rows_of(1))) == 2
    assert scheduler.drain(LONG)
    assert "tap failed model=m key=2" in caplog.text


def test_a_tap_gets_nothing_of_what_failed_was_aborted_or_belongs_to_others(scheduler, device):
    def unlucky(x):
        if (x == 13).any():
            raise InvalidRequest("unlucky number")
        return x * 2

    samples = []
    gate = Gate(unlucky)
    m = model(device, gate)
    scheduler.add(m)
    scheduler.start()
    scheduler.tap(m, samples.append, 1.0)
    gate.open()
    send(scheduler, m, rows_of(13)).error()
    new = model(device, times(3))
    scheduler.replace(new)
    value(send(scheduler, new, rows_of(1)))
    gate.wait_entered()
    last = send(scheduler, m, rows_of(1))
    gate.wait_entered()
    scheduler.abort(m, GONE)
    gate.open()
    assert last.error() is GONE
    assert scheduler.drain(LONG)
    assert samples == []


def test_a_tap_can_be_taken_away(scheduler, device):
    samples = []
    m = model(device, double)
    scheduler.add(m)
    scheduler.start()
    scheduler.tap(m, samples.append, 1.0)
    value(send(scheduler, m, rows_of(1)))
    scheduler.tap(m, None, 0.0)
    value(send(scheduler, m, rows_of(2)))
    assert scheduler.drain(LONG)
    assert len(samples) == 1
    stranger = model(device, double)
    scheduler.tap(stranger, None, 0.0)
    with pytest.raises(UnknownModel):
        scheduler.tap(stranger, samples.append, 1.0)
    with pytest.raises(InvalidRequest, match=r"1\.5"):
        scheduler.tap(m, samples.append, 1.5)


def test_where_there_is_no_tap_nothing_is_copied(scheduler, device, monkeypatch):
    monkeypatch.setattr(dispatch.Dispatcher, "_cut_and_sample", None)
    m = model(device, double)
    scheduler.add(m)
    scheduler.start()
    assert value(send(scheduler, m, rows_of(1))) == 2
