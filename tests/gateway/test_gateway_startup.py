"""How a gateway that places models waits for its workers."""

import math
import threading

import pytest
from support.mock_worker import MockWorker
from support.stub_worker import StubWorker

from rsrv.core.errors import Code, NoWorkers, ServerStopping
from rsrv.gateway.discovery.startup import wait_for_workers
from rsrv.gateway.metrics.counters import GatewayCounters
from rsrv.gateway.timers import Timers
from rsrv.gateway.workers.channels import ChannelSettings
from rsrv.gateway.workers.fleet import Endpoint, Fleet
from rsrv.gateway.workers.worker import Worker

NOBODY = "127.0.0.1:1"


@pytest.fixture
def waiting():
    """`waiting(urls, …)` is `wait_for_workers` for a fleet of these."""
    timers, stopping, fleets = Timers(), threading.Event(), []
    asked = []

    class Asked(Worker):
        def probe(self, path, body, **how):
            asked.append(self.url)
            return super().probe(path, body, **how)

    def wait(*urls, least=1, limit=0.0, round_seconds=0.01, probe_seconds=5.0):
        fleet = Fleet(
            lambda endpoint: Asked(
                endpoint.url,
                endpoint.name,
                settings=ChannelSettings(1 << 20, 1 << 20),
                streams=4,
                timers=timers,
                counters=GatewayCounters(),
            )
        )
        fleets.append(fleet)
        for url in urls:
            fleet.add(Endpoint(url))
        how = {"least": least, "limit": limit, "round_seconds": round_seconds, "probe_seconds": probe_seconds}
        return wait_for_workers(fleet, timers, stopping=stopping, **how)

    wait.stopping, wait.asked = stopping, asked
    yield wait
    for fleet in fleets:
        fleet.close()
    timers.close()


def test_it_goes_on_with_the_workers_that_answer(waiting):
    with MockWorker(["a", "b"]) as mock:
        poll = waiting(mock.url, NOBODY)
    assert poll.polled == (mock.url,)
    assert set(poll.hosts) == {"a", "b"}


def test_too_few_workers_are_an_error_that_names_those_without_an_answer_and_the_variable(waiting):
    with MockWorker() as mock, pytest.raises(NoWorkers) as caught:
        waiting(mock.url, NOBODY, least=2)
    assert NOBODY in caught.value.message
    assert mock.url not in caught.value.message
    assert "RSRV_GATEWAY_STARTUP_WAIT_SECONDS" in caught.value.hint
    assert caught.value.exit_code == 1


def test_a_bounded_wait_asks_again_until_its_time_is_up(waiting):
    with MockWorker() as mock:
        mock.fail("ModelControlStatus", Code.UNAVAILABLE, times=3)
        assert waiting(mock.url, limit=30.0).polled == (mock.url,)
        assert mock.count("ModelControlStatus") == 4
        mock.fail("ModelControlStatus", Code.UNAVAILABLE)
        before = mock.count("ModelControlStatus")
        with pytest.raises(NoWorkers):
            waiting(mock.url, limit=0.3, round_seconds=10.0)
        assert mock.count("ModelControlStatus") == before + 2  # at once, and when the time was up


def test_a_worker_that_answers_garbage_has_not_answered(waiting):
    with MockWorker() as mock:
        mock.answer("ModelControlStatus", b"\xff\xff")
        with pytest.raises(NoWorkers):
            waiting(mock.url)


def test_three_rounds_in_which_every_call_hangs_end_the_wait_however_long_it_may_be(waiting):
    with MockWorker() as mock:
        mock.hang("ModelControlStatus")
        with pytest.raises(NoWorkers, match="in 3 rounds"):
            waiting(mock.url, limit=math.inf, probe_seconds=0.05)
        assert waiting.asked == [mock.url] * 3  # of which it may have missed some, for they end soon
        mock.resume("ModelControlStatus")


def test_one_refusal_among_silent_workers_is_no_wedge():
    timers, stopping, fleet = Timers(), threading.Event(), Fleet(StubWorker.connect)
    silent, refusing = fleet.add(Endpoint("silent:1")), fleet.add(Endpoint("refusing:1"))
    silent.on_probe = lambda probe: probe.fail(Code.DEADLINE_EXCEEDED)
    refusing.on_probe = lambda probe: (len(refusing.probes) == 5 and stopping.set(), probe.fail(Code.UNAVAILABLE))
    with pytest.raises(ServerStopping):
        wait_for_workers(fleet, timers, least=1, limit=math.inf, stopping=stopping, round_seconds=0.0)
    assert len(silent.probes) == 5
    timers.close()


def test_a_stop_ends_the_wait(waiting):
    waiting.stopping.set()
    with pytest.raises(ServerStopping):
        waiting(NOBODY, limit=math.inf, round_seconds=10.0)
