"""How long loads of weights take, as a histogram for metrics."""

from __future__ import annotations

import threading
from bisect import bisect_left

from rsrv.serve.counters import HistogramSnapshot

LOAD_BOUNDS = tuple(0.001 * 4**k for k in range(10))
"""Upper bounds in seconds: 1 ms … 262 s."""

_BOUNDS_NS = tuple(round(bound * 1e9) for bound in LOAD_BOUNDS)


class LoadTimes:
    """Counts the loads of all models together: a histogram for each of thousands of models would be most of the
    exposition. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(_BOUNDS_NS) + 1)
        self._total_ns = 0

    def record(self, name: str, seconds: float) -> None:
        """The weights of model `name` took that long to arrive on the device."""
        taken_ns = round(seconds * 1e9)
        with self._lock:
            self._counts[bisect_left(_BOUNDS_NS, taken_ns)] += 1
            self._total_ns += taken_ns

    def snapshot(self) -> HistogramSnapshot:
        with self._lock:
            return HistogramSnapshot(_BOUNDS_NS, tuple(self._counts), self._total_ns)
