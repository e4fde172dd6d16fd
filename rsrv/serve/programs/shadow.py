"""A program set in the shadow of the one that serves: it gets copies of batches, and its answers are only compared.

The dispatch thread copies a share of the batches that ran and puts them here; a thread of its own runs each again on
the programs that are tried, behind the requests of all models, and compares the outputs. What it cannot keep up with is
dropped and counted. Nothing that happens here reaches a client.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

from rsrv.core.errors import ModelUnloaded, NotResident, RsrvError, ServerStopping, UnknownModel
from rsrv.serve.programs.compare import Tally, compare_rows
from rsrv.serve.programs.contract import describe
from rsrv.serve.programs.runner import Runner

if TYPE_CHECKING:
    from rsrv.audit.parity import Tolerances
    from rsrv.serve.scheduler import Sample, Scheduler, ServableModel

log = logging.getLogger(__name__)

WAITING = 4
"""Copies that may wait; each is a batch with its outputs."""


class Shadow:
    """Runs from `start` to `stop`.

    Args:
        serving: the model whose batches are copied.
        tried: the same incarnation with the programs that are tried.
        share: how many of its batches, 0 to 1.
        tally: where results are counted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        serving: ServableModel,
        tried: ServableModel,
        *,
        share: float,
        tally: Tally,
        tolerances: Tolerances = None,
    ) -> None:
        self._scheduler = scheduler
        self._serving = serving
        self._tried = tried
        self._share = share
        self._tally = tally
        self._tolerances = tolerances
        self._runner = Runner(scheduler, tried, "shadow")
        self._changed = threading.Condition()
        self._waiting: deque[Sample] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rsrv-shadow", daemon=True)

    def start(self) -> None:
        """Raises UnknownModel when the model is not scheduled."""
        self._scheduler.tap(self._serving, self.offer, self._share)
        self._thread.start()

    def offer(self, sample: Sample) -> None:
        """Take a copy of a batch; on the dispatch thread."""
        with self._changed:
            if not self._stopping and len(self._waiting) < WAITING:
                self._waiting.append(sample)
                self._changed.notify()
                return
        self._tally.skipped()

    def stop(self) -> None:
        """Take no more copies, forget those that wait, and return when none is being run."""
        with contextlib.suppress(UnknownModel, ModelUnloaded, ServerStopping):
            self._scheduler.tap(self._serving, None, 0.0)
        with self._changed:
            self._stopping = True
            self._waiting.clear()
            self._changed.notify()
        self._runner.close()
        if self._thread.ident is not None:
            self._thread.join()

    def _next(self) -> Sample | None:
        with self._changed:
            while not self._waiting:
                if self._stopping:
                    return None
                self._changed.wait()
            return self._waiting.popleft()

    def _run(self) -> None:
        while (sample := self._next()) is not None:
            try:
                self._compare(sample)
            except Exception as error:
                log.exception("shadow failed model=%s", self._tried.name)
                self._tally.failed(describe((sample.variant, sample.batch_key)), error)

    def _compare(self, sample: Sample) -> None:
        if not self._tried.weights.resident:
            # They are not brought back for this: other weights would have to go.
            self._tally.skipped()
            return
        key = (sample.variant, sample.batch_key)
        error: BaseException | None
        try:
            result = self._runner.run(key, sample.inputs)
            error = result.error
        except RsrvError as refused:
            error = refused
        if error is None:
            assert result.outputs is not None
            specs = self._tried.output_specs
            report = compare_rows(specs, sample.outputs, result.outputs, sample.rows, self._tolerances)
            self._tally.compared(describe(key), report)
        elif isinstance(error, (ModelUnloaded, NotResident, ServerStopping)):
            self._tally.skipped()
        else:
            log.warning("shadow did not run model=%s program=%s why=%s", self._tried.name, describe(key), error)
            self._tally.failed(describe(key), error)
