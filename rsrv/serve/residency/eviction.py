"""Which weights leave the device: request rates, the worth of weights, and the choice of victims."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log

from rsrv.serve.residency.entry import Entry
from rsrv.serve.residency.holdings import Trial

HALFLIFE_SECONDS = 120.0
"""Uses this long ago weigh half in the request rate. Much longer than a model that is worth keeping is ever idle, so
that its rate is not noise; short enough that one which nobody wants any more is gone within minutes: after ten
half-lives it weighs as much as one that is used a thousandth as often."""
_PER_NS = 1e-9 / HALFLIFE_SECONDS
_LONGEST = 500.0
"""Half-lives after which the epoch moves; 2 ** 1024 would overflow."""
_RATE_PER_USE = log(2) / HALFLIFE_SECONDS
"""A steady rate r has a decayed count of r * halflife / ln 2."""


class Rates:
    """Exponentially decayed counts of uses.

    They are stored inflated, a use at time t counting ``2 ** (t / H)``: nothing has to decay, and they compare without
    the time.
    """

    def __init__(self) -> None:
        self._epoch_ns: int | None = None

    def note(self, entry: Entry, everybody: Iterable[Entry], now_ns: int) -> None:
        """`entry` was used; `everybody` is looked at once in many half-lives."""
        epoch_ns = self._epoch_ns
        if epoch_ns is None:
            epoch_ns = self._epoch_ns = now_ns
        halflives = (now_ns - epoch_ns) * _PER_NS
        if halflives > _LONGEST:
            deflate = 2.0 ** -min(halflives, 1000.0)
            for each in everybody:
                each.uses *= deflate
            self._epoch_ns, halflives = now_ns, 0.0
        entry.uses += 2.0**halflives

    def per_second(self, now_ns: int) -> float:
        """What an entry's `uses` are multiplied with for its uses per second."""
        if self._epoch_ns is None:
            return 0.0
        return float(2.0 ** -min((now_ns - self._epoch_ns) * _PER_NS, 1000.0) * _RATE_PER_USE)


def worth(entry: Entry, freed: int) -> float:
    """What a byte of these weights saves on the device: reload seconds x request rate / bytes that eviction frees.

    The cheapest goes first: GreedyDual-Size (Cao and Irani 1997) with a decayed rate in place of its ageing. Weights
    that others share entirely free nothing, so they go last.
    """
    return entry.uses * (entry.reload_seconds or 0.0) / freed if freed > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class Choice:
    """Who leaves, in order.

    Attributes:
        victims: all that leave.
        waits_for: those victims that are in use, so that their bytes are free only later.
        blocked: those that would have to leave as well and may not yet.
        missing: bytes that arrive.
        fits: the limit is kept once all of them left.
    """

    victims: tuple[Entry, ...]
    waits_for: tuple[Entry, ...]
    blocked: tuple[Entry, ...]
    missing: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Occupants:
    """The on-demand models on the device, by what may be done with them; each list in the order of eviction.

    Attributes:
        idle: they can go at once.
        busy: running work uses them. A device runs one program at a time, so these are the last used anyway.
        held: loading, or loaded for requests that did not have their turn yet.
        flagged: pinned by flag.
    """

    idle: Sequence[Entry]
    busy: Sequence[Entry]
    held: Sequence[Entry]
    flagged: Sequence[Entry]


def choose(trial: Trial, limit: int, occupants: Occupants, *, everything: bool = False) -> Choice:
    """Who leaves so that the on-demand bytes of `trial` are within `limit`: the idle, then the busy, then the held.

    `everything`: all idle and busy ones go. `trial` is then without all that is in the choice.
    """

    def take(entries: Sequence[Entry], *, everything: bool = False) -> tuple[Entry, ...]:
        taken = []
        for entry in entries:
            if trial.on_demand <= limit and not everything:
                break
            trial.without(entry.footprint)
            taken.append(entry)
        return tuple(taken)

    idle = take(occupants.idle, everything=everything)
    busy = take(occupants.busy, everything=everything)
    blocked = take(occupants.held)
    return Choice((*idle, *busy), busy, blocked, trial.missing(), trial.on_demand <= limit)


def succeeded(order: Iterable[Entry], before: Entry, after: Entry) -> list[Entry]:
    """An order of eviction in which `after` has the place of `before`, if it is in it, and `before` leaves first."""
    entries = [*order]
    there = after in entries
    if there:
        entries.remove(after)
    at = entries.index(before)
    entries[at : at + 1] = [after] if there else []
    return [before, *entries]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model gets onto the device.

    Attributes:
        victims: those that leave for it, in order; none while it is blocked.
        waits_for: those victims that are in use: they are freed when that ends, and the load waits for it.
        blocked: those without whose bytes it does not fit, and which may not leave yet; the caller plans again later.
        need: bytes that arrive on the device.
        exceeds: it does not fit even with all others gone, and goes on all the same, as it could never run otherwise;
            the caller warns.
    """

    victims: tuple[str, ...] = ()
    waits_for: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    need: int = 0
    exceeds: bool = False
