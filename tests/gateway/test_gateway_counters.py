"""What the request path counts: every call once, bounded names, and nothing of who has left."""

import threading

from rsrv.gateway.metrics.counters import BOUNDS, MODELS, REASON_LETTERS, REASONS, UNKNOWN, GatewayCounters


def test_bounds_double_from_1_ms_beyond_the_60_s_that_requests_may_take():
    assert BOUNDS[0] == 0.001
    assert BOUNDS[13] == 8.192  # where the reference ends
    assert BOUNDS[-2:] == (32.768, 65.536)


def test_calls_are_counted_by_rpc_model_and_status_and_up_to_and_including_their_bound():
    counters = GatewayCounters()
    for seconds in (0.0005, 0.001, 0.0011, 70.0):
        counters.finished("ModelInfer", "m", "OK", seconds)
    counters.finished("ModelInfer", "m", "Unavailable", 0.002)
    counters.finished("ServerReady", "", "OK", 0.0)
    seen = counters.snapshot()
    assert seen.statuses == {
        ("ModelInfer", "m", "OK"): 4,
        ("ModelInfer", "m", "Unavailable"): 1,
        ("ServerReady", "", "OK"): 1,
    }
    assert seen.latency["ModelInfer", "m"].counts == (2, 2, *[0] * 15, 1)
    assert seen.latency["ModelInfer", "m"].total == 0.0005 + 0.001 + 0.0011 + 70.0 + 0.002
    assert seen.models == {"m", ""}


def test_calls_to_workers_and_what_goes_with_them_are_counted_by_address():
    counters = GatewayCounters()
    counters.worker_call("ModelInfer", "h:1", 0.004)
    counters.worker_call("CompactMemory", "h:1", 1.0)
    counters.queue_wait("h:2", 0.25)
    counters.ejected("h:3")
    counters.ejected("h:3")
    counters.failover("m", "unreachable")
    counters.hedged()
    seen = counters.snapshot()
    assert {key: sum(times.counts) for key, times in seen.worker_latency.items()} == {
        ("ModelInfer", "h:1"): 1,
        ("CompactMemory", "h:1"): 1,
    }
    assert seen.queue_wait["h:2"].total == 0.25
    assert seen.ejections == {"h:3": 2}
    assert seen.failovers == {("m", "unreachable"): 1}
    assert seen.hedges == 1
    assert seen.workers == {"h:1", "h:2", "h:3"}


def test_a_worker_that_left_leaves_nothing_and_others_stay():
    counters = GatewayCounters()
    for url in ("h:1", "h:2"):
        counters.worker_call("ModelInfer", url, 0.1)
        counters.worker_call("SystemSharedMemory", url, 0.1)
        counters.queue_wait(url, 0.1)
        counters.ejected(url)
    counters.forget("h:1")
    counters.forget("h:9")
    assert counters.snapshot().workers == {"h:2"}
    counters.worker_call("ModelInfer", "h:1", 0.1)
    assert sum(counters.snapshot().worker_latency["ModelInfer", "h:1"].counts) == 1


def test_a_model_that_is_forgotten_leaves_nothing():
    counters = GatewayCounters()
    for rpc in ("ModelInfer", "ModelReady"):
        counters.finished(rpc, "m", "OK", 0.1)
    counters.failover("m", "preparing")
    counters.failover("n", "preparing")
    counters.forget_model("m")
    assert counters.snapshot().models == {"n"}


def test_names_beyond_the_limit_share_a_label_until_others_are_forgotten():
    counters = GatewayCounters()
    for number in range(MODELS):
        counters.finished("ModelInfer", f"m{number}", "OK", 0.1)
    counters.finished("ModelInfer", "late", "OK", 0.1)
    counters.finished("ModelInfer", "late", "OK", 0.1)
    counters.failover("late", "stopping")
    counters.failover("m0", "stopping")  # a name that has its place
    seen = counters.snapshot()
    assert seen.statuses["ModelInfer", UNKNOWN, "OK"] == 2
    assert seen.failovers == {(UNKNOWN, "stopping"): 1, ("m0", "stopping"): 1}
    assert len(seen.models) == MODELS + 1
    counters.forget_model("m1")
    counters.finished("ModelInfer", "late", "OK", 0.1)
    assert counters.snapshot().statuses["ModelInfer", "late", "OK"] == 1


def test_reasons_that_workers_make_up_are_cut_and_counted_together():
    counters = GatewayCounters()
    for number in range(REASONS + 5):
        counters.failover("m", f"{number:03}{'x' * 1000}")
    seen = counters.snapshot().failovers
    assert len(seen) == REASONS + 1
    assert seen["m", "other"] == 5
    assert max(len(reason) for _, reason in seen) == REASON_LETTERS


def test_calls_from_many_threads_are_all_counted():
    counters = GatewayCounters()

    def call():
        for number in range(500):
            counters.finished("ModelInfer", f"m{number % 3}", "OK", 0.1)
            counters.worker_call("ModelInfer", "h:1", 0.1)
            counters.queue_wait("h:1", 0.1)
            counters.failover("m", "stopping")
            counters.hedged()

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = counters.snapshot()
    assert sum(seen.statuses.values()) == 2000
    assert sum(seen.worker_latency["ModelInfer", "h:1"].counts) == 2000
    assert sum(seen.queue_wait["h:1"].counts) == 2000
    assert seen.failovers["m", "stopping"] == 2000
    assert seen.hedges == 2000
