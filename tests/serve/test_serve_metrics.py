import re
from types import SimpleNamespace

import pytest

from rsrv.serve.counters import STAGES, TRITON_STAGES, ServerCounters
from rsrv.serve.metrics import ROW_BOUNDS, _by_rows, gpu_label
from rsrv.serve.registry import ModelState
from rsrv.serve.series import SERIES
from rsrv.serve.triton_metrics import TRITON_SERIES, exposition


@pytest.mark.parametrize(
    ("platform", "visible", "ordinal", "label"),
    [
        ("cpu", "3", 0, ""),
        ("fake", None, 0, ""),
        ("cuda", "3", 0, "3"),
        ("cuda", "GPU-1b2c", 0, "GPU-1b2c"),
        ("cuda", "4,5,6", 1, "5"),
        ("cuda", "4,5", 7, "7"),
        ("cuda", None, 2, "2"),
        ("cuda", "", 2, "2"),
    ],
)
def test_the_gpu_is_named_as_operators_name_it(platform, visible, ordinal, label):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_label(platform, ordinal, environ) == label


def test_counters_end_in_total_and_nothing_else_does():
    assert all((series.type == "counter") == name.endswith("_total") for name, series in SERIES.items())
    assert all(series.help.endswith(".") for series in SERIES.values())


def test_rows_of_executions_are_counted_up_to_and_including_their_bound():
    histogram = _by_rows({1: 2, 2: 1, 3: 4, 5000: 1})
    assert histogram.total == 2 + 2 + 12 + 5000
    counts = dict(histogram.buckets)
    assert (counts["1.0"], counts["2.0"], counts["4.0"], counts["1024.0"], counts["+Inf"]) == (2, 3, 7, 7, 8)
    assert len(histogram.buckets) == len(ROW_BOUNDS) + 1


# --- the names of Triton ----------------------------------------------------------------------------------------------


def test_every_stage_belongs_to_exactly_one_part_of_triton():
    parts = [stage for stages in TRITON_STAGES.values() for stage in stages]
    assert sorted(parts) == sorted(STAGES)


def sources(**states):
    counters = ServerCounters()
    entries = [SimpleNamespace(name=name, state=state) for name, state in states.items()]
    stats = {name: SimpleNamespace(dispatch_count=3, queue_depth=2) for name in states}
    return SimpleNamespace(
        counters=counters, registry=SimpleNamespace(entries=lambda: entries), scheduled=lambda: stats
    )


def samples(text):
    """Not with prometheus_client, whose parser wants counters to end in _total."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {(line.partition("{")[0], *re.findall(r'="(.*?)"', line)): float(line.rpartition(" ")[2]) for line in lines}


def test_requests_are_exported_under_the_names_labels_and_units_of_triton():
    server = sources(m=ModelState.READY)
    model = server.counters.model("m")
    model.succeeded(9_000_000, 4, (1_000_000, -1, 2_000_000, 3_000_000, 4_000_000, 500_000, -1, 500_000))
    for status in ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "CANCELLED", "INTERNAL", "INVALID_ARGUMENT"):
        model.failed(1, status)
    found = samples(exposition(server, {}))
    assert found["nv_inference_request_success", "m", "1"] == 1
    assert found["nv_inference_count", "m", "1"] == 4
    assert found["nv_inference_exec_count", "m", "1"] == 3
    assert found["nv_inference_pending_request_count", "m", "1"] == 2
    assert found["nv_inference_request_duration_us", "m", "1"] == 9000
    assert found["nv_inference_queue_duration_us", "m", "1"] == 2000
    assert found["nv_inference_compute_input_duration_us", "m", "1"] == 4000
    assert found["nv_inference_compute_infer_duration_us", "m", "1"] == 4000
    assert found["nv_inference_compute_output_duration_us", "m", "1"] == 1000
    failures = {key[3]: value for key, value in found.items() if key[0] == "nv_inference_request_failure"}
    assert failures == {"REJECTED": 2, "CANCELED": 1, "BACKEND": 1, "OTHER": 1}
    assert {key[0] for key in found} == set(TRITON_SERIES)


def test_what_is_not_ready_has_no_series_and_strange_names_are_quoted():
    server = sources(**{'od"d\\': ModelState.READY, "late": ModelState.PREPARING})
    text = exposition(server, {"worker": "w7", "model": "no"})
    assert 'nv_inference_count{model="od\\"d\\\\",version="1",worker="w7"} 0' in text
    assert 'model="late"' not in text
    assert text.count("# TYPE ") == len(TRITON_SERIES)
