"""Routes that look at the request: bodies, queries, guards, threads, streams, and clients that leave."""

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import struct
import threading

import pytest

from rsrv.core.errors import (
    ExpectedMismatch,
    HeldFull,
    InvalidRequest,
    NameTaken,
    Removing,
    ServerStopping,
    Unauthenticated,
    UnknownModel,
    WaitTimeout,
    WrongState,
)
from rsrv.rpc.http import MAX_BODY_BYTES, HttpAnswer, HttpListener, HttpRoute
from rsrv.rpc.http_messages import http_status

WAIT = 30
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def listen():
    """``listen(routes)`` starts a listener and returns its port; ``listen.stop()`` stops it."""
    with contextlib.ExitStack() as stack:

        def start(routes, **options):
            listener = HttpListener("127.0.0.1", 0, routes, **options)
            stack.callback(listener.stop)
            port = listener.bind()
            listener.start()
            start.stop = listener.stop
            return port

        yield start


def fetch(port, method, path, **kwargs):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
    with contextlib.closing(connection):
        connection.request(method, path, **kwargs)
        response = connection.getresponse()
        return response.status, response.read(), response.headers


def fetch_error(port, method, path, **kwargs):
    status, body, _ = fetch(port, method, path, **kwargs)
    return status, json.loads(body)["error"]


def echo(request):
    return HttpAnswer(200, json.dumps([request.method, request.path, request.parameters(), request.body.decode()]))


@pytest.fixture(params=["loop", "thread"])
def echoing(request, listen):
    route = HttpRoute(echo, request.param)
    return listen({("GET", "/e"): route, ("POST", "/e"): route, ("PATCH", "/e"): route})


def test_a_handler_sees_method_path_query_and_body(echoing):
    assert json.loads(fetch(echoing, "GET", "/e?a=1&b=x%20y")[1]) == ["GET", "/e", {"a": "1", "b": "x y"}, ""]
    for method in ("POST", "PATCH"):
        assert json.loads(fetch(echoing, method, "/e", body=b'{"k":1}', headers=JSON)[1]) == [
            method,
            "/e",
            {},
            '{"k":1}',
        ]


def test_head_follows_get_and_other_methods_are_refused(echoing):
    status, body, headers = fetch(echoing, "HEAD", "/e")
    assert (status, body, int(headers["Content-Length"]) > 0) == (200, b"", True)
    status, _, headers = fetch(echoing, "DELETE", "/e")
    assert (status, headers["Allow"]) == (405, "GET, HEAD, PATCH, POST")


def test_a_repeated_parameter_is_refused(echoing):
    status, error = fetch_error(echoing, "GET", "/e?a=1&a=2")
    assert (status, error["reason"], error["message"]) == (400, "invalid", "the query has 'a' twice")


def test_a_body_of_a_mebibyte_is_taken_and_one_byte_more_is_not(echoing):
    assert fetch(echoing, "POST", "/e", body=b" " * MAX_BODY_BYTES, headers=JSON)[0] == 200
    status, error = fetch_error(echoing, "POST", "/e", body=b" " * (MAX_BODY_BYTES + 1), headers=JSON)
    assert (status, error["code"], error["reason"]) == (413, "INVALID_ARGUMENT", "too_large")


def test_a_chunked_body_is_counted_too(echoing):
    chunks = iter([b" " * 100_000] * 11)
    status, error = fetch_error(echoing, "POST", "/e", body=chunks, headers=JSON)
    assert (status, error["reason"]) == (413, "too_large")


def test_a_compressed_body_is_counted_as_what_it_holds(echoing):
    import gzip

    body = gzip.compress(b" " * (MAX_BODY_BYTES + 1))
    status, error = fetch_error(echoing, "POST", "/e", body=body, headers={**JSON, "Content-Encoding": "gzip"})
    assert (status, error["reason"]) == (413, "too_large")


def test_a_body_that_is_not_what_its_headers_say_is_a_bad_request_and_no_error_of_ours(echoing, caplog):
    status, error = fetch_error(echoing, "POST", "/e", body=b"{}", headers={**JSON, "Content-Encoding": "gzip"})
    assert (status, error["code"], error["reason"]) == (400, "INVALID_ARGUMENT", "invalid")
    assert error["message"].startswith("the body cannot be read: ")
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize(("length", "answers"), [(7, [b"100", b"200"]), (MAX_BODY_BYTES + 1, [b"413"])])
def test_who_asks_before_sending_a_body_is_told_to_go_on_or_refused_at_once(echoing, length, answers):
    head = (
        f"POST /e HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
        "Expect: 100-continue\r\nConnection: close\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", echoing), timeout=WAIT) as connection:
        connection.sendall(head.encode())
        seen = connection.recv(1 << 16)
        if len(answers) == 2:
            assert seen == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(b'{"k":1}')
            seen += connection.recv(1 << 16)
    assert [line.split()[1] for line in seen.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")] == answers


def test_below_the_first_part_of_a_json_path_unknown_paths_and_methods_are_json_too(listen):
    port = listen({("GET", "/v1/a"): HttpRoute(echo), ("GET", "/plain"): lambda: HttpAnswer()})
    status, error = fetch_error(port, "GET", "/v1/b")
    assert (status, error["code"], error["reason"]) == (404, "NOT_FOUND", "unknown_path")
    status, error = fetch_error(port, "PUT", "/v1/a")
    assert (status, error["code"], error["reason"]) == (405, "UNIMPLEMENTED", "method")
    assert fetch(port, "GET", "/v2")[1] == b"not found"
    assert fetch(port, "PUT", "/plain")[1] == b"method not allowed"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_what_a_page_of_another_origin_may_send_unasked_is_refused(echoing, kind):
    status, error = fetch_error(echoing, "POST", "/e", body=b"{}", headers={"Content-Type": kind})
    assert (status, error["reason"], error["hint"]) == (415, "not_json", "curl --json sends it so")


def test_an_empty_body_needs_no_type(echoing):
    assert fetch(echoing, "POST", "/e")[0] == 200


def test_a_guard_refuses_before_the_body_is_read(listen):
    def guard(request):
        if request.headers.get("x-key") != "yes":
            raise Unauthenticated("no key")

    port = listen({("POST", "/e"): HttpRoute(echo, "thread", guard)})
    assert fetch(port, "POST", "/e", headers={"X-Key": "yes"})[0] == 200
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT) as connection:
        connection.sendall(
            b"POST /e HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
        )
        head = connection.recv(1 << 16)
    assert head.startswith(b"HTTP/1.1 401 ")
    assert b"WWW-Authenticate: Bearer" in head


@pytest.mark.parametrize("where", ["loop", "thread"])
def test_an_error_is_json_with_its_code_its_reason_and_its_hint(listen, where):
    def handler(request):
        raise WrongState("model 'a' is open", reason="not_drained", hint="drain it")

    status, body, headers = fetch(listen({("GET", "/e"): HttpRoute(handler, where)}), "GET", "/e")
    assert (status, headers["Content-Type"]) == (409, "application/json")
    assert json.loads(body) == {
        "error": {
            "code": "FAILED_PRECONDITION",
            "reason": "not_drained",
            "message": "model 'a' is open",
            "hint": "drain it",
        }
    }


@pytest.mark.parametrize("where", ["loop", "thread"])
def test_an_unexpected_error_is_json_without_its_text(listen, where, caplog):
    port = listen({("GET", "/e"): HttpRoute(lambda request: 1 / 0, where)})
    status, error = fetch_error(port, "GET", "/e")
    assert (status, error) == (500, {"code": "INTERNAL", "reason": "internal", "message": "internal error"})
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("x"), 400),
        (Unauthenticated("x"), 401),
        (UnknownModel("x"), 404),
        (WaitTimeout("x"), 408),
        (WrongState("x"), 409),
        (WrongState("x", reason="removing"), 409),
        (NameTaken("x"), 409),
        (ExpectedMismatch("x", selected=1), 409),
        (Removing("x"), 410),
        (HeldFull("x"), 429),
        (ServerStopping("x"), 503),
    ],
)
def test_each_error_has_the_status_of_the_table(error, status):
    assert http_status(error) == status


def test_what_takes_long_holds_up_nobody(listen):
    entered, go = threading.Event(), threading.Event()
    threads = []

    def slow(request):
        threads.append(threading.current_thread().name)
        entered.set()
        assert go.wait(WAIT)
        return HttpAnswer(body="slow")

    port = listen({("GET", "/slow"): HttpRoute(slow, "thread"), ("GET", "/quick"): lambda: HttpAnswer(body="quick")})
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(fetch(port, "GET", "/slow")[1]))
    waiting.start()
    assert entered.wait(WAIT)
    assert fetch(port, "GET", "/quick")[1] == b"quick"
    go.set()
    waiting.join(WAIT)
    assert answers == [b"slow"]
    assert threads[0].startswith("rsrv-http-call")


def test_a_handler_learns_that_its_client_has_left_and_runs_to_its_end(listen):
    entered, left, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(request):
        entered.set()
        for _ in range(WAIT * 200):
            if request.gone():
                left.set()
                break
            threading.Event().wait(0.005)
        ended.set()
        return HttpAnswer()

    port = listen({("GET", "/slow"): HttpRoute(slow, "thread")})
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT) as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
        assert entered.wait(WAIT)
    assert left.wait(WAIT)
    assert ended.wait(WAIT)


class Numbers:
    """A stream of what `put` is given; ends with `end`."""

    content_type = "text/event-stream"
    heartbeat = b": \n\n"

    def __init__(self, heartbeat_seconds=WAIT):
        self.heartbeat_seconds = heartbeat_seconds
        self.waiting = []
        self.started, self.closed = threading.Event(), threading.Event()
        self.wake = lambda: None

    def start(self, wake):
        self.wake = wake
        self.started.set()

    def read(self):
        if not self.waiting:
            return b""
        return self.waiting.pop(0)

    def close(self):
        self.closed.set()

    def put(self, text):
        self.waiting.append(text)
        self.wake()


def open_stream(port, path="/s"):
    connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    return connection


def read_until(connection, text):
    seen = b""
    while text not in seen:
        more = connection.recv(1 << 16)
        assert more, f"the stream ended after {seen!r}"
        seen += more
    return seen


def test_a_stream_sends_what_comes_when_it_comes_and_ends(listen):
    stream = Numbers()
    port = listen({("GET", "/s"): HttpRoute(lambda request: stream, "stream")})
    with open_stream(port) as connection:
        assert stream.started.wait(WAIT)
        stream.put(b"data: 1\n\n")
        head = read_until(connection, b"data: 1\n\n")
        assert b"Content-Type: text/event-stream" in head
        assert b"Cache-Control: no-store" in head
        stream.put(b"data: 2\n\n")
        read_until(connection, b"data: 2\n\n")
        stream.put(None)
        read_until(connection, b"0\r\n\r\n")
    assert stream.closed.wait(WAIT)


def test_a_silent_stream_has_a_heartbeat(listen):
    stream = Numbers(heartbeat_seconds=0.01)
    port = listen({("GET", "/s"): HttpRoute(lambda request: stream, "stream")})
    with open_stream(port) as connection:
        read_until(connection, b": \n\n")


def test_a_stream_is_closed_when_its_reader_leaves(listen):
    stream = Numbers(heartbeat_seconds=0.01)
    port = listen({("GET", "/s"): HttpRoute(lambda request: stream, "stream")})
    with open_stream(port):
        assert stream.started.wait(WAIT)
    assert stream.closed.wait(WAIT)


def test_a_stream_is_closed_when_its_reader_leaves_in_the_moment_in_which_it_comes():
    stream = Numbers()
    listener = HttpListener("127.0.0.1", 0, {})

    class Inline:
        """Instead of the threads: the handler has run before its caller waits for it."""

        def submit(self, run):
            run()

        def message_arrived(self):
            pass

    listener._pool = Inline()

    async def leave():
        task = asyncio.create_task(listener._elsewhere(lambda request: stream, None))
        await asyncio.sleep(0)  # the answer is queued now; this comes after it, and before the task goes on
        asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(leave())
    assert stream.closed.is_set()


def test_streams_whose_readers_leave_at_any_moment_are_all_closed_without_a_heartbeat(listen):
    streams = []

    def follow(request):
        streams.append(Numbers(heartbeat_seconds=3600))
        streams[-1].put(b"retry: 1\n\n")
        return streams[-1]

    port = listen({("GET", "/s"): HttpRoute(follow, "stream"), ("GET", "/e"): HttpRoute(echo, "thread")}, threads=2)
    abruptly = struct.pack("ii", 1, 0)
    for n in range(300):
        with open_stream(port) as connection:
            threading.Event().wait(n % 17 * 0.0002)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, abruptly)
    for _ in range(2):  # all that came before has been begun when these are answered
        assert fetch(port, "GET", "/e")[0] == 200
    assert streams
    assert all(stream.closed.wait(WAIT) for stream in streams)


def test_a_stop_ends_streams(listen):
    stream = Numbers()
    port = listen({("GET", "/s"): HttpRoute(lambda request: stream, "stream")})
    with open_stream(port) as connection:
        assert stream.started.wait(WAIT)
        stream.put(b"data: 1\n\n")
        read_until(connection, b"data: 1\n\n")
        listen.stop()
        assert stream.closed.is_set()
        stream.put(b"late")


def test_a_stream_route_may_refuse_and_has_no_head(listen):
    def refuse(request):
        raise HeldFull("too many streams")

    port = listen({("GET", "/s"): HttpRoute(refuse, "stream")})
    assert fetch_error(port, "GET", "/s")[0] == 429
    assert fetch(port, "HEAD", "/s")[0] == 405


def test_a_stop_does_not_wait_for_a_handler_that_hangs_and_logs_nothing_but_that(listen, caplog):
    entered, go = threading.Event(), threading.Event()
    finished = threading.Event()

    def slow(request):
        entered.set()
        go.wait(WAIT)
        finished.set()
        return HttpAnswer()

    port = listen({("GET", "/slow"): HttpRoute(slow, "thread")})
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT) as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
        assert entered.wait(WAIT)
        stopping = threading.Thread(target=listen.stop)
        stopping.start()
        assert connection.recv(1 << 16) == b""
        go.set()
        stopping.join(WAIT)
    assert not stopping.is_alive()
    assert finished.wait(WAIT)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
