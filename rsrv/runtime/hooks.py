"""Loads the hooks of a bundle (``model.py``) and calls them. On which thread or process is not decided here."""

from __future__ import annotations

import logging
import traceback
import types
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import rsrv
from rsrv.core.errors import BundleError, HookError, HookRejected

log = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray]
Hook = Callable[[Arrays], Arrays]
MetaRun = Callable[[Arrays, Any], Arrays]

_REGULAR = ("preprocess", "postprocess")
_META = "run"


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of one load of one bundle; None = identity."""

    preprocess: Hook | None = None
    postprocess: Hook | None = None
    run: MetaRun | None = None


@dataclass(slots=True)
class _Registrations:
    file: str
    calls: list[tuple[str, Hooks]] = field(default_factory=list)


# Per load, not per process: bundles may be loaded on several threads at once.
_loading: ContextVar[_Registrations | None] = ContextVar("rsrv_loading_hooks", default=None)


def register_model(name: str | None = None, *, preprocess: Hook | None = None, postprocess: Hook | None = None) -> None:
    """Called from a bundle's ``model.py``: registers the hooks of a model.

    Args:
        name: informational; a model's name is the name of its directory.
        preprocess: client inputs by name -> executable inputs by name; None = identity.
        postprocess: executable outputs by name (the rows of one request) -> client outputs by name; None = identity.

    Raises BundleError outside a load and for anything that cannot be called.
    """
    _register("register_model", Hooks(preprocess=preprocess, postprocess=postprocess))


def register_meta_model(name: str | None = None, *, run: MetaRun) -> None:
    """Called from the ``model.py`` of a ``kind: meta`` bundle: registers ``run(inputs, call) -> outputs``."""
    _register("register_meta_model", Hooks(run=run))


def _register(function: str, hooks: Hooks) -> None:
    registrations = _loading.get()
    if registrations is None:
        raise BundleError(f"{function} was called outside the load of a bundle; it belongs into a bundle's model.py")
    for role in (*_REGULAR, _META):
        value = getattr(hooks, role)
        if value is not None and not callable(value):
            raise BundleError(
                f"{registrations.file}: {function}({role}=…) wants a function, got {type(value).__name__}"
            )
    registrations.calls.append((function, hooks))


def load_hooks(path: Path, *, name: str, incarnation: int, meta: bool = False, source: bytes | None = None) -> Hooks:
    """Execute the ``model.py`` of bundle `name` in a fresh module and return what it registers.

    `source` is what `path` held when somebody read it before; None = read it now.

    Raises BundleError (B-71, B-72): the file cannot be read or raises, registers nothing, registers twice, mixes module
    level functions with calls of `register_model`, or registers for the other kind of bundle. `bundle.hookfile` finds
    most of that without running the file; here is what only a run can tell, and the last word.
    """
    module = types.ModuleType(f"rsrv_bundle_{name}_{incarnation}")
    module.__file__ = str(path)
    module.__dict__.update(
        BUNDLE_DIR=path.parent, register_model=register_model, register_meta_model=register_meta_model, rsrv=rsrv
    )
    registrations = _Registrations(str(path))
    token = _loading.set(registrations)
    try:
        exec(compile(path.read_bytes() if source is None else source, str(path), "exec"), module.__dict__)
    except BundleError:
        raise
    except (Exception, SystemExit) as error:
        log.exception("hooks failed to load bundle=%s file=%s", name, path)
        raise BundleError(f"{path}: {_where(error, path)}{_describe(error)}", rule="B-71", file=path.name) from error
    finally:
        _loading.reset(token)
    return _choose(module, registrations, path, meta)


def _choose(module: types.ModuleType, registrations: _Registrations, path: Path, meta: bool) -> Hooks:
    def refuse(problem: str, hint: str) -> BundleError:
        return BundleError(f"{path}: {problem}", rule="B-72", file=path.name, hint=hint)

    functions = {role: value for role in (*_REGULAR, _META) if callable(value := module.__dict__.get(role))}
    calls = [function for function, _ in registrations.calls]
    if calls and functions:
        raise refuse(
            f"mixes {calls[0]} with the module level function {next(iter(functions))!r}",
            "keep one form: rename the function, or drop the call",
        )
    if len(calls) > 1:
        raise refuse(f"registers {len(calls)} times ({', '.join(calls)})", "register once")
    if not calls and not functions:
        wanted = "a module level function 'run'" if meta else "a module level function 'preprocess' or 'postprocess'"
        raise refuse("registers nothing", f"define {wanted}, or remove the file")
    hooks = registrations.calls[0][1] if calls else Hooks(**functions)
    if meta and hooks.run is None:
        raise refuse("registers the hooks of a model, but the manifest says kind: meta", "define run(inputs, call)")
    if not meta and (hooks.run is not None or "register_meta_model" in calls):
        raise refuse("registers a meta model, but the manifest says kind: model", "define preprocess or postprocess")
    if meta and (hooks.preprocess is not None or hooks.postprocess is not None):
        raise refuse("defines preprocess or postprocess, but a meta model has run only", "remove them")
    return hooks


def _where(error: BaseException, path: Path) -> str:
    """``line N: `` of the last frame inside `path`, so that a failed load names the line that its author can fix."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"line {lines[-1]}: " if lines else ""


def _describe(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]


def call_hook(hook: Hook, inputs: Mapping[str, np.ndarray], *, model: str, role: str) -> Arrays:
    """Run a hook and check the type of what it returns; arrays come back in C order.

    Raises HookRejected when the hook refuses the data, HookError for anything else (the text goes to the log only).
    """
    try:
        result = hook(dict(inputs))
    except HookRejected:
        raise
    except BaseException as error:
        log.exception("hook failed model=%s hook=%s", model, role)
        raise HookError(
            f"hook {role} of model {model!r} raised {type(error).__name__}", hint="the server's log has the traceback"
        ) from error
    if not isinstance(result, dict):
        raise HookError(f"hook {role} of model {model!r} returned {_kind(result)}, wanted dict[str, np.ndarray]")
    arrays: Arrays = {}
    for name, array in result.items():
        if not isinstance(name, str):
            raise HookError(f"hook {role} of model {model!r} returned the key {name!r}, wanted a str")
        if not isinstance(array, np.ndarray):
            raise HookError(f"hook {role} of model {model!r} returned {_kind(array)} for {name!r}, wanted np.ndarray")
        arrays[name] = np.asarray(array, order="C")
    return arrays


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
