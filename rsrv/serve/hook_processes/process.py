"""One hook process as the server sees it: start it, hand it a call, wait for the answer under a limit, end it."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rsrv.core.errors import BundleError, Code, HookError, HookRejected
from rsrv.runtime.frames import FrameError, FrameReader, encode
from rsrv.runtime.process import ending_of
from rsrv.serve.hook_processes.tensors import memory_file, read_arrays, shrink, write_arrays

_READ_BYTES = 1 << 16
_MAX_WAIT_SECONDS = 60.0
_REAP_SECONDS = 5.0
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
# It searches where this process does, so that a `model.py` finds the same modules in either mode. -P: nowhere else.
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from rsrv.serve.hook_processes.child import main; main()"
)


class ProcessLost(Exception):
    """The process is gone, or had to be ended; the text says why, as the end of a sentence.

    Attributes:
        late: it was ended because a time limit had passed.
    """

    def __init__(self, why: str, *, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


@dataclass(frozen=True, slots=True)
class HookFile:
    """The ``model.py`` of one load of one bundle; `source` is its text, the same for all processes of the model."""

    path: Path
    source: bytes
    name: str
    incarnation: int


class HookProcess:
    """One call at a time; only `kill` may be used by other threads meanwhile, and `close` by anybody afterwards.

    Start it from a thread that outlives it: the kernel ends it with that thread. Raises OSError when it cannot start.
    """

    def __init__(self, file: HookFile) -> None:
        self._file = file
        self._frames = FrameReader()
        self._ids = itertools.count(1)
        self._end_lock = threading.Lock()
        self._fds: list[int] = []
        self.roles: tuple[str, ...] | None = None
        """The hooks that the file registers; None until `ready` has returned true."""
        theirs: tuple[int, ...] = ()
        try:
            theirs, self._calls, self._replies = self._pipes()
            self._inputs, self._outputs = self._own(memory_file("inputs")), self._own(memory_file("outputs"))
            os.pwrite(self._inputs, file.source, 0)
            fds = (*theirs, self._inputs, self._outputs)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-c", _BOOTSTRAP, json.dumps([path or os.getcwd() for path in sys.path])),
                    self._settings(fds),
                ],
                stdin=subprocess.DEVNULL,
                stdout=2,  # as in the server: what hooks print belongs to stderr
                pass_fds=fds,  # and nothing else: no listening socket, no device
                process_group=0,  # a Ctrl-C in the terminal is for the server
            )
            self.pid = self._process.pid
            self._pidfd = self._own(os.pidfd_open(self.pid))
        except BaseException:
            if hasattr(self, "_process"):
                self._process.kill()
                self._process.wait()
            self._close_fds()
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        for fd in (self._calls, self._replies):
            os.set_blocking(fd, False)

    @property
    def alive(self) -> bool:
        """Asked of the kernel, without reaping: as long as nobody has, the number of its group cannot be reused."""
        return not _readable(self._pidfd)

    def ready(self, seconds: float) -> bool:
        """Wait at most so long for the import of ``model.py``. Raises BundleError when that fails, ProcessLost."""
        if self.roles is not None:
            return True
        answer = self._receive(time.monotonic() + seconds)
        if answer is None:
            return False
        if (error := answer.get("error")) is not None:
            raise BundleError(error["message"], rule=error["rule"], file=error["file"], hint=error["hint"])
        self.roles = tuple(answer["roles"])
        return True

    def call(self, role: str, arrays: Mapping[str, np.ndarray], timeout: float | None) -> dict[str, np.ndarray]:
        """Run a hook. Raises HookRejected, HookError, or ProcessLost, after which the process is of no use.

        `timeout` in seconds, None = no limit.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        number = next(self._ids)
        headers = write_arrays(self._inputs, arrays)
        self._send({"id": number, "role": role, "tensors": headers}, deadline)
        answer = self._receive(deadline)
        if answer is None:
            raise ProcessLost(f"did not return within {timeout:g} s", late=True)
        try:
            if answer["id"] != number:
                raise ValueError(f"it is for call {answer['id']}, not {number}")
            if (error := answer.get("rejected")) is not None:
                code = Code(error["code"])
                raise HookRejected(error["message"], hint=error["hint"], code=code, reason=error["reason"])
            if (error := answer.get("error")) is not None:
                raise HookError(error["message"], hint=error["hint"])
            return read_arrays(self._outputs, answer["tensors"])
        except (ValueError, KeyError, TypeError) as error:
            raise ProcessLost(f"sent an answer that makes no sense: {error}") from error
        finally:
            shrink(self._inputs)
            shrink(self._outputs)

    def kill(self) -> None:
        """End the process and what it started, now; `close` still has to be called."""
        with self._end_lock:
            if self._process.returncode is None:
                # Before it is reaped, so that its group is certainly its own.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        with self._end_lock:
            self._process.wait()
            self._close_fds()

    def _send(self, message: Mapping[str, Any], deadline: float | None) -> None:
        data = memoryview(b"".join(encode(message)))
        while data:
            try:
                data = data[os.write(self._calls, data) :]
            except BlockingIOError:
                if not self._wait(self._calls, select.POLLOUT, deadline):
                    raise ProcessLost("did not take its inputs in time", late=True) from None
            except BrokenPipeError:
                raise self._died() from None

    def _receive(self, deadline: float | None) -> dict[str, Any] | None:
        """The next message, or None when the deadline passes first. Raises ProcessLost."""
        while True:
            try:
                frame = self._frames.next()
            except FrameError as error:
                raise ProcessLost(f"sent nonsense: {error}") from error
            if frame is not None:
                return frame[0]
            if not self._wait(self._replies, select.POLLIN, deadline):
                return None
            try:
                data = os.read(self._replies, _READ_BYTES)
            except BlockingIOError:
                raise self._died() from None  # a copy that it forked may hold the pipe open
            if not data:
                raise self._died()
            self._frames.feed(data)

    def _wait(self, fd: int, event: int, deadline: float | None) -> bool:
        """Until `fd` is ready or the process has ended; False when the deadline passes first."""
        poll = select.poll()
        poll.register(fd, event)
        poll.register(self._pidfd, select.POLLIN)
        while True:
            left = _MAX_WAIT_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
            found = poll.poll(min(left, _MAX_WAIT_SECONDS) * 1000)
            if found:
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def _died(self) -> ProcessLost:
        if not _readable(self._pidfd, _REAP_SECONDS):
            return ProcessLost(f"ended its process: {ending_of(None)}")
        self.kill()
        with self._end_lock:
            return ProcessLost(f"ended its process: {ending_of(self._process.wait())}")

    def _pipes(self) -> tuple[tuple[int, int], int, int]:
        their_calls, calls = os.pipe()
        self._own(calls)
        try:
            replies, their_replies = os.pipe()
        except OSError:
            os.close(their_calls)
            raise
        return (their_calls, their_replies), calls, self._own(replies)

    def _own(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _close_fds(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def _settings(self, fds: tuple[int, ...]) -> str:
        file, root = self._file, logging.getLogger()
        formats = [handler.formatter._fmt for handler in root.handlers if handler.formatter is not None]
        return json.dumps(
            {
                "parent": os.getpid(),
                "fds": fds,  # calls, replies, inputs, outputs
                "path": str(file.path),
                "source_bytes": len(file.source),
                "name": file.name,
                "incarnation": file.incarnation,
                "log_level": root.getEffectiveLevel(),
                "log_format": next(filter(None, formats), _LOG_FORMAT),
            }
        )


def _readable(fd: int, seconds: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
