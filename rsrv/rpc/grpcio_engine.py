"""The engine on grpcio's sync server: compatible with everything, and the first one built."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import grpc

from rsrv.core.errors import ConfigError, PortTaken, ServerStopping, Shed, Unimplemented
from rsrv.rpc.call import Call
from rsrv.rpc.grpcio_call import STATUS, GrpcioCall, StreamCall, UnaryCall
from rsrv.rpc.listen import hang_up, hold_back, open_sockets, port_taken
from rsrv.rpc.routes import Route
from rsrv.rpc.status import status_of
from rsrv.rpc.threads import CallThreads

_WINDOW_BYTES = 32 << 20
_MAX_PENDING_CALLS = 16384
_FREE_PORT_ATTEMPTS = 5
_LONGEST_MS = 2**31 - 2
"""The largest number that grpcio does not take for infinity."""
_FLUSH_SECONDS = 1.0
"""How long statuses that were written at the end of the grace may take to reach their clients."""
_QUIET_SECONDS = 0.05
"""How long grpcio may take to hand over a call that it has read."""
_GOAWAY_SECONDS = 0.02
"""How long it may take to write a frame to each connection."""


class GrpcioEngine:
    """Serves `routes` on ``host:port`` with at most `threads` calls open at a time; further ones wait their turn.

    An open call holds a thread, a stream for as long as it lives. So at most `max_streams` streams are open (default: a
    quarter of the threads, 16 at most); one more is refused with RESOURCE_EXHAUSTED, reason ``shed``. ``threads.grow``
    allows more threads while it runs.

    A connection of `max_connection_age_seconds` (± 10 %, so that those of one moment do not come back in one moment) is
    told with GOAWAY to make place for a new one; the calls on it have `max_connection_age_grace_seconds` to finish.
    """

    def __init__(
        self,
        routes: Mapping[str, Route],
        *,
        host: str,
        port: int,
        threads: int,
        max_recv_bytes: int,
        max_send_bytes: int,
        max_streams: int | None = None,
        max_connection_age_seconds: float | None = None,
        max_connection_age_grace_seconds: float = 30.0,
    ) -> None:
        self.max_send_bytes = max_send_bytes
        self.threads = CallThreads(threads, name="rsrv-rpc")
        self.open_calls: set[GrpcioCall] = set()
        self._options = _options(max_recv_bytes)
        if max_connection_age_seconds is not None:
            self._options += _age(max_connection_age_seconds, max_connection_age_grace_seconds)
        self._host = host
        self._port = port
        self._handlers = {path: self._method_handler(path, route) for path, route in routes.items()}
        self._max_streams = max_streams if max_streams is not None else max(1, min(16, threads // 4))
        self._streams = 0
        self._readers: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._server: grpc.Server | None = None
        self.bound_port = 0
        self._started = False
        self.stopping = False

    # --- life -------------------------------------------------------------------------------------------------------

    def bind(self) -> int:
        attempts = 1 if self._port else _FREE_PORT_ATTEMPTS
        while True:
            attempts -= 1
            try:
                return self._bind()
            except PortTaken:
                if not attempts:
                    raise

    def _bind(self) -> int:
        sockets = open_sockets(self._host, self._port, what="gRPC")
        addresses = [listener.getsockname()[:2] for listener in sockets]
        for listener in sockets:  # grpcio opens its own; these have told apart why it might not be able to
            listener.close()
        server = grpc.server(cast(Any, self.threads), handlers=[_Methods(self)], options=self._options)
        try:
            for ip, port in addresses:
                _add_port(server, f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}", port)
        except BaseException:
            _discard(server)
            raise
        self._server = server
        self.bound_port = int(addresses[0][1])
        return self.bound_port

    def start(self) -> None:
        if self._server is None:
            raise RuntimeError("bind the engine before it is started")
        self._started = True
        self._server.start()

    def stop(self, grace: float) -> None:
        with self._lock:
            server, self._server = self._server, None
            self.stopping = True
        if server is None:
            return
        if not self._started:
            _discard(server)
            return
        self._abandon(streams_only=True)
        if not self._wait(grace):
            self._abandon()
            self._wait(_FLUSH_SECONDS)
        if hold_back(self.bound_port):
            # A call that is new to grpcio when it stops is CANCELLED, which clients do not try again. So what is in
            # there gets out of it first; then GOAWAY says that whatever else was sent has not been begun.
            time.sleep(_QUIET_SECONDS)
            self._wait(_FLUSH_SECONDS)
            server.stop(_FLUSH_SECONDS)
            time.sleep(_GOAWAY_SECONDS)
        hang_up(self.bound_port)
        server.stop(None)
        with self._lock:
            readers = list(self._readers)
        for reader in readers:
            reader.join(_FLUSH_SECONDS)
        self.threads.shutdown()

    def _wait(self, seconds: float) -> bool:
        """Whether the open calls ended within `seconds`."""
        deadline = time.monotonic() + seconds
        while self.open_calls and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self.open_calls

    def _abandon(self, *, streams_only: bool = False) -> None:
        for call in list(self.open_calls):
            if isinstance(call, StreamCall) or not streams_only:
                call.abandon(ServerStopping("the server is stopping"))

    # --- for the calls ----------------------------------------------------------------------------------------------

    def read(self, reader: Callable[[], None], path: str) -> None:
        """Run `reader` on a thread of its own, because grpcio blocks for each request message of a stream."""

        def run() -> None:
            try:
                reader()
            finally:
                with self._lock:
                    self._readers.discard(thread)

        thread = threading.Thread(target=run, name=f"rsrv-rpc-read {path}", daemon=True)
        with self._lock:
            self._readers.add(thread)
        thread.start()

    def handler(self, path: str) -> grpc.RpcMethodHandler[Any, Any]:
        """What grpcio runs for `path`; an unknown one is answered like any other error, with a reason."""
        return self._handlers.get(path) or _unknown(path)

    def _method_handler(self, path: str, route: Route) -> grpc.RpcMethodHandler[Any, Any]:
        handler, message_arrived = route.handler, self.threads.message_arrived

        def unary(body: bytes, context: grpc.ServicerContext) -> bytes:
            message_arrived()
            return UnaryCall(path, body, context, self).serve(handler)

        def server_stream(body: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            message_arrived()
            return self._stream(StreamCall(path, body, context, self), handler)

        def bidi(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            message_arrived()
            return self._stream(StreamCall(path, b"", context, self, messages), handler)

        if route.kind == "unary":
            return grpc.unary_unary_rpc_method_handler(unary)
        if route.kind == "server_stream":
            return grpc.unary_stream_rpc_method_handler(server_stream)
        return grpc.stream_stream_rpc_method_handler(bidi)

    def _stream(self, call: StreamCall, handler: Callable[[Call], None]) -> Iterator[bytes]:
        """Let `call` begin, or refuse it when too many streams are open; one that is refused takes no place."""
        with self._lock:
            full = self._streams >= self._max_streams
            if not full:
                self._streams += 1
        if full:
            return call.serve(self._refuse_stream)
        try:
            return call.serve(handler)
        finally:
            self.threads.afterwards(self._stream_ended)

    def _stream_ended(self) -> None:
        with self._lock:
            self._streams -= 1

    def _refuse_stream(self, call: Call) -> None:
        call.fail(Shed(f"{self._max_streams} streaming calls are open, which is the limit"))


class _Methods(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Finds the handler of a method; messages stay bytes, since no (de)serializer is given."""

    def __init__(self, engine: GrpcioEngine) -> None:
        self._handler = engine.handler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        return self._handler(handler_call_details.method)


def _add_port(server: grpc.Server, where: str, port: int) -> None:
    try:
        bound = server.add_insecure_port(where)
    except RuntimeError:  # somebody was quicker
        raise port_taken("gRPC", where) from None
    if bound != port:
        raise ConfigError(f"gRPC: {where} was wanted and port {bound} was given")


def _discard(server: grpc.Server) -> None:
    """Let go of the ports of a server that was not started, which grpcio does only for one that was."""
    server.start()
    server.stop(None)


def _unknown(path: str) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the kind that fits every client, since it reads no request."""
    status = status_of(Unimplemented(f"unknown method {path}"))

    def refuse(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.set_trailing_metadata(status.trailers)
        context.abort(STATUS[status.code], status.text)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _age(seconds: float, grace_seconds: float) -> list[tuple[str, Any]]:
    def milliseconds(value: float) -> int:
        return min(max(round(value * 1000), 1), _LONGEST_MS)

    return [
        ("grpc.max_connection_age_ms", milliseconds(seconds)),
        ("grpc.max_connection_age_grace_ms", milliseconds(grace_seconds)),
    ]


def _options(max_recv_bytes: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.so_reuseport", 0),  # otherwise a second server would share the port silently
        ("grpc.max_receive_message_length", max_recv_bytes),
        ("grpc.max_send_message_length", -1),  # checked in `Call.send`, which can say what is wrong
        # Beyond its default of 1000 calls that Python has not taken yet, the core resets some without a status, which
        # clients see as CANCELLED; in a burst we answer each, if only with `shed`.
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * _MAX_PENDING_CALLS),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
        # Clients may ping each second, also without a call; the default is to close their connection for that.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        # A client whose machine vanished frees its streams' threads after this, not after TCP's two hours.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
