"""How many arguments the programs of a bundle take, against how many it supplies: quick triage of a repository."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rsrv.audit.programs import bindings_missing, parse_pool
from rsrv.bundle.directory import open_bundle
from rsrv.bundle.files import read_program
from rsrv.bundle.safetensors import read_header
from rsrv.core.errors import ProgramError, SignatureMismatch
from rsrv.runtime.compile_pool import CompilePool


@dataclass(frozen=True)
class ModuleArity:
    """One program file. `entry_args` is None when it cannot be read, which `problem` explains."""

    module_file: str
    entry_args: int | None
    servable: bool
    problem: str | None = None


@dataclass(frozen=True)
class ArityReport:
    """`expected` is inputs plus weights in program order; a meta bundle has no modules and is servable as such."""

    name: str
    kind: str
    n_inputs: int
    n_weights: int
    expected: int
    modules: tuple[ModuleArity, ...]

    @property
    def servable(self) -> bool:
        return all(module.servable for module in self.modules)

    def __str__(self) -> str:
        """One line per module; ``✗`` marks those that disagree."""
        if self.kind == "meta":
            return f"{self.name}: kind meta, which has no programs"
        head = f"{self.name}: {self.n_inputs} inputs + {self.n_weights} weights = {self.expected} arguments expected"
        return "\n".join([head, *map(_line, self.modules)])


def bundle_entry_arity(mlir_path: Path | str, *, pool: CompilePool | None = None) -> int:
    """Argument count of the entry function of the program at `mlir_path`, parsed in a process that may die.

    Raises BundleError when the file is not there, ProgramError when it cannot be read as a program.
    """
    path = Path(mlir_path)
    data = read_program(path)
    if (reason := bindings_missing()) is not None:
        raise ProgramError(f"{path.name}: {reason}", file=path.name)
    with parse_pool(pool) as parser:
        try:
            return len(parser.inspect(data).signature.arguments)
        except ProgramError as error:
            raise ProgramError(f"{path.name}: {error.message}", rule=error.rule, file=path.name) from error


def bundle_arity_report(directory: Path | str, *, pool: CompilePool | None = None) -> ArityReport:
    """Compare every program of the bundle with what it is given. Never raises for a mismatch or an unreadable program.

    Raises BundleError when manifest, weights or a program file is missing or damaged as a file.
    """
    bundle = open_bundle(directory)
    manifest = bundle.manifest
    n_inputs = len(manifest.executable_inputs)
    n_weights = 0
    if bundle.weights_path is not None and not manifest.is_meta:
        n_weights = len(read_header(bundle.weights_path).argument_order)
    expected = n_inputs + n_weights
    files = bundle.program_files()
    if (reason := bindings_missing()) is not None:
        modules = [ModuleArity(path.name, None, False, reason) for path in files]
    elif files:
        with parse_pool(pool) as parser:
            modules = [_module(path, expected, parser) for path in files]
    else:
        modules = []
    return ArityReport(bundle.name, manifest.kind, n_inputs, n_weights, expected, tuple(modules))


def assert_bundle_arity(directory: Path | str, *, pool: CompilePool | None = None) -> ArityReport:
    """The report of a bundle whose programs all take the expected number of arguments, else SignatureMismatch."""
    report = bundle_arity_report(directory, pool=pool)
    if not report.servable:
        raise SignatureMismatch(
            str(report),
            rule="X-30",
            file=next(module.module_file for module in report.modules if not module.servable),
            hint="surplus arguments are most often captured values (a random key), missing ones unused inputs",
        )
    return report


def _module(path: Path, expected: int, pool: CompilePool) -> ModuleArity:
    try:
        count = bundle_entry_arity(path, pool=pool)
    except ProgramError as error:
        return ModuleArity(path.name, None, False, error.message)
    return ModuleArity(path.name, count, count == expected)


def _line(module: ModuleArity) -> str:
    what = f"takes {module.entry_args} arguments" if module.entry_args is not None else str(module.problem)
    return f"  {'✓' if module.servable else '✗'} {module.module_file} {what}"
