"""Where a server is: the URL forms that people write, parsed into what grpcio dials."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rsrv.core.errors import UsageError

_SCHEMES = {"": False, "grpc": False, "http": False, "grpcs": True, "https": True}
_ADDRESS = re.compile(
    r"(?P<host>\[(?P<v6>[0-9A-Fa-f:.]+)(?:%[\w.-]+)?\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})/?", re.ASCII
)
_NUMBERS = re.compile(r"[0-9]+(\.[0-9]+)*", re.ASCII)
_MAX_SOCKET_PATH = 107
"""Bytes of a socket's path on Linux."""


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL: `target` for grpcio, whether it asks for TLS, and whether it stays on this machine."""

    target: str
    secure: bool
    local: bool


def parse_url(url: str) -> Address:
    """Parse ``[grpc|http|grpcs|https://]host:port``, ``[::1]:8001`` or ``unix:path``; raises UsageError."""
    if not isinstance(url, str):
        raise UsageError(f"invalid gRPC URL {url!r}: wanted text, not {type(url).__name__}")
    if url.startswith("unix:"):
        return Address("unix:" + _socket_path(url), secure=False, local=True)
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    if scheme.lower() not in _SCHEMES or (separator and not scheme):
        raise _invalid(url, f"scheme {scheme!r} is not one of grpc, grpcs, http, https")
    match = _ADDRESS.fullmatch(rest)
    if match is None:
        raise _invalid(url, "wanted host:port")
    host, port = match["host"], int(match["port"])
    if not 1 <= port <= 65535:
        raise _invalid(url, f"port {port} is not in 1..65535")
    return Address(f"{host}:{port}", _SCHEMES[scheme.lower()], _is_local(url, host, match["v6"]))


def host_port(host: str, port: int) -> str:
    """The URL of `port` at `host`, which may be an IPv6 address with or without its brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _is_local(url: str, host: str, v6: str | None) -> bool:
    """Whether `host` is this machine by its very name; raises UsageError for what looks like an address but is none."""
    import socket

    try:
        if v6 is not None:
            return socket.inet_pton(socket.AF_INET6, v6) == socket.inet_pton(socket.AF_INET6, "::1")
        if _NUMBERS.fullmatch(host):
            return socket.inet_pton(socket.AF_INET, host)[0] == 127
    except OSError:
        raise _invalid(url, f"{host} is not an IP address") from None
    return host.lower() == "localhost"


def _socket_path(url: str) -> str:
    """What follows ``unix:`` for grpcio, which takes it for a piece of a URI: our path is a plain one."""
    path = url.removeprefix("unix:")
    if path.startswith("//"):
        path = path.removeprefix("//")
        if not path.startswith("/"):
            raise _invalid(url, "wanted unix:path or unix:///absolute/path")
        slashes = "//"
    else:
        slashes = ""
    if not path:
        raise _invalid(url, "the socket's path is empty")
    if "\0" in path or "," in path:
        raise _invalid(url, "gRPC cannot dial a path with a comma or a zero byte")
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise _invalid(url, "the socket's path is not valid UTF-8") from None
    if size > _MAX_SOCKET_PATH:
        raise _invalid(url, f"the socket's path has {size} bytes; the system takes {_MAX_SOCKET_PATH}")
    from urllib.parse import quote

    return slashes + quote(path)


def _invalid(url: str, why: str) -> UsageError:
    return UsageError(
        f"invalid gRPC URL {url!r}: {why}", hint="for example 127.0.0.1:8001, grpcs://host:443, [::1]:8001"
    )
