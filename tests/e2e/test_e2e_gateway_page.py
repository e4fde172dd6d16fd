"""docs/gateway.md is true: the commands of its day-to-day part, in order, print what the page shows."""

from __future__ import annotations

import io
import re
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from support.bundles import N, write_model
from support.console import commands, is_as_shown
from support.server import ServerProcess

from rsrv.cli.main import main
from rsrv.core.config import GatewayConfig
from rsrv.gateway import serve_gateway

PAGE = Path(__file__).parents[2] / "docs" / "gateway.md"
HEADING = "## Day by day"
LOOKS = ("rsrv ctl gateway status", "rsrv ctl gateway workers list", "rsrv models")
"""Commands that change nothing: they are repeated until what the commands before them began has come so far."""
SECONDS = 60
FAKE = {
    "RSRV_ALLOW_FAKE": "1",
    "RSRV_WORKER_RUNTIME_BACKEND": "fake",
    "RSRV_WORKER_SCHEDULER_DISCIPLINE": "fifo",
    "RSRV_WORKER_RUNTIME_FAKE_SECONDS_PER_ROW": "0.001",
}


class Site:
    """A gateway with two workers, and a third one that nobody has told it of; their ports as on the page and here."""

    def __init__(self, stack: ExitStack, repo: Path) -> None:
        def start(_: int) -> ServerProcess:
            worker = ServerProcess(repo, env=FAKE)
            stack.enter_context(worker)
            worker.wait_ready()
            return worker

        with ThreadPoolExecutor(3) as pool:
            workers = list(pool.map(start, range(3)))
        workers.sort(key=lambda worker: worker.url)  # as on the page: equals are taken in the order of addresses
        gateway = serve_gateway(
            GatewayConfig(
                listen={"grpc": "127.0.0.1:0", "http": None},
                endpoints=[worker.url for worker in workers[:2]],
                metrics_endpoints=[f"127.0.0.1:{worker.http_port}" for worker in workers[:2]],
                worker_names=["w1", "w2"],
                scheduling={"mode": "lpt_packing"},
                health_interval_seconds=0.2,
            ),
            blocking=False,
        )
        stack.callback(gateway.stop, 0.0)
        self._prober = gateway.prober
        self.url = f"127.0.0.1:{gateway.grpc_port}"
        self._ports = {"8001": str(gateway.grpc_port)}
        for number, worker in enumerate(workers, 1):
            self._ports |= {f"810{number}": str(worker.grpc_port), f"820{number}": str(worker.http_port)}

    def _wait_for_rounds(self) -> None:
        """Until the gateway has looked at its workers since now, as it has when people type the next command."""
        wanted, end = self._prober.rounds + 2, time.monotonic() + SECONDS
        while self._prober.rounds < wanted:
            assert time.monotonic() < end, f"{self._prober.rounds} rounds of the prober, wanted {wanted}"
            time.sleep(0.02)

    def run(self, text: str) -> tuple[int, str]:
        """The exit code of a command, and what it printed, as the page would have it."""
        looks = text.startswith(LOOKS)
        for there, here in self._ports.items():
            text = re.sub(rf"(?<=127\.0\.0\.1:){there}\b", here, text)
        text = re.sub(r"^rsrv ctl ", f"rsrv ctl --url {self.url} ", text)
        text = re.sub(r"^rsrv (infer|models)\b", rf"rsrv \1 --url {self.url}", text)
        printed = io.StringIO()
        with redirect_stdout(printed), redirect_stderr(printed):
            code = main(shlex.split(text)[1:])
        if not looks:
            self._wait_for_rounds()
        shown = printed.getvalue()
        for there, here in self._ports.items():
            shown = re.sub(rf"(?<=127\.0\.0\.1:){here}\b", there, shown)
        return code, shown


@pytest.fixture
def site(tmp_path):
    for name, factor in (("ranker", 2.0), ("spell", 3.0), ("vision", 4.0)):
        write_model(
            tmp_path / name,
            lambda x, w: (x * w,),
            {"x": ((N, 16), np.float32)},
            {"y": ((N, 16), np.float32)},
            weights={"w": np.full(16, factor, np.float32)},
            batch_sizes=(1, 8),
        )
    with ExitStack() as stack:
        yield Site(stack, tmp_path)


def test_the_commands_of_the_page_print_what_it_shows(site):
    page = PAGE.read_text(encoding="utf-8")
    first = page[: page.index(HEADING)].count("\n")
    last = page[: page.index("\n## ", page.index(HEADING) + 1)].count("\n")
    shown = [command for command in commands(page) if first < command.line <= last]
    assert len(shown) > 10
    for command in shown:
        end = time.monotonic() + SECONDS
        code, printed = site.run(command.text)
        while not is_as_shown(command.shown, printed) and command.text.startswith(LOOKS) and time.monotonic() < end:
            time.sleep(0.05)
            code, printed = site.run(command.text)
        assert is_as_shown(command.shown, printed), (
            f"{PAGE.name}:{command.line}: $ {command.text}\nprints (exit code {code}):\n{printed}\n"
            "the page shows:\n" + "\n".join(command.shown)
        )
        refused = any(line.startswith("error: ") for line in command.shown)
        assert (code != 0) == refused, f"{PAGE.name}:{command.line}: $ {command.text} ends with {code}\n{printed}"
