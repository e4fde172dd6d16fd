"""The door to jaxlib's MLIR bindings: contexts with the dialects of a program, and the words of a failed parse.

Importing this module imports jaxlib (about 100 ms) but neither jax nor a device client.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

from rsrv.core.errors import ConfigError

try:
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    from jaxlib.mlir.dialects import chlo, sdy, stablehlo
except ModuleNotFoundError as error:  # pragma: no cover - the development environment has jaxlib
    raise ConfigError(f"StableHLO programs need jaxlib ({error})", hint="pip install 'rsrv[serve]'") from error

__all__ = ["BYTECODE_MAGIC", "bytecode", "context", "diagnostics", "ir", "stablehlo", "summary"]

BYTECODE_MAGIC = b"ML\xefR"


def context() -> ir.Context:
    """A fresh context that knows every dialect that jax programs use; a context lives as long as its modules."""
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    fresh = ir.Context()
    fresh.enable_multithreading(False)  # else every context starts threads of its own
    fresh.append_dialect_registry(registry)
    fresh.load_all_available_dialects()
    for dialect in (stablehlo, chlo, sdy):
        dialect.register_dialect(fresh)
    return fresh


def bytecode(module: ir.Module) -> bytes:
    """`module` as plain MLIR bytecode, which only this version of jaxlib is sure to read."""
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


@contextmanager
def diagnostics(target: ir.Context) -> Iterator[list[str]]:
    """Collect what MLIR would otherwise write to stderr; exceptions of the bindings often say less than this."""
    messages: list[str] = []

    def collect(diagnostic: ir.Diagnostic) -> bool:
        messages.append(diagnostic.message.strip())
        messages.extend(note.message.strip() for note in diagnostic.notes)
        return True

    handler = target.attach_diagnostic_handler(collect)
    try:
        yield messages
    finally:
        handler.detach()  # type: ignore[attr-defined]  # the stubs type the handler as object


def summary(text: str, limit: int = 300) -> str:
    """The first line of a message of MLIR or XLA that says something, cut to `limit` characters."""
    line = next((stripped for line in text.splitlines() if (stripped := line.strip())), "no message")
    return line if len(line) <= limit else line[: limit - 1] + "…"
