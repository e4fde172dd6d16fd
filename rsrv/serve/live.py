"""What changes the models of a running server: registrations, moves of weights, program sets, and the repository.

Everything here is made while the server comes up, and begins to act when its models are loaded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rsrv.serve.admin.events import EventLog
from rsrv.serve.admin.parameters import Parameters
from rsrv.serve.followed import Followed
from rsrv.serve.programs.sets import ProgramSets
from rsrv.serve.registrations import Registrations
from rsrv.serve.repository.watcher import Watcher
from rsrv.serve.residency.operations import ParameterOperations
from rsrv.serve.residency.reclaim import IdlePolicy, Reclaimer
from rsrv.serve.residency.setup import scratch_of

if TYPE_CHECKING:
    from rsrv.core.config import ServerConfig
    from rsrv.serve.admission import Admission
    from rsrv.serve.counters import ServerCounters
    from rsrv.serve.inference import Inference
    from rsrv.serve.loading import Loader, ProgramSource, Warmup
    from rsrv.serve.registry import Registry
    from rsrv.serve.request import Request
    from rsrv.serve.residency.manager import Residency
    from rsrv.serve.residency.operations import OperationError
    from rsrv.serve.scheduler import Scheduler
    from rsrv.stablehlo.policy import Policy

log = logging.getLogger(__name__)


class Live:
    """The parts, wired to each other.

    Attributes:
        watcher: None unless the models follow their directories.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        registry: Registry,
        scheduler: Scheduler,
        residency: Residency,
        loader: Loader,
        source: ProgramSource,
        policy: Policy,
        warmup: Warmup,
        inference: Inference,
        admission: Admission[Request],
        counters: ServerCounters,
        stopping: threading.Event,
    ) -> None:
        self.events = EventLog()
        self._registry = registry
        self.registrations = Registrations(
            config=config,
            registry=registry,
            scheduler=scheduler,
            residency=residency,
            loader=loader,
            inference=inference,
            admission=admission,
            counters=counters,
            events=self.events,
            stopping=stopping,
        )
        self.operations = ParameterOperations(residency, on_change=self._operation_changed)
        self.programs = ProgramSets(
            source,
            policy,
            scheduler=scheduler,
            registry=registry,
            capacity=config.admin.program_capacity,
            events=self.events,
            digests=config.bundles.digests,
            compiles=config.runtime.compile_workers,
            reserve=lambda model: residency.note_scratch(scratch_of(config, model.manifest, model.programs)),
        )
        self.parameters = Parameters(
            registry=registry,
            registrations=self.registrations,
            residency=residency,
            operations=self.operations,
            events=self.events,
            warm=lambda name: warmup.measure(registry.prepared(name).model),
        )
        idle = config.reclaim
        self.reclaimer = Reclaimer(
            residency,
            scheduler.staging,
            IdlePolicy(idle.parameter_idle_ms, idle.workspace_idle_ms, idle.host_idle_ms),
            on_reclaimed=self._reclaimed,
        )
        self.registrations.busy = self.operations.busy
        self.registrations.on_ending = self.programs.drop
        self.registrations.on_gone = self.operations.forget
        self.registrations.on_renamed = self.operations.rename
        self.watcher: Watcher | None = None
        if config.model_control_mode == "dynamic":
            self.watcher = Watcher(config, Followed(self.registrations, registry))

    def start(self) -> None:
        """Begin to act. The watcher begins later, when the models of the start are loaded."""
        self.registrations.start()
        self.reclaimer.start()

    def close(self) -> None:
        """Begin nothing more; the scheduler may still run."""
        if self.watcher is not None:
            self.watcher.stop()
        self.reclaimer.stop()
        self.operations.close()
        self.programs.close()

    def join(self) -> None:
        """Wait for what is under way, once scheduler and residency have stopped."""
        # First: an activation may wait for the preparation of its model.
        self.registrations.close()
        self.operations.join()

    def _reclaimed(self, names: Sequence[str]) -> None:
        for name in names:
            self._tell(name, "parameters", "active", "idle")

    def _operation_changed(self, name: str, old: str, new: str, error: OperationError | None) -> None:
        self._tell(name, "parameter_operation", old, new, "" if error is None else f"{error.phase}: {error.message}")

    def _tell(self, name: str, kind: str, old: str, new: str, detail: str = "") -> None:
        entry = self._registry.get(name)
        self.events.append(name, 0 if entry is None else entry.incarnation, kind, old, new, detail)
