"""The status document of a worker, over its HTTP port."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from rsrv.core.errors import InvalidResponse, ServerUnreachable, UsageError

PATH = "/v1/status"
_HINT = "wanted the HTTP port of a worker, which is 8002 unless endpoints.http_port says otherwise"


def fetch_status(url: str, timeout: float = 5.0) -> dict[str, Any]:
    """What ``GET /v1/status`` answers; `docs/status.md` describes it.

    `url` is ``[http[s]://]host[:port]``, port 8002 unless given. Raises UsageError for another form, ServerUnreachable
    when nothing answers HTTP there, InvalidResponse when something else than a worker does.
    """
    secure, host, port = _parse(url)
    connection = (HTTPSConnection if secure else HTTPConnection)(host, port, timeout=timeout)
    try:
        connection.request("GET", PATH, headers={"Accept": "application/json"})
        answer = connection.getresponse()
        status, body = answer.status, answer.read()
    except HTTPException as error:
        what = type(error).__name__
        raise ServerUnreachable(f"{host}:{port} does not speak HTTP ({what})", hint=_HINT) from error
    except OSError as error:
        raise ServerUnreachable(f"{host}:{port} cannot be reached: {error.strerror or error}", hint=_HINT) from error
    finally:
        connection.close()
    if status != 200:
        raise InvalidResponse(f"{host}:{port} answered {PATH} with HTTP status {status}", hint=_HINT)
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise InvalidResponse(
            f"{host}:{port} answered {PATH} with {len(body)} bytes that are no JSON object", hint=_HINT
        )
    return document


def _parse(url: str) -> tuple[bool, str, int]:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.path not in ("", "/"):
        raise UsageError(f"--url {url!r}: wanted [http[s]://]host[:port]", hint=_HINT)
    return parts.scheme == "https", parts.hostname, port or 8002
