"""Warm-up: run each program of a new model twice on zeros, so that the scheduler knows what it costs (spec worker 3.8).

The first run of a program may take a tenth of a second longer than all later ones (XLA finishes the code then, and the
kernel maps the weights); the second one is measured.

Where device memory is the host's, both run beside the requests, on the warm-up's thread: they take processor time, but
no request waits for them, and what they measure is replaced by the first run of a request. They are the only executions
that overlap another one; the scratch of one program comes on top. A card has one queue, so there they are launches of a
stand-in that nobody else can name and whose share of the device is tiny: they wait behind the requests of every model,
and no model waits for more than one of them.

A model whose weights are not on the device is not measured: nobody's weights should go for it. Nor is a program again
that a new version of a model shares with the one before it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from rsrv.core.errors import NotResident, RsrvError, ServerStopping, UnknownModel
from rsrv.serve.scheduler.plan import Variant
from rsrv.serve.scheduler.queue import Result
from rsrv.serve.stand_ins import add_stand_in, zeros

if TYPE_CHECKING:
    from rsrv.runtime.device import Buffer, Device
    from rsrv.serve.scheduler import Scheduler
    from rsrv.serve.scheduler.model import ServableModel

log = logging.getLogger(__name__)

_Run = Callable[["ServableModel", Variant, int], int]
"""Runs one program of a model once; the nanoseconds that it took."""

_LEAST_SECONDS = 1e-6


class Warmup:
    """Measures the models that it is given, one after the other, on a thread of its own (`run`).

    Args:
        device: where the programs run.
        enabled: whether the scheduler's discipline uses costs; without it nothing is run.
    """

    def __init__(self, scheduler: Scheduler, device: Device, *, enabled: bool = True) -> None:
        self._scheduler = scheduler
        self._device = device
        self._enabled = enabled
        self._models: SimpleQueue[ServableModel | None] = SimpleQueue()
        self._stopping = threading.Event()

    def add(self, model: ServableModel) -> None:
        """Measure `model` when its turn comes."""
        if self._enabled:
            self._models.put(model)

    def stop(self) -> None:
        """Let `run` return after the run that is under way; a scheduler that stops ends that one."""
        self._stopping.set()
        self._models.put(None)

    def run(self) -> None:
        """Until `stop`."""
        while (model := self._models.get()) is not None and not self._stopping.is_set():
            try:
                self.measure(model)
            except ServerStopping:
                return
            except Exception:
                log.exception("warm-up failed model=%s", model.name)

    def measure(self, model: ServableModel) -> None:
        """Run every program of `model` twice and seed its cost with the second run. Raises ServerStopping."""
        if not model.input_specs:
            return
        try:
            if self._device.unified:
                self._measure_programs(model, self._run_aside)
            else:
                self._measure_in_turn(model)
        except UnknownModel:
            log.debug("warm-up ended model=%s why=it was unloaded", model.name)

    def _measure_in_turn(self, model: ServableModel) -> None:
        # One for each: an operator may have a model warmed up while it is measured anyway.
        stand_in = add_stand_in(self._scheduler, model, "warmup")
        try:
            self._measure_programs(model, lambda _, *program: self._run_in_turn(stand_in, *program))
        finally:
            self._scheduler.remove(stand_in.name)

    def _measure_programs(self, model: ServableModel, run: _Run) -> None:
        for variant, keys in model.batch_keys_by_variant.items():
            for key in keys:
                if self._stopping.is_set() or not model.weights.resident:
                    return
                if self._scheduler.warmed(model, variant, key):
                    continue
                try:
                    run(model, variant, key)
                    took_ns = run(model, variant, key)
                except (ServerStopping, UnknownModel):
                    raise
                except RsrvError as error:
                    name, sizes = model.name, list(variant)
                    log.warning("warm-up failed model=%s variant=%s key=%d why=%s", name, sizes, key, error)
                else:
                    self._scheduler.seed_cost(model, variant, key, max(took_ns / 1e9, _LEAST_SECONDS))

    def _run_aside(self, model: ServableModel, variant: Variant, key: int) -> int:
        inputs, _ = zeros(model, variant, key)
        if not self._scheduler.hold(model.weights):
            raise NotResident(f"the weights of model {model.name!r} left the device")
        began = time.monotonic_ns()
        buffers: list[Buffer] = []
        try:
            for array in inputs.values():
                buffers.append(self._device.put(array, alias=True))
            self._device.launch(model.programs[variant][key], [*buffers, *model.weights.buffers]).result()
        finally:
            self._device.free(buffers)
            self._scheduler.release(model.weights)
        return time.monotonic_ns() - began

    def _run_in_turn(self, stand_in: ServableModel, variant: Variant, key: int) -> int:
        inputs, rows = zeros(stand_in, variant, key)
        results: SimpleQueue[Result] = SimpleQueue()
        self._scheduler.submit(stand_in, inputs, rows, variant, 0, results.put)
        result = results.get()
        if result.error is not None:
            raise result.error
        return result.compute_ns
