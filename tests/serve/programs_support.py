"""A model whose program files are words: ``double 4`` is the program for batch size 4 that doubles.

`Source` stands in the place of parser and compiler: ``unreadable`` cannot be parsed, ``bad 4`` does not compile.
"""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
from sched_support import FakeDevice, Gate, model, send, signature, spec

from rsrv.bundle.blocks import BatchingSpec
from rsrv.core.errors import DeviceError, ProgramError
from rsrv.runtime.compiled import Compiled
from rsrv.runtime.hooks import Hooks
from rsrv.serve.admin.events import EventLog
from rsrv.serve.loading import prepare_checks
from rsrv.serve.loading.programs import Found, Loaded
from rsrv.serve.programs import ProgramSets
from rsrv.serve.registry import Registry
from rsrv.serve.scheduler import Scheduler
from rsrv.stablehlo.policy import Policy
from rsrv.stablehlo.signature import ProgramReport

LONG = 60.0
IN, OUT = (spec("x", "n", 2),), (spec("y", "n", 2),)


def broken(x, w):
    raise DeviceError("the device is on fire")


FUNCTIONS = {
    "double": lambda x, w: x * 2,
    "double-again": lambda x, w: x + x,
    "nearly": lambda x, w: x * np.float32(2.001),
    "triple": lambda x, w: x * 3,
    "weighed": lambda x, w: x * w,
    "broken": broken,
}


class Source:
    """Attributes: `loads`, the programs that were loaded, in order; `gate`, clear it to hold what compiles."""

    def __init__(self, device):
        self._device = device
        self._made = {}
        self.loads = []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.functions = dict(FUNCTIONS)

    def find(self, job):
        word, _, rows = job.program.decode().partition(" ")
        if word == "unreadable":
            raise ProgramError("program cannot be read: no such operation")
        rows = int(rows or job.policy.batch or 1)
        outputs = (spec("y", "n", 3),) if word == "wide" else OUT
        return Found(ProgramReport(signature(IN, outputs, rows, weights=[np.zeros(())])))

    def load(self, job, found):
        self.entered.set()
        assert self.gate.wait(LONG)
        word = job.program.decode().partition(" ")[0]
        self.loads.append(job.program.decode())
        if word == "bad":
            raise ProgramError("the compiler gave up")
        executable = self._device.program(self.functions[word], found.report.signature, name=word)
        self._made[id(executable)] = job.identity[0].hex()
        return Loaded(executable, Compiled(found.report, None, 0.25, 0, f"numerics of {word}"), "compiled")

    def digests(self, executables):
        return [self._made.get(id(executable), "00") for executable in executables]


class World:
    """One model, ``m``, with programs for the batch sizes `keys` that double; `start` lets it run."""

    def __init__(self, root, *, keys=(1, 4), capacity=4, fn=FUNCTIONS["double"], **options):
        self.root = Path(root)
        self.device = FakeDevice()
        self.source = Source(self.device)
        self.scheduler = Scheduler(self.device)
        self.registry = Registry()
        self.events = EventLog()
        self.keys = keys
        self.sets = ProgramSets(
            self.source,
            Policy(),
            scheduler=self.scheduler,
            registry=self.registry,
            capacity=capacity,
            events=self.events,
            clock=lambda: 1000.0,
            **options,
        )
        self.registry.announce({"m": self.root / "m"})
        self.model = self.made(fn)
        self.scheduler.add(self.model)
        self.registry.set_ready("m", prepare_checks(self.model, Hooks(), None, numerics="as it was"))

    def made(self, fn=FUNCTIONS["double"], incarnation=1, name="m"):
        made = model(
            self.device, fn, name=name, keys=self.keys, inputs=IN, outputs=OUT, weights=[2.0], incarnation=incarnation
        )
        return replace(made, manifest=replace(made.manifest, batching=BatchingSpec(self.keys)))

    def write(self, *words, name="other", sizes=None):
        """A directory without a manifest: one word for all sizes, or one for each."""
        directory = self.root / name
        directory.mkdir(exist_ok=True)
        sizes = self.keys if sizes is None else sizes
        for at, size in enumerate(sizes):
            (directory / f"model.b{size}.mlir").write_text(f"{words[at % len(words)]} {size}")
        return directory

    def stage(self, *words, name=None, **more):
        return self.sets.stage("m", directory=self.write(*words, name=name or "-".join(words)), **more)

    def reload(self):
        """A new incarnation of the model takes over."""
        fresh = self.made(incarnation=self.registry.get("m").prepared.model.incarnation + 1)
        self.scheduler.replace(fresh)
        self.registry.set_ready("m", prepare_checks(fresh, Hooks(), None))
        return fresh

    def serving(self):
        return self.registry.get("m").prepared

    def ask(self, x):
        """What a request gets now."""
        return send(self.scheduler, self.serving().model, np.asarray(x, np.float32)).outputs()["y"]

    def told(self, kind):
        return [(e.old, e.new, e.detail) for e in self.events.read()[0] if e.type == kind]

    def close(self):
        self.source.gate.set()
        self.sets.close()
        self.scheduler.stop()


__all__ = ["FUNCTIONS", "IN", "LONG", "OUT", "Gate", "World", "send"]
