"""The HTTP listener: a table of quick, synchronous answers on a thread with its own event loop."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rsrv.rpc.listen import open_sockets

log = logging.getLogger(__name__)

TEXT = "text/plain; charset=utf-8"
_SHUTDOWN_SECONDS = 1.0
_QUIET_SECONDS = 60.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A reply; text is sent as UTF-8 and `content_type` verbatim."""

    status: int = 200
    body: bytes | str = b""
    content_type: str = TEXT
    headers: Mapping[str, str] = field(default_factory=dict)


class _QuietAboutClients(logging.LoggerAdapter[logging.Logger]):
    """aiohttp logs each request that is no HTTP as an error, with a traceback; who scans ports would fill the log."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **kwargs: Any) -> None:
        level = logging.DEBUG if isinstance(exc_info, HttpProcessingError) else logging.ERROR
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


HttpRoutes = Mapping[tuple[str, str], Callable[[], HttpAnswer]]
"""(method, path) → the answer. HEAD follows GET; a query string is not looked at."""


class HttpListener:
    """Answers `routes` on ``host:port``. Handlers run on the loop's thread one at a time and must be quick."""

    def __init__(self, host: str, port: int, routes: HttpRoutes) -> None:
        self._host = host
        self._port = port
        self._routes = dict(routes)
        self._methods: dict[str, set[str]] = {}
        for method, path in self._routes:
            self._methods.setdefault(path, set()).update({method, "HEAD"} if method == "GET" else {method})
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: web.ServerRunner | None = None
        self._thread: threading.Thread | None = None
        self._sockets: list[socket.socket] = []

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
        """Close the port and every connection; an answer that is being written gets a second for that. Idempotent."""
        thread, self._thread = self._thread, None
        loop, runner = self._loop, self._runner
        if thread is not None and loop is not None and runner is not None:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
        for listener in self._sockets:
            listener.close()
        self._sockets = []

    async def _open(self) -> None:
        server = web.Server(self._handle, access_log=None, logger=_QuietAboutClients(log))
        self._runner = web.ServerRunner(server, shutdown_timeout=_SHUTDOWN_SECONDS)
        await self._runner.setup()
        for listener in self._sockets:
            await web.SockSite(self._runner, listener).start()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        answer = self._answer(request.method, request.path)
        body = answer.body.encode() if isinstance(answer.body, str) else answer.body
        headers = {"Content-Type": answer.content_type, "Server": "rsrv", **answer.headers}
        return web.Response(status=answer.status, body=body, headers=headers)

    def _answer(self, method: str, path: str) -> HttpAnswer:
        methods = self._methods.get(path)
        if methods is None:
            return HttpAnswer(HTTPStatus.NOT_FOUND, "not found")
        if method not in methods:
            allowed = ", ".join(sorted(methods))
            return HttpAnswer(HTTPStatus.METHOD_NOT_ALLOWED, "method not allowed", headers={"Allow": allowed})
        handler = self._routes.get((method, path)) or self._routes["GET", path]
        try:
            return handler()
        except Exception:
            log.exception("unexpected error path=%s", path)
            return HttpAnswer(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error")
