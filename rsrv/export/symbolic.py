"""The batch size as a symbol: one program for every batch size, for bundles with ``batching.dynamic`` (B-12a)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import jax.export

from rsrv.core.errors import ExportError, RsrvError
from rsrv.export.usercode import describe
from rsrv.stablehlo.program import parse
from rsrv.stablehlo.specialise import without_assertions

if TYPE_CHECKING:
    from jaxlib.mlir import ir

FIXED = "without dynamic_batch (--dynamic-batch) every batch size gets a program of its own"


def batch_symbol() -> Any:
    """A symbol that stands for any batch size from 1 on, where shapes have a size."""
    (symbol,) = jax.export.symbolic_shape("b")
    return symbol


def is_symbol(batch: object) -> bool:
    return batch is not None and not isinstance(batch, int)


def lower_symbolic(main: Callable[..., Any], specs: Sequence[jax.ShapeDtypeStruct], platform: str) -> ir.Module:
    """The StableHLO module of ``main(*specs)``, in whose shapes one symbol stands. It asserts nothing about sizes.

    Raises ExportError when an operation has to know the number.
    """
    with symbolic_batch():
        exported = jax.export.export(jax.jit(main, keep_unused=True), platforms=(platform,))(*specs)
        return without_assertions(parse(exported.mlir_module_serialized))


@contextmanager
def symbolic_batch() -> Iterator[None]:
    """Say of every failure inside that it is one of the symbolic batch size, and what to do."""
    try:
        yield
    except RsrvError as error:
        if error.hint == FIXED:
            raise
        raise ExportError(f"no program for every batch size: {error.message}", hint=FIXED) from error
    except Exception as error:
        raise ExportError(f"no program for every batch size: {describe(error)}", hint=FIXED) from error
