"""Fill plans: what a model's mode and quantum come to."""

import pytest

from rsrv.gateway.scheduling.fill import UNPLANNED, FillPlan, fill_plans, quantum
from rsrv.gateway.scheduling.knobs import ModelOverride


def plan_of(override=None, mode="spread", factor=1.0):
    overrides = {} if override is None else {"m": override}
    return fill_plans({"m": 8}, {"m": ("x", 2)}, mode=mode, factor=factor, overrides=overrides)["m"]


@pytest.mark.parametrize(
    ("factor", "max_batch", "wanted"),
    [(1, 8, 8), (1.5, 8, 12), (0.25, 8, 2), (1, 0, 1), (9, 0, 1), (0.01, 8, 1), (0.5, 5, 2), (0.5, 7, 4), (1, -3, 1)],
)
def test_a_quantum_is_the_factor_times_the_largest_batch(factor, max_batch, wanted):
    assert quantum(factor, max_batch) == wanted


def test_a_model_overrides_the_fleets_mode_and_factor_each_on_its_own():
    assert plan_of(ModelOverride(fill_mode="inflight"))[:2] == ("inflight", 8)
    assert plan_of(ModelOverride(fill_factor=0.25))[:2] == ("spread", 2)
    assert plan_of(ModelOverride(replicas=3))[:2] == ("spread", 8)
    assert plan_of()[:2] == ("spread", 8)


def test_a_new_default_holds_for_all_models_without_overrides():
    assert plan_of(mode="run", factor=2.0)[:2] == ("run", 16)
    assert plan_of(ModelOverride(fill_mode="inflight"), mode="run", factor=2.0)[:2] == ("inflight", 16)


def test_a_plan_keeps_where_the_batch_is():
    assert plan_of() == FillPlan("spread", 8, "x", 2)


def test_plans_cover_what_is_known_or_overridden():
    plans = fill_plans({"a": 4}, {}, mode="run", factor=1.0, overrides={"b": ModelOverride(fill_mode="spread")})
    assert plans == {"a": FillPlan("run", 4), "b": FillPlan("spread", 1)}
    assert plans["a"].axis is None
    assert UNPLANNED == ("run", 1, "", None)
