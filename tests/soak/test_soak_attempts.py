"""What a soak sends and what it accepts: a soak that would pass anything proves nothing."""

from dataclasses import replace

import numpy as np
import pytest

from soak.attempts import PATIENCE, Attempt, Outcome, draw
from soak.models import models

KINDS = {
    *("valid", "nan", "deadline", "impossible", "cancelled", "hook"),
    *("shape", "rank", "dtype", "no rows", "too many rows", "input name", "output name", "twice", "model name"),
    *("raw contents", "claimed size", "cut", "garbage"),
}


@pytest.fixture(scope="module")
def drawn():
    """One attempt of each kind."""
    found: dict[str, Attempt] = {}
    for number in range(1500):
        attempt = draw(np.random.default_rng((1, number)))
        found.setdefault(attempt.kind, attempt)
    return found


def test_all_kinds_are_drawn(drawn):
    assert drawn.keys() == KINDS


def test_the_same_seed_draws_the_same_request():
    for number in range(200):
        assert draw(np.random.default_rng((1, number))).body == draw(np.random.default_rng((1, number))).body


@pytest.mark.parametrize("name", models())
def test_the_right_answer_is_accepted_and_any_change_of_it_is_not(name):
    model = models()[name]
    attempt = plain(model)
    answer = attempt.expected
    assert attempt.problem(Outcome("OK", answer=answer)) is None
    for output, right in answer.items():
        changed = right.copy()
        changed.reshape(-1)[-1] += 1
        assert "is wrong" in attempt.problem(Outcome("OK", answer={**answer, output: changed}))
        assert "wanted" in attempt.problem(Outcome("OK", answer={**answer, output: right[:-1]}))
        others = {k: v for k, v in answer.items() if k != output}
        assert "has outputs" in attempt.problem(Outcome("OK", answer=others))


@pytest.mark.parametrize("name", [name for name, model in models().items() if model.sizes])
def test_rows_in_another_order_are_wrong(name):
    attempt = plain(models()[name], rows=models()[name].largest)
    swapped = {output: right[::-1] for output, right in attempt.expected.items()}
    assert attempt.problem(Outcome("OK", answer=swapped)) is not None


def test_nan_has_to_stay_in_its_row():
    model = models()["wide"]
    inputs = model.inputs(np.random.default_rng(0), 2)
    inputs["x"][0] = np.nan
    right = model.answer(inputs)["y"]
    attempt = Attempt(model, "nan", inputs, b"", 2, {"y": right})
    assert attempt.problem(Outcome("OK", answer={"y": right})) is None
    assert attempt.problem(Outcome("OK", answer={"y": np.full_like(right, np.nan)})) is not None
    assert attempt.problem(Outcome("OK", answer={"y": np.nan_to_num(right)})) is not None


def test_poison_may_not_be_answered_and_has_to_be_refused_for_its_reason(drawn):
    for kind in KINDS - {"valid", "nan", "deadline", "impossible", "cancelled"}:
        attempt = drawn[kind]
        assert attempt.expected is None
        assert "was answered" in attempt.problem(Outcome("OK", answer={}))
        assert "ended with INTERNAL" in attempt.problem(Outcome("INTERNAL", "internal"))
        assert attempt.problem(Outcome("INVALID_ARGUMENT", next(iter(attempt.reasons)))) is None


def test_only_who_set_a_deadline_may_miss_it_and_only_who_cancelled_may_be_cancelled(drawn):
    for kind, code in (
        ("deadline", "DEADLINE_EXCEEDED"),
        ("impossible", "DEADLINE_EXCEEDED"),
        ("cancelled", "CANCELLED"),
    ):
        assert drawn[kind].problem(Outcome(code)) is None
        assert "wanted an answer" in drawn["valid"].problem(Outcome(code))
        assert "wanted an answer" in replace(drawn[kind], seconds=PATIENCE, cancel_after=None).problem(Outcome(code))


def test_a_busy_server_may_turn_anybody_away_and_a_failing_one_may_not(drawn):
    for attempt in drawn.values():
        assert attempt.problem(Outcome("RESOURCE_EXHAUSTED", "queue_full")) is None
        assert attempt.problem(Outcome("RESOURCE_EXHAUSTED", "device_oom")) is not None
        assert attempt.problem(Outcome("UNAVAILABLE", "failed")) is not None


def plain(model, rows=1):
    inputs = model.inputs(np.random.default_rng(0), rows)
    return Attempt(model, "valid", inputs, b"", rows, model.answer(inputs))
