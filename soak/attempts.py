"""One request of a soak: what is sent, when it is given up, and which outcomes are right. Drawn from a seed alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rsrv.core.wire import decode_response, encode_request, join
from rsrv.protos import inference
from soak.models import EXIT, HANG, REJECT, Arrays, Model, Rng, models

PATIENCE = 60.0
"""Seconds after which a request without a deadline of its own counts as lost."""
TOLERANCE = 1e-4
"""Of answers in float32 that a matrix product went into, relative to the largest one."""

REFUSED = frozenset({"shed", "queue_full"})
"""Reasons for which a server may turn away any request while it is busy."""


@dataclass(frozen=True)
class Outcome:
    """How a request ended: `code` is a gRPC status, `reason` the server's (empty where it said none)."""

    code: str
    reason: str = ""
    answer: Mapping[str, np.ndarray | None] | None = None
    details: str = ""

    @property
    def label(self) -> str:
        return f"{self.code}/{self.reason}" if self.reason else self.code


@dataclass(frozen=True)
class Attempt:
    """A request.

    Attributes:
        kind: what makes it special: valid, nan, deadline, impossible, cancelled, hook, or a kind of poison.
        inputs: its tensors; `body` is the whole message.
        rows: of `inputs`.
        expected: the right answer; None when there is to be none.
        reasons: the server's reasons for an error that is right.
        seconds: the deadline.
        cancel_after: seconds until the caller loses interest; None = it does not.
    """

    model: Model
    kind: str
    inputs: Arrays
    body: bytes
    rows: int
    expected: Arrays | None
    reasons: frozenset[str] = frozenset()
    seconds: float = PATIENCE
    cancel_after: float | None = None

    def problem(self, outcome: Outcome) -> str | None:
        """What is wrong with an outcome; None when nothing is."""
        if outcome.code == "OK":
            if self.expected is None:
                return f"was answered, wanted an error for one of {sorted(self.reasons)}"
            return _difference(self.expected, outcome.answer or {})
        if outcome.reason in REFUSED or outcome.reason in self.reasons:
            return None
        if outcome.code == "DEADLINE_EXCEEDED" and self.seconds < PATIENCE:
            return None
        if outcome.code == "CANCELLED" and self.cancel_after is not None:
            return None
        wanted = f"wanted an error for one of {sorted(self.reasons)}" if self.expected is None else "wanted an answer"
        return f"ended with {outcome.label}, {wanted}: {outcome.details}"


def draw(rng: Rng) -> Attempt:
    """A random request to a random model."""
    model = list(models().values())[rng.integers(len(models()))]
    rows = 1 if rng.random() < 0.5 else int(rng.integers(1, model.largest + 1))
    inputs = model.inputs(rng, rows)
    plain = _attempt(model, "valid", inputs, rows)
    drawn = rng.random()
    if drawn < 0.12:
        return _POISONS[rng.integers(len(_POISONS))](rng, plain)
    if model.marks and drawn < 0.3:
        return _marked(rng, plain)
    if model.spoils and drawn < 0.2:
        return _spoilt(rng, plain)
    if drawn < 0.4:
        return replace(plain, kind="deadline", seconds=float(10 ** rng.uniform(-2.5, -0.5)))
    if drawn < 0.44:
        return replace(plain, kind="impossible", seconds=float(10 ** rng.uniform(-4.5, -3)))
    if drawn < 0.54:
        return replace(plain, kind="cancelled", cancel_after=float(10 ** rng.uniform(-4, -1)))
    return plain


def _attempt(model: Model, kind: str, inputs: Arrays, rows: int) -> Attempt:
    return Attempt(
        model, kind, inputs, join(encode_request(model.name, list(inputs.items()))), rows, model.answer(inputs)
    )


def _marked(rng: Rng, plain: Attempt) -> Attempt:
    """A request whose hook fails. Those that cost a process are rarer, as a new one takes a second to start."""
    marks = plain.model.marks
    mark = marks[rng.integers(len(marks))]
    if mark in (EXIT, HANG) and rng.random() < 0.8:
        mark = marks[0]
    plain.inputs["x"][0, 0] = mark
    attempt = _attempt(plain.model, "hook", plain.inputs, plain.rows)
    return replace(attempt, expected=None, reasons=frozenset({"hook_rejected" if mark == REJECT else "hook_error"}))


def _spoilt(rng: Rng, plain: Attempt) -> Attempt:
    """NaN and infinities in one row, which have to stay there."""
    x = next(iter(plain.inputs.values()))
    x[rng.integers(len(x))] = (np.nan, np.inf, -np.inf)[rng.integers(3)]
    with np.errstate(invalid="ignore"):
        return _attempt(plain.model, "nan", plain.inputs, plain.rows)


# --- what nobody may answer -----------------------------------------------------------------------------------------


def _poison(plain: Attempt, kind: str, body: bytes, *reasons: str) -> Attempt:
    return replace(plain, kind=kind, body=body, expected=None, reasons=frozenset(reasons or {"invalid"}))


def _first(plain: Attempt) -> tuple[str, np.ndarray]:
    return next(iter(plain.inputs.items()))


def _with_first(plain: Attempt, kind: str, array: np.ndarray) -> Attempt:
    name, _ = _first(plain)
    inputs = plain.inputs | {name: array}
    return _poison(plain, kind, join(encode_request(plain.model.name, list(inputs.items()))))


def _wrong_shape(rng: Rng, plain: Attempt) -> Attempt:
    return _with_first(plain, "shape", np.concatenate([_first(plain)[1]] * 2, axis=-1))


def _wrong_rank(rng: Rng, plain: Attempt) -> Attempt:
    return _with_first(plain, "rank", _first(plain)[1][None])


def _wrong_dtype(rng: Rng, plain: Attempt) -> Attempt:
    dtypes = (np.float64, np.int64, np.float16, np.bool_)
    return _with_first(plain, "dtype", _first(plain)[1].astype(dtypes[rng.integers(len(dtypes))]))


def _no_rows(rng: Rng, plain: Attempt) -> Attempt:
    attempt = _with_first(plain, "no rows", _first(plain)[1][:0])
    # Hooks run before rows are counted, and ours looks at the first one.
    return replace(attempt, reasons=frozenset({"hook_error"})) if plain.model.marks else attempt


def _too_many_rows(rng: Rng, plain: Attempt) -> Attempt:
    return _with_first(plain, "too many rows", np.concatenate([_first(plain)[1]] * (plain.model.largest + 1)))


def _wrong_name(rng: Rng, plain: Attempt) -> Attempt:
    inputs = [(f"{name}?", array) for name, array in plain.inputs.items()]
    return _poison(plain, "input name", join(encode_request(plain.model.name, inputs)))


def _wrong_output(rng: Rng, plain: Attempt) -> Attempt:
    body = join(encode_request(plain.model.name, list(plain.inputs.items()), outputs=["nothing of the sort"]))
    return _poison(plain, "output name", body)


def _twice(rng: Rng, plain: Attempt) -> Attempt:
    return _poison(plain, "twice", join(encode_request(plain.model.name, [_first(plain), *plain.inputs.items()])))


def _unknown_model(rng: Rng, plain: Attempt) -> Attempt:
    body = join(encode_request(f"{plain.model.name}-not", list(plain.inputs.items())))
    return _poison(plain, "model name", body, "unknown_model")


def _raw(rng: Rng, plain: Attempt) -> Attempt:
    """Fewer or more bytes than the shape says."""
    message = inference.ModelInferRequest.FromString(plain.body)
    raw = message.raw_input_contents[0]
    message.raw_input_contents[0] = raw[: rng.integers(len(raw))] if rng.random() < 0.7 else raw + b"\0"
    return _poison(plain, "raw contents", message.SerializeToString())


def _overflow(rng: Rng, plain: Attempt) -> Attempt:
    """A shape whose size is beyond all memory, or negative."""
    message = inference.ModelInferRequest.FromString(plain.body)
    message.inputs[0].shape[-1] = (-1, 2**62, -(2**63))[rng.integers(3)]
    return _poison(plain, "claimed size", message.SerializeToString())


def _cut(rng: Rng, plain: Attempt) -> Attempt:
    """A message that ends in its first tensor's header."""
    return _poison(plain, "cut", plain.body[: len(plain.model.name) + 5], "invalid")


def _garbage(rng: Rng, plain: Attempt) -> Attempt:
    """Bytes that begin no field of protobuf."""
    return _poison(plain, "garbage", b"\xff" * 12 + rng.bytes(int(rng.integers(100))))


_POISONS: tuple[Callable[[Rng, Attempt], Attempt], ...] = (
    _wrong_shape,
    _wrong_rank,
    _wrong_dtype,
    _no_rows,
    _too_many_rows,
    _wrong_name,
    _wrong_output,
    _twice,
    _unknown_model,
    _raw,
    _overflow,
    _cut,
    _garbage,
)


# --- answers --------------------------------------------------------------------------------------------------------


def read(body: bytes) -> Outcome:
    return Outcome("OK", answer=decode_response(body).arrays())


def _difference(expected: Arrays, answer: Mapping[str, np.ndarray | None]) -> str | None:
    """Where an answer is not the expected one."""
    if set(answer) != set(expected):
        return f"has outputs {sorted(answer)}, wanted {sorted(expected)}"
    for name, right in expected.items():
        given = answer[name]
        if given is None or given.dtype != right.dtype or given.shape != right.shape:
            seen = "nothing" if given is None else f"{given.dtype}{list(given.shape)}"
            return f"output {name!r} is {seen}, wanted {right.dtype}{list(right.shape)}"
        exact = right.dtype.kind != "f" or np.array_equal(right, np.rint(right))
        scale = 1.0 if exact else float(np.max(np.abs(right[np.isfinite(right)]), initial=1e-6))
        if exact and np.array_equal(given, right):
            continue
        if exact or not np.allclose(given, right, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True):
            return f"output {name!r} is wrong: {_head(given)}, wanted {_head(right)}"
    return None


def _head(array: np.ndarray) -> str:
    return np.array2string(array.reshape(-1)[:6], precision=4)
