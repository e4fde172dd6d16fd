"""Models for the scheduler's tests: programs are Python functions over arrays, run by the fake device."""

import dataclasses
import itertools
import threading
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from rsrv.bundle.manifest import Manifest
from rsrv.core.dtypes import DType
from rsrv.core.errors import InvalidRequest
from rsrv.core.tensors import BATCH, VARIABLE, Dim, DimKind, TensorSpec
from rsrv.runtime.fake import FakeDevice
from rsrv.serve.scheduler import ServableModel
from rsrv.serve.scheduler.account import Account
from rsrv.serve.scheduler.backlog import Backlog
from rsrv.serve.scheduler.policy import Policy
from rsrv.serve.scheduler.queue import ModelQueue
from rsrv.stablehlo.signature import ProgramSignature, tensor_type

LONG = 60.0
INCARNATIONS = itertools.count(1000)


def spec(name, *axes, dtype=DType.F32):
    """``spec("x", "n", 3)``: "n" is the batch axis, "?" a variable one, numbers are fixed."""
    dims = tuple(BATCH if a == "n" else VARIABLE if a == "?" else Dim(DimKind.FIXED, a) for a in axes)
    letters = "".join("n" if a == "n" else "abcdefgh"[i] for i, a in enumerate(axes))
    return TensorSpec(name, dtype, dims, letters, axes.index("n") if "n" in axes else None)


X = (spec("x", "n", 2),)
Y = (spec("y", "n", 2),)


@dataclass(eq=False)
class Weights:
    """Weights that are on the device for good."""

    buffers: tuple = ()
    nbytes: int = 0
    uses: int = 0
    resident: bool = True
    leaving: bool = False


def signature(inputs, outputs, rows, variant=(), weights=()):
    sizes = iter(variant)
    arguments = [
        tensor_type(s.dtype.stablehlo, s.concrete_shape(rows, [next(sizes) for _ in s.variable_axes])) for s in inputs
    ]
    arguments += [tensor_type("f32", np.shape(w)) for w in weights]
    results = [tensor_type(s.dtype.stablehlo, s.concrete_shape(rows, variant)) for s in outputs]
    return ProgramSignature(tuple(arguments), tuple(results))


def model(
    device,
    fn,
    *,
    name="m",
    keys=(1,),
    inputs=X,
    outputs=Y,
    weights=(),
    variants=((),),
    incarnation=None,
    cap=None,
    fixed_rows=1,
):
    """A model whose programs all are `fn(*inputs, *weights) -> [outputs]`; `fixed_rows` is what key 0 takes.

    Like every load, it has a number of its own.
    """
    incarnation = next(INCARNATIONS) if incarnation is None else incarnation
    programs = {
        variant: {
            key: device.program(fn, signature(inputs, outputs, key or fixed_rows, variant, weights)) for key in keys
        }
        for variant in variants
    }
    manifest = Manifest(name=name, executable_inputs=tuple(inputs), executable_outputs=tuple(outputs))
    buffers = tuple(device.put(np.asarray(w, np.float32)) for w in weights)
    return ServableModel(name, incarnation, manifest, programs, Weights(buffers), max_batch_size=cap)


def paper_model(name="m", keys=(1, 4, 8), **more):
    """A model that only gets planned, never run."""
    device = SimpleNamespace(
        program=lambda fn, signature: SimpleNamespace(signature=signature), put=None, free=lambda buffers: None
    )
    return model(device, None, name=name, keys=keys, **more)


def lone_queue(m):
    """A queue that no scheduler knows."""
    return ModelQueue(m, Policy(), deque(), Account(m.name, 1.0))


def rows_of(*values, width=2):
    """A request of one row for each value, filled with it."""
    return np.repeat(np.array(values, np.float32)[:, None], width, axis=1)


class Clock:
    """Nanoseconds that pass only when told."""

    def __init__(self):
        self.ns = 1_000_000_000

    def __call__(self):
        return self.ns

    def advance(self, seconds):
        self.ns += round(seconds * 1e9)


class Desk:
    """A backlog and its clock; each request is one tick younger than the one before."""

    def __init__(self, *models, policy=Policy()):  # noqa: B008
        self.clock = Clock()
        self.backlog = Backlog(policy)
        self.models = {m.name: m for m in models}
        for m in models:
            self.backlog.add(m)

    def queue(self, name):
        return self.backlog.queues[name]

    def seed(self, name, seconds, variant=(), runs=0):
        """Set what each batch key costs, as if a warm-up and `runs` runs had measured it now."""
        costs = self.queue(name).costs
        for key, cost in seconds.items():
            costs.seed(variant, key, round(cost * 1e9), self.clock.ns)
            for _ in range(runs):
                costs.measured(variant, key, round(cost * 1e9), self.clock.ns)
        self.backlog.replan(self.queue(name))

    def accept(self, name, rows=1, *, deadline_ns=0, within=0, variant=(), tick=1):
        """`within`: seconds from now to the deadline."""
        self.clock.ns += tick
        if within:
            deadline_ns = self.clock.ns + round(within * 1e9)
        return self.backlog.accept(
            self.models[name], {}, rows, variant, deadline_ns, lambda result: None, self.clock.ns
        )

    def next(self, busy_ns=0):
        work = self.backlog.next(self.clock.ns, busy_ns)
        return None if work is None else (work.queue.model.name, work.batch_key, work.tickets)

    def dropped(self):
        """Requests and reasons since the last call."""
        dropped, self.backlog.dropped = self.backlog.dropped, []
        return [(ticket, reason) for ticket, reason, _ in dropped]


class Reply:
    """A `done` callback that can be waited for, and that counts."""

    def __init__(self):
        self._results = deque()
        self._event = threading.Event()

    def __call__(self, result):
        self._results.append(result)
        self._event.set()

    @property
    def settled(self):
        return self._event.is_set()

    def wait(self):
        assert self._event.wait(LONG), "the request was never settled"
        assert len(self._results) == 1, "the request was settled more than once"
        return self._results[0]

    def outputs(self):
        result = self.wait()
        if result.error is not None:
            raise result.error
        return result.outputs

    def error(self):
        result = self.wait()
        assert result.outputs is None
        return result.error


class Gate:
    """A program that reports when it runs and waits to be let through: ``run(*arrays)`` is handed to `fn` then."""

    def __init__(self, fn):
        self._fn = fn
        self._permits = threading.Semaphore(0)
        self._entered = threading.Semaphore(0)
        self.calls = []

    def __call__(self, *arrays):
        self.calls.append([np.array(a) for a in arrays])
        self._entered.release()
        assert self._permits.acquire(timeout=LONG), "nobody opened the gate"
        return self._fn(*arrays)

    def wait_entered(self):
        assert self._entered.acquire(timeout=LONG), "the program was never run"

    def open(self, n=1):
        self._permits.release(n)


def double(x):
    return x * 2


def poisonous(x):
    if (x == 13).any():
        raise InvalidRequest("unlucky number")
    return x * 2


def send(scheduler, m, x, *, deadline_ns=0, variant=(), name="x"):
    reply = Reply()
    axis = m.input_specs[0].batch_axis
    reply.ticket = scheduler.submit(m, {name: x}, x.shape[axis], variant, deadline_ns, reply)
    return reply


def value(reply):
    return reply.outputs()["y"][0, 0]


def times(factor):
    return lambda x: x * factor


def renamed(m, name):
    return dataclasses.replace(m, name=name)


def programmed(device, m, fn, keys=(1,)):
    """The same incarnation with other programs."""
    return dataclasses.replace(m, programs=model(device, fn, keys=keys).programs)


def blocked(scheduler, device, fn=double, **options):
    """A model whose first request has been let into the program and waits there."""
    gate = Gate(fn)
    m = model(device, gate, **options)
    scheduler.add(m)
    scheduler.start()
    first = send(scheduler, m, rows_of(0))
    gate.wait_entered()
    return m, gate, first


__all__ = [
    "INCARNATIONS",
    "Clock",
    "Desk",
    "FakeDevice",
    "Gate",
    "Reply",
    "Weights",
    "blocked",
    "double",
    "lone_queue",
    "model",
    "paper_model",
    "poisonous",
    "programmed",
    "renamed",
    "rows_of",
    "send",
    "signature",
    "spec",
    "times",
    "value",
]
