"""Runs programs of a set that serves nobody: in turn with the requests of all models, but behind them.

Each run is a request to a stand-in that nobody else can name, whose share of the device is tiny and which has just the
one program, so that the scheduler has nothing to choose. It waits behind the requests of every model, and no model
waits for more than one run.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import TYPE_CHECKING

from rsrv.core.errors import ModelUnloaded
from rsrv.serve.scheduler.plan import ANY_BATCH
from rsrv.serve.stand_ins import add_stand_in, zeros

if TYPE_CHECKING:
    import numpy as np

    from rsrv.serve.programs.contract import Key
    from rsrv.serve.scheduler import Result, Scheduler, ServableModel


class Runner:
    """One run at a time. `model` has the programs; `purpose` tells its stand-in from others of the model.

    Its weights are used as they are: whoever runs something sees to it that they are on the device.
    """

    def __init__(self, scheduler: Scheduler, model: ServableModel, purpose: str) -> None:
        self._scheduler = scheduler
        self._model = model
        self._purpose = purpose
        self._lock = threading.Lock()
        self._key: Key | None = None
        self._stand_in: ServableModel | None = None
        self._closed = False

    def run(self, key: Key, inputs: Mapping[str, np.ndarray]) -> Result:
        """Run one program on inputs that fill it, and wait for it. Raises what the scheduler refuses it with."""
        results: SimpleQueue[Result] = SimpleQueue()
        with self._lock:
            stand_in = self._for(key)
            variant, batch_key = key
            rows = stand_in.largest(variant) if batch_key == ANY_BATCH else batch_key
            self._scheduler.submit(stand_in, inputs, rows, variant, 0, results.put)
        return results.get()

    def close(self) -> None:
        """Let go of the programs, and let `run` return with an error if it waits."""
        with self._lock:
            self._closed = True
            self._leave()

    def _for(self, key: Key) -> ServableModel:
        if self._closed:
            raise ModelUnloaded(f"the {self._purpose} of model {self._model.name!r} was ended")
        if self._stand_in is not None and self._key == key:
            return self._stand_in
        self._leave()
        variant, batch_key = key
        programs = {variant: {batch_key: self._model.programs[variant][batch_key]}}
        self._key, self._stand_in = key, add_stand_in(self._scheduler, self._model, self._purpose, programs)
        return self._stand_in

    def _leave(self) -> None:
        if self._stand_in is not None:
            self._scheduler.remove(self._stand_in.name)
            self._key = self._stand_in = None


def measure(scheduler: Scheduler, model: ServableModel) -> dict[Key, float]:
    """Run every program of `model` twice on zeros; the seconds that each second run took.

    A model whose weights are not on the device is not measured, or only in part when they leave it: nobody's weights
    should go for it. Raises the error of a program that does not run.
    """
    seconds: dict[Key, float] = {}
    runner = Runner(scheduler, model, "programs")
    try:
        for variant, keys in model.batch_keys_by_variant.items():
            for batch_key in keys:
                inputs, _ = zeros(model, variant, batch_key)
                for _ in range(2):
                    if not model.weights.resident:
                        return seconds
                    result = runner.run((variant, batch_key), inputs)
                    if result.error is not None:
                        raise result.error
                seconds[variant, batch_key] = result.compute_ns / 1e9
    finally:
        runner.close()
    return seconds
