"""`Engine`: what carries calls over the network, as the servers see it."""

from __future__ import annotations

from typing import Protocol


class Engine(Protocol):
    """A gRPC server for a table of routes."""

    def bind(self) -> int:
        """Take the port and return it. Clients may connect from now on and are answered after `start`.

        Raises PortTaken when somebody has the port, ConfigError when it or the host cannot be used.
        """

    def start(self) -> None:
        """Begin to answer."""

    def stop(self, grace: float) -> None:
        """End service; returns when all is over.

        In this order: new calls are answered UNAVAILABLE with reason ``stopping``, and streams end with the same; open
        unary calls may finish for `grace` seconds, and those that do not get it too; the functions of `Call.on_cancel`
        run for every call that is ended so. When the replies have left, connections are told to go away (GOAWAY), and
        the port and the connections are closed; a call that comes in that instant sees a broken connection, which is
        UNAVAILABLE as well.

        A server whose health checks are to be answered while its work drains, drains first and calls `stop` then.
        """
