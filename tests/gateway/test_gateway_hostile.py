"""What clients and workers can do to the request path: nothing leaks, nobody else pays, and no request is lost."""

from __future__ import annotations

import gc
import socket
import threading
import time
import weakref
from contextlib import contextmanager

import pytest
from support.gateway_site import request_body, wait_until

from rsrv.core.config.gateway import OutliersConfig, RetriesConfig
from rsrv.core.errors import Code
from rsrv.core.tensors import OutputTarget
from rsrv.core.wire import RequestedOutput
from rsrv.gateway.routing.retries import RetryBudget
from rsrv.gateway.routing.standing import Standing
from rsrv.gateway.scheduling.modes import Choice
from rsrv.gateway.workers.channels import Stubs, _is_unsure, forwarded, trailers_of
from rsrv.gateway.workers.fleet import Endpoint
from rsrv.gateway.workers.outcome import Outcome


class InOrder:
    """A mode that asks the workers in the order of their table, and charges nothing."""

    name, needs_poll = "in_order", False

    def record_arrival(self, model): ...
    def request_units(self, model, body):
        return 1

    def select(self, model, units, picked, avoid):
        return Choice(tuple(self.order(picked))) if picked else None

    order = staticmethod(sorted)

    def move(self, reservation, url): ...
    def release(self, reservation): ...
    def tick(self, ready, poll, now): ...
    def take_notes(self):
        return []

    def forget(self, url): ...
    def inflight_work(self):
        return None


@contextmanager
def posted(site, bodies, **how):
    """Requests on threads of their own; the calls, which have ended when the block ends."""
    calls = [site.call(body, **how) for body in bodies]
    threads = [threading.Thread(target=call.serve, args=(site.proxy.handle,)) for call in calls]
    for thread in threads:
        thread.start()
    try:
        yield calls
    finally:
        for thread in threads:
            thread.join()


def nothing_is_left(site) -> None:
    wait_until(lambda: not site.proxy.admission.inflight)
    wait_until(lambda: not any(worker.inflight or worker.waiting for worker in site.fleet.workers))


# --- clients --------------------------------------------------------------------------------------------------------

BAD_PARAMETERS = b"\x0a\x01m" + b"\x22\x03\x0a\x10a"  # a map entry whose key runs past its end


def test_a_body_whose_parameters_are_malformed_takes_no_place_for_ever(make_site):
    site = make_site(1, cap=2)
    for _ in range(5):
        assert site.post(BAD_PARAMETERS).code is Code.INVALID_ARGUMENT
    assert site.proxy.admission.inflight == 0
    assert site.status_counts() == {("ModelInfer", "", "InvalidArgument"): 5}
    assert site.post().error is None


@pytest.mark.parametrize("value", ["caf\ufffd", "caf\xe9", "a\x00b", "a\tb", "a\nb"])
def test_metadata_that_grpc_cannot_send_is_left_out_and_the_worker_is_not_blamed(make_site, value):
    site = make_site(1)
    for _ in range(6):
        assert site.post(metadata={"x-odd": value, "x-request-id": "7"}).error is None
    assert site.counters.snapshot().ejections == {}
    seen = site.mocks[0].seen("ModelInfer")[0].metadata
    assert "x-odd" not in seen
    assert seen["x-request-id"] == "7"


def test_binary_metadata_goes_on_value_by_value_and_what_is_no_base64_does_not():
    assert forwarded({"x-a-bin": "YWI=,Yg=="}, ()) == (("x-a-bin", b"ab"), ("x-a-bin", b"b"))
    assert forwarded({"x-a-bin": "YWI"}, ()) == ()
    assert forwarded({"x-A": "1", "x-b c": "1", "authorization": "1"}, ()) == ()


def test_an_unknown_model_that_a_client_gives_up_makes_no_label(make_site):
    site = make_site(1)
    site.refresh.refresh = lambda deadline_ns, done: None  # a scan that takes its time
    for number in range(20):
        call = site.call(request_body(f"no-{number}"))
        site.proxy.handle(call)
        call.cancel()
    assert site.status_counts() == {("ModelInfer", "_unknown_", "Cancelled"): 20}
    nothing_is_left(site)


def test_an_answer_that_cannot_be_handed_on_fails_the_call(make_site):
    site = make_site(1)
    call = site.call(request_body())

    def refuse(buffers):
        raise ValueError("no")

    call.send = refuse
    call.serve(site.proxy.handle, seconds=10)
    assert call.code is Code.INTERNAL
    nothing_is_left(site)


# --- workers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "kept"),
    [
        ([("rsrv-reason", "shed"), ("grpc-status-details-bin", b"\x00")], {"rsrv-reason": "shed"}),
        ([("x-a", "\ufffd"), ("x-b", "a\x7f"), ("X-C", "1"), (":path", "/"), ("x-d", "")], {"x-d": ""}),
        ([("x-a", "y" * 7000), ("rsrv-reason", "shed")], {}),
        ([("rsrv-reason", "shed"), ("x-a", "y" * 7000), ("x-b", "1")], {"rsrv-reason": "shed"}),
    ],
)
def test_trailers_that_the_client_could_not_be_sent_are_dropped(metadata, kept):
    assert trailers_of(metadata) == kept


def test_a_worker_that_takes_back_its_connection_is_no_cancellation_by_the_client(make_site):
    site = make_site(2, mode=InOrder())
    site.mocks[0].fail("ModelInfer", Code.CANCELLED)
    assert site.post().error is None
    assert site.served() == [1, 1]


def test_a_request_that_writes_shared_memory_is_not_repeated_when_its_worker_may_still_be_at_it(make_site):
    site = make_site(2, mode=InOrder())
    site.mocks[0].fail("ModelInfer", Code.CANCELLED)
    body = request_body(outputs=[RequestedOutput("out", OutputTarget("r", 0, 4))])
    assert site.post(body).code is Code.UNAVAILABLE
    assert site.served() == [1, 0]


@pytest.mark.parametrize(
    ("code", "text", "unsure"),
    [
        (Code.UNAVAILABLE, "keepalive watchdog timeout", True),
        (Code.UNAVAILABLE, "ping timeout", True),
        (Code.UNAVAILABLE, "recvmsg:Connection timed out", True),
        (Code.UNAVAILABLE, "Socket closed", False),
        (Code.UNAVAILABLE, "recvmsg:Connection reset by peer", False),
        (Code.UNAVAILABLE, "failed to connect to all addresses; last error: UNKNOWN: Timeout occurred", False),
        (Code.DEADLINE_EXCEEDED, "timeout", False),
    ],
)
def test_only_a_connection_that_fell_silent_leaves_it_open_whether_the_worker_goes_on(code, text, unsure):
    assert _is_unsure(code, text) is unsure


@pytest.fixture
def silent(monkeypatch):
    """A worker that accepts connections and never says a word, until `kill` breaks them."""

    class Silent:
        def __init__(self) -> None:
            self.listener = socket.create_server(("127.0.0.1", 0))
            self.url = f"127.0.0.1:{self.listener.getsockname()[1]}"

        def kill(self) -> None:
            self.listener.close()

    # For so long it counts as broken down, which is as long as the test takes.
    monkeypatch.setattr("rsrv.gateway.workers.worker._AWAY_NS", 60_000_000_000)
    silent = Silent()
    yield silent
    silent.kill()


def front(site, silent, *, first: bool = True):
    """`silent` becomes the worker that every request tries first."""
    worker = site.fleet.add(Endpoint(silent.url))
    site.router.joined(silent.url, slowly=False)
    site.fleet.probed(silent.url, True)
    site.router.probed(silent.url, True)
    site.router.mode.order = lambda picked: sorted(picked, key=lambda url: url != silent.url)
    site.install(m=[silent.url, *(mock.url for mock in site.mocks)])
    return worker


def test_what_waits_for_a_worker_that_breaks_down_goes_elsewhere_and_costs_no_budget(make_site, silent):
    site = make_site(1, mode=InOrder(), streams=1, retries={"ratio": 0.0, "minimum": 1})
    worker = front(site, silent)
    with posted(site, [request_body()] * 20) as calls:
        wait_until(lambda: (worker.inflight, worker.waiting) == (1, 19))
        silent.kill()
    assert [call.error for call in calls] == [None] * 20
    assert site.proxy.retries.total == 1
    nothing_is_left(site)


def test_what_waits_for_a_worker_that_hangs_goes_elsewhere_when_that_is_found_out(make_site, silent):
    site = make_site(1, mode=InOrder(), streams=1, retries={"ratio": 0.0, "minimum": 1})
    worker = front(site, silent)
    with posted(site, [request_body()] * 20) as calls:
        wait_until(lambda: (worker.inflight, worker.waiting) == (1, 19))
        worker.rebuild()
    assert [call.error for call in calls] == [None] * 20
    assert site.proxy.retries.total == 1
    nothing_is_left(site)


def test_what_waits_for_the_only_worker_stays_when_it_is_connected_anew(make_site, silent):
    site = make_site(0, mode=InOrder(), streams=1)
    worker = front(site, silent)
    with posted(site, [request_body()] * 3, seconds=5.0) as calls:
        wait_until(lambda: (worker.inflight, worker.waiting) == (1, 2))
        worker.rebuild()
        wait_until(lambda: (worker.inflight, worker.waiting) == (1, 1))
        assert sum(call.ended for call in calls) == 1
        for call in calls:
            call.cancel()
    nothing_is_left(site)


def test_a_request_that_is_just_being_sent_outlives_the_removal_of_its_worker(make_site, monkeypatch):
    site = make_site(1)
    start, sending, go_on = Stubs.start, threading.Event(), threading.Event()

    def slowly(stubs, path, *arguments, **options):
        sending.set()
        go_on.wait(10)
        return start(stubs, path, *arguments, **options)

    monkeypatch.setattr(Stubs, "start", slowly)
    closed = threading.Event()
    close = Stubs.close
    monkeypatch.setattr(Stubs, "close", lambda stubs: (close(stubs), closed.set()))
    (worker,) = site.fleet.workers
    with posted(site, [request_body()]) as (call,):
        assert sending.wait(10)
        worker.close()
        time.sleep(0.05)
        go_on.set()
    assert call.error is None
    assert worker.inflight == 0


def test_a_worker_that_has_left_takes_no_request(make_site):
    site = make_site(2, mode=InOrder())
    first = site.fleet.get(site.mocks[0].url)
    first.close()
    assert site.post().error is None
    assert site.served() == [0, 1]
    assert site.proxy.retries.total == 0


def test_models_that_failed_long_ago_make_place_for_those_that_fail_now():
    now = [0.0]
    standing = Standing(OutliersConfig(cooldown_seconds=1.0), lambda: now[0])
    standing.joined("w", slowly=False)
    standing.probed("w", True)
    failed = Outcome(Code.NOT_FOUND, trailers={"rsrv-reason": "unknown_model"})
    for number in range(5000):
        standing.failed("w", f"m{number}", failed)
    assert standing.avoid("m0") == {"w"}
    assert standing.avoid("m4999") == frozenset()  # there was no room
    now[0] = 2.0
    standing.failed("w", "new", failed)
    assert standing.avoid("new") == {"w"}
    assert standing.avoid("m1") == frozenset()
    now[0] = 20.0
    standing.avoid("new")
    assert standing._cooling == 0


def test_a_model_that_fails_again_and_again_on_a_worker_is_tried_there_ever_more_seldom():
    now = [0.0]
    standing = Standing(OutliersConfig(cooldown_seconds=1.0, eject_seconds=10.0), lambda: now[0])
    standing.joined("w", slowly=False)
    standing.probed("w", True)
    lies = Outcome(Code.NOT_FOUND, trailers={"rsrv-reason": "unknown_model"})

    def tried_at(until: float) -> list[float]:
        """The seconds at which the worker is asked, and fails."""
        found = []
        while now[0] < until:
            if not standing.avoid("m"):
                found.append(now[0])
                standing.failed("w", "m", lies)
                standing.failed("w", "m", lies)  # a request that was on its way at the same time
            now[0] += 0.5
        return found

    assert tried_at(50.0) == [0.0, 1.0, 3.0, 7.0, 15.0, 25.0, 35.0, 45.0]
    assert standing.avoid("other") == frozenset()
    standing.succeeded("w", "m")
    assert standing.avoid("m") == frozenset()
    assert tried_at(54.0) == [50.0, 51.0, 53.0]
    standing.probed("w", False)
    standing.probed("w", True)
    assert standing._cooling == 0


def test_a_full_queue_is_no_reason_to_stay_away_for_longer_each_time():
    now = [0.0]
    standing = Standing(OutliersConfig(cooldown_seconds=1.0), lambda: now[0])
    standing.joined("w", slowly=False)
    standing.probed("w", True)
    for second in range(5):
        now[0] = float(second)
        assert standing.avoid("m") == frozenset()
        standing.failed("w", "m", Outcome(Code.RESOURCE_EXHAUSTED, trailers={"rsrv-reason": "queue_full"}))


def test_hedges_leave_half_of_the_budget_to_requests_that_have_failed():
    budget = RetryBudget(RetriesConfig(ratio=0.0, minimum=10), lambda: 0.0)
    assert [budget.take(hedge=True) for _ in range(7)] == [True] * 5 + [False] * 2
    assert [budget.take() for _ in range(6)] == [True] * 5 + [False]
    assert (budget.total, budget.refused) == (10, 1)


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_what_a_request_held_is_free_when_it_has_ended(make_site, no_gc, failures):
    """By counts of references alone: large bodies come faster than Python looks for circles."""
    site = make_site(2, mode=InOrder())
    for mock in site.mocks[:failures]:
        mock.fail("ModelInfer", Code.UNAVAILABLE, reason="preparing")
    call = site.post()
    assert (call.error is None) is (failures < 2)
    call.error = None  # whose traceback leads here
    call._on_cancel.clear()  # as an engine does
    held = weakref.ref(call)
    del call
    wait_until(lambda: held() is None)


def test_of_workers_that_are_all_to_be_avoided_the_best_are_asked():
    now = [0.0]
    standing = Standing(OutliersConfig(slow_start_seconds=10.0, cooldown_seconds=1.0), lambda: now[0])
    workers = ("away", "failing", "returned")
    for url in workers:
        standing.joined(url, slowly=url == "returned")
        standing.probed(url, True)
    assert standing.avoid("m", workers) == frozenset()  # the first request after it returned
    standing.probed("away", False)
    standing.failed("failing", "m", Outcome(Code.UNAVAILABLE, text="gone"))
    assert standing.avoid("m") == set(workers)
    assert standing.avoid("m", workers) == {"away", "failing"}
    assert standing.avoid("m", ("away", "failing")) == {"away"}
    assert standing.avoid("m", ("away",)) == frozenset()
