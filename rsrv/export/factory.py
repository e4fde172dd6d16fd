"""Models named on the command line: ``package.module:attr`` or ``path/file.py:attr``, a zero-argument factory."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from rsrv.core.errors import ExportError, UsageError
from rsrv.export.usercode import user_code


@dataclass(frozen=True)
class Factory:
    """What a factory returned: the model, and optionally the names and axes that `export_bundle` takes."""

    fn: Callable[..., Any]
    params: Any
    inputs: Any
    input_names: Any = None
    output_names: Any = None
    input_batch_axes: Any = None
    output_batch_axes: Any = None
    axis_letters: Any = None
    shape_variants: Any = None


_KEYS = tuple(field.name for field in fields(Factory))
_REQUIRED = _KEYS[:3]
_FORM = "write package.module:function or path/to/file.py:function"
_WANTED = "want (fn, params, inputs), or a dict with the keys fn, params, inputs and optionally " + ", ".join(_KEYS[3:])


def load_factory(spec: str) -> Callable[[], Any]:
    """The callable that `spec` names. Raises UsageError when it is not there, ExportError when the import fails."""
    source, colon, attribute = spec.rpartition(":")
    if not colon or not source or not attribute:
        raise UsageError(f"{spec!r} is not MODULE:FN", hint=_FORM)
    if source.startswith(".") and not source.endswith(".py"):
        raise UsageError(f"{spec!r}: a module is named from the top, not relative to another", hint=_FORM)
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, [name for name in dir(found) if not name.startswith("_")], n=1)
            raise UsageError(
                f"{source} has no attribute {attribute!r}", hint=f"did you mean {close[0]!r}?" if close else None
            )
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{spec}: {attribute!r} is a {type(found).__name__}, want a function without arguments")
    return found  # type: ignore[no-any-return]


def call_factory(spec: str, *, x64: bool | None = None) -> Factory:
    """Load and call the factory, and check the form of what it returned.

    With `x64`, in that 64-bit mode of JAX: arrays that the factory makes with `jax.numpy` are narrowed in the other.
    """
    if x64 is not None:
        import jax

        with jax.enable_x64(x64):
            return call_factory(spec)
    return _checked(spec, made_by(spec))


def made_by(spec: str) -> Any:
    """What the factory that `spec` names returns. Raises UsageError, or ExportError with the user's own traceback."""
    factory = load_factory(spec)
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise UsageError(f"{spec}: {error}; a factory takes no arguments") from None
    except ValueError:  # a callable without a readable signature: calling it will tell
        pass
    with user_code(f"the factory {spec}"):
        return factory()


def _checked(spec: str, made: Any) -> Factory:
    if isinstance(made, Mapping):
        unknown = sorted(str(key) for key in made if key not in _KEYS)
        missing = [key for key in _REQUIRED if key not in made]
        if unknown or missing:
            what = f"unknown keys {', '.join(unknown)}" if unknown else f"no {', '.join(missing)}"
            raise ExportError(f"{spec} returned a dict with {what}", hint=_WANTED)
        result = Factory(**made)
    elif isinstance(made, tuple) and len(made) == len(_REQUIRED):
        result = Factory(*made)
    else:
        what = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise ExportError(f"{spec} returned {what}", hint=_WANTED)
    if not callable(result.fn):
        raise ExportError(f"{spec} returned a {type(result.fn).__name__} as fn, want a callable", hint=_WANTED)
    return result


def _load_file(path: Path) -> ModuleType:
    """Run a file as a module of its own; its directory is importable, as with ``python file.py``."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    path = path.resolve()
    _make_importable(path.parent)
    name = f"_rsrv_factory_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a .py file always has a spec and a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    with user_code(f"importing {path}"):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


def _load_module(name: str) -> ModuleType:
    _make_importable(Path.cwd())
    with user_code(f"importing {name}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there; something that it imports is not
            raise UsageError(
                f"there is no module {error.name!r}",
                hint="modules are looked up in the current directory and among the installed packages",
            ) from None


def _make_importable(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
