"""Weights on the real CPU device, within a budget of bytes: by hand, when idle, and from version to version."""

import gc
import threading

import numpy as np
import pytest
from sched_support import INCARNATIONS, LONG, Clock, Reply, spec
from support.bundles import lower

from rsrv.bundle.manifest import Manifest
from rsrv.bundle.safetensors import write_weights
from rsrv.runtime.pjrt import PjrtDevice
from rsrv.serve.residency.ledger import Ledger
from rsrv.serve.residency.manager import Residency
from rsrv.serve.residency.tensors import TensorPool, open_weights
from rsrv.serve.scheduler import Scheduler, ServableModel

WIDTH = 512
NBYTES = WIDTH * WIDTH * 4
BUDGET = 3 * NBYTES


@pytest.fixture(scope="module")
def cpu():
    device = PjrtDevice("cpu")
    yield device
    device.close()


class Site:
    """A scheduler and a residency on the real device; all models run one program."""

    def __init__(self, cpu, directory):
        self.directory = directory
        self.clock = Clock()
        self.scheduler = Scheduler(cpu, clock=self.clock)
        self.pool = TensorPool(cpu)
        ledger = Ledger(arena=BUDGET, unified=True)
        self.residency = Residency(cpu, self.scheduler, ledger, self.pool, clock=self.clock)
        program = cpu.compile(lower(lambda x, w: (x @ w,), [((1, WIDTH), np.float32), ((WIDTH, WIDTH), np.float32)]))
        self.programs = {(): {1: program}}
        self.models, self.values = {}, {}
        self.residency.start()
        self.scheduler.start()

    def version(self, name, seed, known_as=None):
        """A model with weights of small whole numbers, so that sums are exact; not served yet."""
        values = np.random.default_rng(seed).integers(-3, 4, (WIDTH, WIDTH)).astype(np.float32)
        path = self.directory / f"{name}.{seed}.safetensors"
        write_weights(path, [("w", values)])
        weights = self.residency.open(known_as or name, open_weights(path), floor=None, scratch_bytes=0, model=name)
        path.unlink()
        manifest = Manifest(
            name=name, executable_inputs=(spec("x", "n", WIDTH),), executable_outputs=(spec("y", "n", WIDTH),)
        )
        model = ServableModel(name, next(INCARNATIONS), manifest, self.programs, weights)
        self.values[model] = values
        return model

    def add(self, *names):
        for seed, name in enumerate(names):
            self.models[name] = self.version(name, seed)
            self.scheduler.add(self.models[name])

    def ask(self, name, seed=0):
        model = self.models[name]
        x = np.random.default_rng(seed).integers(-3, 4, (1, WIDTH)).astype(np.float32)
        reply = Reply()
        reply.expected = x @ self.values[model]
        self.scheduler.submit(model, {"x": x}, 1, (), 0, reply)
        return reply

    def serve(self, *names):
        for name in names:
            reply = self.ask(name)
            assert np.array_equal(reply.outputs()["y"], reply.expected)

    def passes(self, seconds):
        """Time goes by once no batch is being ended, which it still is when its reply is there."""
        done = threading.Event()
        self.scheduler.command(lambda: (self.clock.advance(seconds), done.set()))
        assert done.wait(LONG)

    @property
    def resident(self):
        return "".join(name for name in sorted(self.models) if self.residency.model(name).device_resident)

    def close(self):
        self.residency.close()
        self.scheduler.stop()
        self.residency.stop()
        self.residency.free()
        assert self.pool.resident_bytes == 0


@pytest.fixture
def here(cpu, tmp_path):
    site = Site(cpu, tmp_path)
    yield site
    site.close()


def anonymous_bytes():
    gc.collect()
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))


def test_weights_are_moved_by_hand_within_the_budget_and_answers_stay_the_same(here):
    here.add("a", "b", "c", "d")
    here.serve("a", "b", "c")
    assert here.pool.resident_bytes == BUDGET
    here.residency.activate("d")
    assert here.resident == "bcd"
    here.residency.pin("b")
    assert here.residency.trim(0) == NBYTES == here.pool.resident_bytes
    here.residency.activate("a")
    here.residency.deactivate("a")
    assert here.resident == "b"
    here.serve("a", "b", "c", "d")
    assert here.pool.resident_bytes == BUDGET
    here.residency.unpin("b")
    assert here.residency.trim(0) == 0
    here.serve("d", "c", "b", "a")


def test_idle_weights_are_given_back_to_the_system_and_come_again(here):
    here.add("a", "b")
    here.serve("a", "b")
    before = anonymous_bytes()
    here.passes(10)
    assert sorted(here.residency.reclaim(parameter_idle_s=10, host_idle_s=0)) == ["a", "b"]
    assert here.pool.resident_bytes == 0
    assert before - anonymous_bytes() > 1.5 * NBYTES
    here.serve("a", "b")
    assert here.pool.resident_bytes == 2 * NBYTES


def test_version_after_version_under_requests_no_answer_mixes_two_and_nothing_stays(here):
    here.add("a", "b")
    replies = []

    def reload(seed):
        old = here.models["a"]
        new = here.version("a", seed, known_as=f"a#{seed}")
        replies.extend([here.ask("a", seed), here.ask("b", seed)])
        here.residency.exchange(old.weights, new.weights, f"a#old{seed}")
        here.scheduler.replace(new)
        here.models["a"] = new
        replies.extend([here.ask("a", seed), here.ask("b", seed)])
        assert here.scheduler.retire(old, timeout=LONG)
        here.residency.close_model(old.weights)
        del here.values[old]
        for reply in replies:
            assert np.array_equal(reply.outputs()["y"], reply.expected)
        replies.clear()
        assert here.pool.resident_bytes <= BUDGET

    for seed in range(10, 20):
        reload(seed)
    before = anonymous_bytes()
    for seed in range(20, 60):
        reload(seed)
    assert anonymous_bytes() - before < 8 * NBYTES, "forty versions, of which two may be there"
    assert set(here.residency.snapshot().models) == {"a", "b"}
    here.residency.trim(0)
    assert here.pool.resident_bytes == 0
