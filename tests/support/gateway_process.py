"""A real ``rsrv gateway`` in a process of its own, and the workers behind it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from support.ports import lasting_ports
from support.server import ServerProcess

PAUSE_SECONDS = 0.01
"""Between two requests of one client, so that servers which start beside the load have something of the processor."""
ROUND_SECONDS = 1.0
"""How often the gateways of tests look at their workers."""


class GatewayProcess(ServerProcess):
    """``rsrv gateway`` in front of `workers`; ``/readyz`` of a gateway is a word, not JSON."""

    def __init__(self, workers: Sequence[str], *arguments: str, env: Mapping[str, str] = {}) -> None:
        named = [word for url in workers for word in ("--worker", url)]
        super().__init__(
            None, env={"RSRV_GATEWAY_HEALTH_INTERVAL_SECONDS": str(ROUND_SECONDS), "RSRV_WORKER_NAME": "", **env}
        )
        ports = [] if "--grpc-port" in arguments else ["--grpc-port", "0", "--http-port", "0"]
        self.command = [sys.executable, "-m", "rsrv", "gateway", *named, *ports, *arguments]
        self._env = {name: value for name, value in self._env.items() if not name.startswith("RSRV_WORKER_")}

    def wait_ready(self, seconds: float = 60.0) -> None:
        self.until(lambda: self.http("/readyz")[0] == 200, seconds)

    def until(self, condition: Callable[[], object], seconds: float = 30.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the gateway ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < until, f"it did not come to pass; the gateway's log:\n{self.log}"
            time.sleep(0.02)


class Workers:
    """Real workers of one repository, each with a port that stays its own when it is started again."""

    def __init__(self, stack: ExitStack, repo: Path, env: Mapping[str, str] = {}) -> None:
        self._stack = stack
        self._repo = repo
        self._env = env
        self.processes: list[ServerProcess] = []

    def start(self, *, port: int | None = None, wait: bool = True) -> ServerProcess:
        ports = ["--grpc-port", str(port or lasting_ports(1)[0]), "--http-port", "0"]
        process = self._stack.enter_context(ServerProcess(self._repo, env=self._env, ports=ports))
        self.processes.append(process)
        if wait:
            process.wait_ready()
        return process

    def start_many(self, count: int) -> list[ServerProcess]:
        started = [self.start(wait=False) for _ in range(count)]
        for process in started:
            process.wait_ready()
        return started


class Load:
    """`clients` threads that call `request` until the block ends; what failed is in `errors`, the rest was right."""

    def __init__(self, request: Callable[[int], None], clients: int = 8) -> None:
        self._request = request
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]
        # By client, which is the only one that counts there.
        self._begun = [0] * clients
        self._done = [0] * clients
        self.errors: list[BaseException] = []
        self.slowest = 0.0

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    @property
    def done(self) -> int:
        """How many requests were answered."""
        return sum(self._done)

    def next_round(self, seconds: float = 30.0) -> None:
        """Wait until whatever was under way at this call is answered, and each client has begun another request."""
        before, until = [*self._begun], time.monotonic() + seconds
        while not all(now > then for now, then in zip(self._begun, before, strict=True)) and not self.errors:
            assert time.monotonic() < until, f"{before} requests were begun by each client, and now {self._begun}"
            time.sleep(0.01)

    def more(self, count: int, seconds: float = 30.0) -> None:
        """Wait until so many more requests were answered."""
        wanted, until = self.done + count, time.monotonic() + seconds
        while self.done < wanted and not self.errors:
            assert time.monotonic() < until, f"{self.done} of {wanted} answers"
            time.sleep(0.01)

    def _run(self, number: int) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            self._begun[number] += 1
            try:
                self._request(number)
            except BaseException as error:
                self.errors.append(error)
                return
            self.slowest = max(self.slowest, time.monotonic() - began)
            self._done[number] += 1
            self._over.wait(PAUSE_SECONDS)
