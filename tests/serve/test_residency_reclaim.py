"""What nobody has used for long goes: weights on the device, host copies, staging buffers; what is in use stays."""

import threading

import pytest
from residency_support import LONG, NBYTES, Gate, affine, in_background
from sched_support import Clock

from rsrv.core.errors import InvalidRequest, ServerStopping
from rsrv.core.staging import StagingPool
from rsrv.serve.residency.floors import Floor
from rsrv.serve.residency.reclaim import IdlePolicy, Reclaimer


def reclaim(here, parameter=0.0, host=0.0):
    return here.residency.reclaim(parameter_idle_s=parameter, host_idle_s=host)


def passes(here, seconds):
    """Time goes by once no batch is being ended, which comes after its replies: then its weights begin to be idle."""
    here.settle()
    here.clock.advance(seconds)


# --- weights ----------------------------------------------------------------------------------------------------------


def test_only_what_is_idle_unpinned_and_not_bound_to_the_device_is_freed_and_comes_back_without_a_compilation(either):
    here = either()
    here.add("d", floor=Floor.DEVICE)
    here.add("a", "p", "b", "cold")
    here.residency.pin("p")
    programs = here.models["a"].programs
    here.serve("a", "p", "d")
    passes(here, 5)
    here.serve("b")
    passes(here, 5)
    assert reclaim(here, 10.5) == []
    assert reclaim(here, 10) == ["a"]
    assert here.resident == "bdp"
    snapshot = here.residency.snapshot()
    assert (snapshot.idle_reclaims, snapshot.evictions) == (1, 0)
    here.is_consistent()
    here.serve("a")
    assert here.models["a"].programs is programs
    passes(here, 100)
    assert sorted(reclaim(here, 10)) == ["a", "b"]
    assert here.residency.snapshot().idle_reclaims == 3
    here.is_consistent()


def test_weights_begin_to_be_idle_when_the_batch_has_ended_and_not_when_it_began(either):
    here = either()
    running = Gate(affine)
    here.add("a", fn=running)
    reply = here.ask("a")
    running.wait_entered()
    passes(here, 100)
    assert here.residency.model("a").idle_s == 0
    assert reclaim(here, 1) == []
    running.open()
    here.is_answered(reply)
    passes(here, 0.75)
    assert here.residency.model("a").idle_s == 0.75, "and who looks does not change it"
    assert reclaim(here, 1) == []
    passes(here, 0.25)
    assert reclaim(here, 1) == ["a"]
    here.is_consistent()


def test_weights_begin_to_be_idle_when_their_pin_is_removed(either):
    here = either()
    here.add("a")
    here.residency.pin("a")
    here.serve("a")
    passes(here, 100)
    assert reclaim(here, 1) == []
    here.residency.unpin("a")
    assert reclaim(here, 1) == []
    passes(here, 0.5)
    here.residency.unpin("a")
    passes(here, 0.5)
    assert reclaim(here, 1) == ["a"], "to remove a pin that is not there is nothing"


def test_what_was_loaded_and_not_used_is_idle_since_it_came(either):
    here = either()
    here.add("a")
    here.serve("a")
    passes(here, 100)
    assert reclaim(here, 1) == ["a"]
    here.residency.activate("a")
    assert reclaim(here, 1) == []
    passes(here, 1)
    assert reclaim(here, 1) == ["a"]


def test_weights_that_somebody_holds_are_in_use(either):
    here = either()
    here.add("a")
    here.serve("a")
    here.settle()
    assert here.scheduler.hold(here.models["a"].weights)
    passes(here, 100)
    assert reclaim(here, 1) == []
    here.scheduler.release(here.models["a"].weights)
    assert reclaim(here, 1) == []
    passes(here, 1)
    assert reclaim(here, 1) == ["a"]
    here.is_consistent()


def test_a_request_that_comes_before_the_turn_of_a_look_saves_its_weights(either):
    here = either()
    here.add("a", "b")
    here.serve("a")
    passes(here, 100)
    with here.device.held_transfers() as gate:
        slow = here.ask("b")
        gate.wait_entered()
        freed = in_background(reclaim, here, 1)
        while not here.residency._moves._orders:
            here.settle()
        here.serve("a")
        here.settle()
    assert freed() == []
    here.is_answered(slow)
    assert here.resident == "ab"


def test_nobody_has_used_what_was_never_loaded(either):
    here = either()
    here.add("a")
    assert here.residency.model("a").idle_s is None
    passes(here, 100)
    assert reclaim(here, 1) == []
    assert reclaim(here) == []


def test_a_look_that_finds_nothing_does_not_bother_the_dispatch_thread(either, monkeypatch):
    here = either()
    here.add("a")
    here.serve("a")
    here.settle()
    monkeypatch.setattr(here.scheduler, "command", None)
    assert reclaim(here, 1, 1) == []


# --- host copies ------------------------------------------------------------------------------------------------------


def test_the_host_copy_of_what_has_been_off_the_device_for_long_is_dropped_and_made_anew(site):
    here = site(2, unified=False)
    here.add("a", "b", "p", "u")
    here.residency.set_floor("u", Floor.UNPINNED)
    here.residency.pin("p")
    here.serve("a")
    passes(here, 100)
    assert reclaim(here, host=100) == ["b"], "it was never there"
    assert here.residency.model("b").host_bytes == 0
    assert here.residency.model("b").floor is Floor.SYSTEM
    here.residency.trim(0)
    passes(here, 99)
    assert reclaim(here, host=100) == []
    passes(here, 1)
    assert reclaim(here, host=100) == ["a"]
    assert here.residency.model("p").host_bytes == NBYTES
    assert here.residency.snapshot().idle_reclaims == 0, "the device is not concerned"
    here.serve("a", "b", "u", "p")
    assert [here.residency.model(name).host_bytes for name in "abpu"] == [NBYTES, NBYTES, NBYTES, 0]
    here.is_consistent()


def test_weights_and_then_their_host_copy_go_each_in_its_time(site):
    here = site(unified=False)
    here.add("a")
    here.serve("a")
    passes(here, 10)
    assert reclaim(here, 10, 5) == ["a"]
    assert here.residency.model("a").host_bytes == NBYTES
    passes(here, 5)
    assert reclaim(here, 10, 5) == ["a"]
    assert here.residency.model("a").host_bytes == 0
    assert reclaim(here, 10, 5) == []


def test_without_room_for_a_host_copy_weights_still_come_from_the_file(site):
    here = site(unified=False)
    here.add("a")
    here.residency.deactivate("a", host=True)
    store = here.residency._copies._store

    def refuse(name, file, fill):
        raise OSError(12, "no memory")

    acquire, store.acquire = store.acquire, refuse
    here.serve("a")
    assert here.residency.model("a").host_bytes == 0
    here.residency.trim(0)
    store.acquire = acquire
    here.serve("a")
    assert here.residency.model("a").host_bytes == NBYTES
    here.is_consistent()


# --- staging buffers --------------------------------------------------------------------------------------------------


def test_buffers_that_nobody_has_used_for_long_are_dropped_and_lent_ones_stay():
    clock = Clock()
    pool = StagingPool(clock=clock)
    old, young, lent = pool.acquire(4096), pool.acquire(8192), pool.acquire(100)
    pool.release(old)
    clock.advance(3)
    pool.release(young)
    assert pool.release_idle(3.5) == 0
    assert pool.release_idle(3) == 4096
    assert pool.idle_bytes == 8192
    again = pool.acquire(8192)
    clock.advance(100)
    assert pool.release_idle(1) == 0
    pool.release(again)
    pool.release(lent)
    assert pool.release_idle(1) == 0
    clock.advance(1)
    assert pool.release_idle(1) == 8192 + 4096
    assert (pool.idle_bytes, pool.lent) == (0, 0)


# --- the thread -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "on_demand", "seconds"),
    [
        (IdlePolicy(), True, None),
        (IdlePolicy(parameter_idle_ms=400), True, 0.4),
        (IdlePolicy(parameter_idle_ms=60_000), True, 1.0),
        (IdlePolicy(parameter_idle_ms=60_000, host_idle_ms=250), True, 0.25),
        (IdlePolicy(parameter_idle_ms=500, host_idle_ms=250), False, None),
        (IdlePolicy(parameter_idle_ms=500, workspace_idle_ms=700), False, 0.7),
        (IdlePolicy(workspace_idle_ms=0.1), False, 0.01),
    ],
)
def test_it_looks_as_often_as_the_shortest_time_and_never_when_nothing_can_expire(policy, on_demand, seconds):
    assert policy.interval_s(on_demand=on_demand) == seconds


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["parameter_idle_ms", "workspace_idle_ms", "host_idle_ms"])
def test_a_duration_that_makes_no_sense_is_refused(either, name, value):
    reclaimer = Reclaimer(either().residency, StagingPool())
    with pytest.raises(InvalidRequest, match=name):
        reclaimer.set_policy(**{name: value})
    assert reclaimer.policy == IdlePolicy()


class Waits:
    """In the place of a wait: tells for how long, and returns when a test, or whoever sets the event, says so."""

    def __init__(self):
        self.seconds = []
        self.asleep = threading.Semaphore(0)
        self.event = None

    def __call__(self, event, seconds):
        self.seconds.append(seconds)
        self.event = event
        self.asleep.release()
        assert event.wait(LONG)

    def until_asleep(self):
        assert self.asleep.acquire(timeout=LONG)

    def look(self):
        """Let it look once, and sleep again."""
        self.event.set()
        self.until_asleep()


def test_the_thread_frees_what_is_idle_and_follows_the_policy(either):
    here = either()
    pool, waits, freed = StagingPool(clock=here.clock), Waits(), []
    reclaimer = Reclaimer(here.residency, pool, on_reclaimed=freed.append, wait=waits)
    here.add("a")
    here.serve("a")
    here.settle()
    pool.release(pool.acquire(5000))
    passes(here, 100)
    reclaimer.start()
    try:
        waits.until_asleep()
        waits.look()
        assert waits.seconds == [None, None], "nothing can expire"
        assert reclaimer.set_policy(workspace_idle_ms=500) == IdlePolicy(workspace_idle_ms=500)
        waits.until_asleep()
        assert (pool.idle_bytes, here.resident) == (0, "a")
        reclaimer.set_policy(parameter_idle_ms=200.0)
        waits.until_asleep()
        assert reclaimer.policy == IdlePolicy(parameter_idle_ms=200, workspace_idle_ms=500)
        assert (here.resident, freed) == ("", [["a"]])
        assert waits.seconds[2:] == [0.5, 0.2]
        waits.look()
        assert freed == [["a"]]
        here.serve("a")
        reclaimer.set_policy(parameter_idle_ms=0, workspace_idle_ms=0)
        waits.until_asleep()
        passes(here, 1000)
        waits.look()
        assert here.resident == "a"
        assert waits.seconds[-1] is None
    finally:
        reclaimer.stop()
    here.is_consistent()


def test_a_look_that_fails_is_logged_and_the_next_one_works(either, caplog):
    here = either()
    waits, failures = Waits(), [ValueError("a bug")]

    def told(names):
        if failures:
            raise failures.pop()

    reclaimer = Reclaimer(here.residency, StagingPool(), IdlePolicy(parameter_idle_ms=1), on_reclaimed=told, wait=waits)
    here.add("a")
    here.serve("a")
    passes(here, 1)
    reclaimer.start()
    try:
        waits.until_asleep()
        waits.look()
        assert "idle memory could not be given back" in caplog.text
        here.serve("a")
        here.settle()
        passes(here, 1)
        waits.look()
        assert here.resident == ""
    finally:
        reclaimer.stop()


def test_the_thread_ends_with_the_server(either):
    here = either()
    waits = Waits()
    reclaimer = Reclaimer(here.residency, StagingPool(), IdlePolicy(parameter_idle_ms=1), wait=waits)
    here.add("a")
    here.serve("a")
    passes(here, 1)
    reclaimer.start()
    waits.until_asleep()
    here.residency.close()
    with pytest.raises(ServerStopping):
        reclaimer.look()
    waits.event.set()
    reclaimer.stop()
    Reclaimer(here.residency, StagingPool()).stop()
