"""Random floors, requests, evictions, pins, compactions, removals and failures at once: what is always true."""

import contextlib
import random
import threading

import numpy as np
import pytest
from residency_support import NBYTES, Device, Site, Version, in_background

from rsrv.core.errors import (
    Cancelled,
    DeadlineExceeded,
    DeviceOutOfMemory,
    ModelUnloaded,
    ServerStopping,
    UnknownModel,
    WrongState,
)
from rsrv.serve.residency.floors import Floor
from rsrv.serve.scheduler.policy import Policy

SIZES = {"a": 1, "b": 1, "c": 2, "d": 2, "e": 3, "f": 1}
BUDGET = 6
FLOORS = [Floor.UNPINNED] * 3 + [Floor.SYSTEM, Floor.DEVICE]


class Unreliable(Device):
    """Some transfers find no memory. Tells whether two loads were ever under way at once."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rate, self.random = 0.0, random.Random(5)
        self._lock_of_loads = threading.Lock()

    def put(self, array, *, alias=False):
        if threading.current_thread().name != "rsrv-transfer":
            return super().put(array, alias=alias)
        assert self._lock_of_loads.acquire(blocking=False), "two loads at once"
        try:
            if self.random.random() < self.rate:
                raise DeviceOutOfMemory("there is no room, the device says")
            return super().put(array, alias=alias)
        finally:
            self._lock_of_loads.release()


class Traffic:
    """Clients and an operator with one seed; every answer is compared with NumPy."""

    def __init__(self, here, seed):
        self.here = here
        self.random = random.Random(seed)
        self.loaded = []

    def client(self, seed, n):
        rng, here, mine = random.Random(seed), self.here, []
        for _ in range(n):
            name = rng.choice("aaabbcdef")
            values = [rng.randint(-50, 50) for _ in range(rng.randint(1, 4))]
            deadline_ns = here.clock.ns + rng.choice([0, 10**6]) if rng.random() < 0.1 else 0
            try:
                reply = here.ask(name, *values, deadline_ns=deadline_ns)
            except (KeyError, ModelUnloaded, DeadlineExceeded):
                continue
            mine.append(reply)
            if rng.random() < 0.1:
                reply.ticket.cancel()
            if len(mine) > rng.randint(1, 6):
                self.check(mine)
                mine = []
        self.check(mine)

    def check(self, replies):
        for reply in replies:
            result = reply.wait()
            if result.error is None:
                assert np.array_equal(result.outputs["y"], reply.expected)
            else:
                assert isinstance(result.error, (Cancelled, DeadlineExceeded, DeviceOutOfMemory, ModelUnloaded))

    def operate(self, n):
        moves = [self.floor, self.floor, self.compact, self.flag, self.hold, self.replace, self.wait, self.reload]
        moves += [self.reload, self.activate, self.deactivate, self.trim, self.reclaim]
        for _ in range(n):
            self.random.choice(moves)()
            self.look()

    def look(self):
        """What holds at every moment."""
        snapshot = self.here.residency.snapshot()
        budget = snapshot.budget.on_demand
        resident = [state for state in snapshot.models.values() if state.state.value != "cold" and not state.reserved]
        assert snapshot.resident_bytes == sum(state.nbytes for state in resident)
        assert snapshot.resident_bytes <= budget or len(resident) == 1, (snapshot.resident_bytes, budget)
        assert sum(state.state.value == "loading" for state in snapshot.models.values()) <= 1, "single flight"
        assert sum(state.loads for state in snapshot.models.values()) <= len(self.loaded) + 1

    def floor(self):
        with contextlib.suppress(DeviceOutOfMemory, UnknownModel):
            self.here.residency.set_floor(self.random.choice("abcdef"), self.random.choice(FLOORS))

    def compact(self):
        with contextlib.suppress(DeviceOutOfMemory):
            self.here.residency.compact(self.random.sample("abcdef", 2))

    def flag(self):
        residency = self.here.residency
        for name in "ab":
            (residency.pin if self.random.random() < 0.3 else residency.unpin)(name)

    def reload(self):
        name = self.random.choice("abcd")
        try:
            version = Version(self.here, name, seed=self.random.randint(0, 99), nbytes=SIZES[name] * NBYTES)
        except DeviceOutOfMemory:
            return
        version.exchange()
        self.look()
        version.retire()

    def activate(self):
        with contextlib.suppress(DeviceOutOfMemory):
            self.here.residency.activate(self.random.choice("abcde"))

    def deactivate(self):
        with contextlib.suppress(WrongState):
            self.here.residency.deactivate(self.random.choice("abcde"), host=self.random.random() < 0.5)

    def trim(self):
        left = self.here.residency.trim(self.random.randint(0, BUDGET) * NBYTES)
        assert 0 <= left <= BUDGET * NBYTES

    def reclaim(self):
        self.here.residency.reclaim(parameter_idle_s=0.005, host_idle_s=0.01)

    def hold(self):
        m = self.here.models[self.random.choice("abcd")]
        if self.here.scheduler.hold(m.weights):
            self.here.settle()
            assert m.weights.buffers, "held weights left"
            self.here.scheduler.release(m.weights)

    def replace(self):
        self.here.remove("f")
        with contextlib.suppress(DeviceOutOfMemory):
            self.here.add("f", nbytes=NBYTES, floor=self.random.choice([None, Floor.UNPINNED]))

    def wait(self):
        self.here.clock.advance(self.random.choice([0.0001, 0.01]))


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "card"])
@pytest.mark.parametrize(("discipline", "eviction"), [("fifo", "lru"), ("edf", "cost"), ("fair", "lru")])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_answers_are_right_and_the_budget_is_kept(tmp_path, unified, discipline, eviction, seed):
    loaded = []
    here = Site(
        tmp_path,
        BUDGET * NBYTES,
        unified=unified,
        policy=Policy(discipline=discipline),
        eviction=eviction,
        compaction_interval=seed,
        on_load=lambda name, seconds: loaded.append(name),
        device=Unreliable,
    )
    try:
        for name, size in SIZES.items():
            here.add(name, nbytes=size * NBYTES)
        here.device.rate = 0.15 * seed
        traffic = Traffic(here, seed)
        traffic.loaded = loaded
        clients = [in_background(traffic.client, 10 * seed + at, 100) for at in range(3)]
        traffic.operate(60)
        for wait in clients:
            wait()
        here.device.rate = 0.0
        here.settle()
        for name in "abcdef":
            here.residency.unpin(name)
            here.residency.set_floor(name, Floor.UNPINNED)
        here.serve(*"abcdef")
        here.is_consistent()
        # Room for what is pinned and the largest that is not; the device never had more than its arena.
        assert here.device.most_weight_bytes <= BUDGET * NBYTES
    finally:
        here.close()


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "card"])
@pytest.mark.parametrize("seed", range(4))
def test_a_server_stops_in_the_middle_of_everything(tmp_path, unified, seed):
    here = Site(
        tmp_path,
        BUDGET // 2 * NBYTES,
        unified=unified,
        policy=Policy(discipline="fair"),
        compaction_interval=seed % 3,
        device=Unreliable,
    )
    for name in "abcd":
        here.add(name, nbytes=NBYTES)
    here.device.rate = 0.1
    rng, asked = random.Random(seed), threading.Semaphore(0)

    def client(seed):
        choose = random.Random(seed)
        try:
            for _ in range(10_000):
                here.ask(choose.choice("abcd"), 1)
                asked.release()
        except ServerStopping:
            pass

    def operator():
        try:
            for _ in range(10_000):
                try:
                    here.residency.set_floor(rng.choice("abcd"), rng.choice(FLOORS))
                    here.residency.compact(["a"])
                    here.residency.activate(rng.choice("abcd"))
                    here.residency.trim(NBYTES)
                    here.residency.deactivate(rng.choice("abcd"), host=True)
                    version = Version(here, rng.choice("abcd"))
                    version.exchange()
                    version.retire()
                except (DeviceOutOfMemory, WrongState):
                    pass
        except ServerStopping:
            pass

    threads = [in_background(client, seed + at) for at in range(2)] + [in_background(operator)]
    for _ in range(rng.randint(1, 60)):
        asked.acquire()
    here.residency.close()
    here.scheduler.stop()
    here.residency.stop()
    for wait in threads:
        wait()
    for reply in here.replies:
        result = reply.wait()
        if result.error is None:
            here.is_answered(reply)
        else:
            assert isinstance(result.error, (ServerStopping, DeviceOutOfMemory))
    here.close()
