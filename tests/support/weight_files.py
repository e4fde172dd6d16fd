"""Weights files for tests of stores: how one is described to a store, and a process that holds weights by command."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from rsrv.bundle.safetensors import ordered, read_header
from rsrv.serve.residency.content import ContentToken

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 60


def source(path, *, ctime_ns=0):
    """What a store needs to know of the weights file `path`, as it is on disk now; it was changed long ago."""
    token = dataclasses.replace(ContentToken.of(os.stat(path)), ctime_ns=ctime_ns)
    return SimpleNamespace(path=Path(path), header=read_header(path), token=token)


class Filler:
    """Reads the tensors of a file into the views of a store, and counts how often it was asked to."""

    def __init__(self, file, *, before=lambda: None, error=None):
        self.file, self.calls = file, 0
        self._before, self._error = before, error

    def __call__(self, views):
        self.calls += 1
        data = self.file.path.read_bytes()[self.file.header.data_offset :]
        for number, (entry, view) in enumerate(zip(ordered(self.file.header), views, strict=True)):
            view[:] = data[entry.begin : entry.end]
            if number == 0:
                self._before()
                if self._error is not None:
                    raise self._error


class Holder:
    """A process with a `SharedWeightStore` that does what it is told; ended by its pid when the block ends."""

    def __init__(self, directory, path, mode=0o660):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.weight_files", str(directory), str(path), f"{mode:o}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
            text=True,
        )
        self.pid = self._process.pid

    def tell(self, *words):
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def hear(self):
        """The next thing that it says."""
        line = self._process.stdout.readline()
        assert line, f"the holder ended with {self._process.wait(WAIT_SECONDS)}"
        return json.loads(line)

    def ask(self, *words):
        self.tell(*words)
        return self.hear()

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(WAIT_SECONDS)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process.poll() is None:
            self.kill()
        self._process.stdin.close()
        self._process.stdout.close()


@contextmanager
def holders(number, directory, path):
    """So many holders, started together and ready for commands."""
    started = [Holder(directory, path) for _ in range(number)]
    try:
        for holder in started:
            assert holder.hear() == "ready"
        yield started
    finally:
        for holder in started:
            holder.__exit__()


def _hold(directory, path, mode):
    from rsrv.serve.residency.shared_store import SharedWeightStore

    store = SharedWeightStore(int(mode, 8), directory)
    copy = None

    def say(value):
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

    def pause():
        say("filling")
        sys.stdin.readline()

    def take(name, before=lambda: None):
        file = source(path)
        fill = Filler(file, before=before)
        taken = store.acquire(name, file, fill)
        return taken, fill.calls

    say("ready")
    while words := sys.stdin.readline().split():
        match words:
            case ["acquire", name]:
                copy, filled = take(name)
                say({"filled": filled, "shared": copy.shared, "sums": [float(a.sum()) for a in copy.arrays]})
            case ["acquire_slowly", name]:
                copy, filled = take(name, pause)
                say({"filled": filled, "shared": copy.shared})
            case ["release"]:
                copy.release()
                say("released")
            case ["become", uid]:
                os.setuid(int(uid))
                say("became")
            case ["limit", nbytes]:
                import resource

                resource.setrlimit(resource.RLIMIT_FSIZE, (int(nbytes), int(nbytes)))
                say("limited")
            case ["churn", rounds]:
                wrong = filled = private = 0
                expected = None
                for _ in range(int(rounds)):
                    taken, calls = take(random.choice("ab"))
                    filled, private = filled + calls, private + (not taken.shared)
                    sums = [float(array.sum()) for array in taken.arrays]
                    expected = expected or sums
                    wrong += sums != expected or not np.isfinite(sums).all()
                    taken.release()
                say({"wrong": wrong, "filled": filled, "private": private, "sums": expected})


if __name__ == "__main__":
    _hold(*sys.argv[1:])
