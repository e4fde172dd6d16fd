"""The bytes of models: brought to host memory and to the device, and freed there."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rsrv.core.errors import WeightsError
from rsrv.serve.residency.floors import Floor
from rsrv.serve.residency.handle import Failure
from rsrv.serve.residency.tensors import TensorPool, trim

if TYPE_CHECKING:
    from rsrv.runtime.device import Device
    from rsrv.serve.residency.handle import ModelWeights
    from rsrv.serve.residency.store import WeightStore

log = logging.getLogger(__name__)


class Copies:
    """The bytes of models in host memory and on the device. On the transfer thread, or where nothing else runs.

    Args:
        store: where host copies are kept; None = there are none.
    """

    def __init__(self, device: Device, pool: TensorPool, store: WeightStore | None) -> None:
        self.device = device
        self.pool = pool
        self._store = store
        # Device memory is host memory, and the workers of a node share it: a load attaches to the copy in the store.
        self.shares_arena = store is not None and device.unified

    def close(self) -> None:
        """End all loads, and all waiting for other workers."""
        self.pool.close()
        if self._store is not None:
            self._store.close()

    def bring(self, weights: ModelWeights) -> None:
        """Bring `weights` to the device. Raises as `TensorPool.load`."""
        if weights.placed is not None:
            # What a failed move has left behind.
            self.drop([weights])
        # A change while it is read deserves another try.
        seen = weights.file.seen()
        try:
            if self.shares_arena:
                self.keep_host(weights)
            elif weights.floor is Floor.SYSTEM and not self.device.unified:
                # The copy was dropped while nobody used it. Without room for one the file does as well.
                with contextlib.suppress(OSError):
                    self.keep_host(weights)
            weights.placed = self.pool.load(weights.file, weights.host)
        except BaseException as error:
            if self.shares_arena:
                self.drop_host(weights)
            # A disk that did not answer may do so the next time.
            if isinstance(error, WeightsError) and (seen is None or not isinstance(error.__cause__, OSError)):
                weights.failure = Failure(seen, error.message, error.hint)
            raise
        weights.failure = None

    def known_failure(self, weights: ModelWeights) -> WeightsError | None:
        """What the last load failed with, when the file has not changed since, so that another one would fail as well.

        On any thread; it looks at the file only after a failure.
        """
        failure = weights.failure
        if failure is None or failure.seen != weights.file.seen():
            return None
        return WeightsError(failure.message, rule="B-60", file=weights.file.path.name, hint=failure.hint)

    def drop(self, several: Iterable[ModelWeights]) -> None:
        """Free the device copies of `several`, which nothing uses any more."""
        freed = False
        for weights in several:
            placed, weights.placed = weights.placed, None
            if placed is not None:
                freed = True
                try:
                    placed.free()
                except BufferError as error:
                    # Nothing will run on it, so whoever comes next need not fail for it.
                    log.warning("memory stays mapped while something looks at it model=%s why=%s", weights.model, error)
            if self.shares_arena:
                self.drop_host(weights)
        if freed:
            trim()

    def keep_host(self, weights: ModelWeights) -> None:
        """Have a copy in host memory. Raises WeightsError or OSError."""
        if weights.host is None and self._store is not None:
            weights.host = self.pool.host_copy(self._store, weights.model, weights.file)

    def drop_host(self, weights: ModelWeights) -> None:
        host, weights.host = weights.host, None
        if host is not None:
            host.release()

    def free(self, weights: ModelWeights) -> None:
        """Free everything."""
        weights.resident = False
        self.drop([weights])
        self.drop_host(weights)
