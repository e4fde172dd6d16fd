"""`DnsEndpoints`: the workers behind a host name. Every address of it is one, all with the same port."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence

from rsrv.core.config.addresses import HostPort, parse_host_port
from rsrv.core.config.gateway import MAX_WORKERS
from rsrv.gateway.workers.fleet import Endpoint

log = logging.getLogger(__name__)


def addresses(host: str, port: int) -> list[str]:
    """The numeric addresses of a name, sorted: of IPv4 if it has any, else of IPv6, because a worker with both is one
    worker. Raises OSError."""
    found: dict[socket.AddressFamily, set[str]] = {}
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        found.setdefault(family, set()).add(str(address[0]))
    return sorted(found.get(socket.AF_INET) or found.get(socket.AF_INET6) or ())


class DnsEndpoints:
    """A source of members. A lookup that fails, or finds nothing, changes nothing and warns once."""

    name = "dns"

    def __init__(
        self, address: str, *, seconds: float = 10.0, lookup: Callable[[str, int], Sequence[str]] = addresses
    ) -> None:
        """`address` is ``host:port``; `seconds` from one lookup to the next."""
        self.seconds = seconds
        self._address = parse_host_port(address)
        self._lookup = lookup
        self._endpoints: tuple[Endpoint, ...] = ()
        self._failed = False

    def look(self) -> tuple[Endpoint, ...]:
        """Look the name up; may take as long as the system's resolver likes."""
        try:
            found = self._lookup(*self._address)
        except (OSError, UnicodeError) as error:
            return self._keep(str(getattr(error, "strerror", None) or error))
        if not found:
            return self._keep("it has no address")
        if len(found) > MAX_WORKERS:
            return self._keep(f"it has {len(found)} addresses; wanted at most {MAX_WORKERS}")
        self._failed = False
        urls = (str(HostPort(address, self._address.port)) for address in found)
        self._endpoints = tuple(Endpoint(url, url, None, "dns") for url in urls)
        return self._endpoints

    def _keep(self, why: str) -> tuple[Endpoint, ...]:
        if not self._failed:
            log.warning("membership.dns %s: cannot be looked up, the workers stay as they are: %s", self._address, why)
        self._failed = True
        return self._endpoints
