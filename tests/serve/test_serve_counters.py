import threading

from rsrv.serve.counters import LATENCY_BOUNDS, STAGES, ServerCounters


def test_latencies_are_counted_up_to_and_including_their_bound():
    model = ServerCounters().model("m")
    for ns in (1, 1_000_000, 1_000_001, 2_000_000):
        model.succeeded(ns, 1, (-1,) * len(STAGES))
    model.failed(9_000_000_000, "INTERNAL")
    latency = model.snapshot().latency
    assert latency.counts == (2, 2, *[0] * 12, 1)
    assert latency.total_ns == 9_004_000_002


def test_latency_bounds_double_from_1_ms_to_8_192_s():
    assert LATENCY_BOUNDS[0] == 0.001
    assert LATENCY_BOUNDS[-1] == 8.192
    assert len(LATENCY_BOUNDS) == 14


def test_successes_and_failures_are_counted_by_model_and_status():
    counters = ServerCounters()
    model = counters.model("m")
    assert counters.model("m") is model
    model.succeeded(2_000_000, 3, (10, -1, 20, 1, 30, -1, -1, 40))
    model.succeeded(1_000_000, 1, (10, 5, 20, 1, 30, 2, 6, 40))
    model.failed(500, "INVALID_ARGUMENT")
    model.failed(500, "INVALID_ARGUMENT")
    counters.unknown.failed(1, "NOT_FOUND")
    unknown, seen = counters.snapshots()
    assert unknown.name == "_unknown"
    assert unknown.statuses == {"NOT_FOUND": 1}
    assert seen.statuses == {"OK": 2, "INVALID_ARGUMENT": 2}
    assert (seen.rows, seen.success_count, seen.success_ns, seen.fail_count, seen.fail_ns) == (4, 2, 3_000_000, 2, 1000)
    assert sum(seen.latency.counts) == 4
    assert {stage: sum(h.counts) for stage, h in seen.stages.items()} == dict(
        zip(STAGES, (2, 1, 2, 2, 2, 1, 1, 2), strict=True)
    )
    assert seen.stages["queue"].total_ns == 40
    assert seen.stage_ns("queue", "upload", "download") == 44
    assert seen.last_unix_ms > 1_600_000_000_000


def test_many_requests_from_many_threads_are_all_counted():
    model = ServerCounters().model("m")
    stages = (1_000, -1, 30_000, 2_000, 700_000, -1, -1, 5_000)

    def answer():
        for _ in range(1000):
            model.succeeded(1_500_000, 2, stages)

    threads = [threading.Thread(target=answer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = model.snapshot()
    assert (seen.success_count, seen.rows, seen.success_ns) == (4000, 8000, 6_000_000_000)
    assert seen.latency.counts[1] == 4000
    assert seen.stages["run"].total_ns == 2_800_000_000
    assert sum(seen.stages["preprocess"].counts) == 0


def test_models_without_requests_have_no_snapshot_row_but_can_be_asked_for():
    counters = ServerCounters()
    assert counters.snapshots() == []
    assert counters.snapshot("m").success_count == 0
    assert counters.snapshots() == []
