"""The start of a gateway that places models: it waits for workers, since without one there is nothing to place on."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from rsrv.core.errors import InvalidResponse, NoWorkers, ServerStopping
from rsrv.gateway.discovery.scan import timed_out
from rsrv.gateway.discovery.survey import PROBE_SECONDS, Survey
from rsrv.gateway.methods import STATUS
from rsrv.gateway.workers.outcome import Outcome
from rsrv.gateway.workers.poll import Poll, WorkerReport

if TYPE_CHECKING:
    from rsrv.gateway.timers import Timers
    from rsrv.gateway.workers.fleet import Fleet

ROUND_SECONDS = 10.0
WEDGED_ROUNDS = 3
"""Rounds in a row in which every call timed out, after which only another process can help."""

log = logging.getLogger(__name__)


def wait_for_workers(
    fleet: Fleet,
    timers: Timers,
    *,
    least: int,
    limit: float,
    stopping: threading.Event,
    round_seconds: float = ROUND_SECONDS,
    probe_seconds: float = PROBE_SECONDS,
) -> Poll:
    """Ask all workers at once for ModelControlStatus until `least` of them answer; what they reported.

    `limit` is in seconds; 0 asks once, infinity for ever. Raises NoWorkers when they do not answer in that time, or
    when every call times out in `WEDGED_ROUNDS` rounds in a row, and ServerStopping when `stopping` was set.
    """
    ends, silent = time.monotonic() + limit, 0
    while True:
        last = time.monotonic() >= ends
        survey = Survey(fleet.workers, STATUS, timers=timers, seconds=probe_seconds)
        survey.wait()
        reports = _reports(survey.outcomes)
        if len(reports) >= least:
            return Poll(reports)
        silent = silent + 1 if survey.outcomes and all(map(timed_out, survey.outcomes.values())) else 0
        answered, pending = _names(fleet, reports, present=True), _names(fleet, reports, present=False)
        if silent >= WEDGED_ROUNDS:
            raise NoWorkers(
                f"no worker answered within {probe_seconds:g} s in {silent} rounds: {pending}",
                hint="this process ends so that it is started anew; look at the workers if that does not help",
            )
        if last:
            raise NoWorkers(
                f"lpt_packing wants {least} workers to begin with (lpt_min_workers) and {len(reports)} answered; "
                f"no answer from {pending}",
                hint="start them first, or set startup.wait_seconds (RSRV_GATEWAY_STARTUP_WAIT_SECONDS) to wait for "
                "them",
            )
        log.info("waiting for workers ready=%s pending=%s wanted=%d", answered, pending, least)
        if stopping.wait(max(0.0, min(round_seconds, ends - time.monotonic()))):
            raise ServerStopping("the gateway was stopped while it waited for its workers")


def _reports(outcomes: dict[str, Outcome]) -> dict[str, WorkerReport]:
    found = {}
    for url, outcome in outcomes.items():
        if not outcome.ok:
            log.debug("no report url=%s status=%s %s", url, outcome.code.name, outcome.text)
            continue
        try:
            found[url] = WorkerReport.read(url, outcome.body)
        except InvalidResponse as error:
            log.warning("worker %s answers ModelControlStatus with %s", url, error)
    return found


def _names(fleet: Fleet, reports: dict[str, WorkerReport], *, present: bool) -> str:
    names = [worker.name for worker in fleet.workers if (worker.url in reports) is present]
    return ",".join(names) or "none"
