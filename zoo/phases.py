"""What the steps of an export cost, measured from outside: their functions are wrapped for the time of a block."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch


@dataclass
class Clock:
    """Seconds by step: on the wall, and of processor time (all threads, and child processes that have ended).

    Processor time is what tells two runs apart on a machine that does other work, too.
    """

    wall: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), _cpu_seconds()
        try:
            yield
        finally:
            self.wall[name] = self.wall.get(name, 0.0) + time.perf_counter() - wall
            self.cpu[name] = self.cpu.get(name, 0.0) + _cpu_seconds() - cpu

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.step(name):
                return function(*args, **kwargs)

        return call


EXPORT, DECOMPOSE, LOWER, SERIALISE, REFERENCE, WEIGHTS, GATE = (
    "torch.export",
    "decomposition",
    "lowering",
    "serialisation",
    "eager reference",
    "weights",
    "gate",
)
STEPS = (EXPORT, DECOMPOSE, LOWER, SERIALISE, REFERENCE, WEIGHTS, GATE)
"""In the order in which an export takes them. ``gate`` checks the files, then compiles and runs every program."""

TOTAL = "export_bundle"


@contextmanager
def export_clock(clock: Clock) -> Iterator[None]:
    """Attribute what an export costs to `STEPS` for the time of the block, and all of it to `TOTAL`."""
    import torch

    from rsrv.bundle import writer
    from rsrv.export.torch import frontend, lowered
    from rsrv.export.torch.model import TorchModel

    gate = frontend.bundle_gate

    def timed_gate(*args: Any, **kwargs: Any) -> Callable[[Path], None]:
        return clock.timed(GATE, gate(*args, **kwargs))

    serialise = clock.timed(SERIALISE, lowered.serialize)
    wrapped = [
        (torch.export, "export", clock.timed(EXPORT, torch.export.export)),
        (
            torch.export.ExportedProgram,
            "run_decompositions",
            clock.timed(DECOMPOSE, torch.export.ExportedProgram.run_decompositions),
        ),
        (lowered.Entry, "lower", clock.timed(LOWER, lowered.Entry.lower)),
        (lowered, "serialize", serialise),
        (TorchModel, "run", clock.timed(REFERENCE, TorchModel.run)),
        (writer, "write_weights", clock.timed(WEIGHTS, writer.write_weights)),
        (frontend, "bundle_gate", timed_gate),
    ]
    with ExitStack() as stack:
        for owner, name, replacement in wrapped:
            stack.enter_context(patch.object(owner, name, replacement))
        stack.enter_context(clock.step(TOTAL))
        yield
    for seconds in (clock.wall, clock.cpu):  # programs are written inside of `lower`
        seconds[LOWER] = seconds.get(LOWER, 0.0) - seconds.get(SERIALISE, 0.0)


def _cpu_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
