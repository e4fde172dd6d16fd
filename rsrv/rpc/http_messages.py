"""What handlers of the HTTP listener get and give: requests, answers, streams, routes, and errors as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from rsrv.core.errors import Code, InvalidRequest, Removing, RsrvError, WaitTimeout

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A reply; text is sent as UTF-8 and `content_type` verbatim."""

    status: int = 200
    body: bytes | str = b""
    content_type: str = TEXT
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request.

    Attributes:
        query: the parameters of the query string; `single` looks at them.
        headers: by name, whatever the case.
        body: at most 1 MiB of JSON, not parsed; empty with GET.
        gone: whether the client went away.
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    gone: Callable[[], bool] = lambda: False

    def with_body(self, body: bytes) -> HttpRequest:
        return replace(self, body=body)

    def parameters(self) -> dict[str, str]:
        """The query string. Raises InvalidRequest when a name is there twice."""
        found: dict[str, str] = {}
        for name, value in self.query.items():
            if name in found:
                raise InvalidRequest(f"the query has {name!r} twice")
            found[name] = value
        return found


class HttpStream(Protocol):
    """An answer that goes on. All but `read`, on the loop's thread, may be called from any thread."""

    content_type: str
    heartbeat: bytes
    """Sent when nothing else was for `heartbeat_seconds`, so that both ends learn of a connection that broke."""
    heartbeat_seconds: float

    def start(self, wake: Callable[[], None]) -> None:
        """`wake` is to be called when there may be something to read."""

    def read(self) -> bytes | None:
        """What there is now; empty when there is nothing, None at the end. Must be quick."""

    def close(self) -> None:
        """The client is gone, or everything was read. Called once or more."""


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """A handler that looks at the request.

    Attributes:
        handler: gives the answer. A RsrvError that it raises is answered as JSON.
        where: `loop` = quick, on the loop's thread; `thread` = it may take long; `stream` = it gives a stream.
        guard: raises what a request is refused with before its body is read.
    """

    handler: Callable[[HttpRequest], HttpAnswer | HttpStream]
    where: Literal["loop", "thread", "stream"] = "loop"
    guard: Callable[[HttpRequest], None] = lambda request: None


_STATUS = {Code.FAILED_PRECONDITION: 409}
"""Where what administrators are told differs from `Code.http_status` (spec worker 11.1)."""


def http_status(error: RsrvError) -> int:
    """The HTTP status of an error of an administrative call."""
    if isinstance(error, Removing):
        return 410
    if isinstance(error, WaitTimeout):
        return 408
    return _STATUS.get(error.code, error.code.http_status)


def error_answer(error: RsrvError, **more: Any) -> HttpAnswer:
    """An error as JSON; `more` goes beside ``error`` into the body."""
    headers = {"WWW-Authenticate": "Bearer"} if error.code is Code.UNAUTHENTICATED else {}
    return refusal(
        http_status(error), error.code.name, error.reason, error.message, hint=error.hint, headers=headers, **more
    )


def refusal(
    status: int,
    code: str,
    reason: str,
    message: str,
    *,
    hint: str | None = None,
    headers: Mapping[str, str] | None = None,
    **more: Any,
) -> HttpAnswer:
    """``{"error": {"code", "reason", "message", "hint"?}, …}``."""
    error = {"code": code, "reason": reason, "message": message}
    if hint is not None:
        error["hint"] = hint
    return json_answer(status, {"error": error, **more}, headers=headers)


def json_answer(status: int, body: Any, *, headers: Mapping[str, str] | None = None) -> HttpAnswer:
    return HttpAnswer(status, json.dumps(body).encode() + b"\n", JSON, headers or {})
