"""Custom calls of a program: code outside of StableHLO that the compiler has to find at the server."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rsrv.audit.findings import Finding
from rsrv.stablehlo.custom_calls import COMPILER_CALLS

# Understood by XLA itself, on every platform.
_EVERYWHERE = COMPILER_CALLS | {
    "stablehlo.dynamic_approx_top_k",
    "stablehlo.dynamic_reduce_window",
    "stablehlo.dynamic_rng_bit_generator",
    "stablehlo.dynamic_top_k",
}
# Come with jaxlib (its CPU wheel, its CUDA plugin), so a server on that platform has them.
_PLATFORMS = (
    ("cpu", re.compile(r"lapack_\w+|tridiagonal_solve_perturbed_ffi")),
    ("cuda", re.compile(r"cu(blas|dnn|fft|solver|sparse)?_\w+|__cu(blas|dnn|fft)\$.*|__gpu\$.*|mosaic_gpu\w*")),
)
_CALLBACK = re.compile(r"callback", re.IGNORECASE)


def custom_call_findings(check: str, targets: Sequence[str]) -> Iterator[Finding]:
    """An error for each target that no server can have, a warning for those that only some platforms have."""
    for target in targets:
        if _CALLBACK.search(target):
            yield Finding(
                "error",
                check,
                f"calls {target!r}, which points into the Python process that exported the program",
                file=check,
                hint="remove host callbacks (jax.debug.print, pure_callback, io_callback) and export again",
            )
        elif target in _EVERYWHERE:
            yield Finding("warning", check, f"custom call {target!r}: meant for the compiler, not portable", file=check)
        elif (platform := platform_of(target)) is not None:
            yield Finding("warning", check, f"custom call {target!r} exists on {platform} only", file=check)
        else:
            yield Finding(
                "error",
                check,
                f"calls {target!r}, which no server knows",
                file=check,
                hint="express it in StableHLO operations, or run that part in a hook",
            )


def platform_of(target: str) -> str | None:
    """The one platform whose jaxlib brings `target`, or None."""
    return next((platform for platform, pattern in _PLATFORMS if pattern.fullmatch(target)), None)
