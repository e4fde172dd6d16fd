"""``python -m benchmarks.traced REPO READY [CACHE]``: a server that watches its own dispatching threads.

The first line of stdout has the ports. For every line on stdin it prints, as JSON, what these two threads have done so
far that they never should: `Trace` says what. When stdin ends, so does the server.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.servers import Server

THREADS = ("rsrv-dispatch", "rsrv-device")
SAMPLE_SECONDS = 0.005
ELSEWHERE = ("rsrv/runtime/compile", "rsrv/runtime/cache", "rsrv/serve/loading", "rsrv/serve/residency", "rsrv/bundle")
"""Code that compiles, loads or reads files, where a dispatching thread has no business."""
EVENTS = frozenset({"open", "import", "mmap.__new__", "subprocess.Popen", "os.listdir", "os.scandir", "ctypes.dlopen"})


@dataclass(frozen=True)
class Trace:
    """Of the threads in `THREADS`.

    Attributes:
        reads: system calls that read (files, pipes, sockets), from any code, as the kernel counts them.
        major_faults: pages that had to come from a file.
        opens: files opened or mapped, modules imported, processes started, as Python's audit hooks see them.
        elsewhere: of `samples` looks at what they were running, those in the code of `ELSEWHERE`.
    """

    reads: int = 0
    major_faults: int = 0
    opens: int = 0
    elsewhere: int = 0
    samples: int = 0

    def since(self, before: Trace) -> Trace:
        return Trace(*(now - then for now, then in zip(vars(self).values(), vars(before).values(), strict=True)))


class Watched:
    """A server process with a trace; read it with `trace`."""

    def __init__(self, process: subprocess.Popen[str], server: Server) -> None:
        self._process = process
        self.server = server

    def trace(self) -> Trace:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Trace(**json.loads(self._process.stdout.readline()))


@contextmanager
def traced_server(repo: Path, ready: str, cache: Path | None = None) -> Iterator[Watched]:
    """A traced server of `repo`; entered when it listens, and ready when the model `ready` is."""
    command = [sys.executable, "-m", "benchmarks.traced", str(repo), ready, *([str(cache)] if cache else [])]
    with (repo.parent / f"{repo.name}.log").open("w") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
        )
    assert process.stdout is not None
    try:
        ports = json.loads(process.stdout.readline())
        yield Watched(process, Server(process, ports["grpc_port"], ports["http_port"], Path(log.name)))
    finally:
        process.communicate(timeout=90)


class Tracer:
    def __init__(self) -> None:
        threads = [thread for thread in threading.enumerate() if thread.name in THREADS]
        assert len(threads) == len(THREADS), threads
        self._idents = {thread.ident for thread in threads}
        self._natives = [thread.native_id for thread in threads]
        self._opens = self._elsewhere = self._samples = 0
        sys.addaudithook(self._audit)
        threading.Thread(target=self._sample, name="tracer", daemon=True).start()

    def trace(self) -> Trace:
        tasks = [Path(f"/proc/self/task/{native}") for native in self._natives]
        reads = sum(int((task / "io").read_text().split("syscr:")[1].split()[0]) for task in tasks)
        faults = sum(int((task / "stat").read_text().rpartition(")")[2].split()[9]) for task in tasks)
        return Trace(reads, faults, self._opens, self._elsewhere, self._samples)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and threading.get_ident() in self._idents:
            self._opens += 1

    def _sample(self) -> None:
        while True:
            time.sleep(SAMPLE_SECONDS)
            for ident, top in sys._current_frames().items():
                if ident not in self._idents:
                    continue
                self._samples += 1
                frame = top
                while frame is not None:
                    if any(part in frame.f_code.co_filename for part in ELSEWHERE):
                        self._elsewhere += 1
                        break
                    frame = frame.f_back  # type: ignore[assignment]


def main(repo: str, ready: str, cache: str = "") -> None:
    from rsrv.core.config import EndpointsConfig, RuntimeConfig, ServerConfig, StartupConfig
    from rsrv.serve.app import serve
    from rsrv.serve.worker import RunningServer

    def listening(server: RunningServer) -> None:
        tracer = Tracer()
        _say({"grpc_port": server.grpc_port, "http_port": server.http_port})
        threading.Thread(target=answer, args=(server, tracer), name="tracer-answers").start()

    def answer(server: RunningServer, tracer: Tracer) -> None:
        for _ in sys.stdin:
            _say(vars(tracer.trace()))
        server.stop(0.0)

    config = ServerConfig(
        model_dirs=[repo],
        cache_dir=cache,
        startup=StartupConfig(ready_when=[ready]),
        endpoints=EndpointsConfig(grpc_port=0, http_port=0),
        runtime=RuntimeConfig(backend="cpu"),
    )
    serve(config, on_listening=listening)


def _say(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
