"""How much scratch programs really take, read off a card's allocator while a server starts (worker spec 4.5).

The compiler says what it planned (`Executable.scratch_bytes`); libraries take workspaces beside that, and an allocator
has its own overhead. Host memory reports no peak, so there is nothing to probe on a CPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rsrv.core.errors import NotResident, RsrvError, ServerStopping

if TYPE_CHECKING:
    from rsrv.runtime.device import Device
    from rsrv.serve.residency.manager import Compacted, Residency
    from rsrv.serve.residency.snapshot import LedgerSnapshot
    from rsrv.serve.scheduler.model import ServableModel

log = logging.getLogger(__name__)


class Reading(NamedTuple):
    """What was found after the programs of one model had run, in bytes.

    Attributes:
        weights: weights that were on the device meanwhile and can be evicted.
        pinned: weights that were there and cannot.
        peak: the most that was ever allocated since the process began.
    """

    weights: int
    pinned: int
    peak: int


def scratch_from_peaks(readings: Iterable[Reading]) -> int:
    """Bytes that the inputs, temporaries and outputs of one execution take at most, among the models that were read.

    ::

        max over models of  peak - (pinned + heaviest weights probed so far),  not below 0

    A peak can never be reset, so a model may show that of an earlier one. With the models in ascending order of weights
    the result is exact all the same: at model i the peak is at least ``pinned + W[i] + S[i]``, and no earlier model can
    have left more than ``pinned + W[i] + max S``. What was allocated before the first model makes it too large, never
    too small.
    """
    scratch = heaviest = 0
    for reading in readings:
        heaviest = max(heaviest, reading.weights)
        scratch = max(scratch, reading.peak - reading.pinned - heaviest)
    return scratch


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model to probe; `evictable_bytes` are its weights as the budget counts them, 0 when they are never evicted."""

    model: ServableModel
    evictable_bytes: int


@dataclass(frozen=True, slots=True)
class ScratchProbe:
    """Runs models alone on a card, on its caller's thread, before the server serves.

    Attributes:
        device: whose peak is read.
        measure: runs every program of a model on zeros; what fails there is a warning (`Warmup.measure`, which also
            seeds the costs).
        compact: frees all weights that can be evicted, then loads those of the models that it is given.
        pinned_bytes: weights that are never evicted, now.
        loads: how often weights were loaded since the server started.
        stopping: asked between two models.
    """

    device: Device
    measure: Callable[[ServableModel], None]
    compact: Callable[[Sequence[str]], Compacted]
    pinned_bytes: Callable[[], int]
    loads: Callable[[], int]
    stopping: Callable[[], bool] = lambda: False

    def run(self, candidates: Iterable[Candidate]) -> int | None:
        """Bytes of scratch; None when this device reports no peak, or not a single model could be run.

        Models whose weights stay come first, as weights of 0 bytes. One that cannot be loaded is skipped. Weights that
        somebody else loads meanwhile end the probe: its later readings would count them as scratch. Nothing that can be
        evicted is on the device afterwards. Raises ServerStopping.
        """
        if self.device.unified or self._peak() is None:
            return None
        began = time.monotonic()
        readings: list[Reading] = []
        try:
            for candidate in sorted(candidates, key=lambda one: (one.evictable_bytes, one.model.name)):
                if self.stopping():
                    break
                name = candidate.model.name
                try:
                    reading = self._read(candidate)
                except ServerStopping:
                    raise
                except NotResident as error:
                    log.debug("scratch probe skipped model=%s why=%s", name, error.message)
                    continue
                except RsrvError as error:
                    log.warning("scratch probe skipped model=%s why=%s", name, error.message)
                    continue
                if reading is None:
                    log.warning("scratch probe ended model=%s why=other weights were loaded while it ran", name)
                    break
                log.debug("scratch probed model=%s weights=%d peak=%d", name, reading.weights, reading.peak)
                readings.append(reading)
        finally:
            self.compact([])
        if not readings:
            return None
        scratch = scratch_from_peaks(readings)
        log.info("scratch probed models=%d scratch=%d seconds=%.2f", len(readings), scratch, time.monotonic() - began)
        return scratch

    def _read(self, candidate: Candidate) -> Reading | None:
        """None when the device did not belong to this model alone."""
        model, evictable = candidate.model, candidate.evictable_bytes
        there = self.compact([model.name] if evictable else [])
        if evictable and not there.reloaded:
            raise NotResident("its weights did not come")
        loads = self.loads()
        self.measure(model)
        peak = self._peak()
        if self.loads() != loads or peak is None:
            return None
        return Reading(there.resident_bytes, self.pinned_bytes(), peak)

    def _peak(self) -> int | None:
        stats = self.device.memory()
        return None if stats is None else stats.peak_bytes_in_use


def probe_scratch(
    device: Device,
    residency: Residency,
    models: Iterable[ServableModel],
    measure: Callable[[ServableModel], None],
    stopping: Callable[[], bool],
) -> None:
    """Find out what scratch `models` take, where a device can tell and weights come and go; the budget follows.

    `measure` runs every program of a model. Raises ServerStopping.
    """

    def counters() -> LedgerSnapshot:
        snapshot = residency.snapshot()
        assert snapshot is not None, "weights are resident for good"
        return snapshot

    if not residency.on_demand:
        return
    states = counters().models
    probe = ScratchProbe(
        device=device,
        measure=measure,
        compact=residency.compact,
        pinned_bytes=lambda: counters().pinned_bytes,
        loads=lambda: counters().loads,
        stopping=stopping,
    )
    found = probe.run(
        Candidate(model, 0 if states[model.name].reserved else states[model.name].nbytes)
        for model in models
        if model.input_specs
    )
    if found is not None:
        residency.note_scratch(found)
