"""Which arithmetic a program's matrix products use: TF32 where the hardware has it, or float32 everywhere (worker §9).

Only attributes are changed; no operation is added or erased.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rsrv.core.errors import ProgramError
from rsrv.stablehlo.custom_calls import COMPILER_CALLS
from rsrv.stablehlo.mlir import ir

_DOTS = frozenset({"stablehlo.dot_general", "stablehlo.dot", "chlo.ragged_dot", "mhlo.dot_general", "mhlo.dot"})
_CONVOLUTIONS = frozenset({"stablehlo.convolution", "stablehlo.dynamic_conv", "mhlo.convolution", "mhlo.dynamic_conv"})
_LIBRARY_OPS = frozenset({"cholesky", "triangular_solve"})
_CUSTOM_CALLS = frozenset({"stablehlo.custom_call", "mhlo.custom_call"})
_SINGLE = frozenset({"f32", "complex<f32>"})
"""Element types that a GPU may multiply in TF32."""
_F32_ALGORITHM = (
    "lhs_precision_type = f32, rhs_precision_type = f32, accumulation_type = f32, lhs_component_count = 1, "
    "rhs_component_count = 1, num_primitive_operations = 1, allow_imprecise_accumulation = false"
)


@dataclass(frozen=True, slots=True)
class Pinned:
    """What `pin` did: algorithms rewritten from TF32 to float32, and operations that were told to use float32."""

    algorithms: int = 0
    dots: int = 0
    convolutions: int = 0

    def __bool__(self) -> bool:
        return bool(self.algorithms or self.dots or self.convolutions)


def strip_tf32(module: ir.Module) -> int:
    """Take explicit TF32 algorithms out of `module`, which hardware without TF32 does not compile; how many."""
    found = [operation for operation in _products(module) if _asks_for_tf32(operation)]
    for operation in found:
        del operation.attributes["algorithm"]
    return len(found)


def pin(module: ir.Module) -> Pinned:
    """Make every product of float32 operands in `module` one in float32; a second time nothing is left to do.

    A TF32 algorithm becomes the float32 algorithm, which excludes a precision; other algorithms are left alone; what
    has none gets the precision HIGHEST. Operands of other types are left alone, where that would change the meaning.
    """
    algorithms = dots = convolutions = 0
    with module.context:
        for operation in _products(module):
            dialect = operation.name.partition(".")[0]
            if _asks_for_tf32(operation):
                operation.attributes["algorithm"] = ir.Attribute.parse(f"#{dialect}.dot_algorithm<{_F32_ALGORITHM}>")
                algorithms += 1
            elif "algorithm" not in operation.attributes and _is_single(operation) and not _is_highest(operation):
                highest = ir.Attribute.parse(f"#{dialect}<precision HIGHEST>")
                operation.attributes["precision_config"] = ir.ArrayAttr.get([highest, highest])
                if operation.name in _DOTS:
                    dots += 1
                else:
                    convolutions += 1
    return Pinned(algorithms, dots, convolutions)


def require_pinned(module: ir.Module) -> None:
    """Raises ProgramError when a product of float32 operands may still be computed in TF32."""
    for operation in _products(module):
        free = "algorithm" not in operation.attributes and _is_single(operation) and not _is_highest(operation)
        if free or _asks_for_tf32(operation):
            raise ProgramError(
                f"runtime.numerics is f32, but a {operation.name} of the program could not be pinned to float32",
                hint="serve it with runtime.numerics: auto, whose results follow the hardware",
            )


def ungoverned(module: ir.Module) -> tuple[str, ...]:
    """What computes in a library that no attribute reaches: targets of custom calls, cholesky, … ; sorted."""
    names: set[str] = set()
    for operation in _walk(module):
        if operation.name in _CUSTOM_CALLS:
            names.add(ir.StringAttr(operation.attributes["call_target_name"]).value)
        elif (bare := operation.name.partition(".")[2]) in _LIBRARY_OPS:
            names.add(bare)
    return tuple(sorted(names - COMPILER_CALLS))


def _products(module: ir.Module) -> Iterator[ir.Operation]:
    return (operation for operation in _walk(module) if operation.name in _DOTS or operation.name in _CONVOLUTIONS)


def _walk(module: ir.Module) -> list[ir.Operation]:
    """All operations in all regions."""
    found: list[ir.Operation] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _asks_for_tf32(operation: ir.Operation) -> bool:
    return "algorithm" in operation.attributes and "tf32" in str(operation.attributes["algorithm"])


def _is_single(operation: ir.Operation) -> bool:
    return all(str(ir.ShapedType(operation.operands[i].type).element_type) in _SINGLE for i in (0, 1))


def _is_highest(operation: ir.Operation) -> bool:
    if "precision_config" not in operation.attributes:
        return False
    entries = [str(entry) for entry in ir.ArrayAttr(operation.attributes["precision_config"])]
    return bool(entries) and all("HIGHEST" in entry for entry in entries)
