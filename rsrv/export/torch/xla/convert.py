"""A program saved by torch.export → StableHLO by torch-xla. A script: it runs in another interpreter, never in ours.

``python convert.py PROGRAM.pt2 DIRECTORY PRECISION`` writes into DIRECTORY:

``program.mlir``
    a portable artifact; its arguments are in torch-xla's order.
``constant_N``
    the bytes of a tensor that torch-xla made an argument of, in row-major order.
``report.json``
    what each argument is (``["weight", name]``, ``["input", position]`` or ``["constant", N]``), dtype and shape of the
    constants, versions; or ``{"error": {kind, message}}``.

Needs the standard library, torch 2.9 and torch_xla 2.9, and works on Python 3.10.
"""

from __future__ import annotations

import json
import platform
import sys
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

SERIES = "2.9"
REDUCTIONS = frozenset(
    f"aten::{name}"
    for name in (
        *("all", "amax", "amin", "any", "count_nonzero", "linalg_vector_norm", "logsumexp", "mean", "nansum", "norm"),
        *("std", "std_mean", "sum", "var", "var_mean"),
    )
)


class Refused(Exception):
    """`kind`: missing, version, import, read or convert."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def main(program: Path, directory: Path, precision: str) -> int:
    try:
        report = convert(program, directory, precision)
    except Refused as refused:
        report = {"error": {"kind": refused.kind, "message": str(refused)}}
    (directory / "report.json").write_text(json.dumps(report), encoding="utf-8")
    return 1 if "error" in report else 0


def convert(program: Path, directory: Path, precision: str) -> dict[str, Any]:
    """Write the program and its constants into `directory`; returns the report."""
    warnings.simplefilter("ignore")
    versions = installed()
    try:
        torch, xla = import_module("torch"), import_module("torch_xla.stablehlo")
        backends = import_module("torch_xla.backends")
    except Exception as error:
        raise Refused("import", describe(error)) from error
    try:
        exported = torch.export.load(program)
    except Exception as error:
        raise Refused("read", describe(error)) from error
    try:
        backends.set_mat_mul_precision(precision)
        state = {*exported.graph_signature.parameters, *exported.graph_signature.buffers}
        exported = xla._run_decompositions(exported)  # as the conversion itself does it
        reduce_all_axes(exported.graph_module)
        options = xla.StableHLOExportOptions(include_human_readable_text=False, export_weights=False)
        bundle = xla.exported_program_to_stablehlo(exported, options)._bundle
        (made,) = bundle.stablehlo_funcs
        constants = list(bundle.additional_constants)
        arguments: list[list[Any]] = []
        for location in made.meta.input_locations:
            if location.type_ == xla.VariableType.PARAMETER and location.name in state:
                arguments.append(["weight", location.name])
            elif location.type_ == xla.VariableType.PARAMETER:  # a constant in the code of the model
                arguments.append(["constant", len(constants)])
                constants.append(exported.constants[location.name].detach().cpu().numpy())
            else:
                kind = "input" if location.type_ == xla.VariableType.INPUT_ARG else "constant"
                arguments.append([kind, location.position])
    except Exception as error:
        raise Refused("convert", describe(error)) from error
    (directory / "program.mlir").write_bytes(made.bytecode)
    for number, array in enumerate(constants):
        (directory / f"constant_{number}").write_bytes(array.tobytes())
    return {
        "arguments": arguments,
        "constants": [{"dtype": array.dtype.name, "shape": list(array.shape)} for array in constants],
        "versions": versions,
    }


def installed() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "torch_xla"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            raise Refused("missing", package) from None
        if not found[package].startswith(f"{SERIES}."):
            raise Refused("version", f"{package} {found[package]}")
    return found


def reduce_all_axes(module: Any) -> None:
    """Name the axes of reductions that name none: torch reduces all of them then, torch-xla silently none."""
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or schema.name not in REDUCTIONS:
            continue
        for place, parameter in enumerate(schema.arguments):
            positional = place < len(node.args)
            given = node.args[place] if positional else node.kwargs.get(parameter.name)
            if parameter.name != "dim" or not (given is None or (isinstance(given, (list, tuple)) and not given)):
                continue
            axes = list(range(node.args[0].meta["val"].ndim))
            if positional:
                node.update_arg(place, axes)
            else:
                node.update_kwarg("dim", axes)
    module.recompile()


def describe(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:500]}" if lines else type(error).__name__


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
