"""What a bundle's `model.py` registers, read from its syntax tree: nothing of the file is executed here (B-72)."""

from __future__ import annotations

import ast
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rsrv.bundle.files import read_regular
from rsrv.bundle.problems import violation
from rsrv.core.errors import BundleError

MAX_HOOK_BYTES = 512 << 10
"""Of statements as short as can be, so many bytes take seconds to compile; vocabularies belong into files beside it."""

PARAMETERS = {"preprocess": ("inputs",), "postprocess": ("outputs",), "run": ("inputs", "call")}
REGISTER_MODEL, REGISTER_META_MODEL = "register_model", "register_meta_model"
_META_FUNCTION = "run"

_parsing = threading.Lock()


@dataclass(frozen=True, slots=True)
class HookRegistrations:
    """What `model.py` registers as far as its text tells.

    Attributes:
        functions: module-level hooks, name → line.
        calls: calls of `register_model` and `register_meta_model` at module level, (function, line).
        unclear: registers in a way that only a run can tell, such as inside of an ``if``, a function or ``import *``.
        mistakes: (line, text) of hooks that cannot be called as hooks are.
    """

    file: str
    functions: dict[str, int] = field(default_factory=dict)
    calls: tuple[tuple[str, int], ...] = ()
    unclear: bool = False
    mistakes: tuple[tuple[int, str], ...] = ()

    def problems(self, *, meta: bool) -> list[BundleError]:
        """Violations of B-72 for a bundle of that kind, only those that are certain without running the file."""
        found = [self._problem(line, text) for line, text in self.mistakes]
        if self.functions and self.calls:
            (name, line), (function, _) = next(iter(self.functions.items())), self.calls[0]
            found.append(self._problem(line, f"defines {name!r} and calls {function}; use one of the two forms"))
        if len(self.calls) > 1:
            found.append(self._problem(self.calls[1][1], f"registers {len(self.calls)} times; register once"))
        if not self.functions and not self.calls and not self.unclear:
            wanted = "'run'" if meta else "'preprocess' or 'postprocess'"
            found.append(self._problem(None, f"registers nothing; define {wanted} at module level, or remove the file"))
        for name, line in (*self.functions.items(), *self.calls):
            if meta != (name in (_META_FUNCTION, REGISTER_META_MODEL)):
                kind = "meta" if meta else "model"
                found.append(self._problem(line, f"{name!r} has no place in a bundle of kind: {kind}"))
        return found

    def _problem(self, line: int | None, text: str) -> BundleError:
        place = self.file if line is None else f"{self.file}:{line}"
        return violation(BundleError, "B-72", f"{place}: {text}", file=self.file)


def inspect_hooks(path: Path | str) -> HookRegistrations:
    """Compile a hook file to bytecode and read what it registers. Raises BundleError (B-71) when that fails."""
    file = Path(path)
    source = read_regular(file, max_bytes=MAX_HOOK_BYTES, error=BundleError, rule="B-71")
    return parse_hooks(source, file=file.name)


def parse_hooks(source: bytes, *, file: str) -> HookRegistrations:
    """As `inspect_hooks`, for source text in its declared encoding."""
    try:
        # One at a time: the filters are the process's, and so is what CPython 3.11 counts the depth of a tree with.
        with _parsing, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source, file)
            compile(tree, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        place = file if line is None else f"{file}:{line}"
        text = getattr(error, "msg", None) or str(error) or type(error).__name__
        raise violation(BundleError, "B-71", f"{place}: does not compile: {text}", file=file) from None
    functions: dict[str, int] = {}
    mistakes: list[tuple[int, str]] = []
    calls: list[tuple[str, int]] = []
    certain_calls: set[int] = set()
    unclear = False
    for statement, certain in _module_statements(tree.body, True):
        for name in _bound_names(statement):
            if name == "*":
                unclear = True
            elif name in PARAMETERS and certain:
                functions.setdefault(name, statement.lineno)
                mistakes += _mistakes(name, statement)
            elif name in PARAMETERS:
                unclear = True
        if certain and isinstance(statement, ast.Expr) and (function := _register_call(statement.value)):
            calls.append((function, statement.lineno))
            certain_calls.add(id(statement.value))
    mentioned = any(_mentions_registration(node) for node in _nodes_outside(tree, certain_calls))
    return HookRegistrations(file, functions, tuple(calls), unclear or mentioned, tuple(mistakes))


def _module_statements(body: list[ast.stmt], certain: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Statements that run when the module does, and whether they are sure to; bodies of definitions are left out."""
    for statement in body:
        yield statement, certain
        if isinstance(statement, ast.If) and _is_main_guard(statement.test):
            yield from _module_statements(statement.orelse, certain)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = certain and isinstance(statement, ast.With)
            for name in ("body", "orelse", "finalbody"):
                yield from _module_statements(getattr(statement, name, []), inside)
            for part in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
                yield from _module_statements(part.body, False)


def _is_main_guard(test: ast.expr) -> bool:
    """``__name__ == "__main__"``, which is never true of a bundle's hooks."""
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and test.left.id == "__name__"
        and isinstance(test.ops[0], ast.Eq)
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value == "__main__"
    )


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    """Names that the statement binds at module level to something that may be callable; ``*`` for a star import."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(statement, ast.Assign | ast.AnnAssign) and not isinstance(statement.value, ast.Constant | None):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def _mistakes(name: str, statement: ast.stmt) -> Iterator[tuple[int, str]]:
    if isinstance(statement, ast.AsyncFunctionDef):
        yield statement.lineno, f"{name!r} is a coroutine; hooks are plain functions"
    elif isinstance(statement, ast.FunctionDef) and not statement.decorator_list:
        wanted, arguments = PARAMETERS[name], statement.args
        positional = len(arguments.posonlyargs) + len(arguments.args)
        required = positional - len(arguments.defaults)
        keyword_only = [default for default in arguments.kw_defaults if default is None]
        enough = positional >= len(wanted) or arguments.vararg is not None
        if not enough or required > len(wanted) or keyword_only:
            yield statement.lineno, f"{name!r} cannot be called as {name}({', '.join(wanted)})"


def _register_call(expression: ast.expr) -> str | None:
    """The registration function that the expression calls."""
    if not isinstance(expression, ast.Call):
        return None
    called = expression.func
    name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else None
    return name if name in (REGISTER_MODEL, REGISTER_META_MODEL) else None


def _nodes_outside(tree: ast.AST, left_out: set[int]) -> Iterator[ast.AST]:
    """All nodes of `tree` but the called names of the calls in `left_out`."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        pending += [
            child
            for child in ast.iter_child_nodes(node)
            if not (id(node) in left_out and isinstance(node, ast.Call) and child is node.func)
        ]


def _mentions_registration(node: ast.AST) -> bool:
    names = (REGISTER_MODEL, REGISTER_META_MODEL)
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Attribute):
        return node.attr in names
    return isinstance(node, ast.Constant) and node.value in names
