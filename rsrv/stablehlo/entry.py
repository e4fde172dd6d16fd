"""Give a program another entry: arguments in another order, more of them, or of another element type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rsrv.core.errors import ProgramError
from rsrv.stablehlo.mlir import ir, stablehlo
from rsrv.stablehlo.program import inspect_module, parse
from rsrv.stablehlo.signature import TensorType


def with_entry(
    program: bytes | str, arguments: Sequence[TensorType], places: Sequence[int], results: Sequence[TensorType]
) -> ir.Module:
    """`program` with @main from `arguments` to `results`, computing what it computed.

    Args:
        places: for each argument that @main has now, the index in `arguments` that it is taken from. Several may be
            taken from one; an argument that none is taken from is not used.
        results: the results of @main in order; an element type that differs is converted, as that of an argument is.

    Attributes of arguments and results are dropped: they name the old ones. Raises ProgramError when counts or shapes
    differ.
    """
    module = parse(program)
    found = inspect_module(module).signature
    if len(places) != len(found.arguments) or not all(0 <= place < len(arguments) for place in places):
        raise ProgramError(
            f"program takes {len(found.arguments)} arguments, which cannot be taken from places {list(places)} of "
            f"{len(arguments)}",
            rule="B-11",
        )
    for index, place in enumerate(places):
        _require_shape(f"argument {index}", found.arguments[index], arguments[place])
    if len(results) != len(found.results):
        raise ProgramError(f"program returns {len(found.results)} results, wanted {len(results)}", rule="B-11")
    for index, (old, new) in enumerate(zip(found.results, results, strict=True)):
        _require_shape(f"result {index}", old, new)
    main = _main(module)
    block = main.regions[0].blocks[0]
    with module.context, ir.Location.unknown():
        taken = [ir.Type.parse(_text(kind)) for kind in arguments]
        given = [ir.Type.parse(_text(kind)) for kind in results]
        fresh = [block.add_argument(kind, ir.Location.unknown()) for kind in taken]
        with ir.InsertionPoint.at_block_begin(block):
            for index, place in enumerate(places):
                old_argument = block.arguments[index]
                old_argument.replace_all_uses_with(_converted(fresh[place], old_argument.type))
        for _ in places:
            block.erase_argument(0)
        end = block.operations[len(block.operations) - 1].operation
        with ir.InsertionPoint(end):
            for index, kind in enumerate(given):
                end.operands[index] = _converted(end.operands[index], kind)
        main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(taken, given))
        for name in ("arg_attrs", "res_attrs"):
            if name in main.attributes:
                del main.attributes[name]
    return module


def _main(module: ir.Module) -> ir.Operation:
    for operation in module.body.operations:
        main = operation.operation
        if main.name == "func.func" and ir.StringAttr(main.attributes["sym_name"]).value == "main":
            return main
    raise AssertionError("inspect_module found @main")


def _converted(value: ir.Value[Any], kind: ir.Type) -> ir.Value[Any]:
    """`value` as `kind`, which differs in its element type at most."""
    converted: ir.Value[Any] = value if value.type == kind else stablehlo.ConvertOp(kind, value).result
    return converted


def _text(kind: TensorType) -> str:
    return f"tensor<{''.join(f'{size}x' for size in kind.shape)}{kind.dtype}>"


def _require_shape(what: str, found: TensorType, wanted: TensorType) -> None:
    if found.shape != wanted.shape:
        raise ProgramError(f"program's {what} is {found}, wanted {wanted}", rule="B-11")
