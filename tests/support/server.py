"""A real ``rsrv serve`` in a process of its own, on ports that the system chose, ended by its pid."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 90


class ServerProcess:
    """A context manager; `log` is everything that the server wrote to stderr."""

    def __init__(
        self, repo: Path | None, *arguments: str, env: Mapping[str, str] = {}, ports: Sequence[str] | None = None
    ) -> None:
        command = [sys.executable, "-m", "rsrv", "serve", *([str(repo)] if repo is not None else [])]
        command += ports if ports is not None else ["--grpc-port", "0", "--http-port", "0"]
        self.command = [*command, *arguments]
        self._env = {**os.environ, "JAX_PLATFORMS": "cpu", "RSRV_WORKER_RUNTIME_BACKEND": "cpu", **env}
        self._lines: list[str] = []

    def __enter__(self) -> ServerProcess:
        self.process = subprocess.Popen(
            self.command, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()
        self._watchdog = threading.Timer(START_SECONDS, self.process.kill)
        self._watchdog.start()
        line = self.process.stdout.readline()
        self._watchdog.cancel()
        if not line:
            self.wait()
            raise AssertionError(f"the server ended with {self.process.returncode} before it listened:\n{self.log}")
        self.listening = json.loads(line)
        self.grpc_port = self.listening["grpc_port"]
        self.http_port = self.listening["http_port"]
        self.url = f"127.0.0.1:{self.grpc_port}"
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def http(self, path: str) -> tuple[int, str]:
        """Status and body of a GET."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=20)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def readyz(self) -> tuple[int, dict]:
        status, body = self.http("/readyz")
        return status, json.loads(body)

    def wait_ready(self, seconds: float = START_SECONDS) -> dict:
        """Wait until ``/readyz`` says 200; returns its body."""
        body = self.wait_for(lambda status, body: status == 200 or body["state"] != "starting", seconds)
        assert body["ready"], f"{body}\n{self.log}"
        return body

    def wait_settled(self, seconds: float = START_SECONDS) -> dict:
        """Wait until every model is ready or failed; returns the body of ``/readyz``."""
        return self.wait_for(lambda status, body: body["state"] == "serving", seconds)

    def wait_for(self, condition, seconds: float = START_SECONDS) -> dict:
        until = time.monotonic() + seconds
        while True:
            status, body = self.readyz()
            if condition(status, body):
                return body
            if time.monotonic() > until or self.process.poll() is not None:
                raise AssertionError(f"/readyz: {status} {body}\n{self.log}")
            time.sleep(0.02)

    def wait_for_log(self, text: str, seconds: float = START_SECONDS) -> None:
        """Wait for what the server says in its own time, such as that of a thread that gives way to all others."""
        until = time.monotonic() + seconds
        while text not in self.log:
            if time.monotonic() > until or self.process.poll() is not None:
                raise AssertionError(f"not said: {text!r}\n{self.log}")
            time.sleep(0.02)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a series that have these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        total = 0.0
        for family in text_string_to_metric_families(self.http("/metrics")[1]):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    total += sample.value
        return total

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The server does nothing while the block runs: what is done there happens at one moment to it, however slow
        this machine is."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def stop(self, seconds: float = 60) -> int:
        """SIGTERM, then the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(seconds)

    def wait(self, seconds: float = 60) -> int:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not end within {seconds} s:\n{self.log}") from None
        finally:
            self._reader.join()
            self.process.stdout.close()
            self.process.stderr.close()
        return self.process.returncode

    def _read_log(self) -> None:
        for line in self.process.stderr:
            self._lines.append(line)
