"""The process in which programs are parsed and compiled for the first time; started by `compile_process`, one per slot.

It reads jobs from one pipe and answers on another, so whatever a library writes to stdout or stderr cannot disturb the
conversation. It may die at any moment: that is what it is for.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rsrv.core.errors import BundleError, RsrvError
from rsrv.runtime.frames import Frame, FrameReader, read_frame, write_frame
from rsrv.runtime.process import die_with_parent

if TYPE_CHECKING:
    from rsrv.runtime.compiled import Compiled

NICENESS = 10
"""With SCHED_BATCH. Not 19 or SCHED_IDLE: where all cores are busy these leave 1 % and less, and a compilation of ten
seconds would run into its deadline, which counts wall time."""

Handler = Callable[[dict[str, Any], bytes], Frame]


def main() -> None:
    serve_jobs(_handler)


def serve_jobs(make_handler: Callable[[dict[str, Any]], Handler]) -> None:
    """Answer jobs until the pipe ends. The first frame only wakes this process: then `make_handler` gets the settings
    of `compile_process.ChildSettings`, and time to import what the jobs need."""
    settings = json.loads(sys.argv[1])
    die_with_parent(settings["parent"])
    _step_back()
    jobs, replies = settings["jobs"], settings["replies"]
    for fd in (jobs, replies):
        os.set_inheritable(fd, False)  # an assembler that XLA starts must not keep the pipes open
    reader = FrameReader()
    # Importing takes a second of CPU time that a server which finds all its executables in its cache needs itself.
    if read_frame(jobs, reader) is None:
        return
    handle = make_handler(settings)
    if settings["memory_bytes"] is not None:
        _limit_memory(settings["memory_bytes"])
    write_frame(replies, {"event": "ready"})
    while (frame := read_frame(jobs, reader)) is not None:
        write_frame(replies, {"event": "accepted"})  # from here on, a death is the program's fault
        write_frame(replies, *_answer(handle, *frame))
        del frame
        _give_memory_back()


def _answer(handle: Handler, message: dict[str, Any], body: bytes) -> Frame:
    try:
        return handle(message, body)
    except BundleError as error:
        return {"error": {"message": error.message, "rule": error.rule, "hint": error.hint}}, b""
    except RsrvError as error:
        return {"error": {"message": error.message, "rule": None, "hint": error.hint}}, b""
    except MemoryError:
        return {"error": {"message": "out of memory", "rule": None, "hint": None}}, b""
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return {"error": {"message": text[:500], "rule": None, "hint": None}}, b""


def _handler(settings: dict[str, Any]) -> Handler:
    from rsrv.runtime.compiled import Compiled
    from rsrv.stablehlo.policy import Applied, Policy, apply
    from rsrv.stablehlo.program import Prepared, prepare, report

    def inspect(message: dict[str, Any], body: bytes) -> Frame:
        if (batch := message.get("batch")) is not None:
            from rsrv.stablehlo.specialise import specialised

            body = specialised(body, batch)
        return {"report": report(body).to_json()}, b""

    def rewritten(message: dict[str, Any], body: bytes) -> tuple[Applied, Prepared]:
        applied = apply(body, Policy.from_json(message["policy"]))
        return applied, prepare(applied.program)

    if settings["parse_only"]:

        def handle(message: dict[str, Any], body: bytes) -> Frame:
            if message["job"] == "inspect":
                return inspect(message, body)
            # For a fake device, which can load any bytes: the program stands for its own executable.
            applied, prepared = rewritten(message, body)
            return _compiled(Compiled(prepared.report, body, 0.0, 0, applied.summary, applied.warnings))

        return handle

    from rsrv.runtime.device import CompileOptions
    from rsrv.runtime.pjrt import PjrtCompiler, scratch_bytes

    # The server's client may own all of a card's memory, so this one takes only what it needs.
    compiler = PjrtCompiler(settings["platform"], ordinal=settings["ordinal"], preallocate=False)

    def handle_all(message: dict[str, Any], body: bytes) -> Frame:
        if message["job"] == "inspect":
            return inspect(message, body)
        applied, prepared = rewritten(message, body)
        start = time.monotonic()
        loaded = compiler.compile(prepared, CompileOptions.from_json(message["options"]))
        seconds = time.monotonic() - start
        blob, scratch = compiler.serialize(loaded), scratch_bytes(loaded)
        return _compiled(Compiled(prepared.report, blob, seconds, scratch, applied.summary, applied.warnings))

    return handle_all


def _compiled(compiled: Compiled) -> Frame:
    return compiled.to_json(), compiled.blob or b""


def _step_back() -> None:
    """Yield to the server. Set before any thread exists, since Linux keeps both per thread and threads inherit them."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_memory(memory_bytes: int) -> None:
    """A second fence behind the parent's watch on resident memory, for what grows faster than that can look.

    RLIMIT_DATA counts reserved memory, so it stands well above what is here already plus the limit. An allocation
    beyond it fails, and XLA aborts or reports.
    """
    with open("/proc/self/statm", encoding="ascii") as file:
        data_pages = int(file.read().split()[5])
    ceiling = data_pages * resource.getpagesize() + 2 * memory_bytes + (512 << 20)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or ceiling < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (ceiling, hard))


def _give_memory_back() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


if __name__ == "__main__":
    main()
