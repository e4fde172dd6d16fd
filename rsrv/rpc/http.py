"""The HTTP listener: a table of answers on a thread with its own event loop, and a few threads for what takes long.

What is quick is answered on the loop's thread. A route may say that it takes long, or that it answers with a stream.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from rsrv.core.errors import RsrvError
from rsrv.rpc.http_connections import Connections, Patience
from rsrv.rpc.http_messages import HttpAnswer, HttpRequest, HttpRoute, HttpStream, error_answer, refusal
from rsrv.rpc.listen import open_sockets
from rsrv.rpc.threads import CallThreads

__all__ = ["HttpAnswer", "HttpListener", "HttpRequest", "HttpRoute", "HttpRoutes", "HttpStream"]

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
THREADS = 8
"""For handlers that take long, unless the listener is told otherwise."""
_SHUTDOWN_SECONDS = 1.0
_BODY_SECONDS = 30.0
"""How long a client may take to send a body, or to read what a stream sends."""
_QUIET_SECONDS = 60.0
_NO_HTTP = (HttpProcessingError, web.RequestPayloadError)
"""What aiohttp raises for a request, or a body, that cannot be read."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class _QuietAboutClients(logging.LoggerAdapter[logging.Logger]):
    """aiohttp logs each request that is no HTTP as an error, with a traceback; who scans ports would fill the log."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **kwargs: Any) -> None:
        level = logging.DEBUG if isinstance(exc_info, _NO_HTTP) else logging.ERROR
        self.log(level, msg, *args, exc_info=exc_info, **kwargs)


class _ExhaustionOnce:
    """Exception handler of the loop. Without descriptors asyncio cannot accept, and reports it a hundred times a second
    with a traceback; here it is a warning a minute. asyncio tries again by itself."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quiet_until = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _EXHAUSTED:
            loop.default_exception_handler(context)
        elif self._clock() >= self._quiet_until:
            self._quiet_until = self._clock() + _QUIET_SECONDS
            log.warning("http connections wait error=%s hint=%s", error.strerror, "raise the limit: ulimit -n")


class _Server(web.Server):
    """aiohttp's, whose `connections` are looked after."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], connections: Connections):
        super().__init__(handler, handler_cancellation=True, access_log=None, logger=_QuietAboutClients(log))
        self._looked_after = connections

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._looked_after.opened(handler, transport)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._looked_after.closed(handler)


HttpRoutes = Mapping[tuple[str, str], Callable[[], HttpAnswer] | HttpRoute]
"""(method, path) → the answer. HEAD follows GET; a function without arguments does not look at the request."""


class HttpListener:
    """Answers `routes` on ``host:port``. Handlers run on the loop's thread one at a time and must be quick, but for
    those of routes that say otherwise: they have up to `threads` threads. Clients are waited for with `patience`."""

    def __init__(
        self, host: str, port: int, routes: HttpRoutes, *, threads: int = THREADS, patience: Patience | None = None
    ) -> None:
        self._host = host
        self._port = port
        self._routes = dict(routes)
        self._methods: dict[str, set[str]] = {}
        for (method, path), route in self._routes.items():
            followed = method == "GET" and not (isinstance(route, HttpRoute) and route.where == "stream")
            self._methods.setdefault(path, set()).update({method, "HEAD"} if followed else {method})
        # First parts of paths below which everything is JSON, errors too.
        self._json = [path.split("/")[1:2] for (_, path), route in routes.items() if isinstance(route, HttpRoute)]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: web.ServerRunner | None = None
        self._thread: threading.Thread | None = None
        self._sockets: list[socket.socket] = []
        self._pool = CallThreads(threads, name="rsrv-http-call")
        self._patience = patience or Patience()
        self._connections = Connections(self._patience, self._patience.connections + threads)
        self._look: asyncio.TimerHandle | None = None
        self._streams: set[asyncio.Event] = set()
        self._closing = False

    def bind(self) -> int:
        """Take the port and return it. Raises PortTaken when somebody has it, ConfigError when it cannot be used."""
        self._sockets = open_sockets(self._host, self._port, what="HTTP")
        return int(self._sockets[0].getsockname()[1])

    def start(self) -> None:
        """Begin to answer."""
        if not self._sockets:
            raise RuntimeError("bind the listener before it is started")
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_ExhaustionOnce())
        self._thread = threading.Thread(target=self._loop.run_forever, name="rsrv-http", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()

    def stop(self) -> None:
        """Close the port and every connection; an answer that is being written gets a second for that. Idempotent.

        Streams end at once. A handler that still runs keeps its thread, and its answer is dropped.
        """
        thread, self._thread = self._thread, None
        loop, runner = self._loop, self._runner
        if thread is not None and loop is not None and runner is not None:
            asyncio.run_coroutine_threadsafe(self._close(runner), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
            self._pool.shutdown()
        for listener in self._sockets:
            listener.close()
        self._sockets = []

    async def _open(self) -> None:
        self._runner = web.ServerRunner(_Server(self._handle, self._connections), shutdown_timeout=_SHUTDOWN_SECONDS)
        await self._runner.setup()
        for listener in self._sockets:
            await web.SockSite(self._runner, listener).start()
        self._look_again()

    def _look_again(self) -> None:
        self._connections.look()
        self._look = asyncio.get_running_loop().call_later(self._patience.look_seconds, self._look_again)

    async def _close(self, runner: web.ServerRunner) -> None:
        self._closing = True
        if self._look is not None:
            self._look.cancel()
        for woken in self._streams:
            woken.set()
        await runner.cleanup()
        self._connections.abort()  # of clients that do not read; the others are closed

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        with self._connections.works(request.protocol):
            answer = await self._answer(request)
        if isinstance(answer, web.StreamResponse):
            return answer
        body = answer.body.encode() if isinstance(answer.body, str) else answer.body
        headers = {"Content-Type": answer.content_type, "Server": "rsrv", **answer.headers}
        return web.Response(status=answer.status, body=body, headers=headers)

    async def _answer(self, request: web.BaseRequest) -> HttpAnswer | web.StreamResponse:
        method, path = request.method, request.path
        methods = self._methods.get(path)
        if methods is None:
            if path.split("/")[1:2] in self._json:
                return refusal(HTTPStatus.NOT_FOUND, "NOT_FOUND", "unknown_path", f"there is nothing at {path!r}")
            return HttpAnswer(HTTPStatus.NOT_FOUND, "not found")
        if method not in methods:
            allowed = {"Allow": ", ".join(sorted(methods))}
            if path.split("/")[1:2] in self._json:
                message = f"{path} has no {method}; wanted {allowed['Allow']}"
                refused = HTTPStatus.METHOD_NOT_ALLOWED
                return refusal(refused, "UNIMPLEMENTED", "method", message, headers=allowed)
            return HttpAnswer(HTTPStatus.METHOD_NOT_ALLOWED, "method not allowed", headers=allowed)
        route = self._routes.get((method, path)) or self._routes["GET", path]
        try:
            return await self._routed(request, route) if isinstance(route, HttpRoute) else route()
        except RsrvError as error:
            return error_answer(error)
        except Exception:
            log.exception("unexpected error path=%s", path)
            if isinstance(route, HttpRoute):
                return refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "INTERNAL", "internal", "internal error")
            return HttpAnswer(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error")

    # --- routes that look at the request --------------------------------------------------------------------------

    async def _routed(self, request: web.BaseRequest, route: HttpRoute) -> HttpAnswer | web.StreamResponse:
        gone = threading.Event()
        message = HttpRequest(
            method=request.method, path=request.path, query=request.query, headers=request.headers, gone=gone.is_set
        )
        # Before the body is read, so that it costs nothing to refuse somebody.
        route.guard(message)
        if request.method not in ("GET", "HEAD"):
            with self._connections.waits(request.protocol):
                body = await _body(request)
            if isinstance(body, HttpAnswer):
                return body
            message = message.with_body(body)
        if route.where == "loop":
            answer = route.handler(message)
        else:
            try:
                answer = await self._elsewhere(route.handler, message)
            except asyncio.CancelledError:
                gone.set()
                raise
        return answer if isinstance(answer, HttpAnswer) else await self._stream(request, answer)

    async def _elsewhere(
        self, handler: Callable[[HttpRequest], HttpAnswer | HttpStream], message: HttpRequest
    ) -> HttpAnswer | HttpStream:
        """Run a handler on one of the threads. When the client goes meanwhile it runs on, and a stream is closed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[HttpAnswer | HttpStream] = loop.create_future()

        def deliver(answer: HttpAnswer | HttpStream | None, error: BaseException | None) -> None:
            if future.cancelled():
                _discard(answer)
            elif error is not None:
                future.set_exception(error)
            elif answer is not None:
                future.set_result(answer)

        def run() -> None:
            self._pool.message_arrived()
            answer: HttpAnswer | HttpStream | None = None
            error: BaseException | None = None
            try:
                answer = handler(message)
            except BaseException as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(deliver, answer, error)
            except RuntimeError:  # the listener was stopped meanwhile
                _discard(answer)

        self._pool.submit(run)
        try:
            return await future
        except asyncio.CancelledError:
            # The client may leave in the very turn of the loop in which the answer comes; then nobody else has it.
            if future.done() and not future.cancelled() and future.exception() is None:
                _discard(future.result())
            raise

    async def _stream(self, request: web.BaseRequest, stream: HttpStream) -> web.StreamResponse:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the listener was stopped meanwhile
                loop.call_soon_threadsafe(woken.set)

        headers = {"Content-Type": stream.content_type, "Server": "rsrv", "Cache-Control": "no-store"}
        response = web.StreamResponse(headers=headers)
        self._streams.add(woken)
        try:
            stream.start(wake)
            await response.prepare(request)
            while not self._closing:
                woken.clear()
                text = stream.read()
                if text is None:
                    break
                if not text:
                    try:
                        # Not `wait_for`, which swallows that the client left while what it waits for ends.
                        async with asyncio.timeout(stream.heartbeat_seconds):
                            await woken.wait()
                        continue
                    except TimeoutError:
                        text = stream.heartbeat
                async with asyncio.timeout(_BODY_SECONDS):
                    await response.write(text)
        except (ConnectionError, TimeoutError):
            log.debug("stream ended path=%s why=the client is gone or does not read", request.path)
        finally:
            self._streams.discard(woken)
            stream.close()
        return response


async def _let_it_send(request: web.BaseRequest) -> None:
    """Tell a client that waits for leave before it sends its body, as curl does with a large one."""
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # aiohttp takes what was written for the begin of the answer


def _discard(answer: HttpAnswer | HttpStream | None) -> None:
    """Let go of an answer that nobody reads."""
    if answer is not None and not isinstance(answer, HttpAnswer):
        answer.close()


async def _body(request: web.BaseRequest) -> bytes | HttpAnswer:
    """The body, or what is wrong with it. What pages of other origins can send without asking is refused: all that is
    not JSON."""
    too_large = refusal(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "INVALID_ARGUMENT",
        "too_large",
        f"the body is too large; at most {MAX_BODY_BYTES} bytes are taken",
    )
    if (request.content_length or 0) > MAX_BODY_BYTES:
        return too_large
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11:
                await _let_it_send(request)
            body = await request.read()
    except web.HTTPRequestEntityTooLarge:
        return too_large
    except TimeoutError:
        message = f"the body did not come within {_BODY_SECONDS:g} s"
        return refusal(HTTPStatus.REQUEST_TIMEOUT, "DEADLINE_EXCEEDED", "body_timeout", message)
    except _NO_HTTP as error:  # not what its headers say: compressed, chunked
        message = f"the body cannot be read: {' '.join(str(error).split())}"
        return refusal(HTTPStatus.BAD_REQUEST, "INVALID_ARGUMENT", "invalid", message)
    if body and request.content_type != "application/json":
        message = f"the body is {request.content_type}; wanted application/json"
        hint = "curl --json sends it so"
        return refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "INVALID_ARGUMENT", "not_json", message, hint=hint)
    return body
