"""What status and metrics say of models that are loaded, reloaded, drained, moved and shadowed while a server runs."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.bundles import write_affine
from support.residency import ScriptedResidency, cold, counted

from rsrv.core.config import EndpointsConfig, RuntimeConfig, ServerConfig
from rsrv.core.errors import UnknownModel
from rsrv.core.status import WorkerStatus
from rsrv.serve import serve
from rsrv.serve.metrics import WorkerMetrics
from rsrv.serve.numerics import ServerNumerics
from rsrv.serve.programs.compare import ShadowRecord
from rsrv.serve.programs.records import ProgramList, ProgramSet, Retained
from rsrv.serve.registry import Failure, ModelState
from rsrv.serve.repository.memory import Tombstone
from rsrv.serve.residency.floors import Floor
from rsrv.serve.residency.manager import ModelResidency
from rsrv.serve.residency.operations import OperationError, ParameterState
from rsrv.serve.residency.reclaim import IdlePolicy
from rsrv.serve.residency.snapshot import State
from rsrv.serve.sources import Sources
from rsrv.serve.status import StatusReport


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    for name in ("net", "other"):
        write_affine(repo / name)
    patch = pytest.MonkeyPatch()
    patch.setenv("RSRV_ALLOW_FAKE", "1")
    config = ServerConfig(
        model_dirs=[str(repo)],
        model_control_mode="static",
        runtime=RuntimeConfig(backend="fake"),
        endpoints=EndpointsConfig(grpc_port=0, http_port=None),
    )
    server = serve(config, blocking=False)
    yield server
    server.stop()
    patch.undo()


class Programs:
    """Two sets of `net`, of which the second is tried in a shadow and selected; none of others."""

    def __init__(self):
        record = ShadowRecord(10.0, 1, batches=7, skipped=3, mismatches=2, errors=1, largest={"y": 0.5})
        self.sets = (ProgramSet(1, "ready", "", "f1", "", 1.0), ProgramSet(2, "ready", "new", "f2", "", 2.0, record))

    def retained(self, name):
        return Retained(2, 2) if name == "net" else Retained(1, 1)

    def list(self, name):
        if not self.sets:
            raise UnknownModel(f"unknown model: {name!r}")
        return ProgramList(2, 4, self.sets)


@pytest.fixture
def sources(server):
    operation = ParameterState("idle", OperationError("activating", "DeviceOutOfMemory", "there is no room"))
    return Sources(
        registry=server.registry,
        lifecycle=server.lifecycle,
        scheduler=server.scheduler,
        counters=server.counters,
        admission=server.admission,
        hook_pool=server.hook_pool,
        hook_processes_lost=lambda: 0,
        regions=None,
        device=server.device,
        programs=lambda: server.progress.counts,
        cache=None,
        registrations=SimpleNamespace(
            accepted=lambda entry: entry.accepted + 2,
            failures=Counter(net=3),
            reloads=Counter(net=5),
        ),
        operations=SimpleNamespace(state=lambda name: operation if name == "net" else ParameterState("waiting")),
        program_sets=Programs(),
        reclaimer=SimpleNamespace(policy=IdlePolicy(parameter_idle_ms=250.0, host_idle_ms=1000.0)),
        watcher=SimpleNamespace(tombstones=lambda: [Tombstone("gone", "1a2b", 12.5)]),
    )


@pytest.fixture
def change(server):
    """Changes entries of the registry, and changes them back."""
    before = server.registry._entries

    def change(name, **changes):
        server.registry._entries = {**server.registry._entries, name: replace(before[name], **changes)}

    yield change
    server.registry._entries = before


def report(server, sources):
    return StatusReport(sources, server.config, worker=None, numerics=ServerNumerics())


def document(server, sources, model=""):
    return WorkerStatus.model_validate_json(report(server, sources).json(model))


def samples(sources):
    text = WorkerMetrics(sources, info={}, constant_labels={}).text().decode()
    # The labels of a sample are in the order of their names.
    return {
        (sample.name.removeprefix("rsrv_worker_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# --- status ---------------------------------------------------------------------------------------------------------


def test_status_of_one_model_has_no_other_and_an_unknown_one_is_refused(server, sources):
    assert [model.name for model in document(server, sources).models] == ["net", "other"]
    found = document(server, sources, "net")
    assert [model.name for model in found.models] == ["net"]
    assert found.tombstones == []
    assert found.devices == document(server, sources).devices
    assert found.devices == [report(server, sources).device()]
    with pytest.raises(UnknownModel):
        document(server, sources, "nobody")


def test_status_tells_of_models_that_an_operator_removed(server, sources):
    (tombstone,) = document(server, sources).tombstones
    assert (tombstone.name, tombstone.signature, tombstone.since) == ("gone", "1a2b", 12.5)


@pytest.mark.parametrize("state", list(ModelState))
@pytest.mark.parametrize("gate", ["open", "draining", "drained", "removing"])
def test_status_says_state_and_gate_of_a_registration(server, sources, change, state, gate):
    change("net", state=state, gate=gate, source="api")
    found = document(server, sources).models[0]
    assert (found.state, found.admission, found.source) == (state.value, gate, "api")


def test_a_failure_and_a_reload_that_failed_are_told_apart(server, sources, change):
    failure = Failure("compile", "ProgramError", "it is no program")
    change("net", pending=failure)
    change("other", state=ModelState.FAILED, prepared=None, failure=failure)
    net, other = document(server, sources).models
    assert (net.reason, net.error) == ("", None)
    assert (net.pending_error.phase, net.pending_error.type) == ("compile", "ProgramError")
    assert net.pending_error.message == "it is no program"
    assert (other.reason, other.pending_error) == ("compile: it is no program", None)
    assert other.error == net.pending_error


def test_accepted_requests_are_told_by_where_they_are(server, sources, change):
    entry = server.registry.get("net")
    scheduler = SimpleNamespace(depth=lambda model: (4, 3), stats=server.scheduler.stats, stuck=None)
    change("net", prepared=replace(entry.prepared, accepted=range(9)))
    found = document(server, replace(sources, scheduler=scheduler)).models[0]
    # Nine have entered, of which four wait and three run; two belong to a version before it.
    assert found.accepted.model_dump() == {"queued": 4, "executing": 3, "hooks": 2, "earlier": 2}
    assert found.phase == "executing"
    scheduler.depth = lambda model: (4, 0)
    assert document(server, replace(sources, scheduler=scheduler)).models[0].phase == "queued"


def test_a_model_that_is_not_prepared_any_more_may_still_have_requests_of_an_earlier_version(server, sources, change):
    change("net", state=ModelState.FAILED, prepared=None, failure=Failure("hooks", "HookError", "lost"))
    found = document(server, sources).models[0]
    assert found.accepted.model_dump() == {"queued": 0, "executing": 0, "hooks": 0, "earlier": 2}


def test_weights_on_their_way_are_a_phase_of_their_model(server, sources):
    residency = ScriptedResidency(net=cold(), other=cold())
    residency.counted = {"net": counted("net", state=State.LOADING), "other": counted("other", state=State.COLD)}
    found = document(server, replace(sources, residency=residency)).models
    assert [(model.phase, model.residency.state) for model in found] == [("loading", "loading"), ("idle", "cold")]


def test_status_says_what_an_operator_does_to_weights_and_what_that_came_to(server, sources):
    net, other = document(server, sources).models
    assert (net.residency.operation, other.residency.operation) == ("idle", "waiting")
    assert (net.residency.operation_error.phase, other.residency.operation_error) == ("activating", None)
    assert net.residency.operation_error.message == "there is no room"


def test_status_says_how_many_bytes_of_weights_are_where(server, sources):
    leaving = ModelResidency(
        Floor.SYSTEM, False, True, 24, pinned=True, host_bytes=20, committed_bytes=24, releasing=True
    )
    residency = ScriptedResidency(net=leaving, other=cold())
    residency.releasing_bytes = 24
    found = document(server, replace(sources, residency=residency))
    net = found.models[0].residency
    assert (net.committed_bytes, net.releasing_bytes, net.host_bytes, net.pinned_by_operator) == (24, 24, 20, True)
    assert (found.devices[0].budget.releasing_bytes, found.devices[0].budget.idle_reclaims) == (24, 0)


def test_status_says_which_program_set_serves_and_how_many_there_are(server, sources):
    net, other = document(server, sources).models
    assert (net.programs.selected, net.programs.retained, net.programs.capacity) == (2, 2, 4)
    assert (other.programs.selected, other.programs.retained, other.programs.capacity) == (1, 1, 4)


def test_idle_times_are_those_in_force(server, sources):
    idle = document(server, sources).server.idle
    assert (idle.parameter_ms, idle.workspace_ms, idle.host_ms) == (250, 0, 1000)


def test_parts_that_are_not_there_leave_defaults(server, sources):
    alone = replace(sources, registrations=None, operations=None, program_sets=None, reclaimer=None, watcher=None)
    found = document(server, alone)
    assert found.tombstones == []
    net = found.models[0]
    assert (net.programs.selected, net.programs.retained, net.residency.operation) == (1, 1, "idle")
    assert (net.accepted.earlier, found.server.idle.parameter_ms) == (0, 0)


def test_whoever_polls_status_does_not_refresh_idle_times(server, sources):
    residency = ScriptedResidency(net=cold(), other=cold())
    document(server, replace(sources, residency=residency))
    samples(replace(sources, residency=residency))
    assert residency.asked == []


# --- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_say_state_and_gate_of_every_registration(sources, change):
    change("net", state=ModelState.RETIRING, gate="removing")
    found = samples(sources)
    states = {key[2]: value for key, value in found.items() if key[:2] == ("model_state", "net")}
    assert states == {**{state.value: 0 for state in ModelState}, "retiring": 1}
    gates = {key[2]: value for key, value in found.items() if key[:2] == ("model_admission", "net")}
    assert gates == {"open": 0, "draining": 0, "drained": 0, "removing": 1}


def test_metrics_count_loads_that_failed_and_those_that_took_effect(sources, change):
    change("net", pending=Failure("compile", "ProgramError", "no"))
    found = samples(sources)
    assert (found["model_load_failures_total", "net"], found["model_load_failures_total", "other"]) == (3, 0)
    assert (found["reloads_total", "net"], found["reloads_total", "other"]) == (5, 0)
    assert (found["model_pending_error", "net"], found["model_pending_error", "other"]) == (1, 0)
    assert found["model_accepted_requests", "net"] == 2


def test_metrics_say_what_a_shadow_came_to(sources):
    found = samples(sources)
    assert (found["model_program_sets", "net"], found["model_selected_program", "net"]) == (2, 2)
    assert (found["model_program_sets", "other"], found["model_selected_program", "other"]) == (1, 1)
    results = {key[3]: value for key, value in found.items() if key[:3] == ("shadow_batches_total", "net", "2")}
    assert results == {"match": 5, "mismatch": 2, "error": 1, "skipped": 3}
    assert found["shadow_largest_difference", "net", "y", "2"] == 0.5
    assert not [key for key in found if key[0].startswith("shadow") and key[2] == "1"]


def test_a_model_that_goes_while_metrics_are_read_only_lacks_its_shadow(sources):
    sources.program_sets.sets = ()
    assert not [key for key in samples(sources) if key[0].startswith("shadow")]


def test_metrics_count_requests_that_wait_and_weights_that_were_idle(sources):
    residency = ScriptedResidency(net=ModelResidency(Floor.SYSTEM, False, True, 24, host_bytes=20), other=cold())
    found = samples(replace(sources, residency=residency))
    assert found["held_requests",] == 0
    assert found["idle_reclaims_total",] == 0
    assert found["host_weights_bytes",] == 20
