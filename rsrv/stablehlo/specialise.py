"""A program with a symbolic batch axis, made into the program for one batch size (rule B-12a)."""

from __future__ import annotations

import re
from importlib import import_module

from rsrv.core.errors import ProgramError
from rsrv.stablehlo.mlir import bytecode, diagnostics, ir, stablehlo, summary
from rsrv.stablehlo.program import inspect_module, parse
from rsrv.stablehlo.signature import ProgramSignature, TensorType

_CONSTRAINTS = frozenset({"shape_assertion"})


def specialised(program: bytes | str, batch: int) -> bytes:
    """`program` with the size `batch` for every symbolic axis of its arguments, as plain MLIR bytecode.

    Shapes are propagated through the whole program, and what it asserts about sizes is checked. Each argument may have
    one symbolic axis, and all of them are the batch.

    Raises ProgramError (B-12a) for a program without a symbolic axis, for one that refuses this size, and for one whose
    results still have no known sizes afterwards, for example since they depend on values.
    """
    if batch < 1:
        raise ValueError(f"batch is {batch}, wanted at least 1")
    module = parse(program)
    signature = inspect_module(module).signature
    require_one_symbol(signature)
    # jax.extend.mlir has the same function, but importing that takes all of jax.
    refine = import_module("jaxlib._jax").mlir.refine_polymorphic_shapes
    with diagnostics(module.context) as messages:
        try:
            _retype(module, [_sized(tensor, batch) for tensor in signature.arguments])
            refined = refine(
                bytecode(module), enable_shape_assertions=True, validate_static_shapes=True, enable_shardy=True
            )
        except Exception as error:
            text = "; ".join(messages) or str(error)
            reason = f"program cannot be specialised to batch size {batch}: {_reason(text)}"
            raise ProgramError(reason, rule="B-12a") from error
    return bytes(refined)


def require_one_symbol(signature: ProgramSignature) -> None:
    """Raises ProgramError (B-12a) unless some argument has a symbolic axis, and none has two."""
    for index, tensor in enumerate(signature.arguments):
        if tensor.shape.count(-1) > 1:
            raise ProgramError(
                f"argument {index} is {tensor}; one axis, the batch, may be symbolic",
                rule="B-12a",
                hint="export it again with a symbol for the batch size only; other sizes are shape variants",
            )
    if all(tensor.is_static for tensor in signature.arguments):
        raise ProgramError(
            "program has no symbolic axis, so it cannot be specialised to a batch size",
            rule="B-12a",
            hint="export it with dynamic_batch=True (--dynamic-batch), or leave batching.dynamic out of the manifest",
        )


def without_assertions(module: ir.Module) -> ir.Module:
    """`module`, in place, without the checks of sizes that an exporter wrote into it.

    For programs in which the one symbol is the batch size and every size from 1 on is allowed: specialising gives all
    of its axes the same size, so nothing is left to check, and no server has to know what an assertion is.
    """
    found: list[ir.Operation] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target in _CONSTRAINTS:
                found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for operation in found:
        operation.erase()
    _run_passes(module, "canonicalize,cse")
    return module


def _run_passes(module: ir.Module, passes: str) -> None:
    from jaxlib.mlir.passmanager import PassManager

    with module.context:
        PassManager.parse(f"builtin.module({passes})").run(module.operation)


def _sized(tensor: TensorType, batch: int) -> tuple[int, ...] | None:
    """The shape of an argument for `batch` rows; None for one that stays as it is."""
    return None if tensor.is_static else tuple(batch if size == -1 else size for size in tensor.shape)


def _retype(module: ir.Module, shapes: list[tuple[int, ...] | None]) -> None:
    """Give the arguments of @main `shapes`; its body goes on with the types that it had, by way of a conversion."""
    main = next(
        operation.operation
        for operation in module.body.operations
        if operation.operation.name == "func.func"
        and ir.StringAttr(operation.operation.attributes["sym_name"]).value == "main"
    )
    block = main.regions[0].blocks[0]
    with module.context, ir.Location.unknown():
        types: list[ir.Type] = []
        for argument, shape in zip(list(block.arguments), shapes, strict=True):
            old = argument.type
            if shape is None:
                types.append(old)
                continue
            new = ir.RankedTensorType.get(shape, ir.RankedTensorType(old).element_type)
            types.append(new)
            argument.set_type(new)
            with ir.InsertionPoint.at_block_begin(block):
                converted = stablehlo.ConvertOp(old, argument)
            argument.replace_all_uses_except(converted.result, converted.operation)
        function = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, function.results))


def _reason(text: str) -> str:
    """The part of a message of the refinement that is about the program."""
    _, _, located = text.partition(": error: ")  # of a program that was text, with the place in it
    return summary(re.sub(r"^(\S*Error: |error: |loc\([^)]*\): )*", "", (located or text).strip()))
