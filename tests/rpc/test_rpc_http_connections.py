"""Clients of the HTTP listener that are slow, or idle, or many: how long they are waited for, and who makes place."""

import contextlib
import select
import socket

import pytest

from rsrv.rpc.http import HttpAnswer, HttpListener, HttpRoute
from rsrv.rpc.http_connections import Connections, Patience

WAIT = 30
GET = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
SOON = 0.02
LARGE = b"x" * (16 << 20)
"""More than the buffers of a connection hold."""


class Wire:
    """A transport: what is unsent, and how it was closed."""

    def __init__(self):
        self.unsent = 0
        self.end = None

    def get_extra_info(self, name):
        assert name == "socket"
        return self

    def setsockopt(self, level, option, value):
        pass

    def get_write_buffer_size(self):
        return self.unsent

    def close(self):
        self.end = "closed"

    def abort(self):
        self.end = "aborted"


class Site:
    """Connections named by letters, and a clock."""

    def __init__(self, limit=100):
        self.now = 1000.0
        patience = Patience(first_seconds=10, idle_seconds=75, unread_seconds=30)
        self.connections = Connections(patience, limit, clock=lambda: self.now)
        self.wires = {}

    def open(self, *names):
        for name in names:
            self.wires[name] = Wire()
            self.connections.opened(name, self.wires[name])

    def after(self, seconds):
        """How connections have ended that far from now, by name."""
        self.now += seconds
        self.connections.look()
        return {name: wire.end for name, wire in self.wires.items() if wire.end}


def test_the_first_header_has_its_time_and_no_more():
    site = Site()
    site.open("a")
    assert site.after(9.9) == {}
    assert site.after(0.1) == {"a": "closed"}


def test_further_headers_have_more_time_from_the_last_answer_on():
    site = Site()
    site.open("a")
    with site.connections.works("a"):
        assert site.after(1000) == {}
    assert site.after(74.9) == {}
    with site.connections.works("a"):
        pass
    assert site.after(74.9) == {}
    assert site.after(0.1) == {"a": "closed"}


def test_the_rest_of_a_request_has_a_time_of_its_own_also_of_the_first_one():
    site = Site()
    site.open("a")
    for _ in ("first", "second"):
        with site.connections.works("a"), site.connections.waits("a"):
            assert site.after(1000) == {}
        assert site.after(74.9) == {}
    assert site.after(0.1) == {"a": "closed"}


def test_an_answer_that_does_not_move_ends_its_connection_even_while_it_is_written():
    site = Site()
    site.open("a", "b")
    site.wires["a"].unsent = 5000
    with site.connections.works("b"):
        site.wires["b"].unsent = 5000
        assert site.after(1) == {}
        site.wires["a"].unsent = 6000  # the answer of another request that was sent behind it
        assert site.after(29.9) == {}
        assert site.after(0.1) == {"a": "aborted", "b": "aborted"}


def test_an_answer_that_moves_may_take_as_long_as_it_takes_and_idleness_begins_when_it_is_out():
    site = Site()
    site.open("a")
    with site.connections.works("a"):
        pass
    for unsent in range(20, 0, -1):
        site.wires["a"].unsent = unsent
        assert site.after(29) == {}
    site.wires["a"].unsent = 0
    assert site.after(29) == {}
    assert site.after(74.9) == {}
    assert site.after(0.1) == {"a": "closed"}


def test_a_new_connection_takes_the_place_of_the_one_that_has_waited_longest(caplog):
    site = Site(limit=3)
    for name in "abc":
        site.now += 1
        site.open(name)
    site.now += 1
    with site.connections.works("a"):
        site.open("d")
        assert site.after(0) == {"b": "aborted"}
        site.now += 1
        with site.connections.waits("a"):  # for the body of its request
            site.now += 1
            site.open("e")
            assert site.after(0) == {"b": "aborted", "c": "aborted"}
            site.now += 1
            site.open("f")
            assert site.after(0) == {"b": "aborted", "c": "aborted", "d": "aborted"}
            site.open("g")
            assert site.wires["a"].end == "aborted"
    assert len(site.connections) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "http connections closed why=there are more than 3"  # once a minute
    ]


def test_connections_that_are_being_answered_are_kept_and_the_new_one_is_closed():
    site = Site(limit=2)
    site.open("a", "b")
    with site.connections.works("a"), site.connections.works("b"):
        site.open("c")
    assert site.after(0) == {"c": "aborted"}
    site.connections.closed("c")
    site.connections.closed("a")
    site.open("d")
    assert site.after(0) == {"c": "aborted"}


@pytest.fixture
def listen():
    """``listen(**patience)`` starts a listener; ``listen.port``, ``listen.stop()``."""
    with contextlib.ExitStack() as stack:

        def start(**patience):
            routes = {
                ("GET", "/livez"): lambda: HttpAnswer(body="ok"),
                ("GET", "/large"): lambda: HttpAnswer(body=LARGE),
                ("POST", "/body"): HttpRoute(lambda request: HttpAnswer(body="ok")),
            }
            listener = HttpListener("127.0.0.1", 0, routes, threads=2, patience=Patience(**patience))
            stack.callback(listener.stop)
            start.port, start.stop = listener.bind(), listener.stop
            listener.start()

        def connect(text=b""):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", start.port), timeout=WAIT))
            connection.sendall(text)
            return connection

        start.connect = connect
        yield start


def is_over(connection):
    """Whether the connection ends, without reading from it."""
    watch = select.poll()
    watch.register(connection, 0)
    return bool(watch.poll(WAIT * 1000))


def received(connection):
    text = b""
    while more := connection.recv(1 << 16):
        text += more
    return text


@pytest.mark.parametrize("sent", [b"", b"GET /liv", GET[:-2]])
def test_a_client_that_sends_no_header_is_left(listen, sent):
    listen(first_seconds=SOON)
    assert received(listen.connect(sent)) == b""


def test_a_client_that_sends_no_second_request_is_left_after_its_answer(listen):
    listen(idle_seconds=SOON)
    assert received(listen.connect(GET)).endswith(b"\r\n\r\nok")


def test_a_body_that_does_not_come_in_time_is_answered_in_words(listen, monkeypatch):
    monkeypatch.setattr("rsrv.rpc.http._BODY_SECONDS", 10 * SOON)
    listen(first_seconds=SOON, idle_seconds=SOON)
    answer = received(listen.connect(b"POST /body HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"body_timeout" in answer


@pytest.mark.parametrize("close", ["", "Connection: close\r\n"])
def test_a_client_that_does_not_read_its_answer_is_left(listen, close):
    listen(unread_seconds=SOON)
    assert is_over(listen.connect(f"GET /large HTTP/1.1\r\nHost: a\r\n{close}\r\n".encode()))


def test_a_stop_leaves_clients_that_do_not_read(listen, monkeypatch):
    monkeypatch.setattr("rsrv.rpc.http._SHUTDOWN_SECONDS", SOON)
    listen()
    connection = listen.connect(b"GET /large HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert connection.recv(1)
    listen.stop()
    assert is_over(connection)


def test_a_fresh_connection_is_answered_beside_any_number_of_hanging_ones(listen):
    listen(connections=6)
    hanging = []
    for _ in range(12):
        hanging.append(listen.connect())
        hanging.append(listen.connect(GET[:9]))
        hanging.append(listen.connect(b"POST /body HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"))
        hanging.append(listen.connect(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n"))
    fresh = listen.connect(GET)
    assert fresh.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
    assert is_over(hanging[0])
