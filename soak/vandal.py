"""Somebody who damages weights files while their models serve, and calls these models before and afterwards.

Right is the answer of the bytes that the server started with. A file that was rewritten or cut has lost them, and the
server has to refuse what it can no longer read; one that was replaced, removed or written again with the same bytes has
not. Only on a server with a small budget do weights have to be read again.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc
import numpy as np

from benchmarks.catalogue import Entry, random_tensor, write_entry
from benchmarks.load import INFER, open_channel

WEIGHT_BYTES = 1 << 18
REFUSAL = "weights_unavailable"
BUSY = frozenset({"shed", "queue_full"})


def _rewrite(file: Path) -> None:
    """Other bytes of the same length in the same file, from the middle of the weights on."""
    with file.open("r+b") as stream:
        stream.seek(-WEIGHT_BYTES // 2, os.SEEK_END)
        stream.write(np.full(WEIGHT_BYTES // 8, 3, np.float32).tobytes())


def _replace(file: Path) -> None:
    """A file of the same layout by rename, with zeros for weights."""
    new = file.with_name(".new.partial")
    data = file.read_bytes()
    new.write_bytes(data[:-WEIGHT_BYTES] + bytes(WEIGHT_BYTES))
    new.replace(file)


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - WEIGHT_BYTES // 2)


def _repeat(file: Path) -> None:
    """The same bytes once more, in place."""
    with file.open("r+b") as stream:
        data = stream.read()
        stream.seek(0)
        stream.write(data)


DAMAGES: Mapping[str, Callable[[Path], None]] = {
    "rewritten": _rewrite,
    "truncated": _truncate,
    "replaced": _replace,
    "removed": Path.unlink,
    "repeated": _repeat,
}
"""By name of the model that it happens to."""
LOST = frozenset({"rewritten", "truncated"})
"""Those whose old bytes are gone."""


class Vandal:
    """Works on a thread of its own between `start` and `stop`.

    Attributes:
        outcomes: how requests ended, as ``model outcome``, before and after the damage alike.
        problems: wrong answers, and refusals for other reasons.
        requests: how many were sent.
    """

    def __init__(self, repo: Path) -> None:
        rng = np.random.default_rng(0)
        self._entries = [write_entry(repo / name, [random_tensor(rng, WEIGHT_BYTES)]) for name in DAMAGES]
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.requests = 0

    @property
    def unnoticed(self) -> list[str]:
        """Models that were never refused although their bytes are gone."""
        return sorted(name for name in LOST if not self.outcomes[f"{name} {REFUSAL}"])

    def start(self, target: str, *, after: float) -> None:
        """Begin to call; do the damage `after` so many seconds."""
        self._thread = threading.Thread(target=self._run, args=(target, time.monotonic() + after))
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, target: str, moment: float) -> None:
        damaged = False
        with open_channel(target) as channel:
            while not self._over.wait(0.02):
                if not damaged and time.monotonic() > moment:
                    for entry in self._entries:
                        DAMAGES[entry.name](entry.weights)
                    damaged = True
                for entry in self._entries:
                    self._call(channel, entry, damaged=damaged)

    def _call(self, channel: grpc.Channel, entry: Entry, *, damaged: bool) -> None:
        self.requests += 1
        try:
            answer = channel.unary_unary(INFER)(entry.stream.body, timeout=60)
        except grpc.RpcError as error:
            outcome = str(dict(error.trailing_metadata() or ()).get("rsrv-reason", error.code().name))
            if outcome not in BUSY and not (damaged and entry.name in LOST and outcome == REFUSAL):
                self.problems.append(f"{entry.name}, damaged: {damaged}: {outcome}: {error.details()}")
        else:
            outcome = "OK"
            assert entry.stream.check is not None
            if not entry.stream.check(answer):
                self.problems.append(f"{entry.name}, damaged: {damaged}: a wrong answer")
        self.outcomes[f"{entry.name} {outcome}"] += 1
