"""Portable artifacts: a program as versioned StableHLO bytecode, the form in which bundles hold it."""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING

from rsrv.core.errors import ExportError, ProgramError

if TYPE_CHECKING:
    from jaxlib.mlir import ir

DEFAULT_VERSION = "1.13.7"
"""What `serialize` writes: about twelve weeks behind jaxlib 0.10.2, so that servers that are a little older read it."""

_HEAD = re.compile(rb"ML\xefR[\x00-\xff]{1,2}StableHLO_v(\d{1,9})\.(\d{1,9})\.(\d{1,9})\x00", re.DOTALL)


def artifact_version(data: bytes) -> str | None:
    """The StableHLO version in the head of an artifact; None for text and for plain MLIR bytecode. Needs no jaxlib."""
    match = _HEAD.match(data[:64])
    return ".".join(str(int(part)) for part in match.groups()) if match else None


def readable_versions() -> tuple[str, str]:
    """The oldest and the newest StableHLO version that this installation reads."""
    from rsrv.stablehlo.mlir import stablehlo

    return stablehlo.get_minimum_version(), stablehlo.get_current_version()


def require_readable(version: str) -> None:
    """Raises ProgramError (B-70) for an artifact of a version outside the window; MLIR itself would just try."""
    oldest, newest = readable_versions()
    if _key(version) > _key(newest):
        raise ProgramError(
            f"program was written at StableHLO {version}, this installation reads {oldest} to {newest}",
            rule="B-70",
            hint=f"export it again with stablehlo_version={newest!r} or older, or upgrade jaxlib here",
        )
    if _key(version) < _key(oldest):
        raise ProgramError(
            f"program was written at StableHLO {version}, this installation reads {oldest} to {newest}",
            rule="B-70",
            hint="export it again with a newer toolchain",
        )


def serialize(module: ir.Module | str | bytes, version: str = DEFAULT_VERSION) -> bytes:
    """Write a portable artifact at StableHLO `version` ("x.y.z", "min" or "current").

    The bytes depend on the program alone: source locations are dropped, and the given module is left as it is. CHLO
    operations (erf, top_k) become composites that carry their own decomposition.

    Raises:
        ExportError: `version` is no version that this installation can write.
        ProgramError: the module cannot be parsed, or cannot be expressed at that version.
    """
    from jaxlib.mlir.passmanager import PassManager

    from rsrv.stablehlo.mlir import bytecode, context, diagnostics, ir, summary
    from rsrv.stablehlo.program import foreign_dialect, parse, unportable_dialect

    _jax = import_module("jaxlib._jax")  # a binary module without stubs; jax.extend.mlir has the same function
    target = _resolve(version)
    # Through bytecode into a context of our own: the caller's module stays untouched, whatever passes run on the copy.
    original = bytecode(parse(module) if isinstance(module, (str, bytes)) else module)
    with context() as own, diagnostics(own) as messages:
        copy = ir.Module.parse(original)
        try:
            PassManager.parse("builtin.module(strip-debuginfo)").run(copy.operation)
            return bytes(_jax.mlir.serialize_portable_artifact(bytecode(copy), target))
        except Exception as error:
            if (dialect := unportable_dialect(copy)) is not None:
                raise foreign_dialect(dialect) from error
            text = str(error).partition("Detailed error from MLIR:")[2] or "; ".join(messages) or str(error)
            raise ProgramError(f"program cannot be written at StableHLO {target}: {summary(text)}") from error


def _resolve(version: str) -> str:
    oldest, newest = readable_versions()
    if version in ("min", "current"):
        return oldest if version == "min" else newest
    if not re.fullmatch(r"\d{1,9}\.\d{1,9}\.\d{1,9}", version) or not _key(oldest) <= _key(version) <= _key(newest):
        raise ExportError(
            f'stablehlo_version {version!r} cannot be written: wanted "min", "current" or a version from '
            f"{oldest} to {newest}"
        )
    return version


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
