"""The processes under measurement: each is pinned to one core, and is ended by pid when its block is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

SERVER_CORE = 0
DRIVER_CORE = 1
START_SECONDS = 120.0


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    grpc_port: int
    http_port: int | None = None
    log: Path = Path(os.devnull)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"


def echo_server(threads: int, *, core: int = SERVER_CORE) -> AbstractContextManager[Server]:
    return _bare("benchmarks.echo", str(threads), str(core))


def relay(target: str, threads: int, form: str) -> AbstractContextManager[Server]:
    """The gateway's control, ``blocking`` or ``future``."""
    return _bare("benchmarks.relay", target, str(threads), str(SERVER_CORE), form)


@contextmanager
def _bare(module: str, *arguments: str) -> Iterator[Server]:
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Server(process, int(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(30)


def rsrv_server(
    repo: Path, *, environ: dict[str, str] | None = None, core: int | None = SERVER_CORE
) -> AbstractContextManager[Server]:
    """`rsrv serve` of `repo` on free ports, waited for until it is ready."""
    return _rsrv("serve", str(repo), log_directory=repo, environ=environ, core=core)


def rsrv_gateway(
    workers: Sequence[Server],
    *arguments: str,
    log_directory: Path,
    environ: dict[str, str] | None = None,
    core: int | None = SERVER_CORE,
) -> AbstractContextManager[Server]:
    """`rsrv gateway` in front of `workers` on free ports, waited for until it is ready."""
    named = [word for worker in workers for word in ("--worker", worker.target)]
    return _rsrv("gateway", *named, *arguments, log_directory=log_directory, environ=environ, core=core)


@contextmanager
def _rsrv(*arguments: str, log_directory: Path, environ: dict[str, str] | None, core: int | None) -> Iterator[Server]:
    command = [sys.executable, "-m", "rsrv", *arguments, "--grpc-port", "0", "--http-port", "0"]
    if core is not None and os.path.exists("/usr/bin/taskset"):
        command = ["taskset", "-c", str(core), *command]
    # Several servers may serve one repository.
    log = NamedTemporaryFile("w+", prefix=".server.", suffix=".log", dir=log_directory, delete=False)  # noqa: SIM115
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, **(environ or {})},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            log.seek(0)
            raise RuntimeError(f"rsrv {arguments[0]} did not start:\n{log.read()[-4000:]}")
        ports = json.loads(line)
        server = Server(process, ports["grpc_port"], ports["http_port"], Path(log.name))
        drain = threading.Thread(target=process.stdout.read, daemon=True)
        drain.start()
        wait_ready(server)
        yield server
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()
        log.close()


def wait_ready(server: Server) -> None:
    import time
    import urllib.error
    import urllib.request

    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/readyz", timeout=5):
                return
        except (urllib.error.URLError, OSError) as error:
            ended = server.process.poll()
            if ended is not None or time.monotonic() > deadline:
                how = f"not ready after {START_SECONDS} s: {error}" if ended is None else f"ended with {ended}"
                raise RuntimeError(f"rsrv serve {how}; its log ends with\n{server.log.read_text()[-4000:]}") from error
            time.sleep(0.05)
