"""Everything about a model's requests that can be computed before the first one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rsrv.serve.gate import Accepted
from rsrv.serve.registry import Prepared
from rsrv.serve.validate import OutputCheck, RowCheck, RowSizes, TensorCheck

if TYPE_CHECKING:
    from rsrv.runtime.hooks import Hooks
    from rsrv.serve.hook_processes.processes import HookProcesses
    from rsrv.serve.request import Request
    from rsrv.serve.scheduler.model import ServableModel


def prepare_checks(
    model: ServableModel,
    hooks: Hooks,
    hook_timeout: float | None,
    *,
    split_oversize: bool = False,
    numerics: str = "",
    processes: HookProcesses | None = None,
    accepted: Accepted[Request] | None = None,
) -> Prepared:
    """Everything about a model's requests that can be computed before the first one.

    `split_oversize`: requests with more rows than any program takes are run in pieces, so any number is allowed.
    `numerics`: what was done about the arithmetic of its programs, for people.
    `processes`: those that `hooks` run in, if any.
    `accepted`: the requests that the model has already, under another name; None = it is a new one.
    """
    manifest, name = model.manifest, model.name
    hooked = hooks.preprocess is not None or hooks.postprocess is not None
    exact = not model.coalescable
    return Prepared(
        model=model,
        hooks=hooks,
        inputs=TensorCheck(manifest.wire_inputs, model=name),
        executable_inputs=TensorCheck(manifest.executable_inputs, model=name, what="executable input")
        if hooks.preprocess is not None
        else None,
        rows=RowCheck(
            manifest.executable_inputs,
            {
                variant: RowSizes(() if split_oversize and not exact else sizes, exact)
                for variant, sizes in model.row_sizes_by_variant.items()
            },
            model=name,
        ),
        outputs=OutputCheck(manifest.wire_outputs, model=name, rows_known=not hooked),
        client_outputs=TensorCheck(manifest.wire_outputs, model=name, what="output")
        if hooks.postprocess is not None
        else None,
        hook_timeout=manifest.hooks.timeout_seconds or hook_timeout,
        numerics=numerics,
        processes=processes,
        accepted=Accepted() if accepted is None else accepted,
    )
