"""The options that every compilation gets, from the keys of the ``runtime`` section."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rsrv.runtime.device import CompileOptions

logger = logging.getLogger(__name__)

_LEVEL = "xla_gpu_autotune_level"
_CACHE_DIR = "xla_gpu_per_fusion_autotune_cache_dir"
_CACHE_MODE = "xla_gpu_experimental_autotune_cache_mode"


def compile_options(
    xla_options: Mapping[str, str | int | float | bool] = {},
    *,
    platform: str,
    autotune: bool = True,
    autotune_cache: bool | None = None,
    autotune_cache_dir: str = "",
) -> CompileOptions:
    """`xla_options`, and on CUDA what the keys of autotuning mean; an option that is written out wins over them.

    Whether XLA knows the options is found out by compiling with them (`CompilePool`).
    """
    chosen: dict[str, str | int | float | bool] = {}
    if platform == "cuda":
        if not autotune:
            chosen[_LEVEL] = 0
        if autotune_cache and not autotune_cache_dir:
            logger.warning("autotune cache off why=runtime.autotune_cache is true without runtime.autotune_cache_dir")
        elif autotune_cache or (autotune_cache is None and autotune_cache_dir):
            chosen[_CACHE_DIR] = autotune_cache_dir
            chosen[_CACHE_MODE] = "AUTOTUNE_CACHE_MODE_UPDATE"
        elif autotune_cache is False:
            chosen[_CACHE_DIR] = ""
    chosen.update({name.removeprefix("--"): value for name, value in xla_options.items()})
    return CompileOptions(tuple(sorted(chosen.items())))
