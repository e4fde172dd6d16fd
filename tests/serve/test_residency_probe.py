"""The scratch probe: what a card's peak says of one execution, and when it says nothing."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sched_support import FakeDevice, model

from rsrv.bundle.safetensors import write_weights
from rsrv.core.errors import DeviceOutOfMemory, ServerStopping
from rsrv.runtime import PjrtDevice
from rsrv.serve.loading.warmup import Warmup
from rsrv.serve.residency.floors import Floor
from rsrv.serve.residency.ledger import Ledger
from rsrv.serve.residency.manager import Residency
from rsrv.serve.residency.probe import Candidate, Reading, ScratchProbe, scratch_from_peaks
from rsrv.serve.residency.store import PrivateWeightStore
from rsrv.serve.residency.tensors import TensorPool, open_weights
from rsrv.serve.scheduler import Scheduler

KIB = 1024
INPUTS = 256  # one granule of a card


@pytest.mark.parametrize(
    ("readings", "scratch"),
    [
        ([], 0),
        ([Reading(100, 0, 130)], 30),
        ([Reading(100, 50, 180)], 30),
        # the second model's own peak (200 + 5) lies below what the first one could have left
        ([Reading(100, 0, 130), Reading(200, 0, 205)], 30),
        ([Reading(100, 0, 130), Reading(200, 0, 290)], 90),
        # a peak that was there before the first model, as a compiler that times kernels leaves it
        ([Reading(100, 0, 500), Reading(200, 0, 500)], 400),
        # pinned models are probed as weights of 0 bytes
        ([Reading(0, 70, 110), Reading(10, 70, 110)], 40),
        ([Reading(100, 50, 120)], 0),
    ],
)
def test_scratch_is_the_peak_less_the_pinned_and_the_heaviest_weights_so_far(readings, scratch):
    assert scratch_from_peaks(readings) == scratch


@given(
    st.integers(0, 1000),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=20),
)
def test_in_ascending_order_the_largest_scratch_is_found_exactly(pinned, models):
    readings, peak = [], 0
    for weights, scratch in sorted(models):
        peak = max(peak, pinned + weights + scratch)
        readings.append(Reading(weights, pinned, peak))
    assert scratch_from_peaks(readings) == max(scratch for _, scratch in models)


class Weights:
    """Weights that the test loads and frees itself."""

    def __init__(self, device, nbytes):
        self._device, self.nbytes = device, nbytes
        self.buffers = ()
        self.uses, self.resident, self.leaving = 0, False, False

    def load(self):
        self.buffers = (self._device.put(np.zeros(self.nbytes // 4, np.float32)),)
        self.resident = True

    def free(self):
        self._device.free(self.buffers)
        self.buffers, self.resident = (), False


class Shelf:
    """Models of one card, with what a probe needs of a server's residency."""

    def __init__(self, memory_bytes=64 * KIB):
        self.device = FakeDevice(unified=False, memory_bytes=memory_bytes)
        self.models = {}
        self.loads = 0
        self.probed = []
        self.refused: dict[str, Exception] = {}
        self.managed = True

    def add(self, name, weights, scratch, *, pinned=False, fn=lambda x, w: [x]):
        # Made elsewhere, so that this device never had the weights before they are loaded.
        made = model(FakeDevice(), fn, name=name, weights=[np.zeros(weights // 4)])
        ((key, program),) = made.programs[()].items()
        program.scratch_bytes = scratch
        made = replace(made, weights=Weights(self.device, weights), programs={(): {key: program}})
        if pinned:
            made.weights.load()
        self.models[name] = (made, pinned)
        return made

    def compact(self, reload: Sequence[str]):
        for made, pinned in self.models.values():
            if not pinned:
                made.weights.free()
        for name in reload if self.managed else ():
            if name in self.refused:
                raise self.refused[name]
            self.load(name)
        resident = sum(m.weights.nbytes for m, pinned in self.models.values() if m.weights.resident and not pinned)
        return SimpleNamespace(reloaded=len(reload) if self.managed else 0, resident_bytes=resident)

    def load(self, name):
        self.models[name][0].weights.load()
        self.loads += 1

    def measure(self, made):
        self.probed.append(made.name)
        x = self.device.put(np.zeros((1, 2), np.float32))
        try:
            self.device.launch(made.programs[()][1], [x, *made.weights.buffers]).result()
        except DeviceOutOfMemory:
            pass  # Warmup.measure warns of it
        finally:
            self.device.free([x])

    def probe(self, measure=None, **more):
        return ScratchProbe(
            device=self.device,
            measure=measure or self.measure,
            compact=self.compact,
            pinned_bytes=lambda: sum(m.weights.nbytes for m, pinned in self.models.values() if pinned),
            loads=lambda: self.loads,
            **more,
        )

    def run(self, measure=None, **more):
        candidates = [Candidate(m, 0 if pinned else m.weights.nbytes) for m, pinned in self.models.values()]
        return self.probe(measure, **more).run(candidates)


def test_models_run_alone_and_in_ascending_order_of_what_can_be_evicted():
    shelf = Shelf()
    shelf.add("heavy", 16 * KIB, 1 * KIB)
    shelf.add("pinned", 8 * KIB, 2 * KIB, pinned=True)
    shelf.add("light", 4 * KIB, 5 * KIB)
    assert shelf.run() == 5 * KIB + INPUTS
    assert shelf.probed == ["pinned", "light", "heavy"]
    assert shelf.loads == 2
    assert shelf.device.memory().bytes_in_use == 8 * KIB, "only what is pinned is left"


def test_scratch_of_a_pinned_model_counts():
    shelf = Shelf()
    shelf.add("pinned", 8 * KIB, 6 * KIB, pinned=True)
    shelf.add("other", 4 * KIB, 1 * KIB)
    assert shelf.run() == 6 * KIB + INPUTS


def test_a_peak_from_before_makes_the_scratch_too_large_and_never_too_small():
    shelf = Shelf()
    shelf.add("a", 4 * KIB, 1 * KIB)
    shelf.device.spike(20 * KIB)
    assert shelf.run() == 16 * KIB


def test_a_server_probes_by_its_own_scheduler_and_residency_and_the_budget_follows(tmp_path):
    device = FakeDevice(unified=False, memory_bytes=64 * KIB)
    scheduler = Scheduler(device)
    books = Ledger(arena=64 * KIB, fraction=1, wiggle=0, unified=False, externally_managed=False, policy="lru")
    residency = Residency(device, scheduler, books, TensorPool(device), store=PrivateWeightStore())
    residency.start()
    scheduler.start()
    candidates = []
    try:
        for name, weights, scratch, floor in (
            ("heavy", 16 * KIB, 1 * KIB, None),
            ("light", 4 * KIB, 5 * KIB, None),
            ("pinned", 8 * KIB, 2 * KIB, Floor.DEVICE),
        ):
            path = tmp_path / name
            write_weights(path, [("w", np.zeros(weights // 4, np.float32))])
            handle = residency.open(name, open_weights(path), floor=floor, scratch_bytes=100)
            made = model(FakeDevice(), lambda x, w: [x], name=name, weights=[np.zeros(weights // 4)])
            made.programs[()][1].scratch_bytes = scratch
            made = replace(made, weights=handle)
            scheduler.add(made)
            candidates.append(Candidate(made, 0 if floor is Floor.DEVICE else handle.nbytes))
        probe = ScratchProbe(
            device=device,
            measure=Warmup(scheduler, device).measure,
            compact=residency.compact,
            pinned_bytes=lambda: residency.snapshot().pinned_bytes,
            loads=lambda: residency.snapshot().loads,
        )
        scratch = probe.run(candidates)
        assert scratch == 5 * KIB + INPUTS
        residency.note_scratch(scratch)
        assert residency.snapshot().max_bytes == 64 * KIB - scratch - 8 * KIB
        assert residency.snapshot().resident_bytes == 0
        assert len(device.launched) == 6, "each program runs twice, which seeds its cost"
        assert device.memory().bytes_in_use == 8 * KIB
    finally:
        scheduler.stop()
        residency.stop()
        residency.free()
    assert device.live_buffers == 0


def test_a_model_that_cannot_be_loaded_is_skipped_with_a_warning(caplog):
    shelf = Shelf()
    shelf.add("broken", 4 * KIB, 9 * KIB)
    shelf.add("sound", 8 * KIB, 2 * KIB)
    shelf.refused["broken"] = DeviceOutOfMemory("no room")
    assert shelf.run() == 2 * KIB + INPUTS
    assert "scratch probe skipped model=broken why=no room" in caplog.text


def test_where_an_operator_moves_the_weights_only_the_pinned_models_are_probed(caplog):
    shelf = Shelf()
    shelf.managed = False
    shelf.add("pinned", 4 * KIB, 1 * KIB, pinned=True)
    shelf.add("other", 8 * KIB, 9 * KIB)
    assert shelf.run() == 1 * KIB + INPUTS
    assert shelf.probed == ["pinned"]
    assert not caplog.records, "an operator expects nothing else"


def test_a_run_that_fails_leaves_the_other_readings_good():
    shelf = Shelf()
    shelf.add("greedy", 4 * KIB, 1 << 30)
    shelf.add("modest", 8 * KIB, 2 * KIB)
    assert shelf.run() == 2 * KIB + INPUTS


def test_weights_that_somebody_else_loads_end_the_probe_and_are_not_taken_for_scratch(caplog):
    shelf = Shelf()
    shelf.add("a", 4 * KIB, 1 * KIB)
    shelf.add("b", 8 * KIB, 1 * KIB)
    shelf.add("c", 16 * KIB, 1 * KIB)

    def disturbed(made):
        if made.name == "b":
            shelf.load("c")
        shelf.measure(made)

    assert shelf.run(disturbed) == 1 * KIB + INPUTS
    assert shelf.probed == ["a", "b"]
    assert "scratch probe ended model=b why=other weights were loaded while it ran" in caplog.text
    assert shelf.device.memory().bytes_in_use == 0


def test_a_server_that_stops_ends_the_probe():
    shelf = Shelf()
    for name in ("a", "b", "c"):
        shelf.add(name, 4 * KIB, 1 * KIB)
    assert shelf.run(stopping=lambda: len(shelf.probed) == 2) == 1 * KIB + INPUTS
    assert shelf.probed == ["a", "b"]

    def stopped(made):
        raise ServerStopping("the server is stopping")

    with pytest.raises(ServerStopping):
        shelf.run(stopped)


def test_nothing_is_probed_where_no_peak_is_reported():
    def never(*_):
        raise AssertionError("nothing may run")

    for device in (PjrtDevice("cpu"), FakeDevice(unified=False), FakeDevice(memory_bytes=KIB)):
        probe = ScratchProbe(device, never, never, never, never)
        assert probe.run([Candidate(SimpleNamespace(name="a"), 1)]) is None


def test_without_a_model_that_ran_nothing_is_known():
    assert Shelf().run() is None
    shelf = Shelf()
    shelf.add("broken", 4 * KIB, KIB)
    shelf.refused["broken"] = DeviceOutOfMemory("no room")
    assert shelf.run() is None
