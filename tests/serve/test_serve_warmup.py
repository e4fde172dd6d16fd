"""Warm-up: each program runs twice on zeros; the second run, behind everybody else's, is what it costs."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest
from sched_support import FakeDevice, Gate, Reply, model, rows_of, spec

from rsrv.core.errors import DeviceError
from rsrv.serve.loading import Warmup
from rsrv.serve.scheduler import Scheduler


class Watched(Scheduler):
    """Remembers which costs were seeded."""

    def __init__(self, device):
        super().__init__(device)
        self.device = device
        self.seeded = []
        self.threads = []

    def seed_cost(self, model, variant, batch_key, seconds):
        super().seed_cost(model, variant, batch_key, seconds)
        self.seeded.append((getattr(model, "name", model), variant, batch_key, seconds))


@pytest.fixture(params=[True, False], ids=["unified", "card"])
def device(request):
    return FakeDevice(unified=request.param)


@pytest.fixture
def scheduler(device):
    scheduler = Watched(device)
    scheduler.start()
    yield scheduler
    scheduler.stop()


def test_every_program_runs_twice_on_zeros_and_counts_for_nobody(device, scheduler):
    shapes = []

    def program(x):
        assert not x.any()
        shapes.append(x.shape)
        return [x]

    m = model(device, program, keys=(1, 4))
    scheduler.add(m)
    Warmup(scheduler, device).measure(m)
    assert shapes == [(1, 2), (1, 2), (4, 2), (4, 2)]
    assert [(name, variant, key) for name, variant, key, _ in scheduler.seeded] == [("m", (), 1), ("m", (), 4)]
    assert all(seconds > 0 for *_, seconds in scheduler.seeded)
    assert list(scheduler.stats()) == ["m"]
    assert (scheduler.stats()["m"].dispatch_count, scheduler.stats()["m"].requests_served) == (0, 0)


def test_shape_variants_and_programs_of_any_batch_are_measured_at_their_own_sizes(device, scheduler):
    shapes = []

    def program(x):
        shapes.append(x.shape)
        return [x]

    inputs, outputs = (spec("x", "n", "?"),), (spec("y", "n", "?"),)
    varied = model(device, program, name="v", keys=(2,), inputs=inputs, outputs=outputs, variants=((3,), (5,)))
    single = model(device, program, name="s", keys=(0,), fixed_rows=3)
    for m in (varied, single):
        scheduler.add(m)
        Warmup(scheduler, device).measure(m)
    assert shapes == [(2, 3), (2, 3), (2, 5), (2, 5), (3, 2), (3, 2)]
    assert [seeded[:3] for seeded in scheduler.seeded] == [("v", (3,), 2), ("v", (5,), 2), ("s", (), 0)]


def test_a_program_that_fails_is_a_warning_that_names_model_variant_and_key(device, scheduler, caplog):
    def program(x):
        if len(x) == 4:
            raise DeviceError("no room")
        return [x]

    m = model(device, program, keys=(1, 4))
    scheduler.add(m)
    Warmup(scheduler, device).measure(m)
    assert [seeded[2] for seeded in scheduler.seeded] == [1]
    assert "warm-up failed model=m variant=[] key=4 why=no room" in caplog.text
    assert list(scheduler.stats()) == ["m"]


def test_on_a_card_requests_of_a_serving_model_go_ahead_of_the_runs_that_wait():
    """While one warm-up run holds the device, a request arrives: it runs before the second warm-up run."""
    order = []
    gate = Gate(lambda x: [x])

    def cold(x):
        order.append("cold")
        return gate(x)

    with watched(FakeDevice(unified=False)) as scheduler:
        reply = beside_the_first_run(scheduler, gate, cold, lambda: order.append("busy"))
        gate.open(2)
        reply.outputs()
    assert order in (["cold", "busy", "cold"], ["cold", "cold", "busy"])
    assert [seeded[0] for seeded in scheduler.seeded] == ["new"]


def test_where_memory_is_shared_no_request_waits_for_the_first_run():
    """That run is the long one: it is still going on when the request that came later has its answer."""
    gate = Gate(lambda x: [x])
    with watched(FakeDevice(unified=True)) as scheduler:
        reply = beside_the_first_run(scheduler, gate, gate, lambda: None)
        np.testing.assert_array_equal(reply.outputs()["y"], rows_of(1))
        assert len(gate.calls) == 1, "the second run has not begun"
        gate.open(2)
    assert [seeded[0] for seeded in scheduler.seeded] == ["new"]


def test_buffers_of_the_first_run_are_freed_also_when_it_fails():
    device = FakeDevice()

    def program(x):
        raise DeviceError("no room")

    with watched(device) as scheduler:
        m = model(device, program)
        scheduler.add(m)
        before = device.live_buffers
        Warmup(scheduler, device).measure(m)
    assert device.live_buffers == before
    assert scheduler.seeded == []


@contextmanager
def watched(device):
    scheduler = Watched(device)
    scheduler.start()
    try:
        yield scheduler
    finally:
        for thread in scheduler.threads:
            thread.join(60)
        scheduler.stop()


def beside_the_first_run(scheduler, gate, program, on_busy):
    """The reply to a request for one model, submitted while the first run of another one, `program`, holds `gate`."""

    def busy(x):
        on_busy()
        return [x]

    device = scheduler.device
    new, serving = model(device, program, name="new"), model(device, busy, name="serving")
    scheduler.add(new)
    scheduler.add(serving)
    thread = threading.Thread(target=Warmup(scheduler, device).measure, args=(new,))
    thread.start()
    scheduler.threads.append(thread)
    gate.wait_entered()
    reply = Reply()
    scheduler.submit(serving, {"x": rows_of(1)}, 1, (), 0, reply)
    return reply


def test_a_stop_ends_the_warm_up_between_two_programs(device, scheduler):
    gate = Gate(lambda x: [x])
    m = model(device, gate, keys=(1, 2))
    scheduler.add(m)
    warmup = Warmup(scheduler, device)
    warmup.add(m)
    thread = threading.Thread(target=warmup.run)
    thread.start()
    gate.wait_entered()
    warmup.stop()
    gate.open(9)
    thread.join(60)
    assert not thread.is_alive()
    assert len(gate.calls) <= 2


def test_a_scheduler_that_stops_ends_the_warm_up_of_a_card():
    device = FakeDevice(unified=False)
    scheduler = Watched(device)
    scheduler.start()
    gate = Gate(lambda x: [x])
    m = model(device, gate, keys=(1,))
    scheduler.add(m)
    warmup = Warmup(scheduler, device)
    warmup.add(m)
    thread = threading.Thread(target=warmup.run)
    thread.start()
    gate.wait_entered()
    stopper = threading.Thread(target=scheduler.stop)
    stopper.start()
    gate.open(9)
    stopper.join(60)
    thread.join(60)
    assert not thread.is_alive()


def test_nothing_runs_where_costs_are_not_used_or_there_is_nothing_to_feed(device, scheduler):
    m = model(device, lambda: [np.zeros((1, 2), np.float32)], inputs=())
    scheduler.add(m)
    Warmup(scheduler, device).measure(m)
    warmup = Warmup(scheduler, device, enabled=False)
    warmup.add(model(device, lambda x: [x], name="other"))
    warmup.stop()
    warmup.run()
    assert device.launched == []
