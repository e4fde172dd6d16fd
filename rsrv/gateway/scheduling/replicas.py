"""Which replica of a placed model gets the next request, and the live counters that decide it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rsrv.gateway.scheduling.fill import UNPLANNED, FillPlan
from rsrv.gateway.scheduling.load import Load, Loads
from rsrv.gateway.scheduling.modes import Choice
from rsrv.gateway.scheduling.placement import Assignment
from rsrv.gateway.scheduling.simple import avoided_last


class Replica:
    """One model on one worker: items in flight, and how many requests were ever routed to it."""

    __slots__ = ("outstanding", "routed", "url")

    def __init__(self, url: str) -> None:
        self.url = url
        self.outstanding = 0
        self.routed = 0


class _Placed:
    """The replicas of one model in the order of the placement, and the run that is being filled."""

    __slots__ = ("by_url", "cursor", "replicas", "target", "units")

    def __init__(self, replicas: Sequence[Replica], cursor: int = 0) -> None:
        self.replicas = replicas
        self.by_url = {replica.url: replica for replica in replicas}
        self.cursor = cursor
        self.target: Replica | None = None
        self.units = 0


class Reservation:
    """A request in flight: what it was charged, and to which counters."""

    __slots__ = ("charge", "load", "model", "replica", "unit", "units")

    def __init__(self, model: str, units: int, unit: str, charge: float) -> None:
        self.model = model
        self.units = units
        self.unit = unit
        self.charge = charge
        self.load: Load | None = None
        self.replica: Replica | None = None


class ReplicaRouting:
    """Routes within an installed placement (spec gateway-node 2.6.8). No lock of its own."""

    def __init__(self) -> None:
        self.assignment: Assignment = {}
        self._placed: dict[str, _Placed] = {}
        self._loads = Loads()

    def install(self, assignment: Assignment) -> None:
        """Take a new placement. Counters of what stays go on, those of what goes are dropped: requests in flight there
        give back to counters that nobody reads. A run that was being filled is closed; whose turn is next stays."""
        placed: dict[str, _Placed] = {}
        for model, shares in assignment.items():
            before = self._placed.get(model)
            known = before.by_url if before else {}
            replicas = [known.get(url) or Replica(url) for url, _ in shares]
            placed[model] = _Placed(replicas, before.cursor if before else 0)
        self._placed = placed
        self.assignment = assignment
        self._loads.retain({url for shares in assignment.values() for url, _ in shares})

    def forget(self, url: str) -> None:
        """The worker has left: its models' other replicas share what it had, or have no placement until the next."""
        self._loads.drop(url)
        assignment = {}
        for model, shares in self.assignment.items():
            if all(each != url for each, _ in shares):
                assignment[model] = shares
            elif left := [each for each, _ in shares if each != url]:
                assignment[model] = tuple((each, 1.0 / len(left)) for each in left)
        self.install(assignment)

    def route(
        self,
        model: str,
        units: int,
        *,
        policy: str,
        basis: str,
        charge: float,
        plan: FillPlan = UNPLANNED,
        avoid: Collection[str] = (),
        picked: Sequence[str] = (),
    ) -> Choice | None:
        """Choose a replica for a request of `units` items, at least 1, and charge it; None for a model without a place.

        Args:
            policy: ``fill_least`` or ``fill_rr``: what decides between replicas that are as full.
            basis, charge: what the request is charged, and by which basis (`load.work`).
            avoid: workers to leave out; they come last in the order of failover, and are taken only when there is no
                other, of the placement or of `picked`.
            picked: the discovered replicas; those that are not placed come after those that are.
        """
        placed = self._placed.get(model)
        if placed is None or not placed.replicas:
            return None
        replicas, quantum = placed.replicas, plan.quantum
        usable = [replica for replica in replicas if replica.url not in avoid] if avoid else replicas
        extras = [url for url in picked if url not in placed.by_url]
        reservation = Reservation(model, units, _UNITS[basis], charge)
        # By how full they are before this request counts.
        order = sorted([(each.outstanding // quantum, each.outstanding, each.url) for each in replicas])
        if not usable and (outside := next((url for url in extras if url not in avoid), None)) is not None:
            chosen = outside
        elif len(replicas) == 1:
            chosen = replicas[0].url
        else:
            chosen = self._choose(placed, usable or replicas, units, plan, policy, reservation.unit).url
        self._charge(reservation, chosen)
        rest = [url for _, _, url in order if url != chosen]
        rest += [url for url in extras if url != chosen]
        return Choice((chosen, *avoided_last(rest, avoid)), reservation)

    def move(self, reservation: Reservation | None, url: str) -> None:
        """The request fails over to `url`: what it was charged is charged there."""
        if reservation is not None and reservation.load is not None:
            self.release(reservation)
            self._charge(reservation, url)

    def release(self, reservation: Reservation | None) -> None:
        """The request has ended; a second time changes nothing."""
        if reservation is None or reservation.load is None:
            return
        reservation.load.subtract(reservation.charge)
        reservation.load = None
        if reservation.replica is not None:
            reservation.replica.outstanding -= reservation.units
            reservation.replica = None

    def replicas(self, model: str) -> Sequence[Replica]:
        """The live counters of a placed model, in the order of the placement; to be read only."""
        placed = self._placed.get(model)
        return placed.replicas if placed is not None else ()

    def loads(self, basis: str) -> dict[str, float]:
        """Worker → work in flight as `basis` measures it, of the workers that ever got some."""
        return self._loads.snapshot(_UNITS[basis])

    def _charge(self, reservation: Reservation, url: str) -> None:
        reservation.load = self._loads.of(reservation.unit, url)
        reservation.load.add(reservation.charge)
        placed = self._placed.get(reservation.model)
        replica = reservation.replica = placed.by_url.get(url) if placed is not None else None
        if replica is not None:
            replica.outstanding += reservation.units
            replica.routed += 1

    def _choose(
        self, placed: _Placed, usable: Sequence[Replica], units: int, plan: FillPlan, policy: str, unit: str
    ) -> Replica:
        """One of several replicas; brings cursor and run up to date."""
        mode, quantum, target = plan.mode, plan.quantum, placed.target
        floor = 0
        if mode == "run":
            items = [replica.outstanding for replica in usable]
            floor = min(items) // quantum
            if (
                target is not None
                and placed.units < quantum
                and target in usable
                and target.outstanding // quantum <= floor
                and any(items)
            ):
                placed.units += units
                return target
        count, least = len(placed.replicas), policy == "fill_least"
        ranks = []
        for index, replica in enumerate(placed.replicas):
            if replica not in usable:
                continue
            items_there = replica.outstanding
            if mode == "spread":
                fullness = (items_there, 0)
            elif mode == "inflight":
                fullness = (items_there // quantum, -items_there)
            else:
                fullness = (int(items_there // quantum > floor), 0)
            load = self._loads.key(unit, replica.url) if least else 0
            ranks.append((fullness, load, (index - placed.cursor) % count, index))
        best = min(ranks)
        # `inflight` lets the turn pass only where it decided anything: that is what may pin a model to one replica.
        if mode != "inflight" or sum(rank[0] == best[0] for rank in ranks) > 1:
            placed.cursor = (best[-1] + 1) % count
        placed.target, placed.units = placed.replicas[best[-1]], units
        return placed.target


_UNITS = {"compute": "seconds", "requests": "seconds", "items": "items"}
"""Bases that measure in the same unit share a set of counters: both of the first are device seconds here."""
