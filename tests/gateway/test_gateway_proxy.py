"""ModelInfer through the proxy: routing, failover, budgets, deadlines, metadata, cancellation, the ends of requests."""

from __future__ import annotations

import threading
import time

import grpc
import pytest
from support.gateway_site import request_body, wait_until

from rsrv.core.errors import Code
from rsrv.core.wire import RequestedOutput
from rsrv.gateway.routing.table import NotReady, RoutingTable
from rsrv.protos import inference as pb


def answer_of(call):
    assert call.error is None, call.error
    return pb.ModelInferResponse.FromString(call.message)


# --- routing --------------------------------------------------------------------------------------------------------


def test_both_replicas_are_seen_within_four_calls(make_site):
    site = make_site(2)
    for number in range(4):
        assert answer_of(site.post(request_body(request_id=f"r{number}"))).id == f"r{number}"
    assert site.served() == [2, 2]
    assert site.status_counts() == {("ModelInfer", "m", "OK"): 4}


def test_the_body_reaches_the_worker_as_it_was_and_so_does_the_answer(make_site):
    site = make_site(1)
    site.mocks[0].answer("ModelInfer", b"\x00any bytes\xff")
    body = request_body() + b"\xf8\x3f\x01"  # an unknown field
    call = site.post(body)
    assert call.message == b"\x00any bytes\xff"
    assert site.mocks[0].seen("ModelInfer")[0].body == body


def test_an_unknown_model_is_not_found_and_makes_no_label(make_site):
    site = make_site(2)
    for number in range(50):
        call = site.post(request_body(f"no-{number}"))
        assert (call.code, call.reason) == (Code.NOT_FOUND, "unknown_model")
        assert f"'no-{number}'" in str(call.error)
    assert site.status_counts() == {("ModelInfer", "_unknown_", "NotFound"): 50}
    assert site.refresh.refreshed == 50
    assert site.served() == [0, 0]


def test_a_model_that_a_refresh_finds_is_served_at_once(make_site):
    site = make_site(1)
    site.mocks[0].models["late"] = site.mocks[0].models["m"]
    site.refresh.found = lambda: site.install(late=[site.mocks[0].url])
    assert answer_of(site.post(request_body("late"))).model_name == "late"


@pytest.mark.parametrize(("reason", "text"), [("preparing", "compiling"), ("failed", "the weights are gone")])
def test_a_model_that_is_listed_and_not_ready_is_unavailable_with_its_reason(make_site, reason, text):
    site = make_site(1)
    site.router.install(RoutingTable({}, {"m": NotReady(reason, text)}))
    call = site.post()
    assert (call.code, call.reason) == (Code.UNAVAILABLE, reason)
    assert text in str(call.error)


@pytest.mark.parametrize("body", [b"\x0a\x05ab", b"\xff" * 9, b""])
def test_a_malformed_body_fails_alone(make_site, body):
    site = make_site(1)
    call = site.post(body)
    assert call.code is Code.INVALID_ARGUMENT
    assert site.status_counts() == {("ModelInfer", "", "InvalidArgument"): 1}
    assert site.proxy.admission.inflight == 0
    answer_of(site.post())


# --- failover -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [Code.NOT_FOUND, Code.UNAVAILABLE])
def test_what_one_replica_does_not_have_another_one_answers(make_site, code):
    site = make_site(2)
    site.mocks[0].fail("ModelInfer", code, reason="preparing")
    for _ in range(4):
        answer_of(site.post())
    assert site.mocks[1].count("ModelInfer") == 4
    assert site.refresh.requested == (site.mocks[0].count("ModelInfer") if code is Code.NOT_FOUND else 0)
    assert site.proxy.retries.total == site.mocks[0].count("ModelInfer")


def test_a_replica_that_is_gone_is_asked_once_and_then_last(make_site):
    site = make_site(2)
    site.mocks[0].close()
    for _ in range(6):
        answer_of(site.post())
    assert site.proxy.retries.total == 1  # the cooldown lasts, since the clock stands still
    assert site.lost == [site.mocks[0].url]
    assert site.counters.snapshot().failovers == {("m", "Unavailable"): 1}


VERBATIM = [
    Code.INVALID_ARGUMENT,
    Code.UNIMPLEMENTED,
    Code.PERMISSION_DENIED,
    Code.UNAUTHENTICATED,
    Code.OUT_OF_RANGE,
    Code.ALREADY_EXISTS,
    Code.INTERNAL,
    Code.UNKNOWN,
    Code.DATA_LOSS,
    Code.ABORTED,
    Code.RESOURCE_EXHAUSTED,
    Code.FAILED_PRECONDITION,
    Code.DEADLINE_EXCEEDED,
]


@pytest.mark.parametrize("code", VERBATIM)
def test_other_statuses_come_from_the_first_replica_as_they_are(make_site, code):
    site = make_site(2)
    for mock in site.mocks:
        mock.fail("ModelInfer", code, "so it is", reason="its_own")
    call = site.post()
    assert (call.code, call.reason) == (code, "its_own")
    url = next(mock.url for mock in site.mocks if mock.count("ModelInfer"))
    assert str(call.error) == f"worker {url}: so it is"
    assert sum(site.served()) == 1


def test_the_last_replica_has_the_last_word(make_site):
    site = make_site(2)
    site.mocks[0].fail("ModelInfer", Code.UNAVAILABLE, "first", reason="preparing")
    site.mocks[1].fail("ModelInfer", Code.NOT_FOUND, "second", reason="unknown_model")
    assert site.post().code is Code.NOT_FOUND
    assert site.served() == [1, 1]


@pytest.mark.parametrize(
    ("spreads", "reason", "tried"), [(True, "queue_full", 2), (False, "queue_full", 1), (False, "shed", 2)]
)
def test_a_full_worker_is_passed_over_where_the_mode_spreads(make_site, spreads, reason, tried):
    site = make_site(2, spreads=spreads)
    for mock in site.mocks:
        mock.fail("ModelInfer", Code.RESOURCE_EXHAUSTED, reason=reason)
    assert site.post().code is Code.RESOURCE_EXHAUSTED
    assert sum(site.served()) == tried


def test_a_device_without_memory_is_passed_over_in_every_mode(make_site):
    site = make_site(2)
    site.mocks[0].fail("ModelInfer", Code.RESOURCE_EXHAUSTED, reason="device_oom")
    answer_of(site.post())
    assert site.served() == [1, 1]


def test_second_attempts_have_a_budget(make_site):
    site = make_site(2, retries={"minimum": 3, "ratio": 0.0}, outliers={"cooldown_seconds": 0.0})
    site.mocks[0].fail("ModelInfer", Code.UNAVAILABLE, reason="preparing")
    codes = [site.post().code for _ in range(20)]
    assert site.proxy.retries.total == 3
    assert codes.count(Code.UNAVAILABLE) == site.mocks[0].count("ModelInfer") - 3 > 0


def test_a_worker_that_fails_again_and_again_is_taken_out_counted_and_told_of(make_site, caplog):
    site = make_site(2, outliers={"consecutive_failures": 3, "cooldown_seconds": 0.0})
    site.mocks[0].fail("ModelInfer", Code.INTERNAL, "broken")
    for _ in range(10):
        site.post()
    assert site.served() == [3, 7]
    url = site.mocks[0].url
    assert site.counters.snapshot().ejections == {url: 1}
    assert caplog.text.count(f"worker={url} is asked last for 10 s: its calls fail one after the other") == 1


def test_a_worker_that_left_is_passed_over(make_site):
    site = make_site(2)
    site.fleet.remove(site.mocks[0].url)
    for _ in range(4):
        answer_of(site.post())
    assert site.proxy.retries.total == 0


def test_a_call_that_ends_after_its_worker_left_leaves_no_series(make_site):
    site = make_site(1)
    mock = site.mocks[0]
    (call,) = hold(site, 1)
    wait_until(lambda: mock.count("ModelInfer"))
    site.fleet.remove(mock.url)
    site.counters.forget(mock.url)
    mock.resume("ModelInfer")
    wait_until(lambda: call.ended)
    assert call.code is Code.OK
    assert not site.counters.snapshot().workers


# --- shared memory --------------------------------------------------------------------------------------------------


def test_regions_are_told_to_a_worker_that_does_not_know_them_and_the_request_goes_on(make_site):
    site = make_site(1)
    site.regions.known = True
    site.mocks[0].fail("ModelInfer", Code.FAILED_PRECONDITION, reason="shm_unregistered", times=1)
    answer_of(site.post())
    assert site.regions.replayed == [site.mocks[0].url]


def test_a_region_that_nobody_registered_is_the_clients_fault(make_site):
    site = make_site(1)
    site.mocks[0].fail("ModelInfer", Code.FAILED_PRECONDITION, "unregistered", reason="shm_unregistered")
    assert site.post().code is Code.FAILED_PRECONDITION
    site.regions.known = True
    assert site.post().code is Code.FAILED_PRECONDITION
    assert site.mocks[0].count("ModelInfer") == 3  # once, and once more for the second


# --- deadlines, metadata, cancellation ------------------------------------------------------------------------------


def test_the_rest_of_the_clients_time_is_the_workers(make_site):
    site = make_site(1, timeout=20.0)
    site.post(seconds=7.5)
    site.post()
    site.post(request_body(parameters={"rsrv_timeout_ns": 3_000_000_000}))
    site.post(seconds=100.0)
    seen = [call.remaining for call in site.mocks[0].seen("ModelInfer")]
    assert [4.0 < seen[0] < 7.8, 15.0 < seen[1] < 20.8, 1.0 < seen[2] < 3.2, 90.0 < seen[3] < 104.0] == [True] * 4


def test_a_request_whose_time_is_over_is_not_sent(make_site):
    site = make_site(2)
    call = site.post(seconds=-1.0)
    assert (call.code, call.reason) == (Code.DEADLINE_EXCEEDED, "deadline")
    assert "deadline exceeded at gateway" in str(call.error)
    assert site.served() == [0, 0]


def test_some_metadata_goes_to_the_worker_and_its_trailers_come_back(make_site):
    site = make_site(1)
    site.mocks[0].trailers = {"rsrv-served-by": "w0", "x-trace": "1"}
    call = site.post(
        metadata={
            "traceparent": "00-a-b-01",
            "x-request-id": "r-7",
            "x-blob-bin": "AAE=",
            "authorization": "Bearer secret",
            "user-agent": "test",
            "x-rsrv-gateway": "forged",
        }
    )
    assert call.trailers == {"rsrv-served-by": "w0", "x-trace": "1"}
    seen = site.mocks[0].seen("ModelInfer")[0].metadata
    assert {key: seen[key] for key in ("traceparent", "x-request-id", "x-blob-bin")} == {
        "traceparent": "00-a-b-01",
        "x-request-id": "r-7",
        "x-blob-bin": b"\x00\x01",
    }
    assert "authorization" not in seen
    assert seen["x-rsrv-gateway"] == site.proxy.hops.identity


def test_a_client_that_goes_away_takes_its_request_back_from_the_worker(make_site):
    site = make_site(1)
    mock = site.mocks[0]
    (call,) = hold(site, 1)
    assert mock.entered.acquire(timeout=10)
    call.cancel()
    wait_until(lambda: mock.cancelled.get("ModelInfer") == 1)
    wait_until(lambda: site.fleet.workers[0].inflight == 0)
    assert site.proxy.admission.inflight == 0
    assert site.status_counts() == {("ModelInfer", "m", "Cancelled"): 1}
    mock.resume("ModelInfer")


# --- limits ---------------------------------------------------------------------------------------------------------


def hold(site, count):
    """So many requests that their workers do not answer."""
    for mock in site.mocks:
        mock.hang("ModelInfer")
    calls = [site.call(request_body(request_id=str(number))) for number in range(count)]
    for call in calls:
        site.proxy.handle(call)
    return calls


def resume(site, calls):
    for mock in site.mocks:
        mock.resume("ModelInfer")
    for call in calls:
        wait_until(lambda call=call: call.ended)
        answer_of(call)


def test_what_is_above_the_cap_is_shed_and_the_cap_follows_the_workers_that_are_ready(make_site):
    site = make_site(2, cap=3)
    calls = hold(site, 6)
    call = site.post()
    assert (call.code, call.reason) == (Code.RESOURCE_EXHAUSTED, "shed")
    resume(site, calls)
    assert site.proxy.admission.shed == 1
    assert site.proxy.admission.inflight == 0
    for mock in site.mocks:
        site.fleet.probed(mock.url, False)
    assert site.proxy.admission.cap == 3


def test_calls_wait_for_a_slot_in_order_and_their_wait_is_part_of_their_time(make_site):
    site = make_site(1, streams=2)
    calls = hold(site, 5)
    worker = site.fleet.workers[0]
    assert (worker.inflight, worker.waiting) == (2, 3)
    for _ in range(2):
        assert site.mocks[0].entered.acquire(timeout=10)
    late = site.call(request_body(request_id="late"), seconds=0.05)
    site.proxy.handle(late)
    wait_until(lambda: late.ended)
    assert late.code is Code.DEADLINE_EXCEEDED
    gone = site.call(request_body(request_id="gone"))
    site.proxy.handle(gone)
    gone.cancel()
    assert worker.waiting == 3
    resume(site, calls)
    ids = [pb.ModelInferRequest.FromString(seen.body).id for seen in site.mocks[0].seen("ModelInfer")]
    assert sorted(ids) == list("01234")
    assert ids[2] in "23"  # two run at a time, on threads of the mock; the last one is sent when one of them has ended
    assert (worker.inflight, worker.waiting) == (0, 0)


def test_calls_that_wait_for_the_only_slot_are_sent_first_in_first_out(make_site):
    site = make_site(1, streams=1)
    resume(site, hold(site, 5))
    ids = [pb.ModelInferRequest.FromString(seen.body).id for seen in site.mocks[0].seen("ModelInfer")]
    assert ids == list("01234")


def test_requests_wait_while_the_gate_of_shared_memory_is_held(make_site):
    site = make_site(1)
    worker = site.fleet.workers[0]
    worker.hold()
    worker.hold()
    call = site.call(request_body())
    site.proxy.handle(call)
    worker.release()
    assert not call.ended
    assert worker.waiting == 1
    worker.release()
    wait_until(lambda: call.ended)
    answer_of(call)


# --- hedging --------------------------------------------------------------------------------------------------------


def test_a_second_worker_is_asked_when_the_first_takes_long_and_the_first_answer_counts(make_site):
    site = make_site(2, hedge_ns=20_000_000)
    site.mocks[0].hang("ModelInfer")
    site.mocks[0].answer("ModelInfer", b"slow")
    site.mocks[1].answer("ModelInfer", b"quick")
    assert site.post().message == b"quick"
    assert site.counters.snapshot().hedges == 1
    wait_until(lambda: site.mocks[0].cancelled.get("ModelInfer") == 1)
    assert site.post().message == b"quick"  # from the worker that is asked first this time
    site.mocks[0].resume("ModelInfer")


def test_a_worker_that_answers_in_time_is_the_only_one_to_be_asked(make_site):
    site = make_site(2, hedge_ns=60_000_000_000)
    answer_of(site.post())
    assert sum(site.served()) == 1
    assert site.counters.snapshot().hedges == 0


def test_a_request_that_writes_shared_memory_is_never_sent_to_two_workers(make_site):
    from rsrv.core.tensors import OutputTarget

    site = make_site(2, hedge_ns=1_000_000)
    site.mocks[0].delay("ModelInfer", 0.1)
    site.mocks[1].delay("ModelInfer", 0.1)
    for mock in site.mocks:
        mock.regions["r"] = b""
    answer_of(site.post(request_body(outputs=[RequestedOutput("y", OutputTarget("r", 0, 8))])))
    assert sum(site.served()) == 1


def test_a_hedge_that_fails_leaves_the_first_attempt_its_say(make_site):
    site = make_site(2, hedge_ns=10_000_000, outliers={"cooldown_seconds": 0.0})
    first, second = site.mocks
    first.hang("ModelInfer")
    second.fail("ModelInfer", Code.INTERNAL, reason="bad")
    call = site.call(request_body())
    site.proxy.handle(call)
    wait_until(lambda: ("ModelInfer", second.url) in site.counters.snapshot().worker_latency)  # its failure has come
    assert not call.ended
    first.resume("ModelInfer")
    wait_until(lambda: call.ended)
    answer_of(call)
    assert site.served() == [1, 1]


# --- workers that hang ----------------------------------------------------------------------------------------------


def test_a_worker_that_hangs_loses_its_requests_to_others(make_site):
    from rsrv.core.tensors import OutputTarget

    site = make_site(2)
    site.mocks[0].hang("ModelInfer")
    site.mocks[0].regions["r"] = site.mocks[1].regions["r"] = b""
    plain = site.call(request_body())
    shared = site.call(request_body(outputs=[RequestedOutput("y", OutputTarget("r", 0, 8))]))
    order = [plain, site.call(request_body()), shared, site.call(request_body())]
    for call in order:
        site.proxy.handle(call)
    assert site.mocks[0].entered.acquire(timeout=10)
    assert site.mocks[0].entered.acquire(timeout=10)
    hung = site.fleet.get(site.mocks[0].url)
    hung.rebuild()
    wait_until(lambda: plain.ended)
    answer_of(plain)
    assert not shared.ended, shared.error  # its worker may still write where the client would read
    site.mocks[0].resume("ModelInfer")
    wait_until(lambda: shared.ended)
    answer_of(shared)
    answer_of(site.post())
    answer_of(site.post())
    wait_until(lambda: hung.inflight == 0)


def test_nothing_is_left_after_many_requests_that_end_in_every_way(make_site):
    site = make_site(3, streams=4, cap=1000, hedge_ns=5_000_000, outliers={"cooldown_seconds": 0.0})
    site.mocks[1].fail("ModelInfer", Code.UNAVAILABLE, reason="preparing", times=40)
    site.mocks[2].delay("ModelInfer", 0.01)
    stop = threading.Event()

    def client(number):
        for round_ in range(30):
            call = site.call(request_body(request_id=f"{number}-{round_}"), seconds=5.0)
            site.proxy.handle(call)
            if (number + round_) % 5 == 0:
                call.cancel()
            else:
                wait_until(lambda call=call: call.ended, 20)
                assert call.code in (Code.OK, Code.UNAVAILABLE)
                assert call.ends == 1
            if stop.is_set():
                return

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: all(worker.inflight == worker.waiting == 0 for worker in site.fleet.workers))
    wait_until(lambda: sum(site.status_counts().values()) == 180)  # the last act, where an answer and a cancel met
    assert site.proxy.admission.inflight == 0


def test_grpcio_and_ours_agree_on_the_time_that_is_left(make_site):
    """A deadline that grpcio enforces itself, with a worker that never answers."""
    site = make_site(1)
    site.mocks[0].hang("ModelInfer")
    started = time.monotonic()
    call = site.call(request_body(), seconds=0.2)
    site.proxy.handle(call)
    wait_until(lambda: call.ended)
    assert call.code is Code.DEADLINE_EXCEEDED
    assert time.monotonic() - started >= 0.19
    assert call.reason == "deadline"
    site.mocks[0].resume("ModelInfer")
    assert grpc.StatusCode.DEADLINE_EXCEEDED.value[0] == call.code


def test_a_request_whose_inputs_are_malformed_is_the_clients_fault_and_nothing_is_left_of_it(make_site):
    from rsrv.core.errors import InvalidRequest
    from rsrv.gateway.scheduling.simple import RoundRobin

    class Counting(RoundRobin):
        def request_units(self, model, body):
            raise InvalidRequest("malformed message")

    site = make_site(1, mode=Counting())
    assert site.post().code is Code.INVALID_ARGUMENT
    assert site.proxy.admission.inflight == 0
    assert site.status_counts() == {("ModelInfer", "m", "InvalidArgument"): 1}


def test_a_model_that_only_a_worker_that_was_never_heard_of_may_have_is_unavailable_and_not_unknown(make_site):
    site = make_site(1)
    site.router.install(RoutingTable({"m": [site.mocks[0].url]}, {}, ["10.0.0.9:8001"]))
    call = site.post(request_body("other"))
    assert (call.code, call.reason) == (Code.UNAVAILABLE, "no_workers")
    assert "10.0.0.9:8001" in str(call.error)


def test_workers_are_told_whether_another_one_is_there_for_the_request(make_site):
    site = make_site(2, outliers={"cooldown_seconds": 0.0})
    site.mocks[0].fail("ModelInfer", Code.UNAVAILABLE, reason="admission_closed", times=1)
    site.post(metadata={"x-rsrv-failover": "forged"})
    told = [[seen.metadata.get("x-rsrv-failover") for seen in mock.seen("ModelInfer")] for mock in site.mocks]
    assert told == [["1"], [None]]
