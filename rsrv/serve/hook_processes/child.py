"""The process in which the hooks of one model run; started by `process`, one call at a time. It may die at any moment.

Calls come on one pipe and go out on another, so what hooks print cannot disturb them; it goes to the server's stderr.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from rsrv.core.errors import BundleError, HookError, HookRejected
from rsrv.core.memory import tune_malloc
from rsrv.runtime.frames import FrameReader, read_frame, write_frame
from rsrv.runtime.hooks import Arrays, Hooks, call_hook, load_hooks
from rsrv.runtime.process import die_with_parent
from rsrv.serve.hook_processes.tensors import read_arrays, write_arrays

ROLES = ("preprocess", "postprocess")


def main() -> None:
    settings = json.loads(sys.argv[1])
    die_with_parent(settings["parent"])
    calls, replies, inputs, outputs = settings["fds"]
    for fd in settings["fds"]:
        os.set_inheritable(fd, False)  # a program that a hook starts must not keep them open
    for number in (signal.SIGTERM, signal.SIGINT):
        # A supervisor may signal the whole group, but the server still has requests to finish, and ends this process.
        signal.signal(number, _ignore)
    faulthandler.enable()
    tune_malloc()
    logging.basicConfig(level=settings["log_level"], format=settings["log_format"])
    me = os.getpid()

    def reply(message: dict[str, Any]) -> None:
        if os.getpid() != me:
            os._exit(0)  # a hook forked, and this is the copy: the answer is for the original to give
        write_frame(replies, message)

    try:
        source = os.pread(inputs, settings["source_bytes"], 0)
        path, incarnation = Path(settings["path"]), settings["incarnation"]
        hooks = load_hooks(path, name=settings["name"], incarnation=incarnation, source=source)
    except BundleError as error:
        reply({"error": {"message": error.message, "rule": error.rule, "file": error.file, "hint": error.hint}})
        os._exit(1)
    reply({"roles": [role for role in ROLES if getattr(hooks, role) is not None]})
    reader = FrameReader()
    while (frame := read_frame(calls, reader)) is not None:
        message = frame[0]
        reply({"id": message["id"], **_answer(hooks, message, settings["name"], inputs, outputs)})
    os._exit(0)  # threads that hooks left behind must not keep it alive


def _answer(hooks: Hooks, message: dict[str, Any], model: str, inputs: int, outputs: int) -> dict[str, Any]:
    role, me = message["role"], os.getpid()
    try:
        try:
            arrays: Arrays = call_hook(
                getattr(hooks, role), read_arrays(inputs, message["tensors"]), model=model, role=role
            )
        finally:
            if os.getpid() != me:
                os._exit(0)  # a hook forked, and this is the copy: it must not write where the next answer may be
        return {"tensors": write_arrays(outputs, arrays)}
    except HookRejected as error:
        code, reason = int(error.code), error.reason
        return {"rejected": {"message": error.message, "hint": error.hint, "code": code, "reason": reason}}
    except HookError as error:
        return {"error": {"message": error.message, "hint": error.hint}}
    except (TypeError, MemoryError, OSError) as error:
        # What it returned cannot be sent: a dtype that no tensor has, or more than there is memory for.
        text = str(error) or type(error).__name__
        return {
            "error": {"message": f"hook {role} of model {model!r} returned what cannot be sent: {text}", "hint": None}
        }


def _ignore(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which programs that a hook starts would inherit."""


if __name__ == "__main__":
    main()
