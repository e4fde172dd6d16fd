"""A ``rsrv serve`` in a child process, for commands that need a server of their own; it ends with its block."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rsrv.core.errors import InvalidRequest, ModelPreparing, RsrvError, UnknownModel

if TYPE_CHECKING:
    from rsrv.client.model import KServeModel

_START_SECONDS = 120.0
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.05
_LINES_SHOWN = 20
_LOOPBACK = ("--host", "127.0.0.1", "--grpc-port", "0", "--http-port", "0")


class LocalServer:
    """Serves the directory `models` on free ports of the loopback interface, whatever ends the block.

    Args:
        log: the file that gets what the server says on stderr.
        settings: environment variables for it, beside those of this process.
    """

    def __init__(self, models: Path, log: Path, settings: Mapping[str, str] | None = None) -> None:
        self.url = ""
        self._log = log
        with log.open("wb") as stderr:
            # A session of its own: Ctrl-C reaches this process alone, which then stops the server in order.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rsrv", "serve", str(models), *_LOOPBACK],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "RSRV_WORKER_RUNTIME_BACKEND": "cpu", **(settings or {})},
                start_new_session=True,
            )

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def wait_ready(self) -> str:
        """Wait until the server serves all its models; returns where."""
        from rsrv.client.server import Server

        end = time.monotonic() + _START_SECONDS
        where = self.wait_listening(end)
        with Server(self.url) as server:
            while not server.ready():
                self.require_running(end)
                time.sleep(_POLL_SECONDS)
        return where

    def wait_listening(self, end: float) -> str:
        """Wait until the ports answer, at most until the monotonic time `end`; returns where."""
        ports = json.loads(self._first_line(end))
        self.url = f"{ports['host']}:{ports['grpc_port']}"
        return f"gRPC on {self.url}, HTTP on {ports['host']}:{ports['http_port']}"

    def wait_model(self, model: KServeModel, end: float) -> None:
        """Wait until the server answers for `model`. Raises ModelFailed when it cannot serve it."""
        while True:
            try:
                model.infer({})
                return
            except (ModelPreparing, UnknownModel):
                self.require_running(end)
                time.sleep(_POLL_SECONDS)
            except InvalidRequest:  # inputs are missing: it is there
                return

    def stop(self) -> int:
        """Stop it gracefully; returns its exit code. Raises TimeoutExpired."""
        self._process.terminate()
        return self._process.wait(_STOP_SECONDS)

    def _first_line(self, end: float) -> bytes:
        assert self._process.stdout is not None
        while not select.select([self._process.stdout], [], [], _POLL_SECONDS)[0]:
            self.require_running(end)
        line = self._process.stdout.readline()
        if not line:  # it closed its end: it is ending
            self._process.wait(_STOP_SECONDS)
            self.require_running(end)
        return line

    def require_running(self, end: float = math.inf) -> None:
        """Raises RsrvError with what the server said last when it has ended, or the monotonic time `end` has passed."""
        code = self._process.poll()
        if code is None and time.monotonic() < end:
            return
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-_LINES_SHOWN:])
        what = "did not become ready in time" if code is None else f"exited with {code}"
        raise RsrvError(f"the server {what}; it said:\n{tail}")


@contextlib.contextmanager
def signals_unwind() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this block like Ctrl-C does, so that child and files go away too."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
