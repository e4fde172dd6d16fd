"""Taking a TCP port: precise errors for the ways in which that fails, the same for every kind of listener."""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import socket
import stat
import struct
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from rsrv.core.errors import ConfigError, PortTaken

_BACKLOG = 512
_SO_ATTACH_FILTER = 26  # not in Python's socket module
_SO_DETACH_FILTER = 27
_NO_SUCH_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


@dataclass(frozen=True, slots=True)
class Address:
    """A numeric address of a host; `sockaddr` is what sockets take, with the port left out."""

    family: socket.AddressFamily
    ip: str
    scope: int = 0

    def text(self, port: int) -> str:
        """``127.0.0.1:8001`` or ``[::1]:8001``."""
        return f"[{self.ip}]:{port}" if self.family == socket.AF_INET6 else f"{self.ip}:{port}"

    def sockaddr(self, port: int) -> tuple[str, int] | tuple[str, int, int, int]:
        return (self.ip, port, 0, self.scope) if self.family == socket.AF_INET6 else (self.ip, port)


def resolve(host: str, *, what: str) -> list[Address]:
    """The addresses to listen on for `host`. Raises ConfigError for a name that means none."""
    name = host.removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{what}: the host {host!r} cannot be resolved: {reason}") from None
    addresses = []
    for family, _, _, _, sockaddr in found:
        scope = sockaddr[3] if len(sockaddr) == 4 else 0
        address = Address(family, str(sockaddr[0]), int(scope))
        if address not in addresses:
            addresses.append(address)
    return addresses


def is_loopback(host: str) -> bool:
    """Whether a host, a name or a numeric address, is this machine's own loopback; no name is looked up."""
    name = host.removeprefix("[").removesuffix("]").rstrip(".").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def open_sockets(host: str, port: int, *, what: str) -> list[socket.socket]:
    """Listening sockets on every address of `host`, all with one port, which the system chooses when `port` is 0.

    `what` names the listener in errors. Raises PortTaken when somebody listens there, ConfigError for any other reason.
    """
    opened: list[socket.socket] = []
    skipped: OSError | None = None
    try:
        for address in resolve(host, what=what):
            try:
                opened.append(_listen(address, port))
            except OSError as error:
                if error.errno not in _NO_SUCH_FAMILY:
                    raise _refusal(error, what, address.text(port)) from None
                skipped = error
                continue
            port = opened[-1].getsockname()[1]
        if not opened and skipped is not None:
            raise _refusal(skipped, what, f"{host}:{port}")
    except BaseException:
        for listener in opened:
            listener.close()
        raise
    return opened


def hold_back(port: int) -> int:
    """Let nothing more in that clients send to `port`, on connections or as new ones; returns how many there are.

    Replies still go out, slower if they are large. `hang_up` has to follow soon.
    """
    with ExitStack() as stack:
        listeners, connections = _sockets_of(port, stack)
        for found in (*listeners, *connections):
            _drop_packets(found)
    return len(connections)


def hang_up(port: int) -> int:
    """Shut down every connection that this process has accepted on `port`, and let no new one in; returns their count.

    For a library that keeps its sockets to itself, right before it closes them. It sees connections that broke.
    """
    with ExitStack() as stack:
        listeners, connections = _sockets_of(port, stack)
        for listener in listeners:
            _drop_packets(listener)
        for connection in connections:
            with suppress(OSError):  # of `hold_back`: what is in the buffers leaves only if clients can acknowledge it
                connection.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
    return len(connections)


def port_taken(what: str, where: str) -> PortTaken:
    return PortTaken(f"{what}: port {where} is taken", hint="choose another port; 0 lets the system choose one")


def _sockets_of(port: int, stack: ExitStack) -> tuple[list[socket.socket], list[socket.socket]]:
    """(listeners, connections) of this process on `port`, as duplicates that `stack` closes."""
    listeners: list[socket.socket] = []
    connections: list[socket.socket] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            found = stack.enter_context(socket.fromfd(int(name), socket.AF_INET, socket.SOCK_STREAM))
            if found.getsockname()[1] == port:
                listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                (listeners if listens else connections).append(found)
        except (OSError, IndexError):  # closed meanwhile, or of a family without ports
            continue
    return listeners, connections


def _drop_packets(one: socket.socket) -> None:
    """Attach a packet filter that keeps no byte: attempts to connect wait until the listener is closed, and what comes
    on a connection is sent again by the client's system until the filter is gone."""
    code = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET | BPF_K, 0
    program = struct.pack("HP", 1, ctypes.addressof(code))
    with suppress(OSError):  # where the system has no filters, a client may slip in
        one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _listen(address: Address, port: int) -> socket.socket:
    listener = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address.sockaddr(port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _refusal(error: OSError, what: str, where: str) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return port_taken(what, where)
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"{what}: {where} is not an address of this machine")
    return ConfigError(f"{what}: cannot listen on {where}: {error.strerror}")
