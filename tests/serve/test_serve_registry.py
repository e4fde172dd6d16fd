from pathlib import Path
from types import SimpleNamespace

import pytest

from rsrv.core.errors import BundleError, ModelFailed, ModelPreparing, UnknownModel
from rsrv.serve.gate import Accepted
from rsrv.serve.lifecycle import Lifecycle
from rsrv.serve.registry import ModelState, Registry


def manifest(meta=False):
    return SimpleNamespace(is_meta=meta)


def prepared(incarnation=1):
    return SimpleNamespace(model=SimpleNamespace(incarnation=incarnation, manifest=manifest()), accepted=Accepted())


@pytest.fixture
def registry():
    registry = Registry()
    registry.announce({"b": Path("b"), "a": Path("a")})
    return registry


def test_before_the_scan_every_name_is_preparing_and_afterwards_unknown_names_are_unknown():
    registry = Registry()
    with pytest.raises(ModelPreparing, match="'a' is not known yet"):
        registry.prepared("a")
    registry.announce({"a": Path("a")})
    with pytest.raises(UnknownModel, match="unknown model: 'b'"):
        registry.prepared("b")
    with pytest.raises(ModelPreparing, match="'a' is being prepared"):
        registry.prepared("a")


def test_entries_are_sorted_and_an_entry_once_taken_never_changes(registry):
    assert [entry.name for entry in registry.entries()] == ["a", "b"]
    before = registry.get("a")
    registry.set_ready("a", prepared(7))
    assert before.state is ModelState.PREPARING
    assert registry.get("a").incarnation == 7
    assert registry.get("a").reason == ""
    assert registry.prepared("a") is registry.get("a").prepared


def test_a_failed_model_answers_with_the_phase_and_the_text_of_its_failure(registry):
    registry.set_ready("a", prepared())
    registry.set_failed("a", "compile", BundleError("model.mlir: bad op"))
    with pytest.raises(ModelFailed, match=r"model 'a' failed \(compile: model.mlir: bad op\)"):
        registry.prepared("a")
    assert registry.get("a").failure.type == "BundleError"
    registry.set_failed("b", "hooks", ValueError("x"))
    assert registry.get("b").reason == "hooks: ValueError: x"


def test_an_import_that_takes_long_is_why_a_model_and_its_server_are_not_ready(registry, monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 1042.0)
    registry.set_ready("b", prepared())
    for name in "ab":
        registry.change(name, importing_since=1000.0)
    assert registry.get("a").reason == "preparing: its hooks are being imported for 42 s"
    assert registry.get("b").reason == ""
    assert registry.waiting_for("all") == "not ready: a (preparing: its hooks are being imported for 42 s)"


def test_incarnations_never_repeat(registry):
    assert registry.next_incarnation() < registry.next_incarnation()


def test_every_change_is_told(registry):
    told = []
    registry.on_change = lambda name: told.append(registry.progress())
    registry.set_ready("a", prepared())
    registry.set_failed("b", "compile", BundleError("no"))
    assert [(p.total, p.prepared, p.failed) for p in told] == [(2, 1, 0), (2, 1, 1)]


@pytest.mark.parametrize(
    ("rule", "nothing", "one_ready", "other_failed", "both"),
    [
        ("all", "not ready: a (preparing), b (preparing)", "not ready: b (preparing)", "not ready: b (failed)", ""),
        ("any", "no model is ready", "", "", ""),
        (["a"], "not ready: a (preparing)", "", "", ""),
        (["b", "zz"], "not ready: b (preparing), zz (not registered)", "not ready: b (preparing), zz (not registered)",
         "not ready: b (failed), zz (not registered)", "not ready: zz (not registered)"),
    ],
)  # fmt: skip
def test_the_ready_rules(registry, rule, nothing, one_ready, other_failed, both):
    assert registry.waiting_for(rule) == nothing
    registry.set_ready("a", prepared())
    assert registry.waiting_for(rule) == one_ready
    registry.set_failed("b", "compile", BundleError("no"))
    assert registry.waiting_for(rule) == other_failed
    registry.set_ready("b", prepared())
    assert registry.waiting_for(rule) == both


def test_a_meta_model_does_not_hold_the_server_back_but_does_not_make_it_ready_either(registry):
    registry.set_ready("a", prepared())
    registry.change("b", manifest=manifest(meta=True))
    registry.set_failed("b", "manifest", BundleError("kind: meta is not supported yet"))
    assert registry.waiting_for("all") == ""
    only_meta = Registry()
    only_meta.announce({"m": Path("m")})
    only_meta.change("m", manifest=manifest(meta=True))
    assert only_meta.waiting_for("all") == "no model is ready"


@pytest.mark.parametrize("rule", ["all", "any", ["a"]])
def test_an_empty_or_unread_repository_is_never_ready(rule):
    registry = Registry()
    assert registry.waiting_for(rule) == "the model directories are not read yet"
    registry.announce({})
    assert registry.waiting_for(rule) == "no model is registered"


def test_a_server_is_ready_by_the_rule_until_it_stops(registry):
    lifecycle = Lifecycle(registry, "any")
    told = []
    lifecycle.on_change = lambda: told.append(lifecycle.state)
    lifecycle.phase = "compile 0/2"
    assert lifecycle.readiness().phase == "compile 0/2"
    assert not lifecycle.readiness().ready
    registry.set_ready("a", prepared())
    assert lifecycle.readiness().ready
    assert lifecycle.enter("stopping")
    now = lifecycle.readiness()
    assert (now.ready, now.reason, now.phase) == (False, "the server is stopping", "stopping")
    assert not lifecycle.enter("serving", only_from=("starting",))
    assert told == ["stopping"]


def test_a_server_with_a_stuck_execution_is_not_ready_until_it_returns(registry):
    stuck = ["an execution runs for 31.0 s"]
    lifecycle = Lifecycle(registry, "any", lambda: stuck[0])
    registry.set_ready("a", prepared())
    assert (lifecycle.readiness().ready, lifecycle.readiness().reason) == (False, stuck[0])
    stuck[0] = ""
    assert lifecycle.readiness().ready
