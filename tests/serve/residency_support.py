"""A worker's scheduler and residency around a fake device, with models whose weights are small files."""

import threading
import time
from contextlib import contextmanager

import numpy as np
from sched_support import INCARNATIONS, LONG, Clock, Gate, Reply, X, Y, rows_of, send, signature

from rsrv.bundle.manifest import Manifest
from rsrv.bundle.safetensors import write_weights
from rsrv.runtime.fake import FakeDevice
from rsrv.serve.residency.ledger import Ledger
from rsrv.serve.residency.manager import Residency
from rsrv.serve.residency.store import PrivateWeightStore
from rsrv.serve.residency.tensors import TensorPool, open_weights
from rsrv.serve.scheduler import Scheduler, ServableModel
from rsrv.serve.scheduler.policy import Policy

NBYTES = 4096
"""Of the weights of one model, unless a test says otherwise."""
THREADS = {"rsrv-dispatch", "rsrv-device", "rsrv-watchdog", "rsrv-transfer", "rsrv-digests"}


class Device(FakeDevice):
    """Tells weights from inputs by the thread that puts them, and lets a test hold or fail their transfer.

    Attributes:
        weight_bytes, most_weight_bytes: on the device now, and the most that ever were.
        transfers: sizes of the weight tensors that were put.
        failures: errors that the next transfers raise, in order; None = that one is fine.
    """

    def __init__(self, **options):
        super().__init__(**options)
        self.weight_bytes = self.most_weight_bytes = 0
        self.transfers, self.failures = [], []
        self._weights = {}
        self._gate = None

    def put(self, array, *, alias=False):
        if threading.current_thread().name != "rsrv-transfer":
            return super().put(array, alias=alias)
        self.transfers.append(array.nbytes)
        gate = self._gate
        if gate is not None:
            gate()
        error = self.failures.pop(0) if self.failures else None
        if error is not None:
            raise error
        buffer = super().put(array, alias=alias)
        self._weights[id(buffer)] = buffer
        self.weight_bytes += buffer.nbytes
        self.most_weight_bytes = max(self.most_weight_bytes, self.weight_bytes)
        return buffer

    def free(self, buffers):
        for buffer in buffers:
            if self._weights.pop(id(buffer), None) is not None:
                self.weight_bytes -= buffer.nbytes
        super().free(buffers)

    @contextmanager
    def held_transfers(self):
        """Every tensor of weights waits at the gate that this gives; at the end all may pass."""
        gate = self._gate = Gate(lambda: None)
        try:
            yield gate
        finally:
            self._gate = None
            gate.open(1000)


def affine(x, w):
    return x * w[:2] + w[-2:]


class Site:
    """One worker; `close` takes it down in a worker's order and looks at what is left."""

    def __init__(
        self,
        directory,
        budget,
        *,
        unified=True,
        wiggle=0.0,
        mode="self_managed",
        eviction="lru",
        policy=Policy(discipline="fifo"),  # noqa: B008
        spare=4 * NBYTES,
        device=Device,
        **options,
    ):
        self.directory = directory
        # On a card inputs take some, too.
        self.device = device(unified=unified, memory_bytes=None if unified else budget + spare)
        self.clock = Clock()
        self.scheduler = Scheduler(self.device, policy, clock=self.clock)
        self.ledger = Ledger(
            arena=budget,
            wiggle=wiggle,
            unified=self.device.unified,
            externally_managed=mode == "externally_managed",
            policy=eviction,
        )
        self.pool = TensorPool(self.device)
        store = None if self.device.unified else PrivateWeightStore()
        self.residency = Residency(
            self.device, self.scheduler, self.ledger, self.pool, store=store, mode=mode, clock=self.clock, **options
        )
        self.models, self.values, self.replies = {}, {}, []
        self.values_of = {}
        self.residency.start()
        self.scheduler.start()

    # --- models -------------------------------------------------------------------------------------------------------

    def path(self, name):
        return self.directory / f"{name}.safetensors"

    def write(self, name, nbytes=NBYTES, seed=None):
        rng = np.random.default_rng(abs(hash(name)) if seed is None else seed)
        self.values[name] = rng.integers(-99, 99, nbytes // 4).astype(np.float32)
        write_weights(self.path(name), [("w", self.values[name])])

    def add(self, *names, nbytes=NBYTES, floor=None, fn=affine, keys=(1, 4, 8), scratch=0):
        """Register models, with new files; returns the last."""
        for name in names:
            self.write(name, nbytes, seed=sum(name.encode()))
            weights = self.residency.open(name, open_weights(self.path(name)), floor=floor, scratch_bytes=scratch)
            programs = {
                key: self.device.program(fn, signature(X, Y, key, weights=[self.values[name]]), name=name)
                for key in keys
            }
            manifest = Manifest(name=name, executable_inputs=X, executable_outputs=Y)
            m = ServableModel(name, next(INCARNATIONS), manifest, {(): programs}, weights)
            self.values_of[m] = self.values[name]
            self.models[name] = m
            self.scheduler.add(m)
        return self.models[names[-1]]

    def remove(self, name):
        m = self.models.pop(name)
        assert self.scheduler.remove(name, timeout=LONG)
        self.residency.close_model(m.weights)

    # --- requests -----------------------------------------------------------------------------------------------------

    def ask(self, name, *values, **options):
        x, m = rows_of(*(values or (1,))), self.models[name]
        expected = affine(x, self.values_of[m])
        reply = send(self.scheduler, m, x, **options)
        reply.expected = expected
        self.replies.append(reply)
        return reply

    def serve(self, *names):
        """Ask each in turn and compare what comes."""
        for name in names:
            self.is_answered(self.ask(name, 3, 4))

    def is_answered(self, *replies):
        for reply in replies:
            assert np.array_equal(reply.outputs()["y"], reply.expected)

    def settle(self):
        """Wait until the dispatch thread has nothing to do but to wait for others."""
        dispatcher, end = self.scheduler._dispatcher, time.monotonic() + LONG
        while True:
            with dispatcher.lock:
                if dispatcher._sleeping and not dispatcher._commands:
                    return
            assert time.monotonic() < end, "the dispatch thread never comes to rest"
            time.sleep(0)

    # --- what is where ------------------------------------------------------------------------------------------------

    @property
    def resident(self):
        return "".join(name for name in sorted(self.models) if self.residency.model(name).device_resident)

    @property
    def counted(self):
        """Loads, evictions."""
        snapshot = self.residency.snapshot()
        return snapshot.loads, sum(snapshot.evicts.values())

    def is_consistent(self):
        """Once nothing is under way: handles, ledger, pool and device say the same."""
        self.residency.note_scratch(0)  # ends after all that was begun before
        self.settle()
        snapshot = self.residency.snapshot()
        on_device = {name for name, state in snapshot.models.items() if state.state.value == "resident"}
        assert {state.state.value for state in snapshot.models.values()} <= {"resident", "cold"}
        assert on_device == set(self.resident), (on_device, self.resident)
        total = sum(snapshot.models[name].nbytes for name in on_device)
        assert self.pool.resident_bytes == self.device.weight_bytes == total
        assert snapshot.resident_bytes + snapshot.budget.pinned == total
        assert snapshot.pending_bytes == 0
        assert all(m.weights.uses == 0 and not m.weights.leaving for m in self.models.values())

    def close(self):
        self.residency.close()
        self.scheduler.stop()
        self.residency.stop()
        for reply in self.replies:
            assert len(reply._results) == 1, "not settled exactly once"
        self.residency.free()
        assert self.pool.resident_bytes == 0
        assert (self.device.live_bytes, self.device.live_buffers) == (0, 0)
        assert not [thread.name for thread in threading.enumerate() if thread.name in THREADS]


class Version:
    """The next version of a model of a site: a file, weights and programs of its own."""

    def __init__(self, here, name, *, seed=99, nbytes=NBYTES, floor=None):
        self.here, self.name, self.old = here, name, here.models[name]
        incarnation = next(INCARNATIONS)
        self.own, self.aside = f"{name}#{incarnation}", f"{name}#{self.old.incarnation}"
        self.values = np.random.default_rng(seed).integers(-99, 99, nbytes // 4).astype(np.float32)
        self.path = here.path(self.own)
        write_weights(self.path, [("w", self.values)])
        self.weights = here.residency.open(self.own, open_weights(self.path), floor=floor, scratch_bytes=0, model=name)
        programs = {
            key: here.device.program(affine, signature(X, Y, key, weights=[self.values]), name=name)
            for key in (1, 4, 8)
        }
        manifest = Manifest(name=name, executable_inputs=X, executable_outputs=Y)
        self.model = ServableModel(name, incarnation, manifest, {(): programs}, self.weights)

    def exchange(self):
        """From now on it serves; the old version does what it has accepted."""
        here = self.here
        here.residency.exchange(self.old.weights, self.weights, self.aside)
        here.scheduler.replace(self.model)
        here.values[self.name] = here.values_of[self.model] = self.values
        here.models[self.name] = self.model

    def retire(self):
        assert self.here.scheduler.retire(self.old, timeout=LONG)
        self.here.residency.close_model(self.old.weights)

    def swap(self):
        self.exchange()
        self.retire()


def in_background(call, *arguments):
    """Run on a thread; calling what is returned waits for the result, or raises."""
    outcome = Reply()

    def run():
        try:
            outcome((call(*arguments), None))
        except BaseException as error:
            outcome((None, error))

    threading.Thread(target=run, daemon=True).start()

    def wait():
        result, error = outcome.wait()
        if error is not None:
            raise error
        return result

    return wait


__all__ = ["LONG", "NBYTES", "Device", "Gate", "Site", "Version", "affine", "in_background"]
