"""From the first request of a process to its end: settings, the background re-probe, exit handlers and forks."""

import errno
import gc
import os
import subprocess
import sys
import threading

import grpc
import numpy as np
import pytest
from support.client_stub import own_shared_memory

from rsrv.client import KServeModel
from rsrv.client.budget import Budget
from rsrv.client.transport import endpoints
from rsrv.client.transport.lifecycle import client_init, client_shutdown
from rsrv.client.transport.pools import shared_pool
from rsrv.client.transport.reprobe import Reprobe
from rsrv.core.errors import ShmUnrecoverable, UsageError

X = np.arange(8, dtype=np.float32).reshape(2, 4)
PROBE = "IsSameIPCNamespace"
REGISTER = "SystemSharedMemoryRegister"
GONE = ShmUnrecoverable("gone")


def reprobe_threads():
    return [thread for thread in threading.enumerate() if thread.name == "rsrv-reprobe"]


@pytest.fixture(autouse=True)
def fresh_client():
    client_init(pool_bytes=8 * 1024, n_slots=8)
    yield
    client_shutdown()
    for thread in reprobe_threads():
        thread.join(10)
    assert reprobe_threads() == []
    client_init()


@pytest.fixture
def model(server):
    with KServeModel(server.url, "twice") as handle:
        yield handle


# --- settings -----------------------------------------------------------------------------------------------------


def test_open_handles_go_on_after_new_settings(server, model):
    model.infer({"x": X})
    model.endpoint.latch(GONE)
    with client_init(pool_bytes=4096, n_slots=2):
        assert not model.endpoint.latched
        np.testing.assert_array_equal(model.infer({"x": X})["y"], 2 * X)
        assert server.calls.count(PROBE) == 2
    assert own_shared_memory() == set()
    with pytest.raises(UsageError, match="closed"):
        model.infer({"x": X})


def test_a_block_of_settings_ends_the_client_also_after_an_error(server):
    model = KServeModel(server.url, "twice")

    def fail():
        shared_pool(model.endpoint, Budget(20)).acquire()
        raise GONE

    with pytest.raises(ShmUnrecoverable), client_init(pool_bytes=4096):
        fail()
    assert own_shared_memory() == set()
    assert server.regions == {}


def test_an_interval_that_is_no_number_is_refused():
    with pytest.raises(UsageError, match="nan"):
        client_init(shm_reprobe_interval=float("nan"))


def test_shutting_down_unlinks_what_open_handles_have(server):
    model = KServeModel(server.url, "twice", shared_memory="on")
    model.infer({"x": X})
    shared_pool(model.endpoint, Budget(20))
    assert len(own_shared_memory()) == len(server.regions) == 2
    client_shutdown()
    client_shutdown()
    assert own_shared_memory() == set()
    assert server.regions == {}
    model.close()


# --- the re-probe -------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes when the task sleeps, which the test allows one step at a time."""

    def __init__(self):
        self.now = 0.0
        self.slices = []
        self.go = threading.Semaphore(0)
        self.asleep = threading.Semaphore(0)

    def __call__(self):
        return self.now

    def sleep(self, retired, seconds):
        self.slices.append(seconds)
        self.asleep.release()
        assert self.go.acquire(timeout=30)
        self.now += seconds

    def pass_slices(self, count):
        """Return when the task sleeps again after `count` slices."""
        for _ in range(count):
            assert self.asleep.acquire(timeout=30)
            self.go.release()


@pytest.fixture
def timed(monkeypatch):
    clock = Clock()
    task = Reprobe(endpoints.of_this_process.all, interval=2.0, clock=clock, sleep=clock.sleep)
    monkeypatch.setattr(endpoints.of_this_process, "reprobe", task)
    yield clock
    task.retire()
    clock.go.release()
    clock.go.release()


def end_of(threads):
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_a_latched_endpoint_is_tried_again_after_the_interval_in_short_slices(server, timed, model):
    pool = shared_pool(model.endpoint, Budget(20))
    server.regions.clear()
    model.endpoint.latch(GONE)
    (thread,) = reprobe_threads()
    timed.pass_slices(3)
    assert timed.asleep.acquire(timeout=30)  # in the fourth slice of 0.5 s
    assert model.endpoint.latched
    assert PROBE not in server.calls
    timed.go.release()
    end_of([thread])  # nobody is latched any more
    assert not model.endpoint.latched
    assert timed.slices == [0.5] * 4
    assert server.calls.count(PROBE) == 1
    assert set(server.regions) == {pool.region_name}  # fresh, before it is used


@pytest.mark.parametrize("trouble", ["other namespace", "no probe", "away", "registration refused"])
def test_an_endpoint_stays_latched_until_everything_works(server, timed, model, trouble):
    shared_pool(model.endpoint, Budget(20))
    if trouble == "other namespace":
        server.same_namespace = False
    elif trouble == "registration refused":
        server.refuse[REGISTER] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many regions", "shm_limit")
    else:
        status = grpc.StatusCode.UNIMPLEMENTED if trouble == "no probe" else grpc.StatusCode.UNAVAILABLE
        server.refuse[PROBE] = (status, "no", "")
    model.endpoint.latch(GONE)
    (thread,) = reprobe_threads()
    timed.pass_slices(4)
    assert timed.asleep.acquire(timeout=30)  # the next interval has begun
    assert server.calls.count(PROBE) == 1
    assert model.endpoint.latched
    np.testing.assert_array_equal(model.infer({"x": X})["y"], 2 * X)  # inline meanwhile, and without a question
    assert server.calls.count(PROBE) == 1
    server.refuse.clear()
    server.same_namespace = None
    timed.go.release()
    timed.pass_slices(3)
    end_of([thread])
    assert not model.endpoint.latched


def test_the_task_runs_once_and_again_for_a_later_latch(timed, model):
    model.endpoint.latch(GONE)
    (first,) = reprobe_threads()
    model.endpoint.unlatch()
    model.endpoint.latch(GONE)
    assert reprobe_threads() == [first]
    timed.pass_slices(4)
    end_of([first])
    model.endpoint.latch(GONE)
    (second,) = reprobe_threads()
    assert second is not first
    timed.pass_slices(4)
    end_of([second])


def test_the_task_ends_with_the_last_handle(server):
    with KServeModel(server.url, "twice") as model:
        endpoint = model.endpoint
        endpoint.latch(GONE)
        (thread,) = reprobe_threads()
        with KServeModel(server.url, "twice", metadata=[("a", "b")]):
            pass
        assert thread.is_alive()  # others need it
    end_of([thread])
    endpoint.unlatch()
    endpoint.latch(GONE)  # of a call that is late
    assert reprobe_threads() == []


def test_a_machine_that_had_no_room_for_a_moment_is_tried_again(server, model, monkeypatch):
    def full(fd, offset, n_bytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        assert not model.endpoint.uses_shared_memory("auto", Budget(10))
        endpoints.of_this_process.reprobe.probe_latched()
        assert "no room" in model.endpoint.why_inline
        assert server.calls == []
    assert not model.endpoint.uses_shared_memory("auto", Budget(10))
    endpoints.of_this_process.reprobe.probe_latched()
    assert model.endpoint.uses_shared_memory("auto", Budget(10))


def test_without_an_interval_nothing_is_tried_again(model):
    client_init(pool_bytes=8 * 1024, shm_reprobe_interval=0)
    model.endpoint.latch(GONE)
    assert reprobe_threads() == []


def test_every_probe_has_a_nonce_of_its_own(server, model):
    nonces = []
    honest = server.IsSameIPCNamespace

    def probe(request, context):
        nonces.append((request.name, request.nonce))
        return honest(request, context)

    server.IsSameIPCNamespace = probe
    for _ in range(3):
        model.endpoint.latch(GONE)
        endpoints.of_this_process.reprobe.probe_latched()
        assert not model.endpoint.latched
    assert len(set(nonces)) == 3
    assert all(len(nonce) == 16 for _, nonce in nonces)


def test_a_shutdown_does_not_wait_for_a_probe_that_is_under_way(server, model):
    asked, answer = threading.Event(), threading.Event()

    def slow(request, context):
        asked.set()
        answer.wait(30)

    server.IsSameIPCNamespace = slow
    client_init(pool_bytes=8 * 1024, shm_reprobe_interval=0.01)
    model.endpoint.latch(GONE)
    assert asked.wait(30)
    client_shutdown()  # the probe would take 3 s
    assert not answer.is_set()
    end_of(reprobe_threads())
    answer.set()
    assert REGISTER not in server.calls


def test_a_task_that_was_retired_during_its_probe_changes_nothing(server, model):
    """Its server answers 'same' after new settings were made: that is for the new task to find out."""
    task = endpoints.of_this_process.reprobe
    region = shared_pool(model.endpoint, Budget(20)).region
    model.endpoint.latch(GONE)
    wanted = iter([True, False])
    task.probe_latched(lambda: next(wanted))
    assert model.endpoint.latched
    assert model.endpoint.generation(region) == 1


# --- the end of a process -----------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, threading
import numpy as np
from rsrv.client import KServeModel
from rsrv.client.budget import Budget
from rsrv.client.transport.lifecycle import client_init, client_shutdown
from rsrv.client.transport.pools import shared_pool
x = np.ones((2, 4), np.float32)
def mine():
    return {name for name in os.listdir("/dev/shm") if name.startswith("rsrv-") and f"-{os.getpid()}-" in name}
client_init(pool_bytes=65536)
model = KServeModel(sys.argv[1], "twice", shared_memory="on")
pool = shared_pool(model.endpoint, Budget(20))
assert model.infer({"x": x})["y"][0, 0] == 2
assert len(mine()) == 2
"""


def run_client(server, code):
    outcome = subprocess.run(
        [sys.executable, "-c", SCRIPT + code, server.url], capture_output=True, text=True, timeout=60, check=False
    )
    assert (outcome.returncode, outcome.stderr) == (0, "")
    return outcome.stdout


def left_of(pid):
    return [name for name in os.listdir("/dev/shm") if name.startswith("rsrv-") and f"-{pid}-" in name]


def test_a_process_that_ends_leaves_nothing_here_nor_at_the_server_nor_waits_for_its_task(server):
    printed = run_client(
        server,
        """
import logging
from rsrv.core.errors import ShmUnrecoverable
logging.disable(logging.WARNING)
client_init(pool_bytes=65536, shm_reprobe_interval=3600)
shared_pool(model.endpoint, Budget(20))
model.endpoint.latch(ShmUnrecoverable("gone"))
assert "rsrv-reprobe" in [thread.name for thread in threading.enumerate()]
print(os.getpid())
""",
    )
    assert left_of(printed.strip()) == []
    assert server.regions == {}


def test_a_forked_child_makes_its_own_and_leaves_its_parents_alone(server):
    run_client(
        server,
        """
theirs = mine()
slot = pool.acquire()
view = slot.view("u1", (8,))
view[:] = 7
# As if another thread were in the midst of everything.
from rsrv.client.transport import endpoints, pools
locks = [endpoints.of_this_process._lock, endpoints.of_this_process.reprobe._lock, pools._pools._lock]
locks += [model.endpoint._lock, model.endpoint._probing, model.endpoint._registrations[pool.region_name].lock]
for lock in locks:
    lock.acquire()
pid = os.fork()
if pid == 0:
    import signal
    signal.alarm(40)
    client_shutdown()  # of a child that has nothing yet
    assert theirs <= set(os.listdir("/dev/shm"))
    own = shared_pool(model.endpoint, Budget(20))
    assert own is not pool and own.n_bytes == 65536 and own.region_name in mine()
    assert model.infer({"x": 3 * x})["y"][0, 0] == 6
    assert len(mine()) == 2
    sys.exit(0)  # with exit handlers
assert os.waitpid(pid, 0)[1] == 0
assert not [name for name in os.listdir("/dev/shm") if name.startswith("rsrv-") and f"-{pid}-" in name]
for lock in locks:
    lock.release()
assert theirs == mine()
assert model.infer({"x": x})["y"][0, 0] == 2 and list(view) == [7] * 8
slot.release()
model.close()
assert not mine()
""",
    )
    assert server.regions == {}


def test_a_worker_of_multiprocessing_cleans_up_though_it_skips_exit_handlers(server):
    run_client(
        server,
        """
import multiprocessing, signal
def work():
    signal.alarm(40)
    shared_pool(model.endpoint, Budget(20))
    assert model.infer({"x": x})["y"][0, 0] == 2
    assert len(mine()) == 2
for _ in range(2):
    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    worker.join(50)
    assert worker.exitcode == 0
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("rsrv-") and f"-{worker.pid}-" in name]
assert len(mine()) == 2
""",
    )


def test_a_handle_that_nobody_closed_does_not_keep_its_windows(server):
    other = KServeModel(server.url, "twice", shared_memory="on")
    handle = KServeModel(server.url, "twice", shared_memory="on")
    handle.infer({"x": X})
    assert len(own_shared_memory()) == 1
    del handle
    gc.collect()
    assert own_shared_memory() == set()
    other.infer({"x": X})
    other.endpoint.latch(GONE)
    endpoints.of_this_process.reprobe.probe_latched()  # registers what is left
    assert not other.endpoint.latched
    other.close()


def test_handles_that_come_and_go_in_many_threads_leave_nothing_behind(server):
    wrong = []

    def come_and_go(number):
        x = np.full((2, 4), number, np.float32)
        for _ in range(10):
            with (
                KServeModel(server.url, "twice", shared_memory="on", deadline=60) as handle,
                shared_pool(handle.endpoint, Budget(60)).acquire() as slot,
            ):
                view = slot.view("u1", (64,))
                view[:] = number
                if not np.array_equal(handle.infer({"x": x})["y"], 2 * x) or set(view) != {number}:
                    wrong.append(number)

    threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert endpoints.of_this_process.all() == ()
    assert own_shared_memory() == set()
