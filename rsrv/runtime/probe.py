"""Whether XLA takes the flags and options that somebody wrote down, found out where a refusal costs only a process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rsrv.core.errors import CompileProcessError, ConfigError, ProgramError
from rsrv.runtime.device import CompileOptions
from rsrv.stablehlo.policy import Policy

if TYPE_CHECKING:
    from rsrv.runtime.cache import ExecutableCache
    from rsrv.runtime.compile_pool import CompilePool

_PROGRAM = b"""module { func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %y = stablehlo.add %x, %x : tensor<4xf32>
  return %y : tensor<4xf32> } }"""


def require_usable_flags(pool: CompilePool, environ: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError for ``XLA_FLAGS`` that XLA does not take: it would end this process without an error of ours,
    as it does with a compile process."""
    flags = environ.get("XLA_FLAGS")
    if not flags:
        return
    try:
        pool.inspect(b"module {}")
    except ProgramError:
        pass  # the process lives, which is all that was asked
    except CompileProcessError as error:
        raise ConfigError(
            f"XLA does not start with XLA_FLAGS={flags!r}: {error.message}", hint="correct the variable, or unset it"
        ) from error


def require_usable_options(pool: CompilePool, options: CompileOptions, cache: ExecutableCache | None = None) -> None:
    """Compile three lines with `options`. Raises ConfigError that names the option which XLA does not know or take.

    With a cache, options that were found usable once are not tried again.
    """
    if not options.overrides:
        return
    key = None if cache is None else cache.key(hashlib.sha256(_PROGRAM).hexdigest(), Policy(), options)
    if cache is not None and key is not None and cache.load(key) is not None:
        return
    try:
        compiled = pool.compile(_PROGRAM, options)
    except ProgramError as error:
        given = ", ".join(f"{name}={value!r}" for name, value in options.overrides)
        raise ConfigError(
            f"runtime.xla_options: XLA does not take {given}: {error.message}",
            hint="options are XLA flags without dashes, and booleans are true or false",
        ) from error
    if cache is not None and key is not None:
        cache.store(key, compiled, label="options of XLA")
