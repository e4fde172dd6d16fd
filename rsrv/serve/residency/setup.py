"""From a worker's configuration to its `Residency`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rsrv.serve.residency.floors import Floor
from rsrv.serve.residency.host_pool import PooledWeightStore
from rsrv.serve.residency.janitor import sweep_unheld
from rsrv.serve.residency.ledger import Ledger
from rsrv.serve.residency.manager import Residency
from rsrv.serve.residency.shared_store import SharedWeightStore
from rsrv.serve.residency.store import WeightStore
from rsrv.serve.residency.tensors import TensorPool
from rsrv.stablehlo.signature import nbytes_of

if TYPE_CHECKING:
    from rsrv.bundle.manifest import Manifest
    from rsrv.core.config import ServerConfig
    from rsrv.runtime.device import Device, Executable
    from rsrv.serve.scheduler import Scheduler

log = logging.getLogger(__name__)


def open_residency(
    device: Device,
    scheduler: Scheduler,
    config: ServerConfig,
    *,
    on_load: Callable[[str, float], None] = lambda name, seconds: None,
) -> Residency:
    """The residency of a worker; its transfer thread is not started yet."""
    arena, runtime = arena_bytes(device, config), config.runtime
    explicit = config.model_control_mode == "explicit"
    ledger: Ledger | None = None
    if arena is not None and runtime.weight_cache_fraction > 0:
        ledger = Ledger(
            arena=arena,
            fraction=runtime.weight_cache_fraction,
            wiggle=runtime.weight_cache_wiggle_fraction,
            unified=device.unified,
            externally_managed=explicit,
            policy=runtime.eviction,
        )
    pool = TensorPool(device, map_weights=runtime.map_weights)
    return Residency(
        device,
        scheduler,
        ledger,
        pool,
        store=_store(device, config),
        mode="externally_managed" if explicit else "self_managed",
        compaction_interval=config.scheduler.compaction_interval,
        on_load=on_load,
    )


def arena_bytes(device: Device, config: ServerConfig) -> int | None:
    """`runtime.device_memory_bytes`, else what the device's allocator has; None = nobody counts, so no budget."""
    arena: int | None = config.runtime.device_memory_bytes
    if arena is None and (memory := device.memory()) is not None:
        arena = memory.bytes_limit
    return arena


def floor_of(config: ServerConfig, name: str) -> Floor | None:
    """The floor that the configuration gives a model; None = the default of the device."""
    settings = config.scheduler.models.get(name)
    return None if settings is None or settings.residency is None else Floor(settings.residency)


def scratch_of(
    config: ServerConfig, manifest: Manifest, programs: Mapping[tuple[int, ...], Mapping[int, Executable]]
) -> int:
    """Bytes that the largest program of a model needs beside the weights, as the compiler says: inputs, temporaries and
    outputs. 0 with `runtime.scratch_source: probe`, where they are measured."""
    if config.runtime.scratch_source == "probe":
        return 0
    n_inputs = len(manifest.executable_inputs)
    return max(
        (
            executable.scratch_bytes + sum(map(nbytes_of, executable.signature.arguments[:n_inputs]))
            for by_size in programs.values()
            for executable in by_size.values()
        ),
        default=0,
    )


def _store(device: Device, config: ServerConfig) -> WeightStore | None:
    """Where host copies are kept. Device memory that is host memory needs none, unless workers share it."""
    if config.runtime.shared_host_weights:
        for found in sweep_unheld():
            log.info("%s", found)
        return SharedWeightStore(int(config.runtime.shared_host_weights_mode, 8))
    return None if device.unified else PooledWeightStore()
