"""The HTTP listener: answers, refusals, odd clients, ports, and a clean stop."""

import asyncio
import contextlib
import http.client
import socket
import threading

import pytest

from rsrv.core.errors import ConfigError, PortTaken
from rsrv.rpc import HttpAnswer, HttpListener
from rsrv.rpc.http import _ExhaustionOnce

WAIT = 30
METRICS = "text/plain; version=0.0.4; charset=utf-8"


@pytest.fixture
def listen():
    """``listen(routes)`` starts a listener and returns its port."""
    with contextlib.ExitStack() as stack:

        def start(routes, host="127.0.0.1"):
            listener = HttpListener(host, 0, routes)
            stack.callback(listener.stop)
            port = listener.bind()
            listener.start()
            return port

        yield start


@pytest.fixture
def routes():
    return {
        ("GET", "/healthz"): lambda: HttpAnswer(body="ok"),
        ("GET", "/readyz"): lambda: HttpAnswer(503, '{"phase": "löad"}', "application/json"),
        ("GET", "/metrics"): lambda: HttpAnswer(body=b"rsrv_up 1\n", content_type=METRICS),
        ("POST", "/do"): lambda: HttpAnswer(202, headers={"X-More": "1"}),
        ("GET", "/both"): lambda: HttpAnswer(body="get"),
        ("POST", "/both"): lambda: HttpAnswer(body="post"),
    }


def fetch(port, method, path, host="127.0.0.1", **kwargs):
    connection = http.client.HTTPConnection(host, port, timeout=WAIT)
    with contextlib.closing(connection):
        connection.request(method, path, **kwargs)
        response = connection.getresponse()
        return response.status, response.read(), response.headers


def test_a_route_is_answered_with_its_status_body_and_type(listen, routes):
    port = listen(routes)
    status, body, headers = fetch(port, "GET", "/healthz")
    assert (status, body, headers["Content-Type"]) == (200, b"ok", "text/plain; charset=utf-8")
    status, body, headers = fetch(port, "GET", "/readyz")
    assert (status, body, headers["Content-Type"]) == (503, '{"phase": "löad"}'.encode(), "application/json")
    status, body, headers = fetch(port, "GET", "/metrics?name[]=a")
    assert (status, body, headers["Content-Type"]) == (200, b"rsrv_up 1\n", METRICS)
    status, body, headers = fetch(port, "POST", "/do", body=b"ignored")
    assert (status, body, headers["X-More"]) == (202, b"", "1")
    assert headers["Server"] == "rsrv"


def test_each_method_has_its_own_answer(listen, routes):
    port = listen(routes)
    assert fetch(port, "GET", "/both")[1] == b"get"
    assert fetch(port, "POST", "/both")[1] == b"post"


def test_head_has_the_headers_of_get_and_no_body(listen, routes):
    status, body, headers = fetch(listen(routes), "HEAD", "/metrics")
    assert (status, body, headers["Content-Length"], headers["Content-Type"]) == (200, b"", "10", METRICS)


@pytest.mark.parametrize("path", ["/", "/nope", "/healthz/", "/HEALTHZ", "//healthz", "/%00", "/../healthz"])
def test_anything_else_is_not_found(listen, routes, path):
    status, body, _ = fetch(listen(routes), "GET", path)
    assert (status, body) == (404, b"not found")


def test_an_escaped_path_is_the_path(listen, routes):
    assert fetch(listen(routes), "GET", "/health%7A")[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/healthz", "GET, HEAD"),
        ("DELETE", "/both", "GET, HEAD, POST"),
        ("GET", "/do", "POST"),
        ("HEAD", "/do", "POST"),
    ],
)
def test_another_method_is_not_allowed_and_the_answer_says_which_is(listen, routes, method, path, allow):
    status, body, headers = fetch(listen(routes), method, path)
    assert (status, headers["Allow"]) == (405, allow)
    assert body == (b"" if method == "HEAD" else b"method not allowed")


def test_an_exception_is_a_500_without_its_text(listen, caplog):
    port = listen({("GET", "/bad"): lambda: 1 / 0, ("GET", "/good"): lambda: HttpAnswer(body="ok")})
    status, body, _ = fetch(port, "GET", "/bad")
    assert (status, body) == (500, b"internal error")
    assert fetch(port, "GET", "/good")[0] == 200
    assert "unexpected error path=/bad" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_good_request_is_not_logged(listen, routes, caplog):
    caplog.set_level("DEBUG")
    port = listen(routes)
    fetch(port, "GET", "/healthz")
    fetch(port, "GET", "/nope")
    assert [record for record in caplog.records if record.name != "asyncio"] == []


def test_handlers_run_on_one_thread_of_their_own(listen):
    threads = []
    port = listen({("GET", "/"): lambda: threads.append(threading.current_thread().name) or HttpAnswer()})
    for _ in range(3):
        fetch(port, "GET", "/")
    assert threads == ["rsrv-http"] * 3


def test_a_connection_is_kept_for_further_requests(listen, routes):
    connection = http.client.HTTPConnection("127.0.0.1", listen(routes), timeout=WAIT)
    with contextlib.closing(connection):
        for _ in range(3):
            connection.request("GET", "/healthz")
            response = connection.getresponse()
            assert response.read() == b"ok"
            local = connection.sock.getsockname()
        assert connection.sock.getsockname() == local


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00" * 1000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
        b"GET http://[::1 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /healthz HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "GET /é HTTP/1.1\r\nHost: ü\r\n\r\n".encode(),
    ],
)
def test_garbage_harms_its_own_connection_only(listen, routes, garbage, caplog):
    port = listen(routes)
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT) as connection, contextlib.suppress(OSError):
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass
    assert fetch(port, "GET", "/healthz")[1] == b"ok"
    assert [record.getMessage() for record in caplog.records if record.levelno >= 40] == []


def test_a_client_that_hangs_up_in_the_middle_harms_nobody(listen, routes):
    port = listen(routes)
    for text in (b"", b"GET /heal", b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT) as connection:
            connection.sendall(text)
    assert fetch(port, "GET", "/healthz")[1] == b"ok"


def test_a_taken_port_is_found_at_bind(listen, routes):
    port = listen(routes)
    with pytest.raises(PortTaken, match=rf"HTTP: port 127\.0\.0\.1:{port} is taken") as caught:
        HttpListener("127.0.0.1", port, routes).bind()
    assert caught.value.exit_code == 78
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(PortTaken):
        HttpListener("0.0.0.0", other.getsockname()[1], routes).bind()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_cannot_be_used_is_a_configuration_error(host, routes):
    with pytest.raises(ConfigError, match="HTTP: ") as caught:
        HttpListener(host, 0, routes).bind()
    assert not isinstance(caught.value, PortTaken)


def test_a_name_is_listened_on_at_every_address(listen, routes):
    port = listen(routes, "localhost")
    assert fetch(port, "GET", "/healthz", host="localhost")[1] == b"ok"
    assert fetch(port, "GET", "/healthz", host="127.0.0.1")[1] == b"ok"


def test_a_stop_closes_connections_and_frees_the_port(routes):
    listener = HttpListener("127.0.0.1", 0, routes)
    port = listener.bind()
    listener.start()
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT) as idle:
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200 OK" in idle.recv(1 << 16)
        listener.stop()
        with contextlib.suppress(ConnectionResetError):
            assert idle.recv(1) == b""
    listener.stop()
    assert [thread.name for thread in threading.enumerate() if thread.name == "rsrv-http"] == []
    again = HttpListener("127.0.0.1", port, routes)
    assert again.bind() == port
    again.stop()
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_listener_must_be_bound_before_it_is_started(routes):
    with pytest.raises(RuntimeError, match="bind"):
        HttpListener("127.0.0.1", 0, routes).start()


def test_a_lack_of_descriptors_is_a_warning_a_minute_and_not_a_traceback_a_millisecond(caplog):
    now = [1000.0]
    handler = _ExhaustionOnce(clock=lambda: now[0])
    loop = asyncio.new_event_loop()
    lack = {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")}
    with contextlib.closing(loop):
        for _ in range(100):
            handler(loop, lack)
        assert [record.getMessage() for record in caplog.records] == [
            "http connections wait error=Too many open files hint=raise the limit: ulimit -n"
        ]
        now[0] += 60
        handler(loop, lack)
        assert len(caplog.records) == 2
        handler(loop, {"message": "something else", "exception": RuntimeError("boom")})
    assert caplog.records[-1].name == "asyncio"
