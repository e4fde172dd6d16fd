"""From what workers list to the routing table: pure functions over the answers to RepositoryIndex. Asking is elsewhere.

A worker that falls silent keeps its routes for `KEPT_ROUNDS` rounds. What a lost worker served stays known, so that
clients are told UNAVAILABLE and not NOT_FOUND while it is away.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from google.protobuf.message import DecodeError

from rsrv.core.errors import Code, InvalidResponse
from rsrv.gateway.routing.table import NotReady, RoutingTable
from rsrv.gateway.workers.outcome import Outcome
from rsrv.protos import inference as pb

KEPT_ROUNDS = 3
"""Rounds for which a worker that does not list its models keeps the routes that it had (spec gateway-node 1.9.1)."""

Presence = Literal["ready", "unready", "silent", "refused"]
"""What came of ServerReady: yes, any other answer of a server, nothing in time, nobody is there."""

PREPARING, FAILED = "preparing", "failed"
_PASSING = frozenset({"", "registered", "preparing", "retiring", "draining", "drained", "removing", "not resident"})
"""Reasons in a worker's index that are a state of its models, and no error text."""
_PASSING_BEGINS = ("the server is ", "preparing: ")
"""How such a reason begins that says more: which state the server is in, or what keeps the model."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What one worker said last of its models.

    Attributes:
        ready: names of those that it serves.
        missing: the others, and why.
        misses: rounds since then in which it said nothing.
        heard: false for a worker that has never said anything.
    """

    ready: frozenset[str] = frozenset()
    missing: Mapping[str, NotReady] = field(default_factory=dict)
    misses: int = 0
    heard: bool = True

    def without_routes(self, why: str) -> Listing:
        """The same names, none of them served."""
        if not self.ready:
            return self
        return replace(
            self, ready=frozenset(), missing={**self.missing, **dict.fromkeys(self.ready, NotReady(PREPARING, why))}
        )


def presence_of(outcome: Outcome) -> Presence:
    """What the end of a ServerReady call says about the worker."""
    if outcome.ok:
        try:
            return "ready" if pb.ServerReadyResponse.FromString(outcome.body).ready else "unready"
        except DecodeError:
            return "unready"
    if timed_out(outcome):
        return "silent"
    return "refused" if outcome.lost else "unready"


def timed_out(outcome: Outcome) -> bool:
    """Whether the worker hung: the deadline of a probe is the gateway's own, so no server reports it for itself.

    CANCELLED without a worker's reason is a probe that the watchdog gave up.
    """
    return outcome.code in (Code.DEADLINE_EXCEEDED, Code.CANCELLED) and not outcome.reason


def read_listing(body: bytes) -> Listing:
    """An answer to RepositoryIndex. Raises InvalidResponse for bytes that are none."""
    try:
        answer = pb.RepositoryIndexResponse.FromString(body)
    except DecodeError:
        raise InvalidResponse(f"{len(body)} bytes that are no inference.RepositoryIndexResponse") from None
    ready = set()
    missing = {}
    for row in answer.models:
        if not row.name:
            continue
        if row.state == "READY":
            ready.add(row.name)
        else:
            missing[row.name] = NotReady(_reason(row.reason), row.reason or row.state.lower())
    return Listing(frozenset(ready), {name: why for name, why in missing.items() if name not in ready})


def fold(
    previous: Mapping[str, Listing], heard: Mapping[str, Listing], answers: Mapping[str, Presence]
) -> dict[str, Listing]:
    """The listings after a round, by worker.

    `answers` has what each worker of the fleet said to ServerReady: who is not in it is forgotten. `heard` has those
    that listed their models in this round.
    """
    listings = {}
    for url, answer in answers.items():
        if url in heard:
            listings[url] = heard[url]
            continue
        listing = previous.get(url, Listing(heard=False))
        listing = replace(listing, misses=listing.misses + 1)
        if answer == "refused" or listing.misses > KEPT_ROUNDS:
            listing = listing.without_routes(f"worker {url} does not answer")
        listings[url] = listing
    return listings


def route(listings: Mapping[str, Listing], routable: Collection[str]) -> RoutingTable:
    """The table: models that a `routable` worker serves, and why the others that somebody lists are not served."""
    urls: dict[str, list[str]] = {}
    missing: dict[str, NotReady] = {}
    for url in sorted(listings):
        listing = listings[url]
        if url in routable:
            for model in listing.ready:
                urls.setdefault(model, []).append(url)
        else:
            listing = listing.without_routes(f"worker {url} takes no requests now")
        _merge(missing, listing.missing.items())
    return RoutingTable(urls, missing, [url for url, listing in listings.items() if not listing.heard])


def _merge(missing: dict[str, NotReady], rows: Iterable[tuple[str, NotReady]]) -> None:
    """A model that is failed on one worker and comes up on another is coming up."""
    for model, why in rows:
        if model not in missing or (missing[model].reason == FAILED and why.reason == PREPARING):
            missing[model] = why


def _reason(text: str) -> str:
    return PREPARING if text in _PASSING or text.startswith(_PASSING_BEGINS) else FAILED
