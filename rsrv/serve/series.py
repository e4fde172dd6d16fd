"""Every series that a worker exports, as a table: `metrics` fills it, the documentation is checked against it."""

from __future__ import annotations

from rsrv.rpc.exposition import Series

PREFIX = "rsrv_worker_"

SERIES = {
    series.name: series
    for series in (
        Series(
            "info",
            "gauge",
            ("device_ordinal", "platform", "control_mode", "discipline", "residency_mode"),
            "Always 1; the labels identify the worker.",
        ),
        Series("state", "gauge", ("state",), "1 for the state that the worker is in."),
        Series("models_loaded", "gauge", (), "Models that are prepared."),
        Series("models_resident", "gauge", (), "Models whose weights are on the device."),
        Series(
            "resident_weight_bytes",
            "gauge",
            (),
            "Bytes of weights in the device's memory; what several models share counts once. Those on their way out "
            "still count.",
        ),
        Series("host_weights_bytes", "gauge", (), "Bytes of weights of which a copy is kept in host memory."),
        Series("host_weights_shared", "gauge", (), "1 when some of those copies are in memory that workers may share."),
        Series("weight_pool_bytes", "gauge", (), "Share of the arena that is for weights. Only with a budget."),
        Series(
            "weight_cache_max_bytes", "gauge", (), "The budget: what weights that come and go may take. Only with one."
        ),
        Series(
            "weight_cache_resident_bytes",
            "gauge",
            (),
            "What they take: those on their way to the device count, those on their way out do not. Only with a "
            "budget.",
        ),
        Series(
            "weight_cache_pinned_bytes", "gauge", (), "Weights that are never evicted, beside it. Only with a budget."
        ),
        Series("weight_cache_max_scratch_bytes", "gauge", (), "What one execution needs beside. Only with a budget."),
        Series("evictable_bytes", "gauge", (), "What evictions could free now. Only with a budget."),
        Series(
            "weight_cache_bytes_for_99_percent_hits",
            "gauge",
            (),
            "The budget with which 99 % of the repeated uses of the last time would have found their weights there. "
            "Only when something was used twice.",
        ),
        Series(
            "lru_age_seconds",
            "gauge",
            (),
            "For how long the weights on the device that nobody used for longest were not used; a small number means "
            "that the budget is too small for the traffic.",
        ),
        Series(
            "weight_uses_total",
            "counter",
            (),
            "Batches prepared for models whose weights come and go; one prepared again, with more rows, counts again. "
            "Per load, while nothing is pinned: how often a load paid off. Only with a budget.",
        ),
        Series("weight_loads_total", "counter", (), "Loads of weights, pinned ones as well. Only with a budget."),
        Series("weight_load_seconds_total", "counter", (), "Seconds that those took. Only with a budget."),
        Series("weight_load_time_seconds", "histogram", (), "What each of them took. Only with a budget."),
        Series(
            "weight_evicts_total",
            "counter",
            ("reason",),
            "Evictions of weights: to make room, for a smaller budget, when the device was out of memory (oom), "
            "by a change of the floor, with their model (unload), as an operator asked (trim). Only with a budget.",
        ),
        Series(
            "idle_reclaims_total",
            "counter",
            (),
            "How often weights were freed because nobody had used them for `reclaim.parameter_idle_ms`; those are no "
            "evictions. Only with a budget.",
        ),
        Series(
            "compactions_total",
            "counter",
            (),
            "How often all weights that may be evicted were freed to merge holes; those are no evictions. Only with a "
            "budget.",
        ),
        Series("model_state", "gauge", ("model", "state"), "1 for the state that the model is in."),
        Series("model_incarnation", "gauge", ("model",), "Number of the load that serves the model."),
        Series("model_admission", "gauge", ("model", "state"), "1 for the state that the model's gate is in."),
        Series(
            "model_accepted_requests",
            "gauge",
            ("model",),
            "Requests that passed the gate and are not answered yet; once there are none, a closed gate is drained.",
        ),
        Series(
            "model_pending_error",
            "gauge",
            ("model",),
            "1 while the last reload of the model failed and the version before it serves.",
        ),
        Series(
            "model_load_failures_total",
            "counter",
            ("model",),
            "Loads and reloads of the model that failed since the server started.",
        ),
        Series(
            "reloads_total", "counter", ("model",), "Loads and reloads that took effect while the server was running."
        ),
        Series("model_program_sets", "gauge", ("model",), "Program sets of the model, pending and failed ones, too."),
        Series("model_selected_program", "gauge", ("model",), "Number of the program set that answers requests."),
        Series(
            "shadow_batches_total",
            "counter",
            ("model", "program", "result"),
            "Batches that a program set got a copy of: match, mismatch (an output beyond its tolerance), error (the "
            "set could not run it), or skipped because others were being compared.",
        ),
        Series(
            "shadow_largest_difference",
            "gauge",
            ("model", "program", "output"),
            "The largest difference of an output from that of the selected set, relative to its largest value.",
        ),
        Series("model_resident", "gauge", ("model",), "1 when the model's weights are on the device."),
        Series("model_pinned", "gauge", ("model",), "1 when the model's weights are never evicted from the device."),
        Series("model_weight_bytes", "gauge", ("model",), "Bytes of the model's weights on the device, there or not."),
        Series(
            "model_max_batch_size",
            "gauge",
            ("model",),
            "Most rows that requests are merged to; 1 or less = never merged.",
        ),
        Series(
            "requests_total",
            "counter",
            ("model", "status"),
            "ModelInfer calls by gRPC status; _unknown = the model is not registered, or the call was shed unread.",
        ),
        Series("request_latency_seconds", "histogram", ("model",), "From the arrival of a ModelInfer to its answer."),
        Series(
            "stage_seconds",
            "histogram",
            ("model", "stage"),
            "Where the time of answered requests went; upload, run and download are those of the batch. No download is "
            "measured where the device's memory is the host's.",
        ),
        Series("inflight_requests", "gauge", (), "ModelInfer calls being handled."),
        Series("max_concurrent_requests", "gauge", (), "Most ModelInfer calls that are handled at a time."),
        Series(
            "held_requests",
            "gauge",
            (),
            "ModelInfer calls that wait outside of a closed gate, or for a model that is being prepared.",
        ),
        Series("requests_shed_total", "counter", (), "ModelInfer calls refused at that limit."),
        Series("dispatch_total", "counter", ("model",), "Executions."),
        Series(
            "compute_seconds_total",
            "counter",
            ("model",),
            "Seconds of upload, execution and download; its rate is the use of the device.",
        ),
        Series(
            "requests_served_total",
            "counter",
            ("model",),
            "Requests that executions served; per dispatch: how many were merged.",
        ),
        Series(
            "rows_served_total",
            "counter",
            ("model",),
            "Rows that executions served; per dispatch: the effective batch.",
        ),
        Series("batch_rows", "histogram", ("model",), "Rows that an execution served, without padding."),
        Series("padding_rows_total", "counter", ("model",), "Rows that were computed for nobody."),
        Series(
            "dispatches_by_batch_size_total",
            "counter",
            ("model", "batch_size"),
            "Executions by compiled batch size; 0 = a program without one.",
        ),
        Series("queue_depth", "gauge", ("model",), "Requests that wait."),
        Series(
            "queue_wait_seconds", "gauge", ("model", "quantile"), "Wait before the launch, over the last 1024 requests."
        ),
        Series("dispatch_stuck", "gauge", (), "1 while an execution runs for longer than it may."),
        Series("dispatch_errors_total", "counter", ("model", "reason"), "Executions that failed."),
        Series(
            "requests_dropped_total",
            "counter",
            ("model", "reason"),
            "Requests that were accepted or offered and never ran.",
        ),
        Series("hook_threads_lost_total", "counter", (), "Threads written off because a hook did not return in time."),
        Series("hook_processes_lost_total", "counter", (), "Hook processes that died, hung or had to be ended."),
        Series("programs", "gauge", (), "Programs of the bundles that were opened."),
        Series(
            "programs_loaded_total",
            "counter",
            ("source",),
            "Programs made ready, by where the executable came from: cache, compiled, or shared with another model.",
        ),
        Series(
            "compile_seconds_total", "counter", (), "Seconds that compilations took, without waiting for their turn."
        ),
        Series(
            "cache_lookups_total",
            "counter",
            ("result",),
            "Executables looked for in the cache: hit, miss, or rejected because the entry could not be used.",
        ),
        Series("cache_stored_total", "counter", (), "Executables written into the cache."),
        Series("cache_evicted_total", "counter", (), "Executables removed from the cache to keep within its size."),
        Series("shm_regions", "gauge", (), "Shared-memory regions that clients have registered."),
        Series("shm_region_bytes", "gauge", (), "Bytes of those regions."),
        Series("device_memory_in_use_bytes", "gauge", (), "Bytes that the device's allocator has handed out."),
        Series("device_memory_peak_in_use_bytes", "gauge", (), "The most it ever had handed out."),
        Series("device_memory_limit_bytes", "gauge", (), "Bytes that it may hand out."),
        Series("device_memory_free_bytes", "gauge", (), "The difference of limit and use."),
    )
}
"""By name, in the order of the exposition."""
