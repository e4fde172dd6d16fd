"""The live parts of a worker that metrics and status are read from. Reading never waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rsrv.serve.residency.times import LoadTimes
from rsrv.serve.scheduler.stats import ModelStats

if TYPE_CHECKING:
    from rsrv.core.shm import RegionRegistry
    from rsrv.runtime.cache import ExecutableCache
    from rsrv.runtime.device import Device
    from rsrv.serve.admission import Admission
    from rsrv.serve.counters import ServerCounters
    from rsrv.serve.hook_pool import HookPool
    from rsrv.serve.lifecycle import Lifecycle
    from rsrv.serve.loading.progress import ProgramCounts
    from rsrv.serve.programs.sets import ProgramSets
    from rsrv.serve.registrations import Registrations
    from rsrv.serve.registry import Registry
    from rsrv.serve.repository.watcher import Watcher
    from rsrv.serve.residency.manager import Residency
    from rsrv.serve.residency.operations import ParameterOperations
    from rsrv.serve.residency.reclaim import Reclaimer
    from rsrv.serve.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Sources:
    """`regions` is None without shared memory, `cache` without a cache, `residency` where all weights are resident for
    good; `programs` counts those that were loaded, `load_times` loads of weights. `registrations`, `operations`,
    `program_sets`, `reclaimer` and `watcher` are None where nothing is changed through them."""

    registry: Registry
    lifecycle: Lifecycle
    scheduler: Scheduler
    counters: ServerCounters
    admission: Admission[Any]
    hook_pool: HookPool
    hook_processes_lost: Callable[[], int]
    regions: RegionRegistry | None
    device: Device
    programs: Callable[[], ProgramCounts]
    cache: ExecutableCache | None
    residency: Residency | None = None
    load_times: LoadTimes = field(default_factory=LoadTimes)
    registrations: Registrations | None = None
    operations: ParameterOperations | None = None
    program_sets: ProgramSets | None = None
    reclaimer: Reclaimer | None = None
    watcher: Watcher | None = None

    def scheduled(self) -> Mapping[str, ModelStats]:
        """What the scheduler counted, by model; without the stand-in of a model that is being warmed up."""
        return {name: stats for name, stats in self.scheduler.stats().items() if self.registry.get(name) is not None}
