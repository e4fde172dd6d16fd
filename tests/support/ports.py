"""Ports of 127.0.0.1 that nobody else is given by chance: for servers that come back or come late, and for silence."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_SYSTEMS_OWN = Path("/proc/sys/net/ipv4/ip_local_port_range")


def held_port(port: int = 0) -> socket.socket:
    """A socket that holds a port of 127.0.0.1, one that the system chooses when `port` is 0, until it is closed.

    Nobody is given the port by chance meanwhile, connections to it are refused, and who asks for it by its number, with
    ``SO_REUSEADDR``, may listen on it, as grpcio and rsrv do.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", port))
    return held


def lasting_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 outside of the range from which the system gives some to all who ask for any: there, other
    tests take hundreds a second, so that one that was free may be gone when its server has come up."""
    low, high = map(int, _SYSTEMS_OWN.read_text().split())
    outside = [*range(max(low - 10_000, 1024), low), *range(high + 1, 1 << 16)]
    found: list[int] = []
    for port in random.SystemRandom().sample(outside, len(outside)):
        if len(found) == count:
            break
        try:
            with socket.create_server(("127.0.0.1", port)):
                found.append(port)
        except OSError:  # somebody has it
            continue
    assert len(found) == count, f"{count} ports are wanted and {len(found)} are free beside {low}-{high}"
    return found
