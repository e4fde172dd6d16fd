"""Unary calls on the grpcio engine: answers, deferred work, failures, limits, deadlines and cancellation."""

import logging
import queue
import threading
import time

import grpc
import numpy as np
import pytest
from support.deadlines import overdue

from rsrv.core.errors import (
    Code,
    DeadlineExceeded,
    HookRejected,
    InvalidRequest,
    QueueFull,
    RsrvError,
    UnregisteredRegion,
)
from rsrv.rpc import Route

PATH = "/test.Service/Method"
WAIT = 30


def failure(method, body=b"x", **options):
    with pytest.raises(grpc.RpcError) as caught:
        method(body, timeout=options.pop("timeout", WAIT), **options)
    trailers = dict(caught.value.trailing_metadata() or ())
    return caught.value.code().name, caught.value.details(), trailers.get("rsrv-reason")


def unary(serve, handler, **options):
    engine, channel = serve({PATH: Route(handler)}, **options)
    return engine, channel.unary_unary(PATH)


def test_a_handler_may_answer_at_once(serve):
    def handle(call):
        call.send([call.body, b"-", memoryview(b"abc")[1:]])
        call.finish()

    _, method = unary(serve, handle)
    assert method(b"hello", timeout=WAIT) == b"hello-bc"


def test_a_reply_may_be_one_view_or_an_array_and_is_copied_at_once(serve):
    def handle(call):
        block = np.arange(4, dtype=np.uint8)
        call.send([memoryview(block)])
        block[:] = 9
        call.finish()

    _, method = unary(serve, handle)
    assert method(b"", timeout=WAIT) == bytes([0, 1, 2, 3])


def test_an_empty_reply_is_a_reply(serve):
    def handle(call):
        call.send([])
        call.finish()

    _, method = unary(serve, handle)
    assert method(b"", timeout=WAIT) == b""


def test_another_thread_may_answer_later_through_the_calls_own_thread(serve):
    seen = {}

    def handle(call):
        seen["handler"] = threading.current_thread()

        def answer():
            seen["deferred"] = threading.current_thread()
            call.send([b"late"])
            call.finish()

        helper = threading.Thread(target=lambda: seen.update(accepted=call.defer(answer)))
        helper.start()
        seen["helper"] = helper

    _, method = unary(serve, handle)
    assert method(b"", timeout=WAIT) == b"late"
    seen["helper"].join(WAIT)
    assert seen["deferred"] is seen["handler"]
    assert seen["accepted"] is True


def test_another_thread_may_answer_directly(serve):
    helpers = []

    def handle(call):
        def answer():
            call.send([b"direct"])
            call.finish()

        helpers.append(threading.Thread(target=answer))
        helpers[0].start()

    _, method = unary(serve, handle)
    assert method(b"", timeout=WAIT) == b"direct"
    helpers[0].join(WAIT)


def test_deferred_functions_run_in_order_one_after_the_other(serve):
    order = []

    def handle(call):
        for number in range(50):
            call.defer(lambda number=number: order.append(number))
        call.defer(lambda: (call.send([b"end"]), call.finish()))

    _, method = unary(serve, handle)
    assert method(b"", timeout=WAIT) == b"end"
    assert order == list(range(50))


def test_what_defer_accepted_runs_even_when_the_call_has_ended_meanwhile(serve):
    ran, accepted = threading.Event(), []

    def handle(call):
        accepted.append(call.defer(ran.set))
        call.send([b""])
        call.finish()
        accepted.append(call.defer(lambda: accepted.append("never")))

    _, method = unary(serve, handle)
    method(b"", timeout=WAIT)
    assert ran.is_set()
    assert accepted == [True, False]


def test_a_call_ends_once(serve):
    def handle(call):
        call.send([b"first"])
        call.finish({"a": "1"})
        call.fail(InvalidRequest("ignored"))
        call.finish({"a": "2"})
        call.send([b"ignored"])

    def handle_failure(call):
        call.fail(InvalidRequest("kept"))
        call.send([b"x"])
        call.finish()

    _, channel = serve({PATH: Route(handle), "/t.S/F": Route(handle_failure)})
    message, rpc = channel.unary_unary(PATH).with_call(b"", timeout=WAIT)
    assert dict(rpc.trailing_metadata())["a"] == "1"
    assert message == b"first"
    assert failure(channel.unary_unary("/t.S/F")) == ("INVALID_ARGUMENT", "kept", "invalid")


def test_trailers_reach_the_client(serve):
    def handle(call):
        call.send([b""])
        call.finish({"x-served-by": "w0", "x-n": "3"})

    _, channel = serve({PATH: Route(handle)})
    _, rpc = channel.unary_unary(PATH).with_call(b"", timeout=WAIT)
    trailers = dict(rpc.trailing_metadata())
    assert (trailers["x-served-by"], trailers["x-n"]) == ("w0", "3")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequest("input 'x': wanted f32"), ("INVALID_ARGUMENT", "input 'x': wanted f32", "invalid")),
        (QueueFull("1024 wait", hint="come later"), ("RESOURCE_EXHAUSTED", "1024 wait (come later)", "queue_full")),
        (DeadlineExceeded("late"), ("DEADLINE_EXCEEDED", "late", "deadline")),
        (RsrvError("odd", code=Code.DATA_LOSS, reason="bits"), ("DATA_LOSS", "odd", "bits")),
        (RsrvError("ok?", code=Code.OK), ("INTERNAL", "ok?", "internal")),
        (HookRejected("nö\n“quoted” 100%", reason="a\nb é"), ("INVALID_ARGUMENT", "nö\n“quoted” 100%", "a?b ?")),
        (HookRejected("", reason=""), ("INVALID_ARGUMENT", "", "internal")),
    ],
)
def test_an_error_becomes_its_status_with_the_reason_in_the_trailers(serve, error, expected):
    _, method = unary(serve, lambda call: call.fail(error))
    assert failure(method) == expected


def test_the_text_about_an_unregistered_region_has_the_phrase_that_clients_know(serve):
    _, method = unary(serve, lambda call: call.fail(UnregisteredRegion("r7")))
    code, text, reason = failure(method)
    assert (code, reason) == ("FAILED_PRECONDITION", "shm_unregistered")
    assert "unregistered shared memory region 'r7'" in text


@pytest.mark.parametrize("text", ["e" * 100_000, "é" * 100_000, "€" * 3000, "%" * 9000, "\ud800 lone", "a\x00b"])
def test_a_status_text_is_never_too_long_or_odd_for_the_transport(serve, text):
    _, method = unary(serve, lambda call: call.fail(InvalidRequest(text)))
    code, details, reason = failure(method)
    assert (code, reason) == ("INVALID_ARGUMENT", "invalid")
    assert len(details) <= 4100
    assert details[:1] == text[:1] or text.startswith("\ud800")


@pytest.mark.parametrize("where", ["handler", "deferred", "fail"])
@pytest.mark.parametrize("error", [ZeroDivisionError("secret 17"), SystemExit("secret 17"), KeyboardInterrupt()])
def test_an_unknown_exception_is_internal_and_its_text_stays_here(serve, caplog, where, error):
    def raise_it():
        raise error

    def handle(call):
        if where == "handler":
            raise_it()
        elif where == "deferred":
            call.defer(raise_it)
        else:
            call.fail(error)

    _, method = unary(serve, handle)
    assert failure(method) == ("INTERNAL", "internal error", "internal")
    logged = [record for record in caplog.records if record.name == "rsrv.rpc.status"]
    assert len(logged) == 1
    assert logged[0].levelno == logging.ERROR
    assert logged[0].exc_info[1] is error
    assert PATH in logged[0].getMessage()


def test_an_rsrv_error_raised_by_a_handler_is_not_logged(serve, caplog):
    def handle(call):
        raise InvalidRequest("no")

    _, method = unary(serve, handle)
    assert failure(method) == ("INVALID_ARGUMENT", "no", "invalid")
    assert caplog.records == []


def test_finishing_without_a_message_is_internal(serve, caplog):
    _, method = unary(serve, lambda call: call.finish())
    assert failure(method) == ("INTERNAL", "internal error", "internal")
    assert "finished without a message" in caplog.text


def test_a_second_message_of_a_unary_call_is_an_error_of_the_handler(serve, caplog):
    def handle(call):
        call.send([b"1"])
        call.send([b"2"])
        call.finish()

    _, method = unary(serve, handle)
    assert failure(method) == ("INTERNAL", "internal error", "internal")
    assert "sends one message" in caplog.text


def test_an_unknown_method_is_unimplemented_for_every_kind_of_client(serve):
    _, channel = serve({PATH: Route(lambda call: None)})
    expected = ("UNIMPLEMENTED", "unknown method /nobody.Knows/Me", "unimplemented")
    assert failure(channel.unary_unary("/nobody.Knows/Me")) == expected
    for stream in (channel.unary_stream("/nobody.Knows/Me"), channel.stream_stream("/nobody.Knows/Me")):
        request = b"" if stream is not None and "UnaryStream" in type(stream).__name__ else iter([b""])
        with pytest.raises(grpc.RpcError) as caught:
            next(stream(request, timeout=WAIT))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_request_brings_its_path_metadata_peer_and_body(serve):
    seen = {}

    def handle(call):
        seen.update(path=call.path, metadata=call.metadata, peer=call.peer, body=call.body)
        call.send([b""])
        call.finish()

    _, method = unary(serve, handle)
    method(b"payload", timeout=WAIT, metadata=[("x-a", "1"), ("x-b", "2"), ("x-b", "3"), ("x-c-bin", b"\x00\xff")])
    assert (seen["path"], seen["body"]) == (PATH, b"payload")
    assert seen["peer"].startswith("ipv4:127.0.0.1:")
    assert {key: value for key, value in seen["metadata"].items() if key.startswith("x-")} == {
        "x-a": "1",
        "x-b": "2,3",
        "x-c-bin": "AP8=",
    }


def test_a_deadline_is_absolute_on_the_monotonic_clock_and_zero_without_one(serve):
    seen = []

    def handle(call):
        seen.append((call.deadline_ns, time.monotonic_ns()))
        assert call.deadline_ns == seen[-1][0]
        call.send([b""])
        call.finish()

    _, method = unary(serve, handle)
    method(b"", timeout=20)
    deadline, now = seen[0]
    assert 0 < deadline - now <= 20.5e9
    assert deadline - now > 1e9
    method(b"")
    assert seen[1][0] == 0


def test_over_limit_requests_are_refused_by_the_transport_and_the_text_says_so(serve):
    def handle(call):
        call.send([b"%d" % len(call.body)])
        call.finish()

    _, method = unary(serve, handle, max_recv_bytes=6_000_000)
    assert method(b"x" * 5_000_000, timeout=WAIT) == b"5000000"
    assert method(b"x" * 6_000_000, timeout=WAIT) == b"6000000"
    code, text, _ = failure(method, b"x" * 6_000_001)
    assert code == "RESOURCE_EXHAUSTED"
    assert "larger than max (6000001 vs. 6000000)" in text


def test_over_limit_replies_fail_the_call_and_the_text_says_so(serve):
    def handle(call):
        call.send([b"x" * int(call.body)])
        call.finish()

    _, method = unary(serve, handle, max_send_bytes=1_000_000)
    assert len(method(b"1000000", timeout=WAIT)) == 1_000_000
    code, text, reason = failure(method, b"1000001")
    assert (code, reason) == ("RESOURCE_EXHAUSTED", "message_too_large")
    assert "larger than max (1000001 vs. 1000000)" in text


def test_a_client_that_cancels_is_told_to_on_cancel_once_and_frees_the_thread(serve, wait_until):
    entered, told, ended = threading.Event(), [], threading.Event()
    calls = []

    def handle(call):
        if call.body == b"wait":
            calls.append(call)
            call.on_cancel(lambda: told.append("a"))
            call.on_cancel(lambda: told.append("b"))
            call.on_end(ended.set)
            entered.set()
        else:
            call.send([b"ok"])
            call.finish()

    engine, method = unary(serve, handle, threads=1)
    future = method.future(b"wait")
    assert entered.wait(WAIT)
    assert calls[0].cancelled is False
    future.cancel()
    assert ended.wait(WAIT)
    assert told == ["a", "b"]
    assert calls[0].cancelled is True
    assert method(b"next", timeout=WAIT) == b"ok"  # the only thread is free again
    wait_until(lambda: engine.open_calls == set())

    call = calls[0]
    call.finish()
    call.fail(InvalidRequest("too late"))
    call.send([b"x"])
    assert call.defer(told.clear) is False
    late = []
    call.on_cancel(lambda: late.append("at once"))
    call.on_end(lambda: late.append("at once too"))
    assert late == ["at once", "at once too"]
    assert told == ["a", "b"]


def test_a_deadline_that_passes_is_a_cancellation(serve):
    arrived, cancelled = threading.Event(), threading.Event()

    def handle(call):
        call.on_cancel(cancelled.set)
        arrived.set()

    _, method = unary(serve, handle)
    code, _, _ = overdue(lambda seconds: failure(method, timeout=seconds), arrived.is_set)
    assert code == "DEADLINE_EXCEEDED"
    assert cancelled.wait(WAIT)


def test_on_cancel_stays_silent_for_calls_that_end_well(serve):
    told, ended = [], threading.Event()

    def handle(call):
        call.on_cancel(lambda: told.append("cancelled"))
        call.on_end(ended.set)
        call.send([b""])
        call.finish()

    _, method = unary(serve, handle)
    method(b"", timeout=WAIT)
    assert ended.wait(WAIT)
    assert told == []


def test_a_client_that_went_away_before_the_handler_returned_is_noticed(serve, wait_until):
    gone, released, cancelled = threading.Event(), threading.Event(), threading.Event()

    def handle(call):
        call.on_cancel(cancelled.set)
        gone.set()
        released.wait(WAIT)
        wait_until(lambda: call.cancelled)

    _, method = unary(serve, handle)
    future = method.future(b"")
    assert gone.wait(WAIT)
    future.cancel()
    released.set()
    assert cancelled.wait(WAIT)


@pytest.mark.parametrize("ending", ["finish", "fail", "raise"])
def test_on_end_runs_once_after_every_kind_of_end(serve, ending):
    count, ended = [], threading.Event()

    def handle(call):
        call.on_end(lambda: count.append(1))
        call.on_end(ended.set)
        if ending == "finish":
            call.send([b""])
            call.finish()
        elif ending == "fail":
            call.fail(InvalidRequest("x"))
        else:
            raise InvalidRequest("x")

    _, method = unary(serve, handle)
    if ending == "finish":
        method(b"", timeout=WAIT)
    else:
        failure(method)
    assert ended.wait(WAIT)
    assert count == [1]


def test_on_end_runs_after_the_reply_has_left(serve):
    """The function waits until the client has its answer, which it could not if it stood before the reply."""
    answered, ended = threading.Event(), threading.Event()

    def handle(call):
        call.on_end(lambda: (answered.wait(WAIT), ended.set()))
        call.send([b""])
        call.finish()

    _, method = unary(serve, handle)
    method(b"", timeout=WAIT)
    answered.set()
    assert ended.wait(WAIT)


def test_an_exception_in_on_end_or_on_cancel_is_logged_and_harms_nobody(serve, caplog):
    entered, ended = threading.Event(), threading.Event()

    def handle(call):
        if call.body == b"bad":
            call.on_cancel(lambda: 1 / 0)
            call.on_end(lambda: 1 / 0)
            call.on_end(ended.set)
            entered.set()
        else:
            call.send([b"ok"])
            call.finish()

    _, method = unary(serve, handle, threads=1)
    future = method.future(b"bad", timeout=WAIT)
    assert entered.wait(WAIT)
    future.cancel()
    assert ended.wait(WAIT)
    assert method(b"", timeout=WAIT) == b"ok"
    assert sum("ZeroDivisionError" in record.getMessage() for record in caplog.records) == 2


def test_more_calls_than_threads_wait_for_their_turn(serve):
    open_calls = queue.SimpleQueue()
    engine, method = unary(serve, open_calls.put, threads=2)
    futures = [method.future(b"%d" % n, timeout=WAIT) for n in range(6)]
    held = [open_calls.get(timeout=WAIT) for _ in range(2)]
    assert open_calls.empty()
    assert engine.threads.size == 2
    for n in range(6):
        call = held[n] if n < 2 else open_calls.get(timeout=WAIT)
        call.defer(lambda call=call: (call.send([call.body]), call.finish()))
    assert [future.result(WAIT) for future in futures] == [b"%d" % n for n in range(6)]
    assert engine.threads.size == 2


def test_many_calls_from_many_threads_get_their_own_answers(serve):
    """One helper thread answers everybody, as a dispatch thread does."""
    requests = queue.SimpleQueue()

    def dispatch():
        while (call := requests.get()) is not None:
            call.defer(lambda call=call: (call.send([call.body[::-1]]), call.finish()))

    helper = threading.Thread(target=dispatch)
    helper.start()
    try:
        _, method = unary(serve, requests.put, threads=16)
        wrong = []

        def client(number):
            for n in range(50):
                body = b"%d-%d" % (number, n)
                if method(body, timeout=WAIT) != body[::-1]:
                    wrong.append(body)

        clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        assert wrong == []
    finally:
        requests.put(None)
        helper.join(WAIT)
