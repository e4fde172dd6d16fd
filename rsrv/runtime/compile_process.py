"""One compile process as its pool sees it: start it, talk to it under a deadline and a memory limit, end it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rsrv.runtime.frames import Frame, FrameError, FrameReader, encode
from rsrv.runtime.process import ending_of

START_SECONDS = 120.0
"""How long a process may take until it is ready for its first job."""

_LOOK_SECONDS = 0.05
_MAX_WAIT_SECONDS = 60.0
_TAIL_BYTES = 4096
_TAIL_LINES = 3
_READ_BYTES = 1 << 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ROOT = str(Path(__file__).resolve().parents[2])
# -P keeps the working directory, where anybody may put a numpy.py, off the path. The root comes last, for a checkout
# that is not installed.
_BOOTSTRAP = "import sys; sys.path.append(sys.argv.pop(1)); from {module} import main; main()"


Why = Literal["died", "deadline", "memory", "protocol"]


@dataclass(frozen=True, slots=True)
class ChildSettings:
    platform: str
    ordinal: int
    parse_only: bool
    memory_bytes: int | None
    cpu_threads: int | None


class ChildLost(Exception):
    """The process is gone, or had to be ended.

    Attributes:
        why: ``died``, ``deadline``, ``memory`` or ``protocol``.
        accepted: it had taken the job, so the job is to blame.
        ending: how it ended.
        last_words: the end of its output, as the end of a sentence; empty when it was silent.
    """

    def __init__(self, why: Why, accepted: bool, ending: str, last_words: str) -> None:
        super().__init__(f"{why}: {ending}{last_words}")
        self.why = why
        self.accepted = accepted
        self.ending = ending
        self.last_words = last_words


class CompileProcess:
    """Not thread safe, except `kill`. Start it from a thread that outlives it: the kernel ends it with that thread.

    Args:
        module: whose ``main`` runs there; it has to end in `compile_child.serve_jobs`.
        awake: let it import what its jobs need at once, else at the first job or at `wake`.
    """

    def __init__(
        self, settings: ChildSettings, module: str = "rsrv.runtime.compile_child", *, awake: bool = True
    ) -> None:
        self._memory_bytes = settings.memory_bytes
        self._frames = FrameReader()
        self._tail = b""
        self._outgoing: list[memoryview] = []
        self._ready = False
        self._accepted = False
        self._awake = False
        self._start_deadline = 0.0
        fds: list[int] = []
        try:
            fds += os.pipe()
            fds += os.pipe()
            child_jobs, self._jobs, self._replies, child_replies = fds
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-c", _BOOTSTRAP.format(module=module)),
                    *(_ROOT, _arguments(settings, child_jobs, child_replies)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(child_jobs, child_replies),  # and nothing else: no listening socket, no device
                process_group=0,  # a Ctrl-C in the terminal is for the server
                env=_environment(settings),
                bufsize=0,
            )
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        os.close(child_jobs)
        os.close(child_replies)
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        for fd in (self._jobs, self._replies, self._output):
            os.set_blocking(fd, False)
        self.pid = self._process.pid
        if awake:
            self.wake()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def request(self, message: Mapping[str, Any], body: bytes, *, timeout: float) -> Frame:
        """Send a job and wait for its answer. Raises ChildLost; the process is of no use afterwards."""
        self._accepted = False
        if not self._ready:
            self.wake()
            self._next(self._start_deadline, None)
            self._ready = True
        deadline = time.monotonic() + timeout
        limit = None if self._memory_bytes is None else self._private_bytes() + self._memory_bytes
        self._outgoing = [memoryview(buffer) for buffer in encode(message, body) if buffer]
        self._next(deadline, limit)
        self._accepted = True
        return self._next(deadline, limit)

    def wake(self) -> None:
        """Have the process import what its jobs need, if it has not yet."""
        if self._awake:
            return
        self._awake = True
        self._start_deadline = time.monotonic() + START_SECONDS
        with contextlib.suppress(BrokenPipeError):  # the first job will find out
            os.write(self._jobs, b"".join(encode({"event": "wake"})))

    def kill(self) -> None:
        """End the process now; `close` still has to be called."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._process.wait()
        for fd in (self._jobs, self._replies):
            if fd >= 0:
                os.close(fd)
        self._jobs = self._replies = -1
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _next(self, deadline: float, limit: int | None) -> Frame:
        """Move bytes in all three directions until a frame has arrived; what has arrived counts after the deadline."""
        late = False
        while True:
            try:
                frame = self._frames.next()
            except FrameError as error:
                raise self._lost("protocol", f"it sent nonsense: {error}") from error
            if frame is not None:
                return frame
            if late:
                raise self._lost("deadline", "it was still at work")
            remaining = max(0.0, deadline - time.monotonic())
            late = remaining == 0
            self._move(min(remaining, _LOOK_SECONDS if limit is not None else _MAX_WAIT_SECONDS))
            if limit is not None and (held := self._private_bytes()) > limit:
                raise self._lost("memory", f"it held {held} bytes")

    def _move(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        if self._output >= 0:
            poll.register(self._output, select.POLLIN)
        if self._outgoing:
            poll.register(self._jobs, select.POLLOUT)
        for fd, _ in poll.poll(seconds * 1000):
            if fd == self._jobs:
                self._send()
            elif fd == self._output:
                self._listen()
            else:
                data = os.read(fd, _READ_BYTES)
                if not data:
                    raise self._lost("died", "")
                self._frames.feed(data)

    def _send(self) -> None:
        try:
            written = os.write(self._jobs, self._outgoing[0])
        except BrokenPipeError:
            self._outgoing = []  # the end of the reply pipe will tell
            return
        self._outgoing[0] = self._outgoing[0][written:]
        if not self._outgoing[0]:
            del self._outgoing[0]

    def _listen(self) -> bool:
        """Take what the process printed; False when there is nothing (more)."""
        if self._output < 0:
            return False
        try:
            data = os.read(self._output, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._output = -1  # closed over there; the file object still closes it here
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        return bool(data)

    def _private_bytes(self) -> int:
        """Resident memory that is not backed by files: pages of libraries come and go with what they do."""
        try:
            with open(f"/proc/{self.pid}/statm", encoding="ascii") as file:
                fields = file.read().split()
        except (FileNotFoundError, ProcessLookupError):
            return 0
        return (int(fields[1]) - int(fields[2])) * _PAGE_BYTES

    def _lost(self, why: Why, ending: str) -> ChildLost:
        if why == "died":
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5.0)
            ending = ending_of(self._process.poll())
        self.kill()
        while self._listen():
            pass
        return ChildLost(why, self._accepted, ending, self._last_words())

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._tail.decode(errors="replace").splitlines() if line.strip()]
        return f"; its last output: {' | '.join(lines[-_TAIL_LINES:])}" if lines else ""


def _arguments(settings: ChildSettings, jobs: int, replies: int) -> str:
    return json.dumps(
        {
            "parent": os.getpid(),
            "jobs": jobs,
            "replies": replies,
            "platform": settings.platform,
            "ordinal": settings.ordinal,
            "parse_only": settings.parse_only,
            "memory_bytes": settings.memory_bytes,
        }
    )


def _environment(settings: ChildSettings) -> dict[str, str]:
    environment = dict(os.environ)
    if settings.cpu_threads is not None:
        environment["NPROC"] = str(settings.cpu_threads)
    return environment
