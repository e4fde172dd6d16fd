"""A repack as a pure function: from reports and demand to the next placement, and what it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rsrv.gateway.scheduling.knobs import Knobs, count_of
from rsrv.gateway.scheduling.placement import Assignment, place
from rsrv.gateway.workers.poll import Poll


@dataclass(frozen=True)
class Plan:
    """A placement that is not installed yet; the attributes are those of `RepackReport`."""

    assignment: Assignment
    utilization: Mapping[str, float]
    drifted: Mapping[str, tuple[str, ...]]
    moved: tuple[str, ...]
    changed: tuple[str, ...]
    held: int
    best_improvement: float


def plan(poll: Poll, utilization: Callable[[str], float], previous: Assignment, knobs: Knobs) -> Plan:
    """Steps 5, 6 and 8 of spec gateway-node 2.6.5, for the workers of `poll`.

    A model that not all of them list has drifted. Its requests are spread evenly over those that do, and what it needs
    there, device time and memory, is taken before the other models are placed.
    """
    workers = poll.polled
    needs = {model: utilization(model) for model in poll.hosts}
    drifted = {model: urls for model, urls in sorted(poll.hosts.items()) if len(urls) < len(workers)}
    charged = dict.fromkeys(workers, (0.0, 0))
    for model, urls in drifted.items():
        for url in urls:
            compute, nbytes = charged[url]
            charged[url] = (compute + needs[model] / len(urls), nbytes + poll.weight_nbytes[model])
    placed = place(
        {model: need for model, need in needs.items() if model not in drifted},
        workers,
        previous,
        poll.weight_nbytes,
        poll.budgets,
        replicas=knobs.replica_counts,
        default_replicas=count_of(knobs.default_replicas),
        hysteresis=knobs.hysteresis,
        forbid=knobs.forbid_memory_oversubscription,
        charged=charged,
    )
    spread = {model: tuple((url, 1.0 / len(urls)) for url in urls) for model, urls in drifted.items()}
    assignment = {**placed.assignment, **spread}
    moved, changed = moves(previous, assignment)
    return Plan(assignment, needs, drifted, moved, changed, placed.held, placed.best_improvement)


def moves(previous: Assignment, following: Assignment) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(models that are on other workers now, workers that this and the disappearance of models changed), sorted.

    A model that is new moved from nowhere, and a worker that gets it changed nothing that it had.
    """
    moved, changed = [], set()
    for model, homes in previous.items():
        before = {url for url, _ in homes}
        after = {url for url, _ in following.get(model, ())}
        if model not in following:
            changed |= before
        elif before != after:
            moved.append(model)
            changed |= before ^ after
    return tuple(sorted(moved)), tuple(sorted(changed))


def retired_labels(
    known: frozenset[tuple[str, str]], previous: Assignment, following: Assignment, members: Poll
) -> frozenset[tuple[str, str]]:
    """(model, worker) of replicas that were, and are no more: until the next repack, and for as long as workers list
    the model, so that a gauge goes to 0 before it goes away."""
    before, after = _labels(previous), _labels(following)
    return frozenset(label for label in known | before if label in before or label[0] in members.hosts) - after


def _labels(assignment: Assignment) -> frozenset[tuple[str, str]]:
    return frozenset((model, url) for model, homes in assignment.items() for url, _ in homes)


def preconditions(poll: Poll) -> list[str]:
    """What makes packing worse than it could be on these workers, a sentence each, sorted; never a reason to stop."""
    found = [
        f"worker {url}: its discipline is fair, which shares out the device against the gateway's placement; set "
        "scheduler.discipline: fifo or edf there"
        for url, report in poll.workers.items()
        if report.discipline == "fair"
    ]
    for url in poll.polled:
        missing = sorted(model for model, urls in poll.hosts.items() if url not in urls)
        if missing:
            found.append(
                f"worker {url}: has not {_listed(missing)}, which other workers have; such models are not packed but "
                "spread over the workers that have them"
            )
    return sorted(found)


def drift_warnings(drifted: Mapping[str, tuple[str, ...]], known: Mapping[str, tuple[str, ...]]) -> list[str]:
    """A sentence for each model whose set of workers is not what was said before."""
    return [
        f"model {model}: only {_listed(list(urls))} of the workers that answer have it; its requests are spread evenly "
        "over those"
        for model, urls in drifted.items()
        if known.get(model) != urls
    ]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
