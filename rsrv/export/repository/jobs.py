"""What a conversion runs, by default in a process of its own: a model at one choice of batch sizes after the other, or
a handler. It may die, hang or eat all memory; whatever it writes lies in a staging directory until it is whole."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rsrv.core.errors import RsrvError
from rsrv.export.repository.report import short_error, with_hint
from rsrv.runtime.compile_child import Handler, serve_jobs
from rsrv.runtime.frames import Frame

Sizes = list[int] | None
"""One choice of batch sizes; None: one program without a batch axis."""


def main() -> None:
    serve_jobs(_handler)


def perform(message: Mapping[str, Any]) -> dict[str, Any]:
    """Do one job and never raise for what the model or the handler does.

    Returns:
        ``sizes`` of the bundle in the directory ``out`` of the message, with ``because``: why the earlier choices did
        not do, and ``warnings`` about what it is; or ``error``, with ``final``: no other choice of batch sizes would
        help.
    """
    try:
        return _handled(message) if message["job"] == "handler" else _converted(message)
    except Exception as error:
        return {"error": reason_of(error), "final": True}
    finally:
        gc.collect()


def reason_of(error: Exception) -> str:
    """At most 500 characters about `error` with the way out, if it knows one."""
    return with_hint(short_error(error), error.hint if isinstance(error, RsrvError) else None)


def _converted(message: Mapping[str, Any]) -> dict[str, Any]:
    from rsrv.export.repository.generic import GenericModel

    out = Path(message["out"])
    with _warnings() as about_model:
        model = GenericModel(Path(message["source"]))
    because: str | None = message["because"]
    failures: list[tuple[Sizes, str]] = []
    for sizes in message["choices"]:
        lost = [size for size in message["ladder"] if size not in (sizes or [1])]
        facts = {"dropped_batch_sizes": lost, "dropped_because": because} if lost and because else {}
        try:
            with _warnings() as about_bundle:
                made = model.export(out, sizes, golden=message["golden"], provenance=facts)
        except Exception as error:
            shutil.rmtree(out, ignore_errors=True)
            failures.append((sizes, reason_of(error)))
            because = because or failures[0][1]
            del error  # it holds the frames of the export, and with them its arrays
            gc.collect()
            continue
        warnings = list(dict.fromkeys([*about_model, *about_bundle]))
        return {"sizes": list(made), "because": because, "warnings": warnings}
    # One row with a batch axis says best what is wrong; without that axis something else may be.
    told = [reason for sizes, reason in failures if sizes is not None] or [reason for _, reason in failures]
    return {"error": told[-1], "final": False}


def _handled(message: Mapping[str, Any]) -> dict[str, Any]:
    from rsrv.export.repository.handlers import context_of, run_handler

    source = message["source"]
    context = context_of(
        source=None if source is None else Path(source),
        model=message["model"],
        bundle_name=message["bundle"],
        out_dir=Path(message["out"]),
        options=message["options"],
    )
    with _warnings() as warnings:
        sizes = run_handler(Path(message["file"]), context)
    return {"sizes": sizes, "because": None, "warnings": list(dict.fromkeys(warnings))}


_PROVENANCE = "rsrv.bundle.provenance"
"""Says that sources are in no git repository, which holds for every model of most model repositories."""


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != _PROVENANCE:
            self.texts.append(short_error(record.getMessage()))


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What rsrv warns of meanwhile: an output that proves nothing, a module in training mode. It goes to the report,
    since nobody reads what this process says."""
    kept, ours = _Kept(), logging.getLogger("rsrv")
    ours.addHandler(kept)
    try:
        yield kept.texts
    finally:
        ours.removeHandler(kept)


def _handler(settings: dict[str, Any]) -> Handler:
    def handle(message: dict[str, Any], body: bytes) -> Frame:
        os.environ["TMPDIR"] = tempfile.tempdir = message["tmp"]  # for this process and for those that it starts
        return perform(message), b""

    return handle
