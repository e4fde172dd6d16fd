"""Registrations on all workers: rollback, order, gates, and what workers hear that were away."""

from functools import partial
from random import Random

import pytest
from support.calls import FakeCall
from support.scripted_workers import AWAY, REFUSED, ScriptedFleet, ScriptedWorker

from rsrv.core.errors import Code, InvalidRequest, RegionLimit
from rsrv.gateway.metrics.counters import GatewayCounters
from rsrv.gateway.shm.shared_memory import MAX_BODY_BYTES, SharedMemory
from rsrv.gateway.workers.outcome import Outcome
from rsrv.protos import inference as pb

PATH = "/inference.GRPCInferenceService/SystemSharedMemory"


class Desk:
    """A `SharedMemory` in front of workers that the test answers for."""

    def __init__(self, *workers, **options):
        self.workers = workers
        self.fleet = ScriptedFleet(*workers)
        self.counters = GatewayCounters()
        self.now = 1000.0
        self.memory = SharedMemory(self.fleet, self.counters, timeout=60.0, clock=lambda: self.now, **options)

    def register(self, name, key=None, offset=0, byte_size=8):
        request = pb.SystemSharedMemoryRegisterRequest(
            name=name, key=key or f"/{name}", offset=offset, byte_size=byte_size
        )
        return self.post("Register", request.SerializeToString())

    def unregister(self, name=""):
        return self.post("Unregister", pb.SystemSharedMemoryUnregisterRequest(name=name).SerializeToString())

    def post(self, what, body):
        """The call, which may still be open."""
        call = FakeCall(body, path=PATH + what)
        route = self.memory.routes()[call.path]
        try:
            route.handler(call)
        except Exception as error:  # what the engine does
            call.fail(error)
        return call

    def names(self, name=""):
        return sorted(self.memory.status(pb.SystemSharedMemoryStatusRequest(name=name)).regions)


def two():
    return ScriptedWorker("a"), ScriptedWorker("b")


def logs(*workers):
    return [worker.log for worker in workers]


# --- the table of spec gateway-node 1.6 -------------------------------------------------------------------------------


def test_a_region_goes_to_every_worker_with_the_clients_own_bytes():
    a, b = two()
    desk = Desk(a, b)
    body = pb.SystemSharedMemoryRegisterRequest(name="r", key="/r", byte_size=8).SerializeToString() + b"\x98\x06\x01"
    call = desk.post("Register", body)  # with a field that this version does not know
    assert (call.code, call.message) == (Code.OK, b"")
    assert a.regions == b.regions == {"r": body}
    assert desk.names() == ["r"]


def test_a_worker_that_refuses_makes_the_registration_fail_and_the_others_forget_it():
    a, b, c = *two(), ScriptedWorker("c")
    b.outcome = lambda what, body: REFUSED
    desk = Desk(a, b, c)
    call = desk.register("r")
    assert (call.code, call.reason) == (Code.FAILED_PRECONDITION, "shm_register")
    assert "SHM register failed on workers: [worker-b: no]" in call.error.message
    assert logs(a, c) == [["+r", "-r"], ["+r", "-r"]]
    assert a.regions == c.regions == {}
    assert desk.names() == []
    assert [worker.holds for worker in (a, b, c)] == [0, 0, 0]


def test_nothing_is_rolled_back_when_no_worker_has_the_region():
    a, b = two()
    a.outcome = b.outcome = lambda what, body: REFUSED
    desk = Desk(a, b)
    assert desk.register("r").code is Code.FAILED_PRECONDITION
    assert logs(a, b) == [[], []]


def test_a_failed_rollback_changes_nothing_for_the_client():
    a, b = two()
    a.outcome = lambda what, body: REFUSED if what == "Unregister" else None
    b.outcome = lambda what, body: REFUSED
    call = Desk(a, b).register("r")
    assert (call.code, call.ends) == (Code.FAILED_PRECONDITION, 1)


@pytest.mark.parametrize(
    ("code", "reason"),
    [(Code.INVALID_ARGUMENT, "invalid"), (Code.RESOURCE_EXHAUSTED, "shm_limit"), (Code.UNIMPLEMENTED, "unimplemented")],
)
def test_what_all_workers_say_alike_of_a_bad_registration_is_handed_on(code, reason):
    a, b = two()
    a.outcome = b.outcome = lambda what, body: Outcome(code, text="bad", trailers={"rsrv-reason": reason})
    call = Desk(a, b).register("r")
    assert (call.code, call.reason, call.error.message) == (code, reason, "worker a: bad")


def test_unregistering_is_done_when_one_worker_did_it():
    a, b = two()
    desk = Desk(a, b)
    desk.register("r")
    b.outcome = lambda what, body: REFUSED
    assert desk.unregister("r").code is Code.OK
    assert desk.names() == []


def test_unregistering_that_no_worker_did_is_unavailable_and_the_region_stays():
    a, b = two()
    desk = Desk(a, b)
    desk.register("r")
    a.outcome = b.outcome = lambda what, body: REFUSED
    assert desk.unregister("r").code is Code.UNAVAILABLE
    assert desk.names() == ["r"]


def test_an_empty_name_unregisters_all():
    a, b = two()
    desk = Desk(a, b)
    for name in ("r", "s"):
        desk.register(name)
    assert desk.unregister().code is Code.OK
    assert desk.names() == []
    assert a.regions == b.regions == {}


def test_without_workers_all_is_well_and_a_worker_that_joins_hears_of_it():
    desk = Desk()
    call = desk.register("r")
    assert (call.code, call.message) == (Code.OK, b"")
    assert desk.unregister("other").code is Code.OK
    late = ScriptedWorker("late")
    desk.fleet.workers = (late,)
    proceeded = []
    desk.memory.welcome(late, lambda: proceeded.append(late.holds))
    assert (late.log, proceeded) == (["+r"], [1])
    assert late.holds == 0


@pytest.mark.parametrize("body", [b"\xff", b"", b"\x0a\x05ab", pb.SystemSharedMemoryRegisterRequest(key="/k")])
def test_a_body_that_names_no_region_is_invalid(body):
    a, b = two()
    call = Desk(a, b).post("Register", body if isinstance(body, bytes) else body.SerializeToString())
    assert (call.code, call.reason) == (Code.INVALID_ARGUMENT, "invalid")
    assert logs(a, b) == [[], []]


def test_a_body_that_is_too_long_to_be_kept_is_invalid():
    call = Desk(*two()).register("r" * MAX_BODY_BYTES)
    assert call.code is Code.INVALID_ARGUMENT
    assert str(MAX_BODY_BYTES) in call.error.message


def test_the_status_is_answered_from_what_was_registered():
    desk = Desk(*two())
    desk.register("r", "/key", 16, 64)
    desk.register("s")
    status = desk.memory.status(pb.SystemSharedMemoryStatusRequest(name="r"))
    assert list(status.regions) == ["r"]
    row = status.regions["r"]
    assert (row.name, row.key, row.offset, row.byte_size) == ("r", "/key", 16, 64)
    assert desk.names() == ["r", "s"]
    assert desk.names("unknown") == []


def test_regions_are_no_labels():
    desk = Desk(*two())
    desk.register("r")
    desk.unregister("r")
    counted = desk.counters.snapshot()
    assert counted.statuses == {
        ("SystemSharedMemoryRegister", "", "OK"): 1,
        ("SystemSharedMemoryUnregister", "", "OK"): 1,
    }
    assert set(counted.worker_latency) == {("SystemSharedMemory", "a"), ("SystemSharedMemory", "b")}


# --- registering again ------------------------------------------------------------------------------------------------


def test_registering_again_replaces_the_region():
    a, b = two()
    desk = Desk(a, b)
    desk.register("r", byte_size=8)
    desk.register("r", byte_size=16)
    assert desk.memory.status(pb.SystemSharedMemoryStatusRequest()).regions["r"].byte_size == 16
    assert desk.names() == ["r"]


def test_a_failed_replacement_leaves_the_region_as_it_was_on_every_worker():
    a, b = two()
    desk = Desk(a, b)
    desk.register("r", byte_size=8)
    before = a.regions["r"]
    b.outcome = lambda what, body: REFUSED
    assert desk.register("r", byte_size=16).code is Code.FAILED_PRECONDITION
    assert a.regions == b.regions == {"r": before}
    assert desk.memory.status(pb.SystemSharedMemoryStatusRequest()).regions["r"].byte_size == 8


# --- workers that are away, or hang -----------------------------------------------------------------------------------


def test_a_worker_that_does_not_answer_hears_of_the_region_when_it_is_back():
    a, b = two()
    b.outcome = lambda what, body: AWAY
    desk = Desk(a, b)
    assert desk.register("r").code is Code.OK
    b.outcome = lambda what, body: None
    desk.memory.welcome(b, lambda: None)
    assert b.log == ["-r", "+r"]


def test_a_worker_that_cannot_open_what_replaced_a_region_has_nothing_of_that_name():
    a, b = two()
    desk = Desk(a, b)
    desk.register("r", key="/old")
    b.outcome = lambda what, body: AWAY
    assert desk.register("r", key="/new").code is Code.OK
    assert b.behind
    b.outcome = lambda what, body: REFUSED if what == "Register" else None  # it is back, in another namespace
    proceeded = []
    desk.memory.welcome(b, lambda: proceeded.append(True))
    assert (b.regions, proceeded, b.behind) == ({}, [True], False)
    assert set(a.regions) == {"r"}


def test_an_old_region_of_the_name_goes_also_when_the_worker_comes_back_while_it_is_replaced():
    a, b = two()
    desk = Desk(a, b)
    desk.register("r", key="/old")
    a.hold_calls, b.ready = True, False
    call = desk.register("r", key="/new")
    desk.memory.welcome(b, lambda: setattr(b, "ready", True))  # is told of what is valid still
    b.outcome = lambda what, body: REFUSED if what == "Register" else None
    a.answer()
    assert call.code is Code.OK
    assert (b.regions, b.behind) == ({}, False)


def test_a_worker_is_behind_until_it_was_told_all_that_it_missed():
    a, b = two()
    desk = Desk(a, b)
    desk.register("r")
    b.outcome = lambda what, body: AWAY
    desk.unregister("r")
    told = []
    assert desk.memory.replay(b, told.append)
    assert (b.behind, told) == (True, [False])
    b.outcome = lambda what, body: None
    assert desk.memory.replay(b, told.append)
    assert (b.behind, told, b.regions) == (False, [False, True], {})


def test_a_worker_that_is_not_ready_is_not_waited_for():
    a, b = two()
    b.ready, b.hold_calls = False, True
    desk = Desk(a, b)
    assert desk.register("r").code is Code.OK
    assert b.open == []


def test_with_no_worker_ready_all_are_asked_and_their_silence_is_unavailable():
    a, b = two()
    a.ready = b.ready = False
    a.outcome = b.outcome = lambda what, body: AWAY
    desk = Desk(a, b)
    call = desk.register("r")
    assert (call.code, call.reason) == (Code.UNAVAILABLE, "no_workers")
    assert desk.names() == []


def test_a_worker_that_missed_that_a_region_went_forgets_it_when_it_is_back():
    a, b = two()
    desk = Desk(a, b)
    for name in ("r", "s"):
        desk.register(name)
    b.ready = False
    desk.unregister("r")
    desk.memory.welcome(b, lambda: None)
    assert b.log == ["+r", "+s", "-r", "+s"]
    assert set(b.regions) == {"s"}


def test_a_registration_that_failed_is_forgotten_also_where_nobody_answered():
    a, b, c = *two(), ScriptedWorker("c")
    b.outcome = lambda what, body: REFUSED
    c.outcome = lambda what, body: Outcome(Code.DEADLINE_EXCEEDED, text="too late")
    desk = Desk(a, b, c)
    assert desk.register("r").code is Code.FAILED_PRECONDITION
    c.outcome = lambda what, body: None
    c.regions["r"] = b"it took it after all"
    desk.memory.welcome(c, lambda: None)
    assert c.regions == {}


def test_a_worker_that_would_not_forget_a_region_is_told_again_when_it_is_back():
    a, b = two()
    desk = Desk(a, b)
    desk.register("r")
    b.outcome = lambda what, body: REFUSED
    assert desk.unregister("r").code is Code.OK
    b.outcome = lambda what, body: None
    desk.memory.welcome(b, lambda: None)
    assert b.regions == {}


def test_a_worker_becomes_routable_also_when_its_replay_breaks_off():
    a, b = two()
    desk = Desk(a, b)
    for name in ("r", "s", "t"):
        desk.register(name)
    b.log.clear()
    b.outcome = lambda what, body: AWAY if b"s" in body else None
    proceeded = []
    desk.memory.welcome(b, lambda: proceeded.append(True))
    assert (b.log, proceeded, b.holds) == (["+r"], [True], 0)
    b.outcome = lambda what, body: None
    assert desk.memory.replay(b, proceeded.append)  # it is known to be behind
    assert b.log == ["+r", "+r", "+s", "+t"]


def test_a_region_that_a_worker_refuses_does_not_keep_the_others_from_it():
    a, b = two()
    desk = Desk(a, b)
    for name in ("r", "s"):
        desk.register(name)
    b.log.clear()
    b.outcome = lambda what, body: REFUSED if b"r" in body else None
    told = []
    assert desk.memory.replay(b, told.append)
    assert (b.log, told) == (["+s"], [False])


# --- for the proxy ----------------------------------------------------------------------------------------------------


def test_nothing_is_replayed_when_nothing_is_registered():
    a, b = two()
    assert not Desk(a, b).memory.replay(a, lambda well: pytest.fail("there was nothing to do"))


def test_requests_with_a_region_that_nobody_registered_do_not_make_the_gateway_work_each_time():
    a, b = two()
    desk = Desk(a, b)
    desk.register("r")
    told = []
    assert desk.memory.replay(a, told.append)
    assert not desk.memory.replay(a, told.append)
    assert (a.log, told) == (["+r", "+r"], [True])
    a.incarnation = "second"
    assert desk.memory.replay(a, told.append)
    desk.now += 1.1
    assert desk.memory.replay(a, told.append)
    assert a.log == ["+r"] * 4


def test_requests_that_fail_together_share_one_replay():
    a, b = two()
    desk = Desk(a, b)
    desk.register("r")
    a.hold_calls, told = True, []
    for _ in range(3):
        assert desk.memory.replay(a, told.append)
    assert (len(a.open), told, a.holds) == (1, [], 2)
    a.answer()
    assert (told, a.holds, a.open) == ([True] * 3, 0, [])


def test_a_worker_that_starts_anew_during_its_replay_is_told_all_again():
    a, b = two()
    desk = Desk(a, b)
    for name in ("r", "s"):
        desk.register(name)
    a.log.clear()
    a.hold_calls, told = True, []
    desk.memory.replay(a, told.append)
    a.answer()
    a.incarnation, a.regions = "second", {}
    desk.memory.welcome(a, lambda: told.append("welcome"))
    a.hold_calls = False
    a.answer()
    assert set(a.regions) == {"r", "s"}
    assert told == [True, "welcome"]


# --- what crosses -----------------------------------------------------------------------------------------------------


def test_operations_that_overlap_hold_the_gate_until_the_last_has_ended():
    a, b = two()
    a.hold_calls = True
    desk = Desk(a, b)
    first, second = desk.register("r"), desk.register("s")
    assert (a.holds, b.holds) == (2, 0)
    a.answer()
    assert (a.holds, first.ended, second.ended) == (1, True, False)
    a.answer()
    assert (a.holds, second.ended) == (0, True)


def test_operations_on_one_name_reach_every_worker_in_the_same_order():
    a, b = two()
    a.hold_calls = True
    desk = Desk(a, b)
    register, unregister = desk.register("r"), desk.unregister("r")
    assert logs(a, b) == [[], ["+r"]]
    a.answer()
    assert (register.ended, unregister.ended) == (True, False)
    a.answer()
    assert unregister.ended
    assert logs(a, b) == [["+r", "-r"], ["+r", "-r"]]


def test_a_call_whose_client_is_gone_when_its_turn_comes_is_not_sent():
    a, b = two()
    a.hold_calls = True
    desk = Desk(a, b)
    desk.register("r")
    late, after = desk.unregister("r"), desk.register("r", byte_size=16)
    late.cancel()
    a.answer()
    a.answer()
    assert after.code is Code.OK
    assert logs(a, b) == [["+r", "+r"], ["+r", "+r"]]


def test_what_is_registered_while_a_worker_comes_back_is_told_to_it_as_well():
    a, b = two()
    desk = Desk(a, b)
    desk.register("r")
    b.ready, b.hold_calls = False, True
    order = []
    desk.memory.welcome(b, lambda: order.append("proceed"))
    assert desk.register("s").code is Code.OK
    assert desk.unregister("r").code is Code.OK
    b.hold_calls = False
    b.answer()
    assert b.log == ["+r", "+r", "-s", "+s", "-r"]
    assert (set(b.regions), order) == ({"s"}, ["proceed"])


def test_what_began_before_a_worker_came_and_ended_after_that_is_told_to_it():
    a, b = two()
    b.ready, a.hold_calls = False, True
    desk = Desk(a, b)
    call = desk.register("r")
    desk.memory.welcome(b, lambda: setattr(b, "ready", True))
    a.answer()
    assert call.code is Code.OK
    assert b.log == ["-r", "+r"]


def test_a_replay_that_crosses_an_unregistration_does_not_bring_the_region_back():
    a, b = two()
    desk = Desk(a, b)
    desk.register("r")
    a.hold_calls = True
    call = desk.unregister("r")  # b has done it, a not yet
    desk.memory.welcome(b, lambda: None)  # and b is told of a region that is still valid
    assert b.log == ["+r", "-r", "+r"]
    a.answer()
    assert call.code is Code.OK
    assert b.log == ["+r", "-r", "+r", "-r"]
    assert (b.regions, b.holds) == ({}, 0)


def test_an_unregistration_that_crosses_a_replay_is_told_once_more_after_it():
    a, b = two()
    desk = Desk(a, b)
    desk.register("r")
    a.hold_calls = b.hold_calls = True
    desk.memory.replay(b, lambda well: None)
    call = desk.unregister("r")
    b.answer(position=1)  # it forgets the region, and then hears the step of the replay that was sent before
    b.answer()
    assert set(b.regions) == {"r"}
    b.hold_calls = False
    a.answer()
    assert call.code is Code.OK
    assert (b.regions, b.holds) == ({}, 0)


def test_a_worker_that_became_ready_without_a_replay_is_told_what_was_under_way():
    a, b = two()
    b.ready, a.hold_calls = False, True
    desk = Desk(a, b)
    desk.register("r")
    b.ready = True
    a.answer()
    assert b.log == ["-r", "+r"]


def test_a_change_that_comes_while_a_worker_is_let_in_again_is_told_to_it():
    a, b = two()
    desk = Desk(a, b)
    desk.register("r")
    b.ready = False
    desk.memory.welcome(b, lambda: desk.register("s"))
    assert set(b.regions) == {"r", "s"}


def test_a_worker_that_left_is_forgotten():
    a, b = two()
    desk = Desk(a, b)
    b.ready = False
    desk.unregister("r")
    desk.fleet.workers = (a,)
    desk.unregister("s")
    assert not desk.memory._regions.is_behind("b")


def test_workers_that_come_and_go_for_good_leave_nothing_behind():
    stays = ScriptedWorker("stays")
    desk = Desk(stays)
    desk.register("r")
    for number in range(100):
        passing = ScriptedWorker(f"passing-{number}")
        passing.outcome = lambda what, body: AWAY  # it dies while it is told
        desk.fleet.workers = (stays, passing)
        desk.memory.welcome(passing, lambda: None)
        desk.fleet.workers = (stays,)
        desk.now += 5.0
    desk.memory.welcome(stays, lambda: None)
    assert desk.memory._regions.behind <= 2
    assert list(desk.memory._replays._last) == ["stays"]


# --- room -------------------------------------------------------------------------------------------------------------


def test_past_the_most_regions_one_more_is_refused_but_replacing_is_not():
    a, b = two()
    desk = Desk(a, b, max_regions=2)
    for name in ("r", "s", "r"):
        assert desk.register(name).code is Code.OK
    call = desk.register("t")
    assert (call.code, call.reason) == (RegionLimit.code, RegionLimit.reason)
    assert "t" not in a.regions
    desk.unregister("r")
    assert desk.register("t").code is Code.OK


def test_registrations_under_way_count_as_well():
    a, b = two()
    desk = Desk(a, b, max_regions=1)
    a.hold_calls = True
    first, second = desk.register("r"), desk.register("s")
    assert [told.what for told in a.open] == ["Register", "Status"]
    a.answer()
    a.answer()
    assert (first.code, second.code) == (Code.OK, Code.RESOURCE_EXHAUSTED)


def test_regions_that_workers_have_dropped_make_room():
    a, b = two()
    desk = Desk(a, b, max_regions=2)
    for name in ("r", "s"):
        desk.register(name)
    del a.regions["r"], b.regions["r"]
    assert desk.register("t").code is Code.OK
    assert desk.names() == ["s", "t"]


def test_no_region_is_dropped_while_a_worker_does_not_say_what_it_has():
    a, b = two()
    desk = Desk(a, b, max_regions=2)
    for name in ("r", "s"):
        desk.register(name)
    a.regions.clear()
    b.outcome = lambda what, body: AWAY if what == "Status" else None
    assert desk.register("t").code is Code.RESOURCE_EXHAUSTED
    assert desk.names() == ["r", "s"]


def test_an_unexpected_error_ends_the_call_and_frees_the_name(monkeypatch):
    a, b = two()
    desk = Desk(a, b)
    monkeypatch.setattr(desk.memory, "_settle", lambda *_: 1 / 0)
    assert desk.register("r").code is Code.INTERNAL
    monkeypatch.undo()
    assert desk.register("r").code is Code.OK


def test_a_body_is_checked_before_it_stands_in_line():
    with pytest.raises(InvalidRequest):
        Desk(*two()).memory.register(FakeCall(b"\xff", path=PATH + "Register"))


# --- whatever happens, in whichever order


@pytest.mark.parametrize("seed", range(8))
def test_after_anything_every_worker_that_is_back_knows_exactly_the_valid_regions(seed):
    # Seeded, not hypothesis: long runs in which calls are answered out of order are what finds something here.
    random = Random(seed)
    for _ in range(60):
        workers = two()
        for worker in workers:
            worker.hold_calls = True
        desk, calls = Desk(*workers), []
        for _ in range(random.randint(8, 40)):
            act(desk, workers, calls, random)
        settle(workers)
        for worker in workers:
            desk.memory.welcome(worker, partial(setattr, worker, "ready", True))
            settle(workers)
        valid = {name: step.body for name, step in desk.memory._regions.steps.items()}
        assert [worker.regions for worker in workers] == [valid, valid]
        assert [worker.holds for worker in workers] == [0, 0]
        assert all(call.ends == 1 for call in calls)
        assert not desk.memory._open
        assert not desk.memory._replays.running


def act(desk, workers, calls, random):
    worker = random.choice(workers)
    match random.choice(["register", "unregister", *["answer"] * 5, "goes", "starts anew", "comes back", "replay"]):
        case "register":
            calls.append(desk.register(random.choice("rs"), byte_size=random.randint(1, 3)))
        case "unregister":
            calls.append(desk.unregister(random.choice(["r", "s", ""])))
        case "answer" if any(each.open for each in workers):
            worker = random.choice([each for each in workers if each.open])
            how = random.choice(["ok", "ok", "ok", "away", "lost", "no"])
            outcome = {"ok": None, "away": AWAY, "lost": AWAY, "no": REFUSED}[how]
            worker.answer(outcome, position=random.randrange(len(worker.open)), takes=how == "lost")
        case "goes":
            worker.ready = False
        case "starts anew":
            worker.regions, worker.ready = {}, False
            worker.incarnation += "+"
        case "comes back":
            desk.memory.welcome(worker, partial(setattr, worker, "ready", True))
        case "replay":
            desk.memory.replay(worker, lambda well: None)


def settle(workers):
    while any(worker.open for worker in workers):
        for worker in workers:
            if worker.open:
                worker.answer()
