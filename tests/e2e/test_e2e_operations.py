"""docs/operations.md is true: its commands, in order, against a real server, print what the page shows."""

import io
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from support.console import commands, is_as_shown
from support.server import ServerProcess

from rsrv.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
LOOKS = ("rsrv ctl models", "rsrv ctl events", "rsrv ctl programs ls", "rsrv status", "rsrv models", "curl", "grep")
"""Commands that change nothing: they are repeated until what the commands before them began has come so far."""
SECONDS = 60
SHELL = re.compile(r"[|&;<>*`]|\$\(")
PROVENANCE = re.compile("warning: the provenance has no commit.*\n")
"""Who reads the page exports from a repository of git."""
QUICK = {"RSRV_WORKER_MODEL_SETTLE_SECONDS": "0.3", "RSRV_WORKER_MODEL_POLL_SECONDS": "600"}
"""No round of polls comes in between, which would try again what failed."""


class Terminal:
    """Runs the commands of the page in `directory`, with the server's ports in the place of 8001 and 8002."""

    def __init__(self, directory):
        self.directory = directory
        self.server = None
        binaries = directory / ".bin"
        binaries.mkdir()
        (binaries / "rsrv").write_text(f'#!/bin/sh\nexec {sys.executable} -m rsrv "$@"\n')
        (binaries / "rsrv").chmod(stat.S_IRWXU)
        self.env = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.server is not None:
            self.server.__exit__()

    def run(self, text):
        """The exit code, and what was printed."""
        if "rsrv serve" in text:
            return 0, self._serve(text)
        if text.startswith("kill -TERM"):
            return self.server.stop(), ""
        if self.server is not None:
            (self.directory / "server.log").write_text(self.server.log)
            text = self._with_ports(text)
        if text.startswith("rsrv ") and not SHELL.search(text):
            code, printed = self._in_process(shlex.split(text)[1:])
        else:
            done = subprocess.run(
                ["bash", "-c", text],
                env=self.env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=60,
            )
            code, printed = done.returncode, done.stdout
        return code, self._as_on_the_page(printed)

    def _serve(self, text):
        words = shlex.split(text.partition(" 2>")[0])
        at = words.index("rsrv")
        settings = dict(word.split("=", 1) for word in words[:at])
        repo, *options = words[at + 2 :]
        self.server = ServerProcess(Path(repo), *options, env={**QUICK, **settings})
        self.server.__enter__()
        return self._as_on_the_page(json.dumps(self.server.listening))

    def _in_process(self, argv):
        printed = io.StringIO()
        with redirect_stdout(printed), redirect_stderr(printed):
            code = main(argv)
        return code, printed.getvalue()

    def _with_ports(self, text):
        text = re.sub(r"^rsrv ctl ", f"rsrv ctl --url {self.server.url} ", text)
        text = re.sub(r"^rsrv (infer|models)\b", rf"rsrv \1 --url {self.server.url}", text)
        text = re.sub(r"^rsrv status\b", f"rsrv status --url 127.0.0.1:{self.server.http_port}", text)
        return text.replace("127.0.0.1:8002", f"127.0.0.1:{self.server.http_port}")

    def _as_on_the_page(self, printed):
        if self.server is not None:
            printed = re.sub(rf"\b{self.server.grpc_port}\b", "8001", printed)
            printed = re.sub(rf"\b{self.server.http_port}\b", "8002", printed)
        return PROVENANCE.sub("", printed).replace(str(self.directory), "/srv")


def program_of(page):
    """The file model.py that the page shows."""
    return re.search(r"```python\n(# model\.py\n.*?)```", page, re.DOTALL)[1]


@pytest.fixture
def terminal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with Terminal(tmp_path) as terminal:
        yield terminal


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page uses curl")
def test_the_commands_of_the_page_print_what_it_shows(terminal):
    page = PAGE.read_text(encoding="utf-8")
    Path("model.py").write_text(program_of(page))
    for command in commands(page):
        end = time.monotonic() + SECONDS
        code, printed = terminal.run(command.text)
        while not is_as_shown(command.shown, printed) and command.text.startswith(LOOKS) and time.monotonic() < end:
            time.sleep(0.05)
            code, printed = terminal.run(command.text)
        assert is_as_shown(command.shown, printed), (
            f"{PAGE.name}:{command.line}: $ {command.text}\nprints (exit code {code}):\n{printed}\n"
            f"the page shows:\n" + "\n".join(command.shown) + f"\n{terminal.server.log if terminal.server else ''}"
        )
        refused = any(line.startswith("error: ") for line in command.shown)
        assert (code != 0) == refused, f"{PAGE.name}:{command.line}: $ {command.text} ends with {code}\n{printed}"
    assert terminal.server.process.returncode == 0, terminal.server.log


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("net  ready  0.31 s", "net ready   12.5 s\n", True),
        ("net  ready", "net  failed\n", False),
        ("net  …  yes", "net  ready  yes\n", True),
        ("first\n…\nlast", "first\n2\n3\nlast\n", True),
        ("first\n…\nlast", "first\nlast\n", True),
        ("first\nlast", "first\n2\nlast\n", False),
        ("3 02:22:37 net#3 reload 2 → 3", "7 11:00:00 net#3 reload 2 → 3\n", True),
        ("3 02:22:37 net#3 reload 2 → 3", "3 02:22:37 net#4 reload 3 → 4\n", False),
        ("100 %: 20 batches", "100 %: 16 batches, 4 skipped\n", True),
        ("100 %: 20 batches", "100 %: 0 batches\n", False),
    ],
)
def test_a_page_may_leave_out_and_be_of_another_time_and_no_more(shown, printed, same):
    assert is_as_shown(tuple(shown.splitlines()), printed) is same
