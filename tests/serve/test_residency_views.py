"""What metrics and status say of a whole server on a fake device, and of a residency that does as it is told."""

from dataclasses import replace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.bundles import write_affine
from support.residency import ScriptedResidency, cold, counted

from rsrv.core.config import EndpointsConfig, RuntimeConfig, ServerConfig
from rsrv.core.status import WorkerStatus
from rsrv.serve import serve
from rsrv.serve.metrics import WorkerMetrics
from rsrv.serve.numerics import ServerNumerics
from rsrv.serve.residency.floors import Floor
from rsrv.serve.residency.manager import ModelResidency
from rsrv.serve.residency.snapshot import EVICT_REASONS, State
from rsrv.serve.residency.times import LOAD_BOUNDS, LoadTimes
from rsrv.serve.sources import Sources
from rsrv.serve.status import StatusReport

WITH_A_BUDGET = {
    "weight_pool_bytes",
    "weight_cache_max_bytes",
    "weight_cache_resident_bytes",
    "weight_cache_pinned_bytes",
    "weight_cache_max_scratch_bytes",
    "weight_cache_bytes_for_99_percent_hits",
    "evictable_bytes",
    "lru_age_seconds",
    "weight_uses_total",
    "weight_loads_total",
    "weight_load_seconds_total",
    "weight_evicts_total",
    "compactions_total",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    for name in ("affine", "pinned"):
        write_affine(repo / name)
    patch = pytest.MonkeyPatch()
    patch.setenv("RSRV_ALLOW_FAKE", "1")
    config = ServerConfig(
        model_dirs=[str(repo)],
        runtime=RuntimeConfig(backend="fake"),
        endpoints=EndpointsConfig(grpc_port=0, http_port=None),
    )
    server = serve(config, blocking=False)
    yield server
    server.stop()
    patch.undo()


@pytest.fixture
def residency():
    scripted = ScriptedResidency(affine=cold(floor=Floor.SYSTEM), pinned=ModelResidency(Floor.DEVICE, True, False, 40))
    scripted.counted = {
        "affine": counted("affine", floor=Floor.SYSTEM, loads=3, evicts=2, reload_seconds=0.2, idle_seconds=7.0),
        "pinned": counted("pinned", floor=Floor.DEVICE, nbytes=40, reserved=True, state=State.RESIDENT),
    }
    return scripted


@pytest.fixture
def sources(server, residency):
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
        residency=residency,
        load_times=LoadTimes(),
    )


def samples(sources):
    text = WorkerMetrics(sources, info={}, constant_labels={}).text().decode()
    return {
        (sample.name.removeprefix("rsrv_worker_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def document(server, sources):
    report = StatusReport(sources, server.config, worker=None, numerics=ServerNumerics())
    return WorkerStatus.model_validate_json(report.json())


def without_budget(sources):
    sources.residency.on_demand, sources.residency.mode = False, "self_managed"
    sources.residency.places.clear()
    return sources


# --- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_say_which_weights_are_where(sources):
    found = samples(sources)
    assert (found["model_resident", "affine"], found["model_resident", "pinned"]) == (0, 1)
    assert (found["model_pinned", "affine"], found["model_pinned", "pinned"]) == (0, 1)
    assert (found["model_weight_bytes", "affine"], found["model_weight_bytes", "pinned"]) == (24, 40)
    assert (found["models_loaded",], found["models_resident",]) == (2, 1)
    assert found["resident_weight_bytes",] == sources.residency.resident_bytes
    assert found["host_weights_bytes",] == 0
    assert found["host_weights_shared",] == 0
    for shared in (False, True):
        sources.residency.places["affine"] = ModelResidency(Floor.SYSTEM, False, True, 24, shared, host_bytes=24)
        found = samples(sources)
        assert (found["host_weights_bytes",], found["host_weights_shared",]) == (24, shared)


def test_metrics_of_the_budget_are_those_of_the_ledger(sources):
    found = samples(sources)
    assert found["weight_pool_bytes",] == 800
    assert found["weight_cache_max_bytes",] == 760
    assert found["weight_cache_pinned_bytes",] == 40
    assert found["weight_cache_max_scratch_bytes",] == 100
    assert (found["weight_cache_resident_bytes",], found["evictable_bytes",]) == (24, 16)
    assert (found["lru_age_seconds",], found["weight_cache_bytes_for_99_percent_hits",]) == (7, 640)
    assert (found["weight_uses_total",], found["weight_loads_total",], found["compactions_total",]) == (9, 3, 1)
    assert found["weight_load_seconds_total",] == 0.5
    assert {key[1]: value for key, value in found.items() if key[0] == "weight_evicts_total"} == {
        **dict.fromkeys(EVICT_REASONS, 0),
        "room": 2,
    }


def test_loads_are_counted_by_what_they_took(sources):
    for seconds in (0.001, 0.002, 0.1, 1000.0):
        sources.load_times.record("affine", seconds)
    found = samples(sources)
    buckets = {key[1]: value for key, value in found.items() if key[0] == "weight_load_time_seconds_bucket"}
    assert len(buckets) == len(LOAD_BOUNDS) + 1
    assert (buckets["0.001"], buckets["0.004"], buckets["0.256"], buckets["+Inf"]) == (1, 2, 3, 4)
    assert found["weight_load_time_seconds_sum",] == pytest.approx(1000.103)


def test_without_a_budget_there_are_no_series_of_one_and_all_models_are_resident_and_pinned(server, sources):
    for residency in (without_budget(sources).residency, None):
        found = samples(replace(sources, residency=residency))
        assert not WITH_A_BUDGET & {key[0] for key in found}
        assert not [key for key in found if key[0].startswith("weight_load_time")]
        for name in ("affine", "pinned"):
            assert (found["model_resident", name], found["model_pinned", name]) == (1, 1)
        assert found["models_resident",] == 2
        assert found["resident_weight_bytes",] == 48


def test_what_nobody_knows_yet_has_no_series(sources):
    taken = replace(sources.residency.snapshot(), lru=(), bytes_for_99_percent_hits=None)
    sources.residency.snapshot = lambda: taken
    names = {key[0] for key in samples(sources)}
    assert not {"lru_age_seconds", "weight_cache_bytes_for_99_percent_hits"} & names


# --- status ---------------------------------------------------------------------------------------------------------


def test_status_says_who_decides_and_what_the_budget_is_used_for(server, sources):
    found = document(server, sources)
    assert found.server.residency_mode == "externally_managed"
    (device,) = found.devices
    assert device.weights_bytes == 48
    budget = device.budget
    assert (budget.arena_bytes, budget.pool_bytes, budget.scratch_bytes) == (1000, 800, 100)
    assert (budget.pinned_bytes, budget.budget_bytes, budget.resident_bytes) == (40, 760, 24)
    assert (budget.eviction, budget.uses, budget.loads, budget.load_seconds) == ("lru", 9, 3, 0.5)
    assert (budget.evictions["room"], budget.evictions["oom"], budget.compactions) == (2, 0, 1)
    assert (budget.lru_age_s, budget.bytes_for_99_percent_hits) == (7.0, 640)


def test_status_says_where_the_weights_of_each_model_are_and_how_often_they_moved(server, sources):
    affine, pinned = document(server, sources).models
    assert (affine.residency.floor, affine.residency.state, affine.residency.pinned) == ("system", "cold", False)
    assert (affine.residency.loads, affine.residency.evictions) == (3, 2)
    assert (affine.residency.load_seconds, affine.residency.idle_s) == (0.2, 7.0)
    assert (pinned.residency.floor, pinned.residency.state, pinned.residency.pinned) == ("device", "resident", True)
    assert (pinned.residency.load_seconds, pinned.residency.host_shared) == (None, False)


def test_without_a_budget_status_has_none_and_all_weights_stay(server, sources):
    found = document(server, without_budget(sources))
    assert found.server.residency_mode == "self_managed"
    assert found.devices[0].budget is None
    assert [(model.residency.state, model.residency.pinned) for model in found.models] == [("resident", True)] * 2


# --- the histogram --------------------------------------------------------------------------------------------------


def test_a_load_that_takes_exactly_a_bound_is_counted_up_to_it():
    times = LoadTimes()
    for bound in LOAD_BOUNDS:
        times.record("m", bound)
    taken = times.snapshot()
    assert taken.counts == (*[1] * len(LOAD_BOUNDS), 0)
    assert taken.total_ns == round(np.sum(LOAD_BOUNDS) * 1e9)
