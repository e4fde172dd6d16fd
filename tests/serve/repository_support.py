"""Bundles in a directory, a target that does what a test says, and time that passes when a test says so."""

import os
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from rsrv.serve.repository.follower import Follower
from rsrv.serve.repository.snapshot import FileStat, Seen, scan

WAIT_SECONDS = 30


def write_bundle(directory, weights=b"weights", **more):
    """The files of something that looks like a bundle; nobody parses it."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {"model.mlir": b"program", "weights.safetensors": weights, "manifest.yaml": b"kind: model"}
    for name, data in {**files, **more}.items():
        (directory / name).write_bytes(data)
    return directory


def seen(name, identity=1, *, root="/repo", version=1, **more):
    """A bundle of plain values: one directory, one version of its files."""
    files = {"manifest.yaml": FileStat(10, version * 1000 + 7, version * 1000 + 7, identity * 100), **more}
    return Seen(name, Path(root) / name, (1, identity), files)


def by_name(*bundles):
    return {bundle.name: bundle for bundle in bundles}


def told(changes):
    """Changes as a test writes them: ``load a``, ``rename a b``."""
    return [
        f"rename {change.source} {change.name}" if change.action == "rename" else f"{change.action} {change.name}"
        for change in changes
    ]


class Target:
    """Records what it is told to do. `errors` are raised, by ``action name``; what is in `held` has to be released."""

    def __init__(self):
        self.calls = []
        self.served = {}
        self.errors = {}
        self.hold = set()
        self.held = {}
        self.changed = threading.Condition()

    def load(self, name, path):
        return self._run(f"load {name}", lambda: self.served.__setitem__(name, contents(path)))

    def reload(self, name, path):
        return self._run(f"reload {name}", lambda: self.served.__setitem__(name, contents(path)))

    def unload(self, name):
        return self._run(f"unload {name}", lambda: self.served.pop(name, None))

    def rename(self, moves):
        calls = [f"rename {old} {new}" for old, new, _ in moves]
        for call in calls:
            if len(calls) > 1 and call in self.errors:
                raise self.errors[call]
        for (old, new, _), call in zip(moves, calls, strict=True):
            self._run(call, partial(self._rename, old, new)).result(0)

    def _rename(self, old, new):
        self.served[new] = self.served.pop(old)

    def _run(self, call, work):
        future = Future()
        with self.changed:
            self.calls.append(call)
            if call in self.errors:
                future.set_exception(self.errors[call])
            elif call in self.hold:
                self.held[call] = (future, work)
            else:
                work()
                future.set_result(None)
            self.changed.notify_all()
        return future

    def release(self, call, error=None):
        future, work = self.held.pop(call)
        if error is not None:
            future.set_exception(error)
            return
        work()
        future.set_result(None)

    def wait_for(self, *calls):
        """Wait until these were made, in whatever order."""
        with self.changed:
            assert self.changed.wait_for(lambda: set(calls) <= set(self.calls), WAIT_SECONDS), self.calls

    def take(self):
        calls, self.calls = self.calls, []
        return calls


def contents(directory):
    files = [Path(directory) / name for name in sorted(os.listdir(directory)) if name[0] != "."]
    return {file.name: file.read_bytes() for file in files if file.is_file()}


class Site:
    """A follower of one directory or more, with a clock that only `wait` moves."""

    def __init__(self, *roots, include=(), settle_seconds=1.0):
        self.now = 1000.0
        self.target = Target()
        self.roots = roots
        self.follower = Follower(
            self.target, roots=roots, include=include, settle_seconds=settle_seconds, clock=lambda: self.now
        )

    def seed(self):
        """What is there is served."""
        snapshot = scan(self.roots)
        self.follower.seed(snapshot)
        self.target.served = {name: contents(found.path) for name, found in snapshot.items()}
        self.hash()
        return self

    def hash(self):
        """Do what the threads that hash would do."""
        hashing = self.follower.contents
        while work := hashing._next_comparison() or hashing._next_wanted():
            work()

    def event(self, *names):
        self.follower.event(names, self.now)

    def poll(self, after=0.0):
        self.now += after
        return told(self.follower.look(poll=True))

    def look(self, after=0.0):
        self.now += after
        return told(self.follower.look())

    def settle(self):
        """A round that finds what has changed, and the look after it; what was done."""
        done = [*self.poll(after=15), *self.look(after=0.5)]
        return [*done, *self.look()]
