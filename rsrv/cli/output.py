"""The one sink of all commands: data on stdout, words on stderr, in a human, JSON or quiet form.

Nothing else in rsrv writes to the terminal. Colour and boxes appear on a terminal only, and never with ``NO_COLOR``.
"""

from __future__ import annotations

import json as _json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rsrv.core.errors import RsrvError

Mode = Literal["human", "json", "quiet"]

_mode: Mode = "human"
_debug = False


def set_mode(mode: Mode) -> None:
    """Choose the form of everything that follows; `rsrv.cli.main` resets it to "human" for each command line."""
    global _mode
    _mode = mode


def mode() -> Mode:
    return _mode


def is_json() -> bool:
    """True when the user asked for JSON, with the global option or the command's own ``--json``."""
    return _mode == "json"


def set_debug(on: bool) -> None:
    global _debug
    _debug = on


def debug() -> bool:
    """True when unexpected errors show their traceback: ``--debug`` or ``RSRV_DEBUG=1``."""
    return _debug or os.environ.get("RSRV_DEBUG", "") not in ("", "0")


def _json_requested(value: bool) -> bool:
    if value:
        set_mode("json")
    return value


JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.", callback=_json_requested)]
"""Type of a command's own ``--json`` parameter: ``as_json: JsonOption = False``; afterwards `is_json` is true."""


def data(text: str) -> None:
    """Print `text`, the result of a command, on stdout in every mode."""
    _write(sys.stdout, text)


def json(value: Any) -> None:
    """Print `value` as JSON on stdout in every mode; numpy numbers, paths and dataclasses are understood.

    What JSON has no number for (NaN, infinity) is null.
    """
    try:
        text = _json.dumps(value, indent=2, ensure_ascii=False, default=_plain, allow_nan=False)
    except ValueError:
        plain = _json.loads(_json.dumps(value, default=_plain), parse_constant=lambda name: None)
        text = _json.dumps(plain, indent=2, ensure_ascii=False)
    _write(sys.stdout, text)


def table(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print `rows` on stdout: a table for people, a list of objects as JSON, the first column alone when quiet."""
    if _mode == "json":
        json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    cells = [[_cell(value) for value in row] for row in rows]
    if _mode == "quiet":
        for line in cells:
            _write(sys.stdout, line[0])
    elif sys.stdout.isatty():
        _rich_table(title, columns, cells)
    else:
        _write(sys.stdout, "\n".join([*([title] if title else []), *_aligned([list(columns), *cells])]))


def json_line(value: Any) -> None:
    """Print `value` as one line of JSON on stdout, for a stream of them."""
    _write(sys.stdout, _json.dumps(value, ensure_ascii=False, default=_plain))


@contextmanager
def refreshing() -> Iterator[Callable[[str | None, Sequence[str], Sequence[Sequence[object]]], None]]:
    """A table that changes: what is yielded shows the next one, on a terminal in the place of the last one."""
    if _mode != "human" or not sys.stdout.isatty():
        yield table
        return
    from rich.live import Live

    with Live(console=_console(sys.stdout), auto_refresh=False) as live:

        def show(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
            cells = [[_cell(value) for value in row] for row in rows]
            live.update(_grid(title, columns, cells), refresh=True)

        yield show


def note(text: str) -> None:
    """Say something that is not the result, on stderr; silent when quiet."""
    if _mode != "quiet":
        _write(sys.stderr, text)


def warn(text: str) -> None:
    """Say on stderr, in every mode, that something deserves attention."""
    _styled("warning: ", "yellow", text)


@contextmanager
def logged_warnings() -> Iterator[None]:
    """Show what the enclosed code logs at level warning and above as `warn` does, unless logging is set up already."""
    import logging

    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warn(record.getMessage())

    root = logging.getLogger()
    if root.handlers:
        yield
        return
    handler = Shown(logging.WARNING)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


class Progress:
    """What `progress` yields: say what begins, and what became of it."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._finished = 0

    def start(self, text: str) -> None:
        """`text` has begun."""

    def done(self, text: str) -> None:
        """One more has ended, in the words of `text`."""
        self._finished += 1
        note(f"[{self._finished}/{self._total}] {text}")


@contextmanager
def progress(total: int) -> Iterator[Progress]:
    """Tell on stderr how far a long command of `total` steps is: a line a step, on a terminal also a bar."""
    if _mode != "human" or not sys.stderr.isatty():
        yield Progress(total)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Bar(*columns, console=_console(sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=total)

        class Shown(Progress):
            def start(self, text: str) -> None:
                bar.update(task, description=_shown(text, sys.stderr))

            def done(self, text: str) -> None:
                super().done(text)
                bar.advance(task)

        yield Shown(total)


@contextmanager
def bar(total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """On a terminal, a bar on stderr of `total` things; what is yielded takes how many are done, from any thread."""
    if _mode != "human" or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=_console(sys.stderr), transient=True) as shown:
        task = shown.add_task("", total=total)
        yield lambda done: shown.update(task, completed=done)


def error(error: RsrvError | str, *, hint: str | None = None) -> None:
    """Say on stderr what failed, with an error's notes, and what to do about it; one JSON object in JSON mode."""
    message = error if isinstance(error, str) else error.message
    hint = hint or (None if isinstance(error, str) else error.hint)
    notes: Sequence[str] = getattr(error, "__notes__", ())
    if _mode == "json":
        facts: dict[str, object] = {"message": message, "hint": hint, **({"notes": notes} if notes else {})}
        if not isinstance(error, str):
            facts = {"code": error.code.name, "reason": error.reason, **facts}
        _write(sys.stderr, _json.dumps({"error": facts}, ensure_ascii=False))
        return
    _styled("error: ", "bold red", message)
    for text in notes:
        _styled("note: ", "cyan", text)
    if hint:
        _styled("hint: ", "cyan", hint)


def size(n_bytes: int) -> str:
    """A number of bytes for people: ``1.5 GiB``."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.1f} {unit}"
    return f"{n_bytes} B"


# --- how it reaches the terminal ----------------------------------------------------------------------------------


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def _write(stream: TextIO, text: str) -> None:
    stream.write(_shown(text, stream) + "\n")
    stream.flush()


def _shown(text: str, stream: TextIO) -> str:
    """`text` with escapes for what a terminal would obey (names come from strangers) or `stream` cannot encode."""
    safe = _CONTROL.sub(lambda match: ascii(match.group())[1:-1], text)
    encoding = stream.encoding or "utf-8"
    return safe.encode(encoding, "backslashreplace").decode(encoding)


def _styled(label: str, style: str, text: str) -> None:
    if sys.stderr.isatty():
        from rich.text import Text

        _console(sys.stderr).print(Text.assemble((label, style), _shown(text, sys.stderr)), soft_wrap=True)
    else:
        _write(sys.stderr, label + text)


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False, emoji=False)


def _rich_table(title: str | None, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    _console(sys.stdout).print(_grid(title, columns, cells))


def _grid(title: str | None, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(
        title=None if title is None else Text(_shown(title, sys.stdout)),
        box=box.SIMPLE_HEAD,
        title_justify="left",
        header_style="bold",
    )
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in cells:
        grid.add_row(*(Text(_shown(cell, sys.stdout)) for cell in row))
    return grid


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def _plain(value: Any) -> Any:
    """What JSON has no form for: dataclasses and paths of ours, scalars and arrays of numpy (by duck typing)."""
    import dataclasses

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
