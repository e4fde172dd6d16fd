"""Ports of this machine that stay ours while nobody listens on them."""

from __future__ import annotations

import socket


def held_port(port: int = 0) -> socket.socket:
    """A socket that holds a port of 127.0.0.1, one that the system chooses when `port` is 0, until it is closed.

    Nobody is given the port by chance meanwhile, connections to it are refused, and who asks for it by its number, with
    ``SO_REUSEADDR``, may listen on it, as grpcio and rsrv do.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", port))
    return held
