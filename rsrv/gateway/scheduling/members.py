"""`Members`: the workers that placements are made for, with the last that each of them reported."""

from __future__ import annotations

from collections.abc import Iterable

from rsrv.gateway.workers.poll import Poll, WorkerReport

KEPT_POLLS = 3
"""Polls in a row that a ready worker may miss before placements go on without it: as many as a worker keeps its routes
for without an index. One slow answer must not move all its models away."""


class Members:
    """Ready workers that answered one of their last polls. A worker that is not ready is out at once."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[WorkerReport, int]] = {}

    def update(self, ready: Iterable[str], poll: Poll) -> Poll:
        """The reports of all members: those of `poll`, and the last ones of those that are missing there.

        A worker without any model is no member while others have some: nothing can be placed there, and every model
        would count as drifted, spread over all the others.
        """
        last: dict[str, tuple[WorkerReport, int]] = {}
        for url in ready:
            if url in poll.workers:
                last[url] = (poll.workers[url], 0)
            elif url in self._last and self._last[url][1] < KEPT_POLLS:
                report, missed = self._last[url]
                last[url] = (report, missed + 1)
        self._last = last
        reports = {url: report for url, (report, _) in last.items()}
        with_models = {url: report for url, report in reports.items() if report.models}
        return Poll(with_models or reports)
