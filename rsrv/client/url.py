"""Where a server is: the URL forms that people write, parsed into what grpcio dials."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rsrv.core.errors import UsageError

_SCHEMES = {"": False, "grpc": False, "http": False, "grpcs": True, "https": True}
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s:/\[\]@?#]+):(?P<port>[0-9]{1,5})/?")


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL: `target` for grpcio, whether it asks for TLS, and whether it stays on this machine."""

    target: str
    secure: bool
    local: bool


def parse_url(url: str) -> Address:
    """Parse ``[grpc|http|grpcs|https://]host:port``, ``[::1]:8001`` or ``unix:path``; raises UsageError."""
    if url.startswith("unix:") and url not in ("unix:", "unix://"):
        return Address(url, secure=False, local=True)
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
    local = host in ("localhost", "[::1]") or host.startswith("127.")
    return Address(f"{host}:{port}", _SCHEMES[scheme.lower()], local)


def _invalid(url: str, why: str) -> UsageError:
    return UsageError(
        f"invalid gRPC URL {url!r}: {why}", hint="for example 127.0.0.1:8001, grpcs://host:443, [::1]:8001"
    )
