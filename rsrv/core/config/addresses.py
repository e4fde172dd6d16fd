"""``host:port`` as people write it in a configuration: split, checked, and the text that a channel takes."""

from __future__ import annotations

import re
from typing import NamedTuple

_MAX_HOST = 253
"""Characters of the longest name that DNS has."""
MAX_WORKER_NAME = 128


class HostPort(NamedTuple):
    """A host, without the brackets of an IPv6 address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_host_port(text: str, *, any_port: bool = False) -> HostPort:
    """Split at the last colon. Raises ValueError that says what is wrong; port 0 passes only with `any_port`.

    An IPv6 address must be in brackets: without them nobody can tell where ``::1:8001`` ends.
    """
    host, colon, port = text.strip().rpartition(":")
    lowest = 0 if any_port else 1
    text = _shortened(text)
    if "://" in text:
        raise ValueError(f"{text!r} is not accepted; wanted host:port, without {text.partition('://')[0]}://")
    if not colon or not host:
        raise ValueError(f"{text!r} is not accepted; wanted host:port")
    if not re.fullmatch(r"[0-9]{1,5}", port) or not lowest <= int(port) <= 65535:
        raise ValueError(f"{text!r} is not accepted; wanted host:port with a port of {lowest}…65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            raise ValueError(f"{text!r} is not accepted; only an IPv6 address is written in brackets")
    elif ":" in host:
        meant = f"[{_shortened(host)}]:{port}"
        raise ValueError(f"{text!r} is not accepted; an IPv6 address is written in brackets: {meant}")
    if not host or not host.isprintable() or len(host) > _MAX_HOST or re.search(r"[\s\[\]/@,]", host):
        raise ValueError(f"{text!r} is not accepted; wanted host:port")
    return HostPort(host, int(port))


def parse_worker_name(text: str) -> str:
    """What metrics and logs call a worker, without blanks around it. Raises ValueError that says what is wrong."""
    name = text.strip()
    if not name or not name.isprintable() or len(name) > MAX_WORKER_NAME:
        raise ValueError(
            f"{_shortened(text)!r} is not accepted; wanted the name of a worker: 1 to {MAX_WORKER_NAME} characters, "
            "all of which can be printed"
        )
    return name


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"
