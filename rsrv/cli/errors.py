"""From an exception to the words and the exit code that a user sees. Nothing here decides what went wrong."""

from __future__ import annotations

import sys
import traceback

import typer

from rsrv.cli import output
from rsrv.core.errors import RsrvError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE, what every tool in a pipeline returns when its reader went away."""

_EXTRAS = {"jax": "serve", "jaxlib": "serve", "watchdog": "serve", "torch": "torch", "torchax": "torch"}
"""Package that a heavy command needs → the extra of rsrv that installs it."""


def report(error: BaseException) -> int:
    """Tell the user about `error`; returns the exit code."""
    if isinstance(error, KeyboardInterrupt):
        output.note("interrupted")
        return EXIT_INTERRUPTED
    if isinstance(error, BrokenPipeError):
        _silence_stdout()
        return EXIT_BROKEN_PIPE
    if output.debug():
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, RsrvError):
        output.error(error)
        return error.exit_code
    if isinstance(error, typer.TyperException):
        return _report_usage(error)
    if isinstance(error, ModuleNotFoundError) and (extra := _EXTRAS.get((error.name or "").partition(".")[0])):
        output.error(
            f"this command needs the package {error.name!r}, which is not installed",
            hint=f"pip install 'rsrv[{extra}]'",
        )
        return EXIT_FAILED
    if isinstance(error, OSError) and error.strerror is not None:
        output.error(error.strerror if error.filename is None else f"{error.filename}: {error.strerror}")
        return EXIT_FAILED
    if isinstance(error, MemoryError):
        output.error(f"not enough memory: {error}" if str(error) else "not enough memory")
        return EXIT_FAILED
    text = str(error).strip() or "no message"
    output.error(
        f"unexpected {type(error).__name__}: {text}",
        hint=None if output.debug() else "run `rsrv --debug …` (or set RSRV_DEBUG=1) for the traceback",
    )
    return EXIT_FAILED


def _report_usage(error: typer.TyperException) -> int:
    """A command line that Typer refused; with no arguments at all its message is the whole help."""
    message = error.format_message().strip()
    context: typer.Context | None = getattr(error, "ctx", None)
    if message.startswith("Usage: "):
        output.note(message)
    else:
        output.error(message, hint=f"{context.command_path} --help" if context is not None else None)
    return error.exit_code


def _silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain about the closed pipe."""
    import os

    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, sys.stdout.fileno())
    except (OSError, ValueError):  # stdout is not a file (a test's buffer): nothing will be flushed
        pass
    finally:
        os.close(devnull)
