"""The engine's ports, its stop, and what it tells clients at the level of HTTP/2."""

import queue
import socket
import struct
import subprocess
import sys
import threading
import time

import grpc
import hpack
import pytest

from rsrv.core.errors import ConfigError, PortTaken
from rsrv.rpc import GrpcioEngine, Route

PATH = "/test.Service/Method"
STREAM = "/test.Service/Stream"
WAIT = 30


def ok(call):
    call.send([b"ok"])
    call.finish()


def engine_on(port, host="127.0.0.1", routes=None):
    return GrpcioEngine(
        routes or {PATH: Route(ok)}, host=host, port=port, threads=4, max_recv_bytes=1 << 20, max_send_bytes=1 << 20
    )


def rsrv_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rsrv-")]


def ask(port, host="127.0.0.1"):
    with grpc.insecure_channel(f"{host}:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        return channel.unary_unary(PATH)(b"", timeout=WAIT, wait_for_ready=True)


# --- ports ----------------------------------------------------------------------------------------------------------


def test_a_second_engine_finds_the_port_taken():
    first = engine_on(0)
    port = first.bind()
    first.start()
    with pytest.raises(PortTaken, match=rf"gRPC: port 127\.0\.0\.1:{port} is taken") as caught:
        engine_on(port).bind()
    assert caught.value.exit_code == 78
    assert ask(port) == b"ok"
    first.stop(0)


def test_a_port_that_is_bound_and_not_yet_started_is_taken():
    first = engine_on(0)
    port = first.bind()
    with pytest.raises(PortTaken):
        engine_on(port).bind()
    first.stop(0)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_plain_socket_takes_the_port(host):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortTaken, match=str(port)):
            engine_on(port, host).bind()


def test_a_server_that_shares_its_port_takes_it_all_the_same():
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(PortTaken):
            engine_on(listener.getsockname()[1]).bind()


def test_a_failed_bind_leaves_nothing_behind():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        engine = engine_on(listener.getsockname()[1])
        with pytest.raises(PortTaken):
            engine.bind()
        engine.stop(0)
        port = listener.getsockname()[1]
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("no.such.host.invalid", "'no.such.host.invalid' cannot be resolved"),
        ("192.0.2.1", "192.0.2.1:0 is not an address of this machine"),
        ("a" * 300, "cannot be resolved"),
    ],
)
def test_a_host_that_cannot_be_used_is_a_configuration_error(host, text):
    with pytest.raises(ConfigError, match="gRPC: ") as caught:
        engine_on(0, host).bind()
    assert text in caught.value.message
    assert not isinstance(caught.value, PortTaken)


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0"])
def test_an_engine_answers_on_every_address_of_its_host(host):
    engine = engine_on(0, host)
    port = engine.bind()
    engine.start()
    assert ask(port) == b"ok"
    engine.stop(0)


def test_clients_that_come_before_the_start_are_answered_after_it():
    engine = engine_on(0)
    port = engine.bind()
    answers = queue.SimpleQueue()
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT):
        client = threading.Thread(target=lambda: answers.put(ask(port)))
        client.start()
        engine.start()
        assert answers.get(timeout=WAIT) == b"ok"
    client.join(WAIT)
    engine.stop(0)


def test_the_port_is_free_and_no_thread_is_left_after_a_stop():
    engine = engine_on(0)
    port = engine.bind()
    engine.start()
    ask(port)
    engine.stop(1)
    engine.stop(1)
    assert rsrv_threads() == []
    again = engine_on(port)
    assert again.bind() == port
    again.stop(0)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_an_engine_must_be_bound_before_it_is_started():
    with pytest.raises(RuntimeError, match="bind"):
        engine_on(0).start()


# --- stop -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def held():
    """An engine whose unary calls and streams stay open until the test ends them: (engine, port, calls)."""
    calls = queue.SimpleQueue()
    engine = engine_on(
        0, routes={PATH: Route(calls.put), STREAM: Route(calls.put, "server_stream"), "/t.S/Ok": Route(ok)}
    )
    port = engine.bind()
    engine.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield engine, channel, calls
        engine.stop(0)


def test_a_pending_call_may_finish_within_the_grace(held, wait_until):
    engine, channel, calls = held
    future = channel.unary_unary(PATH).future(b"")
    call = calls.get(timeout=WAIT)
    stopper = threading.Thread(target=engine.stop, args=(WAIT,))
    stopper.start()
    wait_until(lambda: engine.stopping)
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/t.S/Ok")(b"", timeout=WAIT)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(caught.value.trailing_metadata())["rsrv-reason"] == "stopping"
    assert stopper.is_alive()
    assert not future.done()
    call.defer(lambda: (call.send([b"in time"]), call.finish()))
    assert future.result(WAIT) == b"in time"
    stopper.join(WAIT)
    assert not stopper.is_alive()
    assert rsrv_threads() == []


def test_a_call_that_outlives_the_grace_is_told_that_the_server_stops(held):
    engine, channel, calls = held
    told = threading.Event()
    future = channel.unary_unary(PATH).future(b"")
    call = calls.get(timeout=WAIT)
    call.on_cancel(told.set)
    engine.stop(0.05)
    error = future.exception(WAIT)
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the server is stopping")
    assert dict(error.trailing_metadata())["rsrv-reason"] == "stopping"
    assert told.is_set()
    assert call.cancelled
    assert call.defer(told.clear) is False
    assert rsrv_threads() == []


def test_streams_end_at_once_when_the_engine_stops(held):
    engine, channel, calls = held
    stream = channel.unary_stream(STREAM)(b"")
    call = calls.get(timeout=WAIT)
    call.send([b"hello"])
    assert next(stream) == b"hello"
    begin = time.monotonic()
    engine.stop(WAIT)
    assert time.monotonic() - begin < WAIT  # it did not take the grace
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(caught.value.trailing_metadata())["rsrv-reason"] == "stopping"


def test_a_handler_that_blocks_cannot_keep_the_engine_from_stopping(caplog):
    entered, release = threading.Event(), threading.Event()

    def stuck(call):
        entered.set()
        release.wait(WAIT)

    engine = engine_on(0, routes={PATH: Route(stuck)})
    port = engine.bind()
    engine.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        future = channel.unary_unary(PATH).future(b"")
        assert entered.wait(WAIT)
        engine.threads.shutdown_seconds = 0.05
        engine.stop(0.05)
        assert future.exception(WAIT).code() is grpc.StatusCode.UNAVAILABLE
    assert "threads left behind count=1" in caplog.text
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("rsrv-"):
            thread.join(WAIT)


def test_a_stop_under_load_loses_no_answer_and_refuses_as_unavailable():
    """Clients go on without a pause until their connection breaks; nobody may see a code that is not UNAVAILABLE."""
    served, refused, answered = [], queue.SimpleQueue(), queue.SimpleQueue()
    calls = queue.SimpleQueue()

    def dispatch():
        while (call := calls.get()) is not None:

            def answer(call=call):
                served.append(1)
                call.send([call.body])
                call.finish()

            call.defer(answer)

    engine = engine_on(0, routes={PATH: Route(calls.put)})
    port = engine.bind()
    engine.start()
    dispatcher = threading.Thread(target=dispatch)
    dispatcher.start()

    def client(number):
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            method = channel.unary_unary(PATH)
            while True:
                try:
                    answered.put(method(b"%d" % number, timeout=WAIT) == b"%d" % number)
                except grpc.RpcError as error:
                    reason = dict(error.trailing_metadata() or ()).get("rsrv-reason")
                    refused.put((error.code().name, reason))
                    if reason is None:
                        return

    clients = [threading.Thread(target=client, args=(n,)) for n in range(6)]
    for thread in clients:
        thread.start()
    right = [answered.get(timeout=WAIT) for _ in range(50)]
    engine.stop(WAIT)
    for thread in clients:
        thread.join(WAIT)
    calls.put(None)
    dispatcher.join(WAIT)
    right += [answered.get() for _ in range(answered.qsize())]
    assert len(served) == len(right)
    assert all(right)
    outcomes = {refused.get() for _ in range(refused.qsize())}
    assert outcomes <= {("UNAVAILABLE", "stopping"), ("UNAVAILABLE", None)}
    assert ("UNAVAILABLE", None) in outcomes


CLIENT = """
import sys, grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    stream = channel.unary_stream("/test.Service/Stream")(b"")
    future = channel.unary_unary("/test.Service/Method").future(b"")
    next(stream)
    print("ready", flush=True)
    future.result()
"""


def test_a_client_that_is_killed_leaves_no_call_behind(held, wait_until):
    engine, _, calls = held
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, f"127.0.0.1:{engine.bound_port}"], stdout=subprocess.PIPE, text=True
    )
    with client:
        opened = [calls.get(timeout=WAIT) for _ in range(2)]
        told = threading.Semaphore(0)
        for call in opened:
            call.on_cancel(told.release)
            if call.path == STREAM:
                call.send([b"go on"])
        assert client.stdout.readline() == "ready\n"
        client.kill()
    assert told.acquire(timeout=WAIT)
    assert told.acquire(timeout=WAIT)
    wait_until(lambda: not engine.open_calls)
    assert all(call.cancelled for call in opened)


# --- HTTP/2 ---------------------------------------------------------------------------------------------------------

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS = 1, 4


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def frames(connection):
    """(kind, flags, stream, payload) of each frame that the server sends."""
    data = connection.makefile("rb")
    while len(head := data.read(9)) == 9:
        payload = data.read(int.from_bytes(head[:3]))
        yield head[3], head[4], int.from_bytes(head[5:9]), payload


@pytest.fixture
def running():
    engine = engine_on(0)
    engine.bind()
    engine.start()
    yield engine
    engine.stop(0)


@pytest.fixture
def raw(running):
    with socket.create_connection(("127.0.0.1", running.bound_port), timeout=WAIT) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0))
        yield connection


def test_large_windows_are_advertised_for_streams_and_the_connection(raw):
    stream_window = connection_window = 0
    for kind, flags, stream, payload in frames(raw):
        if kind == SETTINGS and not flags & 1:
            settings = dict(struct.iter_unpack(">HI", payload))
            stream_window = settings.get(4, 65535)
        elif kind == WINDOW_UPDATE and stream == 0:
            connection_window = 65535 + int.from_bytes(payload)
        if stream_window and connection_window:
            break
    assert stream_window >= 32 << 20
    assert connection_window >= 32 << 20


def test_a_client_may_ping_as_often_as_it_likes(raw):
    count = 100
    raw.sendall(b"".join(frame(PING, 0, 0, n.to_bytes(8)) for n in range(count)))
    acknowledged = []
    for kind, flags, _, payload in frames(raw):
        assert kind != GOAWAY
        if kind == PING and flags & 1:
            acknowledged.append(int.from_bytes(payload))
            if len(acknowledged) == count:
                break
    assert acknowledged == list(range(count))


def test_a_stop_tells_connections_to_go_away(running, raw):
    """What was sent after that has not been begun, so that clients may send it elsewhere whatever it does."""
    seen = frames(raw)
    for kind, flags, _, _ in seen:
        if kind == SETTINGS and flags & 1:  # the connection is up
            break
    stopper = threading.Thread(target=running.stop, args=(WAIT,))
    stopper.start()
    assert GOAWAY in [kind for kind, *_ in seen]
    stopper.join(WAIT)


def test_a_connection_of_the_given_age_is_told_to_go_away_and_its_call_finishes():
    calls = queue.SimpleQueue()
    engine = GrpcioEngine(
        {PATH: Route(calls.put)},
        host="127.0.0.1",
        port=0,
        threads=4,
        max_recv_bytes=1 << 20,
        max_send_bytes=1 << 20,
        max_connection_age_seconds=0.2,
        max_connection_age_grace_seconds=WAIT,
    )
    port = engine.bind()
    engine.start()
    fields = {":method": "POST", ":scheme": "http", ":path": PATH, ":authority": "x", "te": "trailers"}
    headers = hpack.Encoder().encode({**fields, "content-type": "application/grpc"}, huffman=False)
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0))
        connection.sendall(frame(HEADERS, END_HEADERS, 1, headers) + frame(DATA, END_STREAM, 1, bytes(5)))
        call, ended = calls.get(timeout=WAIT), False
        for kind, flags, stream, payload in frames(connection):
            if kind == GOAWAY and not call.cancelled:
                call.send([b"late"])
                call.finish()
            elif kind == PING and not flags & 1:
                connection.sendall(frame(PING, 1, 0, payload))
            elif kind == HEADERS and flags & END_STREAM:
                ended = stream == 1
                break
        assert ended
    engine.stop(0)


def test_clients_that_send_no_message_cannot_hold_all_threads(wait_until, caplog):
    engine = engine_on(0)
    port = engine.bind()
    engine.threads.body_seconds = 0.0
    engine.start()
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0))
        fields = {":method": "POST", ":scheme": "http", ":path": PATH, ":authority": "x", "te": "trailers"}
        headers = hpack.Encoder().encode({**fields, "content-type": "application/grpc"}, huffman=False)
        for stream in (1, 3, 5, 7):  # as many as there are threads
            connection.sendall(frame(HEADERS, END_HEADERS, stream, headers))
        wait_until(lambda: [worker.waiting_since > 0 for worker in engine.threads._workers] == [True] * 4)
        assert ask(port) == b"ok"
    assert "calls without a message cancelled" in caplog.text
    engine.stop(0)


def test_each_call_of_a_burst_is_answered():
    """By itself the core drops calls without a status when more than a thousand wait for Python."""
    engine = engine_on(0)
    port = engine.bind()
    engine.start()
    number = 4000
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT) as connection:
        fields = {":method": "POST", ":scheme": "http", ":path": PATH, ":authority": "x", "te": "trailers"}
        headers = hpack.Encoder().encode({**fields, "content-type": "application/grpc"}, huffman=False)
        window = frame(WINDOW_UPDATE, 0, 0, (1 << 30).to_bytes(4))
        calls = [
            frame(HEADERS, END_HEADERS, stream, headers) + frame(DATA, END_STREAM, stream, bytes(5))
            for stream in range(1, 2 * number, 2)
        ]
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0) + window
        sender = threading.Thread(target=connection.sendall, args=(preface + b"".join(calls),))
        sender.start()
        ended = 0
        for kind, flags, _, _ in frames(connection):
            assert kind not in (RST_STREAM, GOAWAY)
            ended += kind == HEADERS and flags & END_STREAM
            if ended == number:
                break
        sender.join()
    assert ended == number
    engine.stop(0)


def test_garbage_closes_its_connection_and_no_other():
    engine = engine_on(0)
    port = engine.bind()
    engine.start()
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100):
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT) as connection:
            connection.sendall(garbage)
            while connection.recv(1 << 16):
                pass
    assert ask(port) == b"ok"
    engine.stop(0)
