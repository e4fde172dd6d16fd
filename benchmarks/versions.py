"""A model whose every answer tells which version of its program, its weights and its hooks made it, and clients that
read that while the model is replaced under them.

``y[n,c] = x[n,c] + stamp``, and each part of a version adds a byte of its own to the stamp: the largest and the
smallest weight, the program, `preprocess` and `postprocess`. Parts of two versions in one answer make a stamp that no
version has; so does a tensor of weights that is half old and half new.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import grpc
import numpy as np

from benchmarks.load import INFER, open_channel
from rsrv.bundle.files import MANIFEST
from rsrv.core.wire import decode_response, encode_request, join

Part = Literal["weights", "program", "hooks"]

COLUMNS = 4
BATCH_SIZES = (1, 4)
_BITS = 8
_NUMBERS = (1 << _BITS) - 1
"""Versions of a part are numbered from 1 to this."""
_INPUTS = 1 << 20
_HOOKS = """import numpy as np


def preprocess(inputs):
    return {{"x": inputs["x"] + np.int64({number} << 24)}}


def postprocess(outputs):
    return {{"y": outputs["y"] + np.int64({number} << 32)}}
"""


# --- versions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Version:
    """The numbers of a version's parts; 0 hooks = it has none."""

    weights: int = 1
    program: int = 1
    hooks: int = 1

    @property
    def stamp(self) -> int:
        parts = (self.weights, self.weights, self.program, self.hooks, self.hooks)
        return sum(part << _BITS * index for index, part in enumerate(parts))

    def next(self, part: Part) -> Version:
        """The version with one other part."""
        return replace(self, **{part: getattr(self, part) % _NUMBERS + 1})

    def write(self, directory: Path, *, nbytes: int = 4096, batch_sizes: Sequence[int] = BATCH_SIZES) -> Path:
        """The bundle of this version, with so many bytes of weights."""
        from rsrv.bundle import IOSpec, write_bundle

        rows = nbytes // (8 * COLUMNS)
        return write_bundle(
            directory,
            name=directory.name,
            executable_inputs=[IOSpec("x", np.dtype(np.int64), (1, COLUMNS), batch_axis=0)],
            executable_outputs=[IOSpec("y", np.dtype(np.int64), (1, COLUMNS), batch_axis=0)],
            modules={batch: _program(batch, rows, self.program) for batch in batch_sizes},
            weights=[("w", np.full((rows, COLUMNS), self.weights, np.int64))],
            hooks=_HOOKS.format(number=self.hooks) if self.hooks else None,
        )


def parts_of(stamp: int) -> str:
    """What a stamp says, for people."""
    names = ("largest weight", "smallest weight", "program", "preprocess", "postprocess")
    return ", ".join(f"{name} {(stamp >> _BITS * index) & _NUMBERS}" for index, name in enumerate(names))


@cache
def _program(batch: int, rows: int, number: int) -> bytes:
    from rsrv.stablehlo import serialize

    w, row, x = f"tensor<{rows}x{COLUMNS}xi64>", f"tensor<{COLUMNS}xi64>", f"tensor<{batch}x{COLUMNS}xi64>"
    reduced = f"({w}, tensor<i64>) -> {row}"
    return serialize(f"""func.func public @main(%x: {x}, %w: {w}) -> {x} {{
  %least = stablehlo.constant dense<{-(1 << 63)}> : tensor<i64>
  %most = stablehlo.constant dense<{(1 << 63) - 1}> : tensor<i64>
  %high = stablehlo.reduce(%w init: %least) applies stablehlo.maximum across dimensions = [0] : {reduced}
  %low = stablehlo.reduce(%w init: %most) applies stablehlo.minimum across dimensions = [0] : {reduced}
  %byte = stablehlo.constant dense<{1 << _BITS}> : {row}
  %shifted = stablehlo.multiply %low, %byte : {row}
  %both = stablehlo.add %high, %shifted : {row}
  %number = stablehlo.constant dense<{number << 2 * _BITS}> : {row}
  %stamp = stablehlo.add %both, %number : {row}
  %stamps = stablehlo.broadcast_in_dim %stamp, dims = [1] : ({row}) -> {x}
  %y = stablehlo.add %x, %stamps : {x}
  return %y : {x}
}}""")


def put(served: Path, made: Path) -> float:
    """Put the files of the bundle `made` that differ in the place of those in `served`, which has the same, one after
    the other and the manifest last. Returns when the last was there, by `time.perf_counter`."""
    for file in sorted(made.iterdir(), key=lambda file: file.name == MANIFEST):
        target = served / file.name
        if not target.exists() or target.read_bytes() != file.read_bytes():
            os.replace(file, target)
    return time.perf_counter()


def edit(served: Path, version: Version, *, nbytes: int = 4096) -> float:
    """Make `version` and `put` it into `served`."""
    with TemporaryDirectory(dir=served.parents[1]) as tmp:
        return put(served, version.write(Path(tmp) / served.name, nbytes=nbytes))


# --- clients --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """`ended` is by `time.perf_counter`; `version` is the number that `Answers.allow` gave, -1 = none."""

    ended: float
    seconds: float
    version: int
    name: str


@dataclass
class Answers:
    """What a model has answered, and which versions it may answer with.

    Attributes:
        names: those that the model has in turns: one after a rename, another before.
        problems: what must not have happened, for people.
    """

    names: Sequence[str]
    max_rows: int = BATCH_SIZES[-1]
    answers: list[Answer] = field(default_factory=list, repr=False)
    problems: list[str] = field(default_factory=list)
    _versions: dict[int, int] = field(default_factory=dict)
    _since: list[int] = field(default_factory=list)
    _newest: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _more: threading.Condition = field(init=False)

    def __post_init__(self) -> None:
        self._more = threading.Condition(self._lock)

    def allow(self, version: Version) -> int:
        """From now on the model may answer with this version, too. Returns its number, higher than all before.

        A version that was allowed before becomes the newest again.
        """
        with self._lock:
            self._versions[version.stamp] = number = len(self._since)
            self._since.append(len(self.answers))
        return number

    @property
    def newest(self) -> int:
        """The newest version that has answered; what is asked later must not be answered by an older one."""
        with self._lock:
            return self._newest

    def note(self, answer: Answer, problem: str = "") -> None:
        with self._lock:
            self.answers.append(answer)
            self._newest = max(self._newest, answer.version)
            if problem:
                self.problems.append(problem)
            self._more.notify_all()

    def version_of(self, stamp: int, newest_before: int) -> tuple[int, str]:
        """Number of the version with that stamp, and what is wrong with it; "" = nothing."""
        with self._lock:
            number = self._versions.get(stamp, -1)
        if number < 0:
            return number, f"an answer of no version: {parts_of(stamp)}"
        if number < newest_before:
            return number, f"version {number} answered a request that was sent after an answer of {newest_before}"
        return number, ""

    def first(self, version: int, seconds: float) -> Answer:
        """The first answer of that version or a newer one. Raises TimeoutError."""
        since = self._since[version]
        return self._first(lambda answer: answer.version >= version, seconds, f"version {version}", since)

    def first_as(self, name: str, seconds: float) -> Answer:
        """The first answer from now on to a request for that name. Raises TimeoutError."""
        return self._first(lambda answer: answer.name == name, seconds, name, len(self.answers))

    def more(self, seconds: float) -> Answer:
        """An answer that comes after this call. Raises TimeoutError."""
        return self._first(lambda answer: True, seconds, "anything", len(self.answers))

    def _first(self, wanted: Callable[[Answer], bool], seconds: float, what: str, since: int) -> Answer:
        until = time.monotonic() + seconds
        looked = since
        with self._lock:
            while True:
                while looked < len(self.answers):
                    if wanted(answer := self.answers[looked]):
                        return answer
                    looked += 1
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no answer of {what} within {seconds:g} s; problems: {self.problems[:3]}")
                self._more.wait(left)


@contextmanager
def traffic(target: str, models: Sequence[Answers], *, clients: int = 2, pause: float = 0.0) -> Iterator[None]:
    """While the block runs, `clients` threads for each model ask one thing after the other, `pause` seconds apart."""
    over = threading.Event()
    threads = [
        threading.Thread(target=_ask, args=(target, model, over, pause, seed))
        for model in models
        for seed in range(clients)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _ask(target: str, model: Answers, over: threading.Event, pause: float, seed: int) -> None:
    choose, rng = random.Random(seed), np.random.default_rng(seed)
    names = list(model.names)
    with open_channel(target) as channel:
        call = channel.unary_unary(INFER)
        while not over.is_set():
            rows = choose.randint(1, model.max_rows)
            x = rng.integers(0, _INPUTS, (rows, COLUMNS), np.int64)
            model.note(*_one(call, names, x, model))
            if pause:
                over.wait(pause)


def _one(call: grpc.UnaryUnaryMultiCallable, names: list[str], x: np.ndarray, model: Answers) -> tuple[Answer, str]:
    """One request, under the name that was good last; under another, if the model has been renamed meanwhile."""
    newest, began, problem = model.newest, time.perf_counter(), ""
    for _ in model.names:
        name = names[0]
        try:
            data = call(join(encode_request(name, [("x", x)])), timeout=60)
        except grpc.RpcError as error:
            reason = dict(error.trailing_metadata() or ()).get("rsrv-reason")
            problem = f"{name}: {error.code().name} {reason} {error.details()}"
            if reason != "unknown_model":
                break
            names.append(names.pop(0))
            continue
        ended = time.perf_counter()
        message = decode_response(data)
        y = message.array("y")
        stamps = np.unique(y - x) if y is not None and y.shape == x.shape else np.empty(0, np.int64)
        if len(stamps) != 1 or message.model_name != name:
            what = f"{name}: no such answer: {message.model_name} {stamps[:3]}"
            return Answer(ended, ended - began, -1, name), what
        number, problem = model.version_of(int(stamps[0]), newest)
        return Answer(ended, ended - began, number, name), problem and f"{name}: {problem}"
    ended = time.perf_counter()
    return Answer(ended, ended - began, -1, names[0]), problem
