"""Gives memory back that nobody has used for long: weights on the device, host copies of them, staging buffers.

Every load, and everybody who looks, leaves the idle times alone: they begin when the last batch of a model has ended,
or its pin was removed, and when a buffer came back.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rsrv.core.errors import InvalidRequest, ServerStopping
from rsrv.serve.residency.memory import trim

if TYPE_CHECKING:
    from rsrv.core.staging import StagingPool
    from rsrv.serve.residency.manager import Residency

log = logging.getLogger(__name__)

_LONGEST_SECONDS = 1.0
_SHORTEST_SECONDS = 0.01
"""Whoever asks for less would only keep a processor busy."""


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """After how many idle milliseconds what is given back; 0 = never.

    Attributes:
        parameter_idle_ms: weights on the device.
        workspace_idle_ms: staging buffers.
        host_idle_ms: host copies of weights that are off the device.
    """

    parameter_idle_ms: float = 0.0
    workspace_idle_ms: float = 0.0
    host_idle_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidRequest(f"{name} is {value!r}; wanted milliseconds, 0 = never")

    def interval_s(self, *, on_demand: bool) -> float | None:
        """Seconds between two looks; None when nothing can expire, as when weights do not come and go."""
        durations = [self.workspace_idle_ms]
        if on_demand:
            durations += [self.parameter_idle_ms, self.host_idle_ms]
        shortest = min([each for each in durations if each], default=None)
        return None if shortest is None else min(max(shortest / 1e3, _SHORTEST_SECONDS), _LONGEST_SECONDS)


class Reclaimer:
    """Looks now and then, on a thread of its own, which sleeps for good while nothing can expire. Thread safe.

    Idle times are on the clocks of `residency` and `pool`.

    Args:
        pool: the staging buffers.
        on_reclaimed: told of the models whose weights or host copies were freed, on the thread.
        wait: sleeps until the event is set, at most so many seconds.
    """

    def __init__(
        self,
        residency: Residency,
        pool: StagingPool,
        policy: IdlePolicy = IdlePolicy(),
        *,
        on_reclaimed: Callable[[Sequence[str]], None] = lambda names: None,
        wait: Callable[[threading.Event, float | None], object] = threading.Event.wait,
    ) -> None:
        self._residency = residency
        self._pool = pool
        self._policy = policy
        self._on_reclaimed = on_reclaimed
        self._wait = wait
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rsrv-reclaim", daemon=True)

    @property
    def policy(self) -> IdlePolicy:
        return self._policy

    def set_policy(
        self,
        *,
        parameter_idle_ms: float | None = None,
        workspace_idle_ms: float | None = None,
        host_idle_ms: float | None = None,
    ) -> IdlePolicy:
        """Change some of the durations from now on; what results. None = as it is. Raises InvalidRequest."""
        given = {
            "parameter_idle_ms": parameter_idle_ms,
            "workspace_idle_ms": workspace_idle_ms,
            "host_idle_ms": host_idle_ms,
        }
        with self._lock:
            changed = {name: float(value) for name, value in given.items() if value is not None}
            self._policy = policy = replace(self._policy, **changed)
        self._wake.set()
        return policy

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a look that waits for the dispatch thread ends with `Residency.stop`, so call that before."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def look(self) -> list[str]:
        """Free what has been idle for long enough; the models of which something was. Raises ServerStopping."""
        policy = self._policy
        names = self._residency.reclaim(
            parameter_idle_s=policy.parameter_idle_ms / 1e3, host_idle_s=policy.host_idle_ms / 1e3
        )
        if names:
            log.info("idle weights freed models=%s", ",".join(names))
            self._on_reclaimed(names)
        if policy.workspace_idle_ms:
            freed = self._pool.release_idle(policy.workspace_idle_ms / 1e3)
            if freed:
                trim()
                log.debug("idle staging buffers freed bytes=%d", freed)
        return names

    def _run(self) -> None:
        while True:
            self._wait(self._wake, self._policy.interval_s(on_demand=self._residency.on_demand))
            self._wake.clear()
            if self._stopping:
                return
            try:
                self.look()
            except ServerStopping:
                return
            except Exception:
                # The next look may be luckier, and without one memory would stay for ever.
                log.exception("idle memory could not be given back")
