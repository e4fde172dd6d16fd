"""Which worker gets a request: the routing table, the mode and the standing of the workers, behind one lock."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any

from rsrv.gateway.routing.table import RoutingTable
from rsrv.gateway.scheduling.modes import Choice, Mode
from rsrv.gateway.workers.outcome import Outcome

if TYPE_CHECKING:
    from rsrv.gateway.routing.standing import Standing


class Router:
    """Thread safe. `lock` guards the mode and the standing: pure code only, no I/O, logging or metrics under it.

    `table` is replaced as a whole by `install`; who reads it takes it once. `on_install` is called after that, and must
    be quick.
    """

    def __init__(self, mode: Mode, standing: Standing) -> None:
        self.mode = mode
        self.standing = standing
        self.lock = Lock()
        self.table = RoutingTable()
        self.on_install: list[Callable[[], None]] = []

    def install(self, table: RoutingTable) -> None:
        self.table = table
        for fn in tuple(self.on_install):
            fn()

    # --- for requests -----------------------------------------------------------------------------------------------

    def arrived(self, model: str) -> None:
        """A request for a model that the table or a placement knows was admitted; call it once per request."""
        with self.lock:
            self.mode.record_arrival(model)

    def choose(self, model: str, units: int) -> Choice | None:
        """Workers in the order in which to try them, and what `release` wants back; None when there is nobody."""
        picked = self.table.pick(model)
        with self.lock:
            return self.mode.select(model, units, picked, self.standing.avoid(model, picked))

    def move(self, reservation: Any, url: str) -> None:
        """The request fails over: its charge goes with it."""
        if reservation is not None:
            with self.lock:
                self.mode.move(reservation, url)

    def release(self, reservation: Any) -> None:
        """Exactly once for each reservation."""
        if reservation is not None:
            with self.lock:
                self.mode.release(reservation)

    def succeeded(self, url: str, model: str) -> None:
        with self.lock:
            self.standing.succeeded(url, model)

    def failed(self, url: str, model: str, outcome: Outcome) -> float:
        """Seconds for which the worker is taken out now because its calls fail; 0 = it is not."""
        with self.lock:
            return self.standing.failed(url, model, outcome)

    # --- for the fleet ----------------------------------------------------------------------------------------------

    def joined(self, url: str, *, slowly: bool) -> None:
        with self.lock:
            self.standing.joined(url, slowly=slowly)

    def left(self, url: str) -> None:
        with self.lock:
            self.standing.left(url)
            self.mode.forget(url)

    def probed(self, url: str, ready: bool) -> None:
        with self.lock:
            self.standing.probed(url, ready)

    def drained(self, url: str, draining: bool) -> None:
        with self.lock:
            self.standing.drained(url, draining)
