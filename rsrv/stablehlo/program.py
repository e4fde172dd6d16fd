"""Read a program: parse it, and report what its entry function takes and returns. Compiling is the runtime's work.

A hostile program can end the process that parses it, so servers and `rsrv bundle check` do this in a compile process
(`rsrv.runtime.CompilePool`); call these functions directly only for programs that you made yourself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rsrv.core.errors import ProgramError
from rsrv.stablehlo.artifact import artifact_version, require_readable
from rsrv.stablehlo.mlir import BYTECODE_MAGIC, bytecode, context, diagnostics, ir, stablehlo, summary
from rsrv.stablehlo.signature import ProgramReport, ProgramSignature, TensorType, numpy_dtype, tensor_type

# Dialects that XLA's importer takes; anything else parses here and fails there.
_IMPORTABLE = frozenset({"builtin", "func", "stablehlo", "chlo", "mhlo", "sdy", "shape", "tensor", "arith", "vhlo"})
_FROM_OUTSIDE = frozenset(
    f"{dialect}.{name}" for dialect in ("stablehlo", "mhlo") for name in ("infeed", "outfeed", "send", "recv")
)
_DONATION = ("tf.aliasing_output", "jax.buffer_donor")
_PLACEMENT = ("mhlo.layout_mode", "mhlo.memory_kind")
_MODULE_PLACEMENT = (
    "mhlo.input_output_alias",
    "mhlo.xla_entry_computation_parameter_layouts",
    "mhlo.xla_entry_computation_parameter_tiles",
    "mhlo.xla_entry_computation_result_layout",
    "mhlo.xla_entry_computation_result_tiles",
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A program that is ready for the compiler: `code` keeps the promises of the device protocol."""

    report: ProgramReport
    code: bytes | str


def parse(data: bytes | str) -> ir.Module:
    """Parse a portable artifact, plain MLIR bytecode or MLIR text, in a context of its own.

    Raises ProgramError when it is none of these, newer or older than what this installation reads (B-70), or uses a
    dialect that is not known here (B-69).
    """
    if isinstance(data, bytes) and data.startswith(BYTECODE_MAGIC):
        version = artifact_version(data)
        if version is not None:
            require_readable(version)
        return _parse_bytecode(data)
    text = data if isinstance(data, str) else _decode(data)
    with context() as own, diagnostics(own) as messages:
        try:
            return ir.Module.parse(text)
        except Exception as error:
            lines = [diagnostic.message for diagnostic in getattr(error, "error_diagnostics", ())]
            raise _unreadable([*lines, *messages] or [str(error)], text) from error


def report(data: bytes | str) -> ProgramReport:
    """Parse a program and describe it; see `inspect_module`."""
    return inspect_module(parse(data), artifact_version(data) if isinstance(data, bytes) else None)


def inspect_module(module: ir.Module, version: str | None = None) -> ProgramReport:
    """Describe an in-memory module.

    Raises ProgramError for a program that no bundle may hold: no public @main, an argument or result that is not a
    ranked tensor, more than one replica or partition, operations that wait for data from outside the program, or a
    dialect that the compiler does not take. Dynamic axes are reported as -1 and refused at compile time.
    """
    signature, donated = _entry(module)
    for attribute in ("mhlo.num_replicas", "mhlo.num_partitions"):
        count = _module_attribute(module, attribute)
        if count is not None and ir.IntegerAttr(count).value != 1:
            raise ProgramError(f"program has {attribute} = {ir.IntegerAttr(count).value}, wanted 1", rule="B-8")
    names, custom_calls = _operations(module)
    dialects = {name.partition(".")[0] for name in names}
    if foreign := sorted(dialects - _IMPORTABLE):
        raise foreign_dialect(foreign[0])
    if waiting := sorted(names & _FROM_OUTSIDE):
        raise ProgramError(f"program uses {waiting[0]}, which would wait for data from outside the program for ever")
    return ProgramReport(
        signature=signature,
        custom_calls=tuple(sorted(custom_calls)),
        dialects=tuple(sorted(dialects)),
        donated=donated,
        stablehlo_version=version,
    )


def prepare(data: bytes | str) -> Prepared:
    """Parse, describe and clean a program for the compiler.

    Requests to overwrite arguments, to lay them out in another than row-major order or to place them in another memory
    are removed: XLA would follow them silently, while the device protocol promises that they do not exist.

    Raises ProgramError as `report` does, and for dynamic shapes in the signature (B-10).
    """
    module = parse(data)
    found = inspect_module(module, artifact_version(data) if isinstance(data, bytes) else None)
    if (dynamic := found.signature.dynamic()) is not None:
        raise ProgramError(f"program has dynamic shapes: {dynamic}; wanted static shapes", rule="B-10")
    for tensor in (*found.signature.arguments, *found.signature.results):
        try:
            numpy_dtype(tensor.dtype)
        except KeyError:
            raise ProgramError(f"program takes or returns {tensor}, an element type that no array can hold") from None
    if _clean(module):
        return Prepared(found, bytecode(module))
    if isinstance(data, bytes) and not data.startswith(BYTECODE_MAGIC):
        return Prepared(found, data.decode())
    return Prepared(found, data)


def unportable_dialect(module: ir.Module) -> str | None:
    """A dialect of `module` that a portable artifact cannot hold, or None."""
    dialects = {name.partition(".")[0] for name in _operations(module)[0]}
    return min(dialects - {"builtin", "func", "stablehlo", "chlo", "vhlo"}, default=None)


def foreign_dialect(dialect: str) -> ProgramError:
    """The refusal of rule B-69."""
    return ProgramError(
        f"program uses dialect {dialect!r}, re-export needed: only StableHLO and CHLO operations can be compiled here",
        rule="B-69",
    )


def _parse_bytecode(data: bytes) -> ir.Module:
    with context() as own, diagnostics(own) as messages:
        try:
            return stablehlo.deserialize_portable_artifact(own, data)
        except Exception as error:  # UnicodeDecodeError, too: messages quote the damaged bytes
            raise _unreadable(messages or [str(error)], "") from error


def _decode(data: bytes) -> str:
    if not data.strip():
        raise ProgramError(f"program is empty ({len(data)} bytes)")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ProgramError(
            f"program is neither MLIR bytecode nor MLIR text: its {len(data)} bytes start with {data[:8].hex(' ')}"
        ) from None


def _unreadable(messages: list[str], text: str) -> ProgramError:
    for message in messages:
        if named := re.search(r"[Dd]ialect [`']([\w.$]+)' (?:is unknown|not found)|^[`#!]+\"([\w$]+)\"<", message):
            return foreign_dialect(named[1] or named[2])
        if "unregistered dialect" in message:
            for dialect in re.findall(r'"([A-Za-z_]\w*)\.[\w.]+" ?\(', text):
                if dialect not in _IMPORTABLE:
                    return foreign_dialect(dialect)
    return ProgramError(f"program cannot be read: {summary('; '.join(messages))}")


def _entry(module: ir.Module) -> tuple[ProgramSignature, tuple[int, ...]]:
    """Signature and donated arguments of @main."""
    functions = {}
    for operation in module.body.operations:
        if operation.operation.name == "func.func":
            functions[ir.StringAttr(operation.operation.attributes["sym_name"]).value] = operation.operation
    main = functions.get("main")
    if main is None:
        found = ", ".join(f"@{name}" for name in functions) or "none"
        raise ProgramError(f"program has no function @main (functions: {summary(found)})", rule="B-8")
    if "sym_visibility" in main.attributes:
        visibility = ir.StringAttr(main.attributes["sym_visibility"]).value
        if visibility != "public":
            raise ProgramError(f"program's @main is {visibility}, wanted a public function", rule="B-8")
    function = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    signature = ProgramSignature(
        tuple(_tensor(value, "argument", index) for index, value in enumerate(function.inputs)),
        tuple(_tensor(value, "result", index) for index, value in enumerate(function.results)),
    )
    donated = {
        index
        for index, attributes in enumerate(_dictionaries(main, "arg_attrs"))
        if any(name in attributes for name in _DONATION)
    }
    aliases = str(_module_attribute(module, "mhlo.input_output_alias"))
    donated.update(int(number) for number in re.findall(r"parameter_number = (\d+)", aliases))
    return signature, tuple(sorted(donated))


def _operations(module: ir.Module) -> tuple[set[str], set[str]]:
    """The names of all operations, in every region, and the targets of custom calls."""
    names: set[str] = set()
    custom_calls: set[str] = set()

    def visit(operation: ir.Operation) -> ir.WalkResult:
        names.add(operation.name)
        if operation.name in ("stablehlo.custom_call", "mhlo.custom_call"):
            custom_calls.add(ir.StringAttr(operation.attributes["call_target_name"]).value)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return names, custom_calls


def _tensor(value: ir.Type, kind: str, index: int) -> TensorType:
    try:
        ranked = ir.RankedTensorType(value)
    except (TypeError, ValueError):
        raise ProgramError(
            f"{kind} {index} of @main is {summary(str(value), 80)}, wanted a ranked tensor", rule="B-8"
        ) from None
    shape = tuple(-1 if ranked.is_dynamic_dim(axis) else ranked.get_dim_size(axis) for axis in range(ranked.rank))
    return tensor_type(str(ranked.element_type), shape)


def _dictionaries(function: ir.Operation, name: str) -> list[ir.DictAttr]:
    if name not in function.attributes:
        return []
    return [ir.DictAttr(item) for item in ir.ArrayAttr(function.attributes[name])]


def _entries(dictionary: ir.DictAttr) -> list[ir.NamedAttribute]:
    return [dictionary[index] for index in range(len(dictionary))]


def _module_attribute(module: ir.Module, name: str) -> ir.Attribute | None:
    return module.operation.attributes.get(name)


def _clean(module: ir.Module) -> bool:
    """Remove donation, layout and placement attributes in place; False when there were none."""
    changed = False
    with module.context, ir.Location.unknown():
        for name in _MODULE_PLACEMENT:
            if _module_attribute(module, name) is not None:
                del module.operation.attributes[name]
                changed = True
        for operation in module.body.operations:
            function = operation.operation
            if function.name != "func.func":
                continue
            for kind in ("arg_attrs", "res_attrs"):
                old = _dictionaries(function, kind)
                new = [
                    {entry.name: entry.attr for entry in _entries(item) if entry.name not in (*_DONATION, *_PLACEMENT)}
                    for item in old
                ]
                if any(len(before) != len(after) for before, after in zip(old, new, strict=True)):
                    function.attributes[kind] = ir.ArrayAttr.get([ir.DictAttr.get(item) for item in new])
                    changed = True
    return changed
