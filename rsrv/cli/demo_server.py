"""A ``rsrv serve`` in a child process for ``rsrv demo``, which ends with its block, whatever ends that."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rsrv.core.errors import RsrvError

_START_SECONDS = 120.0
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.05
_LINES_SHOWN = 20


class DemoServer:
    """Serves the directory `models` on free ports; what it says on stderr goes to the file `log`."""

    def __init__(self, models: Path, log: Path) -> None:
        self.url = ""
        self._log = log
        with log.open("wb") as stderr:
            # A session of its own: Ctrl-C reaches the demo alone, which then stops the server in order.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rsrv", "serve", str(models), "--grpc-port", "0", "--http-port", "0"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "RSRV_WORKER_RUNTIME_BACKEND": "cpu"},
                start_new_session=True,
            )

    def __enter__(self) -> DemoServer:
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
        """Wait until the server serves; returns where."""
        from rsrv.client.server import Server

        end = time.monotonic() + _START_SECONDS
        ports = json.loads(self._first_line(end))
        self.url = f"{ports['host']}:{ports['grpc_port']}"
        with Server(self.url) as server:
            while not server.ready():
                self._require_running(end)
                time.sleep(_POLL_SECONDS)
        return f"gRPC on {self.url}, HTTP on {ports['host']}:{ports['http_port']}"

    def stop(self) -> int:
        """Stop it gracefully; returns its exit code. Raises TimeoutExpired."""
        self._process.terminate()
        return self._process.wait(_STOP_SECONDS)

    def _first_line(self, end: float) -> bytes:
        assert self._process.stdout is not None
        while not select.select([self._process.stdout], [], [], _POLL_SECONDS)[0]:
            self._require_running(end)
        line = self._process.stdout.readline()
        if not line:  # it closed its end: it is ending
            self._process.wait(_STOP_SECONDS)
            self._require_running(end)
        return line

    def _require_running(self, end: float) -> None:
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
