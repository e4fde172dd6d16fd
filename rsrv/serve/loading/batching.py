"""Which batch sizes a model is served with: those that its programs have, or those that one program is made into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rsrv.core.errors import BundleError
from rsrv.serve.loading.programs import ProgramJob

if TYPE_CHECKING:
    from rsrv.bundle.manifest import Manifest
    from rsrv.serve.loading.digests import Programs
    from rsrv.stablehlo.policy import Policy


def require_choosable(manifest: Manifest, chosen: Sequence[int] | None) -> None:
    """Raises BundleError when batch sizes are `chosen` for a bundle whose programs have theirs."""
    if chosen is not None and not manifest.batching.dynamic:
        raise BundleError(
            f"scheduler.models.{manifest.name}.batch_sizes is {list(chosen)}, but the programs of {manifest.name!r} "
            "are for fixed batch sizes",
            hint="leave the key out, or export the model again with --dynamic-batch",
        )


def program_jobs(
    manifest: Manifest, programs: Programs, policy: Policy, chosen: Sequence[int] | None = None
) -> list[ProgramJob]:
    """What has to become executables; `chosen` replaces the batch sizes of a bundle with ``batching.dynamic``."""
    name = manifest.name
    if not manifest.batching.dynamic:
        return [
            ProgramJob.of(name, variant, key, program, policy)
            for variant, by_key in programs.items()
            for key, program in by_key.items()
        ]
    sizes = sorted(chosen) if chosen is not None else manifest.batching.compiled_batch_sizes
    return [
        ProgramJob.of(name, variant, size, next(iter(by_key.values())), replace(policy, batch=size))
        for variant, by_key in programs.items()
        for size in sizes
    ]
