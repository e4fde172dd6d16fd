"""`Mode`: what the gateway asks of a way to choose workers. All methods are called under the router's one lock."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rsrv.gateway.workers.poll import Poll

if TYPE_CHECKING:
    from rsrv.gateway.scheduling.reports import PackingStatus


Note = tuple[int, str]
"""A level of `logging`, and a text."""


class Choice(NamedTuple):
    """The worker that is to be tried first, then the others in the order of failover; never empty.

    `reservation` is what `release` is given back; None when nothing is counted.
    """

    urls: tuple[str, ...]
    reservation: Any = None


class Mode(Protocol):
    """A way to choose workers. Pure code: quick, without I/O, logging or a lock of its own; the caller holds one."""

    name: str
    """round_robin, least_outstanding or lpt_packing."""
    needs_poll: bool
    """Whether `tick` wants the workers' reports."""
    spreads: bool
    """Whether it spreads each model over all its workers, so that one that is full is no sign that all of them are."""

    def record_arrival(self, model: str) -> None:
        """A request for a known model has come in, whatever becomes of it."""

    def request_units(self, model: str, body: bytes) -> int:
        """How many items the request carries, at least 1."""

    def select(self, model: str, units: int, picked: Sequence[str], avoid: Collection[str]) -> Choice | None:
        """Choose among `picked`, the discovered replicas in rotated order (`RoutingTable.pick`), or others that a
        placement names. Those in `avoid` come last, unless all are. None when there is nobody at all."""

    def move(self, reservation: Any, url: str) -> None:
        """The request fails over to `url`: what is charged for it is charged there from now on."""

    def release(self, reservation: Any) -> None:
        """The request has ended, however that was. Called once for each reservation."""

    def tick(self, ready: Sequence[str], poll: Poll, now: float) -> None:
        """One round of the prober: the workers that are ready, sorted, and what they report (empty without
        `needs_poll`). `now` is monotonic seconds."""

    def take_notes(self) -> list[Note]:
        """What is to be logged since the last call; the caller does it without the lock, with `log_notes`."""

    def forget(self, url: str) -> None:
        """The worker has left the fleet for good."""

    def inflight_work(self) -> tuple[str, Mapping[str, float]] | None:
        """(work basis, worker → what is in flight there), as it is compared when choosing; None when nothing is."""

    def status(self) -> PackingStatus | None:
        """The placement and what it was made of; None for a mode that places nothing."""


def log_notes(log: logging.Logger, notes: Iterable[Note]) -> None:
    """What `take_notes` gave."""
    for level, text in notes:
        log.log(level, "%s", text)
