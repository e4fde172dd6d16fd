"""Server-streaming and bidirectional calls on the grpcio engine."""

import contextlib
import queue
import threading

import grpc
import pytest
from support.deadlines import overdue

from rsrv.core.errors import InvalidRequest
from rsrv.rpc import Route
from rsrv.rpc.grpcio_call import StreamCall

STREAM = "/test.Service/Stream"
BIDI = "/test.Service/Bidi"
WAIT = 30


def status_of(stream):
    """What is left of a stream, then its code, text and reason."""
    messages = []
    with pytest.raises(grpc.RpcError) as caught:
        messages.extend(iter(stream.__next__, None))
    trailers = dict(caught.value.trailing_metadata() or ())
    return messages, caught.value.code().name, caught.value.details(), trailers.get("rsrv-reason")


def test_messages_arrive_in_order_whatever_thread_sends_them(serve):
    helpers = []

    def handle(call):
        call.send([call.body, b":", b"0"])

        def go():
            for n in range(1, 100):
                call.send([b"%d" % n])
            call.finish({"x-end": "1"})

        helpers.append(threading.Thread(target=go))
        helpers[0].start()

    _, channel = serve({STREAM: Route(handle, "server_stream")})
    stream = channel.unary_stream(STREAM)(b"body", timeout=WAIT)
    assert list(stream) == [b"body:0", *(b"%d" % n for n in range(1, 100))]
    assert dict(stream.trailing_metadata())["x-end"] == "1"
    helpers[0].join(WAIT)


def test_a_stream_may_be_empty(serve):
    _, channel = serve({STREAM: Route(lambda call: call.finish(), "server_stream")})
    assert list(channel.unary_stream(STREAM)(b"", timeout=WAIT)) == []


def test_what_was_sent_arrives_before_the_failure(serve):
    def handle(call):
        call.send([b"1"])
        call.send([b"2"])
        call.fail(InvalidRequest("third"))
        call.send([b"ignored"])

    _, channel = serve({STREAM: Route(handle, "server_stream")})
    stream = channel.unary_stream(STREAM)(b"", timeout=WAIT)
    assert status_of(stream) == ([b"1", b"2"], "INVALID_ARGUMENT", "third", "invalid")


def test_an_unknown_exception_in_a_stream_stays_here(serve, caplog):
    def handle(call):
        call.send([b"1"])
        call.defer(lambda: 1 / 0)

    _, channel = serve({STREAM: Route(handle, "server_stream")})
    stream = channel.unary_stream(STREAM)(b"", timeout=WAIT)
    assert status_of(stream) == ([b"1"], "INTERNAL", "internal error", "internal")
    assert "ZeroDivisionError" in caplog.text


def test_an_over_limit_message_ends_the_stream(serve):
    def handle(call):
        call.send([b"ok"])
        call.send([b"x" * 101])
        call.finish()

    _, channel = serve({STREAM: Route(handle, "server_stream")}, max_send_bytes=100)
    messages, code, text, reason = status_of(channel.unary_stream(STREAM)(b"", timeout=WAIT))
    assert (messages, code, reason) == ([b"ok"], "RESOURCE_EXHAUSTED", "message_too_large")
    assert "larger than max (101 vs. 100)" in text


def test_on_writable_runs_when_all_messages_have_left(serve):
    """Each message is sent only after the one before, so a client that does not read would stop the flow."""
    sent = iter(range(5))

    def handle(call):
        def more():
            n = next(sent, None)
            if n is None:
                call.finish()
            else:
                call.send([b"%d" % n])

        call.on_writable(more)
        more()

    _, channel = serve({STREAM: Route(handle, "server_stream")})
    assert list(channel.unary_stream(STREAM)(b"", timeout=WAIT)) == [b"0", b"1", b"2", b"3", b"4"]


def test_deferred_functions_run_on_the_streams_thread(serve):
    threads = []

    def handle(call):
        def note():
            threads.append(threading.current_thread())
            if len(threads) == 3:
                call.finish()
            else:
                call.send([b"m"])
                call.defer(note)

        note()

    _, channel = serve({STREAM: Route(handle, "server_stream")})
    assert list(channel.unary_stream(STREAM)(b"", timeout=WAIT)) == [b"m", b"m"]
    assert len(set(threads)) == 1


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_stream_whose_client_went_away_frees_its_thread(serve, how, wait_until):
    calls = {}

    def handle(call):
        if call.body == b"next":
            call.send([b"ok"])
            call.finish()
            return
        told, ended = [], threading.Event()
        call.on_cancel(lambda: told.append(1))
        call.on_end(ended.set)
        call.send([b"hello"])
        calls[call.body] = call, told, ended

    engine, channel = serve({STREAM: Route(handle, "server_stream")}, threads=1)

    def begin(seconds):
        stream = channel.unary_stream(STREAM)(b"%g" % seconds, timeout=None if how == "cancel" else seconds)
        with contextlib.suppress(grpc.RpcError):
            assert next(stream) == b"hello"
            seen.append(b"%g" % seconds)
        if how == "cancel":
            stream.cancel()

    seen = []
    overdue(begin, lambda: seen)
    wait_until(lambda: seen[0] in calls)
    call, told, ended = calls[seen[0]]
    assert ended.wait(WAIT)
    assert told == [1]
    assert call.cancelled
    assert call.defer(told.clear) is False
    call.send([b"late"])
    call.finish()
    assert list(channel.unary_stream(STREAM)(b"next", timeout=WAIT)) == [b"ok"]
    wait_until(lambda: engine.open_calls == set())


def test_a_client_that_goes_away_while_a_message_is_written_frees_its_thread(serve, wait_until):
    """The client never reads, so the thread waits inside grpcio for the flow-control window when the cancel comes."""
    ended, told = threading.Event(), threading.Event()

    def handle(call):
        call.on_end(ended.set)
        call.on_cancel(told.set)
        for _ in range(64):
            call.send([bytes(4 << 20)])

    engine, channel = serve(
        {STREAM: Route(handle, "server_stream")}, channel_options=[("grpc.max_receive_message_length", -1)]
    )
    stream = channel.unary_stream(STREAM)(b"", timeout=WAIT)
    next(stream)
    stream.cancel()
    assert ended.wait(WAIT)
    assert told.wait(WAIT)
    wait_until(lambda: engine.open_calls == set())


def test_streams_beyond_the_limit_are_shed_and_unary_calls_are_not(serve):
    ended = threading.Semaphore(0)

    def handle(call):
        call.on_end(ended.release)
        call.send([b"open"])

    def answer(call):
        call.send([b"ok"])
        call.finish()

    routes = {STREAM: Route(handle, "server_stream"), "/t.S/U": Route(answer)}
    _, channel = serve(routes, threads=4, max_streams=2)
    open_stream = channel.unary_stream(STREAM)
    streams = [open_stream(b"", timeout=WAIT) for _ in range(2)]
    assert [next(stream) for stream in streams] == [b"open", b"open"]
    messages, code, text, reason = status_of(open_stream(b"", timeout=WAIT))
    assert (messages, code, reason) == ([], "RESOURCE_EXHAUSTED", "shed")
    assert "2 streaming calls" in text
    assert channel.unary_unary("/t.S/U")(b"", timeout=WAIT) == b"ok"
    streams[0].cancel()
    assert ended.acquire(timeout=WAIT)
    again = open_stream(b"", timeout=WAIT, wait_for_ready=True)
    assert next(again) == b"open"


def test_a_stream_that_is_refused_takes_no_place_while_it_is_let_go(serve, monkeypatch):
    entered, go = threading.Event(), threading.Event()
    let_go = StreamCall._finally

    def late(call):
        if call.body == b"refused":
            entered.set()
            assert go.wait(WAIT)
        let_go(call)

    monkeypatch.setattr(StreamCall, "_finally", late)
    ended = threading.Event()

    def handle(call):
        call.on_end(ended.set)
        call.send([b"open"])

    _, channel = serve({STREAM: Route(handle, "server_stream")}, threads=4, max_streams=1)
    open_stream = channel.unary_stream(STREAM)
    first = open_stream(b"", timeout=WAIT)
    assert next(first) == b"open"
    assert status_of(open_stream(b"refused", timeout=WAIT))[1] == "RESOURCE_EXHAUSTED"
    assert entered.wait(WAIT)
    first.cancel()
    assert ended.wait(WAIT)
    assert next(open_stream(b"", timeout=WAIT)) == b"open"
    go.set()


def echo(call):
    def on_message(message):
        if message is None:
            call.finish()
        else:
            call.send([b"echo ", message])

    call.on_message(on_message)


def test_a_bidirectional_call_answers_each_message_before_the_next_is_sent(serve):
    _, channel = serve({BIDI: Route(echo, "bidi")})
    requests = queue.SimpleQueue()
    stream = channel.stream_stream(BIDI)(iter(requests.get, None), timeout=WAIT)
    for n in range(5):
        requests.put(b"%d" % n)
        assert next(stream) == b"echo %d" % n
    requests.put(None)
    assert list(stream) == []


def test_messages_of_the_client_are_handled_one_at_a_time(serve):
    running, worst = [], []

    def handle(call):
        def on_message(message):
            running.append(1)
            worst.append(len(running))
            running.pop()
            if message is None:
                call.finish()

        call.on_message(on_message)

    _, channel = serve({BIDI: Route(handle, "bidi")})
    assert list(channel.stream_stream(BIDI)(iter([b"x"] * 50), timeout=WAIT)) == []
    assert worst == [1] * 51


def test_the_server_may_end_a_bidirectional_call_that_the_client_keeps_open(serve):
    def handle(call):
        call.on_message(lambda message: call.fail(InvalidRequest("enough")))

    engine, channel = serve({BIDI: Route(handle, "bidi")}, threads=1)
    requests = queue.SimpleQueue()
    requests.put(b"1")
    stream = channel.stream_stream(BIDI)(iter(requests.get, None), timeout=WAIT)
    assert status_of(stream) == ([], "INVALID_ARGUMENT", "enough", "invalid")
    requests.put(None)
    assert list(channel.stream_stream(BIDI)(iter([]), timeout=0.2).__class__.__mro__) != []
    del engine


def test_an_exception_while_a_message_is_handled_fails_the_call(serve, caplog):
    def handle(call):
        call.on_message(lambda message: 1 / 0)

    _, channel = serve({BIDI: Route(handle, "bidi")})
    stream = channel.stream_stream(BIDI)(iter([b"1", b"2"]), timeout=WAIT)
    assert status_of(stream) == ([], "INTERNAL", "internal error", "internal")
    assert "ZeroDivisionError" in caplog.text


def test_a_silent_client_of_a_bidirectional_call_is_let_go_when_it_cancels(serve):
    ended, told, opened = threading.Event(), threading.Event(), threading.Event()

    def handle(call):
        call.on_message(lambda message: None)
        call.on_cancel(told.set)
        call.on_end(ended.set)
        opened.set()

    engine, channel = serve({BIDI: Route(handle, "bidi")}, threads=1)
    requests = queue.SimpleQueue()
    stream = channel.stream_stream(BIDI)(iter(requests.get, None))
    assert opened.wait(WAIT)
    stream.cancel()
    assert ended.wait(WAIT)
    assert told.is_set()
    requests.put(None)
    engine.stop(5.0)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("rsrv-rpc")] == []
