"""`Call` on grpcio's sync server: each open call holds a pool thread, which runs what is deferred to it."""

from __future__ import annotations

import base64
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

import grpc

from rsrv.core.errors import Code, RsrvError, ServerStopping
from rsrv.rpc.call import Buffer, Call
from rsrv.rpc.status import log_unexpected, status_of

if TYPE_CHECKING:
    from rsrv.rpc.grpcio_engine import GrpcioEngine

log = logging.getLogger(__name__)

STATUS = {Code(status.value[0]): status for status in grpc.StatusCode}
"""Our code → grpcio's."""

_NO_DEADLINE_SECONDS = 1e9  # grpcio reports about 9.2e18 s when the client set none
_NO_TRAILERS: Mapping[str, str] = {}


class GrpcioCall(ABC):
    """What unary and streaming calls share: the thread's queue of tasks, and the one end of a call.

    The queue ends with None, which is put under the lock together with the flag that the call is over; so whatever
    `defer` accepted stands before it and runs.
    """

    __slots__ = (
        "_cancelled",
        "_concluded",
        "_context",
        "_deadline_ns",
        "_engine",
        "_error",
        "_lock",
        "_on_cancel",
        "_on_end",
        "_over",
        "_tasks",
        "_trailers",
        "body",
        "path",
    )

    def __init__(self, path: str, body: bytes, context: grpc.ServicerContext, engine: GrpcioEngine) -> None:
        self.path = path
        self.body = body
        self._context = context
        self._engine = engine
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._over = False
        self._cancelled = False
        self._concluded = False
        self._error: BaseException | None = None
        self._trailers = _NO_TRAILERS
        self._on_cancel: list[Callable[[], object]] | None = None
        self._on_end: list[Callable[[], object]] | None = None
        self._deadline_ns: int | None = None

    # --- what came with the request -------------------------------------------------------------------------------

    @property
    def metadata(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for key, value in self._context.invocation_metadata() or ():
            text = base64.b64encode(value).decode() if isinstance(value, bytes) else value
            found[key] = f"{found[key]},{text}" if key in found else text
        return found

    @property
    def deadline_ns(self) -> int:
        if self._deadline_ns is None:
            remaining = self._context.time_remaining()
            none = remaining is None or remaining > _NO_DEADLINE_SECONDS
            self._deadline_ns = 0 if none else time.monotonic_ns() + int(remaining * 1e9)
        return self._deadline_ns

    @property
    def peer(self) -> str:
        return str(self._context.peer())

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @abstractmethod
    def send(self, buffers: Sequence[Buffer]) -> None:
        """See `Call.send`."""

    @abstractmethod
    def on_writable(self, fn: Callable[[], object]) -> None:
        """See `Call.on_writable`."""

    @abstractmethod
    def on_message(self, fn: Callable[[bytes | None], object]) -> None:
        """See `Call.on_message`."""

    # --- the end --------------------------------------------------------------------------------------------------

    def finish(self, trailers: Mapping[str, str] = _NO_TRAILERS) -> None:
        self._end(None, trailers)

    def fail(self, error: BaseException) -> None:
        log_unexpected(error, self.path)
        self._end(error, _NO_TRAILERS)

    def abandon(self, error: BaseException | None) -> None:
        """End the call because nobody waits for the answer, or, with an error, because the engine stops."""
        with self._lock:
            if not self._over:
                self._over = self._cancelled = True
                self._error = error
                self._tasks.put(None)

    def _end(self, error: BaseException | None, trailers: Mapping[str, str]) -> None:
        with self._lock:
            if not self._over:
                self._over = True
                self._error = error
                self._trailers = trailers
                self._tasks.put(None)

    # --- functions that run later -----------------------------------------------------------------------------------

    def defer(self, fn: Callable[[], object]) -> bool:
        with self._lock:
            if self._over:
                return False
            self._tasks.put(fn)
            return True

    def on_cancel(self, fn: Callable[[], object]) -> None:
        with self._lock:
            if not self._cancelled:
                if self._on_cancel is None:
                    self._on_cancel = []
                self._on_cancel.append(fn)
                return
        fn()

    def on_end(self, fn: Callable[[], object]) -> None:
        with self._lock:
            if not self._concluded:
                if self._on_end is None:
                    self._on_end = []
                self._on_end.append(fn)
                return
        fn()

    # --- on the call's own thread -----------------------------------------------------------------------------------

    def _handle(self, handler: Callable[[Call], None]) -> None:
        """Run the handler. The call counts as open until grpcio says that the client has its status, or is gone."""
        self._engine.open_calls.add(self)
        if self._engine.stopping:  # looked at after the call was added, so `stop` misses none that goes on from here
            self._engine.open_calls.discard(self)
            self.fail(ServerStopping("the server is stopping"))
            return
        if not self._context.add_callback(self._gone):
            self._gone()
        try:
            handler(self)
        except BaseException as error:
            self.fail(error)

    def _gone(self) -> None:
        self.abandon(None)
        self._engine.open_calls.discard(self)

    def _run(self, fn: Callable[[], object]) -> None:
        try:
            fn()
        except BaseException as error:
            self.fail(error)

    def _conclude(self) -> None:
        """What is left to do once the queue of tasks has been worked off."""
        with self._lock:
            self._concluded = True
            on_cancel, self._on_cancel = self._on_cancel if self._cancelled else None, None
            on_end = self._on_end
        for fn in on_cancel or ():
            self._run(fn)
        if on_end is not None:
            self._engine.threads.afterwards(lambda: _run_all(on_end, self.path))

    def _joined(self, buffers: Sequence[Buffer]) -> bytes | None:
        """One message as bytes, which is all that grpcio takes; None after failing the call for its size."""
        first = buffers[0] if len(buffers) == 1 else None
        message = first if isinstance(first, bytes) else b"".join(buffers)
        limit = self._engine.max_send_bytes
        if len(message) > limit:
            self.fail(
                RsrvError(
                    f"SERVER: Sent message larger than max ({len(message)} vs. {limit})",
                    hint="grpc.max_send_msg_bytes of the server is the limit",
                    code=Code.RESOURCE_EXHAUSTED,
                    reason="message_too_large",
                )
            )
            return None
        return message

    def _set_trailers(self) -> None:
        if self._trailers:
            self._context.set_trailing_metadata(tuple(self._trailers.items()))

    def _abort(self, error: BaseException) -> None:
        """Leave through grpcio with the status of `error`; it raises an exception that grpcio catches."""
        status = status_of(error)
        self._context.set_trailing_metadata(status.trailers)
        self._context.abort(STATUS[status.code], status.text)


class UnaryCall(GrpcioCall):
    """One message each way."""

    __slots__ = ("_response",)

    def __init__(self, path: str, body: bytes, context: grpc.ServicerContext, engine: GrpcioEngine) -> None:
        super().__init__(path, body, context, engine)
        self._response: bytes | None = None

    def send(self, buffers: Sequence[Buffer]) -> None:
        message = self._joined(buffers)
        if message is not None and not self._over:
            if self._response is not None:
                raise RuntimeError(f"{self.path}: a unary call sends one message, and this is the second")
            self._response = message

    def on_writable(self, fn: Callable[[], object]) -> None:
        """Unary calls send one message and have nothing to wait for."""

    def on_message(self, fn: Callable[[bytes | None], object]) -> None:
        """Unary calls have their one message in `body`."""

    def serve(self, handler: Callable[[Call], None]) -> bytes:
        """Run the call on this thread, a thread of the pool, and return the reply for grpcio to send."""
        self._handle(handler)
        next_task = self._tasks.get
        while (task := next_task()) is not None:
            self._run(task)
        self._conclude()
        if self._error is None and self._response is None and not self._cancelled:
            log.error("finished without a message path=%s", self.path)
            self._error = RsrvError("internal error")
        if self._error is not None:
            self._abort(self._error)
        self._set_trailers()
        return self._response or b""


class StreamCall(GrpcioCall):
    """Many messages to the client, and for the kind ``bidi`` many from it. An iterator, as grpcio wants responses."""

    __slots__ = ("_concluding", "_messages", "_on_message", "_on_writable", "_outgoing", "_unreported")

    def __init__(
        self,
        path: str,
        body: bytes,
        context: grpc.ServicerContext,
        engine: GrpcioEngine,
        messages: Iterator[bytes] | None = None,
    ) -> None:
        super().__init__(path, body, context, engine)
        self._messages = messages
        self._on_message: Callable[[bytes | None], object] | None = None
        self._on_writable: list[Callable[[], object]] = []
        self._outgoing: deque[bytes] = deque()
        self._unreported = False
        self._concluding = False

    def send(self, buffers: Sequence[Buffer]) -> None:
        message = self._joined(buffers)
        if message is None:
            return
        with self._lock:
            if not self._over:
                self._outgoing.append(message)
                self._unreported = True
                self._tasks.put(_wake)

    def on_writable(self, fn: Callable[[], object]) -> None:
        self._on_writable.append(fn)

    def on_message(self, fn: Callable[[bytes | None], object]) -> None:
        self._on_message = fn

    def serve(self, handler: Callable[[Call], None]) -> Iterator[bytes]:
        """Start the call on this thread, a thread of the pool, and return the messages for grpcio to send."""
        # grpcio drops the iterator when the client is gone, so the end must not depend on `__next__`.
        self._engine.threads.afterwards(self._finally)
        self._handle(handler)
        if self._messages is not None and not self._over:
            self._engine.read(self._read, self.path)
        return self

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        while True:
            if self._outgoing:
                return self._outgoing.popleft()
            if self._concluding:
                break
            if self._unreported:
                self._unreported = False
                for fn in self._on_writable:
                    self._run(fn)
                continue
            task = self._tasks.get()
            if task is None:
                self._concluding = True
            else:
                self._run(task)
        if self._error is not None:
            self._abort(self._error)
        self._set_trailers()
        raise StopIteration

    def _finally(self) -> None:
        """Work off what is left, after grpcio has let the call go."""
        if not self._concluding:
            self.abandon(None)
            while (task := self._tasks.get()) is not None:
                self._run(task)
            self._concluding = True
        self._conclude()

    def _read(self) -> None:
        """On a thread of its own: pass on the request messages, each when the one before has been handled."""
        try:
            for message in self._messages or ():
                if not self._deliver(message):
                    return
        except grpc.RpcError:
            return  # the client is gone, and the call hears of that itself
        self._deliver(None)

    def _deliver(self, message: bytes | None) -> bool:
        handled = threading.Event()

        def handle() -> None:
            try:
                if self._on_message is not None:
                    self._on_message(message)
            finally:
                handled.set()

        if not self.defer(handle):
            return False
        handled.wait()
        return True


def _wake() -> None:
    """Nothing but a reason to look at the outgoing messages."""


def _run_all(functions: Sequence[Callable[[], object]], path: str) -> None:
    for fn in functions:
        try:
            fn()
        except BaseException as error:
            log_unexpected(error, path)
