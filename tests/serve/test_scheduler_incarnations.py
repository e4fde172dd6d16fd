"""Versions of a model that come, take over, change their names or programs and go, while requests are under way."""

import dataclasses
import gc
import random
import threading
import weakref

import pytest
from sched_support import (
    LONG,
    Desk,
    Reply,
    blocked,
    double,
    model,
    paper_model,
    programmed,
    renamed,
    rows_of,
    send,
    times,
    value,
)

from rsrv.core.errors import InvalidRequest, ModelUnloaded, ServerStopping, UnknownModel
from rsrv.serve.scheduler import ModelPolicy, Policy

GONE = ModelUnloaded("it was taken away")


pytestmark = pytest.mark.usefixtures("no_small")


def waits(queue, call):
    """Start `call` on a thread and wait until it waits for `queue` to be finished."""
    answers = []
    known = len(queue.settled)
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    for _ in range(100_000):
        if len(queue.settled) > known or not thread.is_alive():
            break
        threading.Event().wait(0.001)
    return thread, answers


# --- a new version takes over -----------------------------------------------------------------------------------------


def test_each_request_is_answered_by_the_version_that_it_was_prepared_for(scheduler, device):
    old, gate, running = blocked(scheduler, device, keys=(1, 4))
    new = model(device, times(3), keys=(1, 4))
    queued = send(scheduler, old, rows_of(1))
    scheduler.replace(new)
    later = [send(scheduler, new, rows_of(2)), send(scheduler, old, rows_of(3)), send(scheduler, new, rows_of(4))]
    scheduler.admit(old, 0)
    scheduler.admit(new, 0)
    gate.open(8)
    assert value(running) == 0
    assert value(queued) == 2
    assert [value(reply) for reply in later] == [6, 6, 12]


def test_no_batch_mixes_versions(scheduler, device):
    seen = []
    old = model(device, lambda x: seen.append(("old", len(x))) or x * 2, keys=(1, 2, 4))
    new = model(device, lambda x: seen.append(("new", len(x))) or x * 3, keys=(1, 2, 4))
    scheduler.add(old)
    scheduler.replace(new)
    replies = [(send(scheduler, m, rows_of(1)), 2 if m is old else 3) for m in (old, new, old, new)]
    scheduler.start()
    assert [value(reply) for reply, _ in replies] == [expected for _, expected in replies]
    assert sorted(seen) == [("new", 2), ("old", 2)]


def test_a_retired_version_finishes_what_it_accepted_and_accepts_no_more(scheduler, device):
    old, gate, running = blocked(scheduler, device)
    queued = send(scheduler, old, rows_of(1))
    new = model(device, times(3))
    scheduler.replace(new)
    assert not scheduler.retire(old, timeout=0)
    for refused in (lambda: send(scheduler, old, rows_of(1)), lambda: scheduler.admit(old, 0)):
        with pytest.raises(ModelUnloaded, match=f"incarnation {old.incarnation}"):
            refused()
    assert value_after(gate, running) == 0
    gate.wait_entered()
    assert not scheduler.retire(old, timeout=0)
    assert value_after(gate, queued) == 2
    assert scheduler.retire(old, timeout=LONG)
    assert scheduler.retire(old), "nothing of it is left, which may be asked for again"
    assert value(send(scheduler, new, rows_of(1))) == 3
    assert old.weights.uses == 0


def value_after(gate, reply):
    gate.open()
    return value(reply)


def test_a_version_is_not_finished_while_an_answer_is_being_given(scheduler, device):
    old = model(device, double)
    scheduler.add(old)
    asked = []
    scheduler.submit(old, {"x": rows_of(1)}, 1, (), 0, lambda result: asked.append(scheduler.retire(old, timeout=0)))
    scheduler.start()
    assert scheduler.retire(old, timeout=LONG)
    assert asked == [False]


def test_nor_while_one_that_was_dropped_is_being_told(scheduler, device):
    old = model(device, double)
    scheduler.add(old)
    asked = []
    ticket = scheduler.submit(
        old, {"x": rows_of(1)}, 1, (), 0, lambda result: asked.append(scheduler.retire(old, timeout=0))
    )
    ticket.cancel()
    scheduler.start()
    assert scheduler.retire(old, timeout=LONG)
    assert asked == [False]


def test_a_version_may_be_retired_with_an_error_for_what_waits(scheduler, device):
    old, gate, running = blocked(scheduler, device)
    queued = [send(scheduler, old, rows_of(n)) for n in (1, 2)]
    scheduler.replace(model(device, times(3)))
    assert not scheduler.retire(old, error=GONE, timeout=0)
    assert [reply.error() for reply in queued] == [GONE, GONE]
    assert not running.settled
    assert value_after(gate, running) == 0
    assert scheduler.retire(old, timeout=LONG)
    assert scheduler.stats()["m"].dropped == {"unloaded": 2}


def test_an_aborted_version_ends_what_runs_with_the_error_too(scheduler, device):
    old, gate, running = blocked(scheduler, device, keys=(1, 4))
    queued = send(scheduler, old, rows_of(1))
    scheduler.abort(old, GONE)
    assert queued.error() is GONE
    assert not running.settled, "the device is not done"
    assert not scheduler.retire(old, timeout=0)
    gate.open()
    assert running.error() is GONE
    assert scheduler.retire(old, timeout=LONG)
    assert scheduler.stats().keys() == set()
    scheduler.abort(old, GONE)


def test_what_an_aborted_version_merged_is_not_run_again_when_it_fails(scheduler, device):
    calls = []

    def fails(x):
        calls.append(len(x))
        gate.wait()
        raise InvalidRequest("no")

    gate = threading.Event()
    entered = threading.Event()
    m = model(device, lambda x: (entered.set(), fails(x)), keys=(4,))
    scheduler.add(m)
    replies = [send(scheduler, m, rows_of(n)) for n in (1, 2)]
    scheduler.start()
    assert entered.wait(LONG)
    scheduler.abort(m, GONE)
    gate.set()
    assert [reply.error() for reply in replies] == [GONE, GONE]
    assert scheduler.retire(m, timeout=LONG)
    assert calls == [4]


def test_a_drain_may_become_an_abort(scheduler, device):
    old, gate, running = blocked(scheduler, device)
    queued = send(scheduler, old, rows_of(1))
    thread, answers = waits(queued.ticket.queue, lambda: scheduler.retire(old, timeout=LONG))
    scheduler.abort(old, GONE)
    assert queued.error() is GONE
    gate.open()
    assert running.error() is GONE
    thread.join(LONG)
    assert answers == [True]


def test_a_bad_request_of_a_retired_version_fails_alone(scheduler, device):
    def unlucky(x):
        if (x == 13).any():
            raise InvalidRequest("unlucky number")
        return x * 2

    old = model(device, unlucky, keys=(4,))
    scheduler.add(old)
    scheduler.replace(model(device, times(3)))
    replies = [send(scheduler, old, rows_of(n)) for n in (1, 13, 2)]
    assert not scheduler.retire(old, timeout=0)
    scheduler.start()
    assert scheduler.retire(old, timeout=LONG)
    assert [value(replies[0]), value(replies[2])] == [2, 4]
    assert isinstance(replies[1].error(), InvalidRequest)


def test_three_versions_may_be_under_way_at_once(scheduler, device):
    first, gate, running = blocked(scheduler, device)
    second, third = model(device, times(3)), model(device, times(5))
    scheduler.replace(second)
    middle = send(scheduler, second, rows_of(1))
    scheduler.replace(third)
    last = send(scheduler, third, rows_of(1))
    assert scheduler.stats()["m"].queue_depth == 2
    gate.open()
    assert [value(reply) for reply in (running, middle, last)] == [0, 3, 5]
    assert scheduler.retire(first, timeout=LONG)
    assert scheduler.retire(second, timeout=LONG)
    assert scheduler._backlog.roster.by_incarnation.keys() == {third.incarnation}


def test_a_finished_version_holds_neither_weights_nor_programs(scheduler, device):
    class Held:
        """What a program is made of."""

    held = Held()
    gone = weakref.ref(held)
    old = model(device, lambda x, held=held: x * 2)
    scheduler.add(old)
    scheduler.start()
    assert value(send(scheduler, old, rows_of(1))) == 2
    scheduler.replace(model(device, times(3)))
    assert scheduler.retire(old, timeout=LONG)
    del held, old
    # The dispatch thread may still be on its way out of the batch that it answered.
    for _ in range(10_000):
        gc.collect()
        if gone() is None:
            break
        threading.Event().wait(0.001)
    assert gone() is None


# --- what goes on with the new version --------------------------------------------------------------------------------


def test_counters_and_settings_go_on(scheduler, device, clock):
    old = model(device, lambda x: clock.advance(0.5) or x * 2, keys=(1, 4))
    scheduler.add(old)
    scheduler.start()
    scheduler.set_policy("m", weight=3.0, max_batch_size=2)
    value(send(scheduler, old, rows_of(1)))
    assert scheduler.drain(LONG)
    new = model(device, lambda x: clock.advance(0.5) or x * 3, keys=(1, 4))
    scheduler.replace(new)
    value(send(scheduler, new, rows_of(1)))
    value(send(scheduler, old, rows_of(1)))
    assert scheduler.drain(LONG)
    stats = scheduler.stats()["m"]
    assert (stats.incarnation, stats.weight, stats.max_batch_size) == (new.incarnation, 3.0, 2)
    assert (stats.dispatch_count, stats.requests_served, stats.total_compute_seconds) == (3, 3, 1.5)
    assert stats.recent_seconds == pytest.approx(1.5, rel=0.05)


def test_only_costs_of_the_same_executables_go_on():
    old = paper_model("a", keys=(1, 4))
    desk = Desk(old)
    desk.seed("a", {1: 0.01, 4: 0.02}, runs=3)
    other = paper_model("a", keys=(1, 4, 8))
    mixed = {(): {1: old.programs[()][1], 4: other.programs[()][4], 8: old.programs[()][4]}}
    queue = desk.backlog.roster.replace(dataclasses.replace(other, programs=mixed))
    assert queue.costs.estimates.keys() == {((), 1)}
    assert queue.costs.seconds((), 1) == 0.01
    queue.costs.measured((), 1, 10**9, 0)
    assert desk.backlog.roster.incarnation(old).costs.seconds((), 1) == 0.01, "each measures for itself"


def test_a_version_that_was_put_out_before_the_next_came_leaves_its_account(scheduler, device):
    old = model(device, double)
    scheduler.add(old)
    scheduler.start()
    scheduler.set_policy("m", weight=3.0)
    value(send(scheduler, old, rows_of(1)))
    assert scheduler.retire(old, error=GONE, timeout=LONG)
    assert scheduler.stats() == {}
    with pytest.raises(ModelUnloaded):
        scheduler.admit(old, 0)
    for come in (scheduler.replace, scheduler.add):
        new = model(device, times(3))
        come(new)
        assert value(send(scheduler, new, rows_of(1))) == 3
        assert scheduler.retire(new, timeout=LONG)
    scheduler.add(new)
    assert scheduler.drain(LONG)
    assert (scheduler.stats()["m"].dispatch_count, scheduler.stats()["m"].weight) == (3, 3.0)
    assert scheduler.remove("m")
    scheduler.add(new)
    assert (scheduler.stats()["m"].dispatch_count, scheduler.stats()["m"].weight) == (0, 1.0)


@pytest.mark.parametrize("population", ["active", "prepared"])
def test_the_population_holds_a_name_once(population):
    desk = Desk(paper_model("a"), paper_model("b"), policy=Policy(fair_population=population))
    shares, old, new = desk.backlog.shares, desk.models["a"], paper_model("a")
    queue = desk.queue("a")
    desk.backlog.roster.replace(new)
    desk.accept("a")
    desk.accept("b")
    desk.models["a"] = new
    desk.accept("a")
    assert shares.weight == 2
    desk.backlog.close(queue)
    desk.backlog.clear(desk.clock.ns, queue)
    desk.backlog.roster.finished(queue)
    assert shares.weight == 2, "the new one has work"
    newest = desk.queue("a")
    desk.backlog.close(newest)
    desk.backlog.clear(desk.clock.ns, newest)
    desk.backlog.roster.finished(newest)
    assert shares.weight == 1
    assert old.incarnation not in desk.backlog.roster.by_incarnation


# --- who goes first ---------------------------------------------------------------------------------------------------


def versions(desk, name, queued):
    """Replace `name`; `queued` requests for each version, the old ones first. Returns how to ask for either."""
    old, new = desk.models[name], paper_model(name)
    for _ in range(queued):
        desk.accept(name)
    desk.backlog.roster.replace(new)
    desk.models[name] = new
    for _ in range(queued):
        desk.accept(name)
    return old, new


def test_under_fair_two_versions_of_a_model_get_no_more_than_one():
    desk = Desk(*[paper_model(name, keys=(1,)) for name in "ab"])
    versions(desk, "a", 200)
    for _ in range(400):
        desk.accept("b")
    ran = {"a": 0, "b": 0}
    for _ in range(200):
        found = desk.backlog.next(desk.clock.ns)
        desk.clock.advance(0.01)
        ran[found.queue.model.name] += len(found.tickets) if found.queue.model.name == "b" else 1
        desk.backlog.shares.charge(found.queue.account, 0.01, desk.clock.ns)
        desk.backlog.settled(found.queue)
    assert ran["a"] == pytest.approx(100, abs=4)


@pytest.mark.parametrize("discipline", ["fair", "fifo", "edf"])
def test_the_old_version_does_not_starve_beside_a_cheaper_new_one(discipline):
    desk = Desk(paper_model("a", keys=(1,)), policy=Policy(discipline=discipline))
    old = desk.models["a"]
    desk.seed("a", {1: 0.1})
    waiting = desk.accept("a")
    desk.backlog.roster.replace(paper_model("a", keys=(1, 4)))
    desk.models["a"] = desk.queue("a").model
    desk.seed("a", {1: 0.001, 4: 0.001})
    for _ in range(4):
        desk.accept("a")
    first = desk.backlog.next(desk.clock.ns)
    assert (first.queue.model, first.tickets) == (old, [waiting])


def test_under_edf_the_earliest_deadline_of_any_version_goes_first():
    desk = Desk(paper_model("a"), policy=Policy(discipline="edf"))
    old = desk.models["a"]
    desk.accept("a", within=5)
    new = desk.models["a"] = desk.backlog.roster.replace(paper_model("a")).model
    desk.accept("a", within=1)
    assert [desk.backlog.next(desk.clock.ns).queue.model for _ in range(2)] == [new, old]


def test_a_retired_version_waits_for_company_no_longer(make, device, clock):
    scheduler = make(max_wait_ns=10**9)
    old = model(device, double, keys=(1, 4))
    scheduler.add(old)
    scheduler.start()
    reply = send(scheduler, old, rows_of(1))
    scheduler.replace(model(device, times(3), keys=(1, 4)))
    assert not reply.settled
    assert scheduler.retire(old, timeout=LONG)
    assert value(reply) == 2


def test_versions_whose_weights_are_elsewhere_wait_each_for_its_own():
    desk = Desk(paper_model("a"))
    old = desk.models["a"]
    old.weights.resident = False
    first = desk.accept("a")
    assert desk.next() is None
    new = desk.models["a"] = desk.backlog.roster.replace(paper_model("a")).model
    new.weights.resident = False
    second = desk.accept("a")
    assert desk.next() is None
    backlog = desk.backlog
    assert [queue.model for queue in backlog.wanted] == [old, new]
    old_queue, new_queue = backlog.wanted
    new.weights.resident = True
    backlog.warm(new_queue)
    assert desk.next() == ("a", 1, [second])
    backlog.close(old_queue)
    assert desk.next() is None
    old.weights.resident = True
    backlog.warm(old_queue)
    assert desk.next() == ("a", 1, [first])


def test_a_version_may_be_refused_while_its_weights_are_elsewhere(scheduler, device):
    old = model(device, double)
    old.weights.resident = False
    scheduler.add(old)
    scheduler.start()
    reply = send(scheduler, old, rows_of(1))
    new = model(device, times(3))
    scheduler.replace(new)
    assert value(send(scheduler, new, rows_of(1))) == 3
    assert scheduler.depth(old) == (1, 0)
    assert scheduler.retire(old, error=GONE, timeout=LONG)
    assert reply.error() is GONE


# --- the end of a name, and of the server -----------------------------------------------------------------------------


def test_the_removal_of_a_name_is_for_all_its_versions(scheduler, device):
    old, gate, running = blocked(scheduler, device)
    new = model(device, times(3))
    scheduler.replace(new)
    queued = [send(scheduler, old, rows_of(1)), send(scheduler, new, rows_of(1))]
    scheduler.retire(old, timeout=0)
    assert not scheduler.remove("m", timeout=0)
    assert [type(reply.error()) for reply in queued] == [ModelUnloaded] * 2
    assert not scheduler.retire(old, timeout=0), "it is running"
    again = model(device, times(5))
    scheduler.add(again)
    ahead = send(scheduler, again, rows_of(1))
    assert value_after(gate, running) == 0
    assert value(ahead) == 5
    assert scheduler.retire(old, timeout=LONG)
    assert scheduler.stats()["m"].incarnation == again.incarnation


def test_a_server_that_stops_ends_the_wait_for_a_version(make, device):
    scheduler = make()
    old, gate, running = blocked(scheduler, device)
    queued = send(scheduler, old, rows_of(1))
    scheduler.replace(model(device, times(3)))
    thread, answers = waits(queued.ticket.queue, lambda: scheduler.retire(old))
    stopping = threading.Thread(target=scheduler.stop)
    stopping.start()
    assert isinstance(queued.error(), ServerStopping)
    gate.open()
    assert value(running) == 0
    stopping.join(LONG)
    thread.join(LONG)
    assert answers == [True]
    for late in (lambda: scheduler.replace(model(device, double)), lambda: scheduler.add(model(device, double))):
        with pytest.raises(ServerStopping):
            late()
    assert scheduler.retire(old)
    assert scheduler.remove("m")


def test_numbers_and_names_that_are_taken_are_refused(scheduler, device):
    m = model(device, double)
    scheduler.add(m)
    with pytest.raises(ValueError, match="'m' is already scheduled"):
        scheduler.add(model(device, double))
    with pytest.raises(ValueError, match=f"incarnation {m.incarnation} .* already scheduled, as model 'm'"):
        scheduler.add(model(device, double, name="other", incarnation=m.incarnation))
    with pytest.raises(ValueError, match="already scheduled"):
        scheduler.replace(m)
    with pytest.raises(UnknownModel, match="'other' is not scheduled"):
        scheduler.replace(model(device, double, name="other"))
    assert scheduler.stats().keys() == {"m"}


def test_how_many_requests_of_a_version_are_where(scheduler, device):
    old, gate, running = blocked(scheduler, device)
    new = model(device, times(3))
    scheduler.replace(new)
    replies = [send(scheduler, old, rows_of(1)) for _ in range(3)] + [send(scheduler, new, rows_of(1))]
    queued, in_flight = scheduler.depth(old)
    assert queued + in_flight == 4
    assert in_flight in (1, 2), "one runs, one may be staged"
    assert sum(scheduler.depth(new)) == 1
    gate.open(9)
    for reply in [running, *replies]:
        reply.outputs()
    assert scheduler.drain(LONG)
    assert scheduler.depth(old) == scheduler.depth(new) == (0, 0)
    assert scheduler.depth(model(device, double)) == (0, 0)


# --- another name -----------------------------------------------------------------------------------------------------


def test_requests_ride_along_with_a_renamed_model(scheduler, device):
    m, gate, running = blocked(scheduler, device)
    queued = send(scheduler, m, rows_of(1))
    scheduler.set_policy("m", weight=2.5, max_batch_size=1)
    new = renamed(m, "n")
    scheduler.rename("m", new)
    assert scheduler.stats().keys() == {"n"}
    late = send(scheduler, m, rows_of(2))
    named = send(scheduler, new, rows_of(3))
    other = model(device, times(5), name="m")
    scheduler.add(other)
    others = send(scheduler, other, rows_of(1))
    gate.open(9)
    assert [value(reply) for reply in (running, queued, late, named, others)] == [0, 2, 4, 6, 5]
    assert scheduler.drain(LONG)
    stats = scheduler.stats()
    assert (stats["n"].requests_served, stats["n"].weight, stats["n"].max_batch_size) == (4, 2.5, 1)
    assert stats["m"].requests_served == 1
    assert scheduler.remove("n", timeout=LONG)
    with pytest.raises(ModelUnloaded):
        send(scheduler, m, rows_of(1))
    assert scheduler.stats().keys() == {"m"}


def test_a_renamed_model_has_the_settings_of_its_new_name(make, device):
    settings = {
        "m": ModelPolicy(weight=2.0, max_batch_size=2, max_wait_ns=10**12),
        "n": ModelPolicy(weight=4.0, max_batch_size=3),
    }
    scheduler = make(models=settings)
    m = model(device, double, keys=(1, 4))
    scheduler.add(m)
    scheduler.start()
    waiting = send(scheduler, m, rows_of(1))
    assert (scheduler.stats()["m"].weight, scheduler.stats()["m"].max_batch_size) == (2.0, 2)
    scheduler.rename("m", renamed(m, "n"))
    assert value(waiting) == 2, "there is no window under the new name"
    assert (scheduler.stats()["n"].weight, scheduler.stats()["n"].max_batch_size) == (4.0, 3)
    scheduler.rename("n", renamed(m, "o"))
    assert (scheduler.stats()["o"].weight, scheduler.stats()["o"].max_batch_size) == (1.0, 4)


def test_a_name_that_is_taken_cannot_be_had(scheduler, device):
    m, other = model(device, double), model(device, double, name="n")
    scheduler.add(m)
    scheduler.add(other)
    with pytest.raises(ValueError, match="'m' cannot be renamed: 'n' is already scheduled"):
        scheduler.rename("m", renamed(m, "n"))
    with pytest.raises(ValueError, match="has that name already"):
        scheduler.rename("m", m)
    with pytest.raises(UnknownModel, match="'nobody'"):
        scheduler.rename("nobody", renamed(m, "o"))
    with pytest.raises(ValueError, match="a new one has to replace it"):
        scheduler.rename("m", model(device, double, name="o"))
    with pytest.raises(ValueError, match="other weights"):
        scheduler.rename("m", model(device, double, name="o", incarnation=m.incarnation))
    assert scheduler.stats().keys() == {"m", "n"}
    assert scheduler.retire(other, timeout=LONG)
    scheduler.rename("m", renamed(m, "n"))
    assert scheduler.stats().keys() == {"n"}


def test_an_old_version_goes_with_the_name(scheduler, device):
    old, gate, running = blocked(scheduler, device)
    new = model(device, times(3))
    scheduler.replace(new)
    assert not scheduler.retire(old, timeout=0)
    scheduler.rename("m", renamed(new, "n"))
    assert scheduler.stats()["n"].in_flight == 1
    gate.open()
    assert value(running) == 0
    assert scheduler.retire(old, timeout=LONG)
    assert scheduler.drain(LONG)
    assert scheduler.stats()["n"].requests_served == 1


# --- all at once ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discipline", ["fair", "fifo", "edf"])
def test_reloads_renames_and_selections_under_load_lose_nothing_and_mix_nothing(make, device, discipline):
    """Each caller prepares its request for the version that it finds: the answer is that of one of its program sets."""
    scheduler = make(discipline=discipline, split_oversize=True)
    rng = random.Random(discipline)
    keys = (1, 2, 4)
    current = [model(device, times(2), keys=keys)]
    allowed = {current[0].incarnation: {2.0}}
    scheduler.add(current[0])
    scheduler.start()
    begun, ended = threading.Event(), threading.Event()
    problems, answered = [], []

    def call(seed):
        mine = random.Random(seed)
        for _ in range(400):
            if ended.is_set():
                break
            m = current[0]
            rows = mine.randint(1, 6)
            x = rows_of(*[mine.randint(1, 99) for _ in range(rows)])
            reply = Reply()
            try:
                scheduler.submit(m, {"x": x}, rows, (), 0, reply)
            except ModelUnloaded:
                # The version went between the look and the submission, as in a server that does not hold it.
                continue
            result = reply.wait()
            if result.error is not None:
                problems.append(result.error)
                continue
            factors = set((result.outputs["y"] / x).ravel().tolist())
            answered.append(m.incarnation)
            begun.set()
            if not (factors <= allowed[m.incarnation] and len(factors) == 1):
                problems.append((m.incarnation, factors, allowed[m.incarnation]))

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(6)]
    for caller in callers:
        caller.start()
    assert begun.wait(LONG)
    factor = 2.0
    for _ in range(60):
        m = current[0]
        factor += 1
        move = rng.choice(["replace", "replace", "rename", "programs"])
        if move == "replace":
            new = model(device, times(factor), keys=keys, name=m.name)
            allowed[new.incarnation] = {factor}
            scheduler.replace(new)
            current[0] = new
            assert scheduler.retire(m, timeout=LONG)
        elif move == "rename":
            new = renamed(m, f"m{factor}")
            scheduler.rename(m.name, new)
            current[0] = new
        else:
            new = programmed(device, m, times(factor), keys)
            allowed[m.incarnation] |= {factor}
            scheduler.set_programs(new, key=int(factor))
            current[0] = new
    ended.set()
    for caller in callers:
        caller.join(LONG)
    assert scheduler.drain(LONG)
    assert problems == []
    last = current[0]
    assert scheduler.stats().keys() == {last.name}
    assert scheduler.stats()[last.name].requests_served >= len(answered)
    assert scheduler._backlog.roster.by_incarnation.keys() == {last.incarnation}
    assert last.weights.uses == 0
