"""Warm-up: run each program of a new model twice on zeros, so that the scheduler knows what it costs (spec worker 3.8).

The measured run is an ordinary launch of a stand-in that nobody else can name and whose share of the device is tiny: it
waits behind the requests of every model, and no model waits for more than one of them.

The first run of a program may take a tenth of a second longer than all later ones (XLA finishes the code then, and the
kernel maps the weights). Where device memory is the host's, it is not launched but runs beside the requests, on the
warm-up's thread: it takes a core for that time and no request waits for it. It is the only execution that overlaps
another one, and its scratch comes on top. A card has one queue, so there the first run takes its turn like the second.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from rsrv.core.errors import RsrvError, ServerStopping, UnknownModel
from rsrv.serve.scheduler.plan import ANY_BATCH
from rsrv.serve.scheduler.queue import Result

if TYPE_CHECKING:
    from rsrv.runtime.device import Buffer, Device
    from rsrv.serve.scheduler import Scheduler
    from rsrv.serve.scheduler.model import ServableModel

log = logging.getLogger(__name__)

SHARE = 1e-3
"""Weight of a stand-in under the fair discipline; a model has 1."""
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
        stand_in = replace(model, name=f"{model.name}/warmup", max_batch_size=None)
        self._scheduler.add(stand_in)
        try:
            self._scheduler.set_policy(stand_in.name, weight=SHARE)
            for variant, key in _programs(model):
                if self._stopping.is_set():
                    return
                self._measure_program(model, stand_in, variant, key)
        except UnknownModel:
            log.debug("warm-up ended model=%s why=it was unloaded", model.name)
        finally:
            self._scheduler.remove(stand_in.name)

    def _measure_program(
        self, model: ServableModel, stand_in: ServableModel, variant: tuple[int, ...], key: int
    ) -> None:
        rows = stand_in.largest(variant) if key == ANY_BATCH else key
        inputs = {shape.name: np.zeros(shape.shape, shape.dtype) for shape in stand_in.input_shapes(variant, rows)}
        try:
            if self._device.unified:
                self._run_aside(model, inputs, variant, key)
            else:
                self._run_once(stand_in, inputs, rows, variant)
            result = self._run_once(stand_in, inputs, rows, variant)
        except ServerStopping:
            raise
        except RsrvError as error:
            log.warning("warm-up failed model=%s variant=%s key=%d why=%s", model.name, list(variant), key, error)
            return
        self._scheduler.seed_cost(model.name, variant, key, max(result.compute_ns / 1e9, _LEAST_SECONDS))

    def _run_aside(
        self, model: ServableModel, inputs: dict[str, np.ndarray], variant: tuple[int, ...], key: int
    ) -> None:
        buffers: list[Buffer] = []
        try:
            for array in inputs.values():
                buffers.append(self._device.put(array))
            self._device.launch(model.programs[variant][key], [*buffers, *model.weights.buffers]).result()
        finally:
            self._device.free(buffers)

    def _run_once(
        self, model: ServableModel, inputs: dict[str, np.ndarray], rows: int, variant: tuple[int, ...]
    ) -> Result:
        results: SimpleQueue[Result] = SimpleQueue()
        self._scheduler.submit(model, inputs, rows, variant, 0, results.put)
        result = results.get()
        if result.error is not None:
            raise result.error
        return result


def _programs(model: ServableModel) -> Iterator[tuple[tuple[int, ...], int]]:
    for variant, keys in model.batch_keys_by_variant.items():
        for key in keys:
            yield variant, key
