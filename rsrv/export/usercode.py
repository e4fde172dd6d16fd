"""Failures of the user's own code, shown as the user's own frames: neither rsrv's nor the frameworks'."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rsrv.core.errors import ExportError, RsrvError

_OURS = str(Path(__file__).parents[1])
_FOREIGN = (
    _OURS,
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    sysconfig.get_path("stdlib"),
    "<frozen",
)

_INFERENCE = "put the model in inference mode (deterministic=True, use_running_average=True, model.eval())"
_VALUES = "the values of the inputs are not known while tracing: use jax.numpy, jnp.where or jax.lax.cond instead"
_HINTS = {
    "ModifyScopeVariableError": _INFERENCE,
    "InvalidRngError": _INFERENCE,
    "TraceContextError": _INFERENCE,
    "ConcretizationTypeError": _VALUES,
    "TracerArrayConversionError": _VALUES,
    "TracerIntegerConversionError": _VALUES,
    "NonConcreteBooleanIndexError": _VALUES,
}


@contextmanager
def user_code(what: str, *, hint: str | None = None) -> Iterator[None]:
    """Turn an exception of the enclosed user code into an ExportError with the type, the text and the user's frames.

    Also SystemExit: a script that ends itself, even with success, has not made a model. `hint` is for errors that are
    not known better.
    """
    try:
        yield
    except RsrvError:
        raise
    except (Exception, SystemExit) as error:
        raise ExportError(f"{what} raised {describe(error)}", hint=_hint(error) or hint) from error


def _hint(error: BaseException) -> str | None:
    """The way out of the mistakes that everybody makes once, by the type that JAX or flax raises."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return next((hint for name, hint in _HINTS.items() if name in names), None)


def describe(error: BaseException) -> str:
    """``ValueError: text`` and below it the frames of the traceback that belong to the user."""
    shown = traceback.TracebackException(type(error), error, None)
    # JAX notes that it removed its frames; the frames below are fewer still.
    shown.__notes__ = [note for note in getattr(error, "__notes__", []) if "internal frames" not in note]
    text = "".join(shown.format_exception_only()).rstrip()
    frames = "".join(_user_frames(error)).rstrip()
    return f"{text}\n{frames}" if frames else text


def _user_frames(error: BaseException) -> list[str]:
    """The user's own frames; without any, the innermost one that is not ours (a model that is an installed package)."""
    stack = traceback.extract_tb(error.__traceback__)
    mine = [frame for frame in stack if not frame.filename.startswith(_FOREIGN)]
    others = [frame for frame in stack if not frame.filename.startswith(_OURS)]
    return traceback.StackSummary.from_list(mine or others[-1:]).format()
