"""Every series that a gateway exports of itself, as a table: `exposition` fills it, docs/metrics.md is made from it."""

from __future__ import annotations

from rsrv.rpc.exposition import Series

PREFIX = "rsrv_gateway_"

_REPLICA = ("model", "worker")

SERIES = {
    series.name: series
    for series in (
        Series("build_info", "gauge", ("version", "python", "mode"), "Always 1; the labels identify the gateway."),
        Series(
            "requests_total",
            "counter",
            ("rpc", "model", "status"),
            "Calls that workers take part in, by the status that the client got; the model is _unknown_ when no worker "
            "has registered it, and empty when the call names none.",
        ),
        Series(
            "request_latency_seconds",
            "histogram",
            ("rpc", "model"),
            "From the arrival of a call to its answer, failovers included.",
        ),
        Series(
            "worker_latency_seconds",
            "histogram",
            ("rpc", "worker"),
            "One call to one worker, from when it was sent: ModelInfer, SystemSharedMemory or CompactMemory.",
        ),
        Series(
            "worker_queue_wait_seconds",
            "histogram",
            ("worker",),
            "How long calls that could not be sent at once waited for a free stream to the worker, or for the end of a "
            "shared-memory registration.",
        ),
        Series(
            "failovers_total",
            "counter",
            ("model", "reason"),
            "Attempts that failed and were followed by one at another worker, by the reason that the worker gave.",
        ),
        Series(
            "retries_total",
            "counter",
            (),
            "Attempts beyond the first of a call, of any kind: after a failure, after regions were registered again, "
            "hedges. The retry budget limits them.",
        ),
        Series("retries_refused_total", "counter", (), "Those that were not made, because there was no budget left."),
        Series("hedges_total", "counter", (), "Second attempts because the first took long. Off by default."),
        Series(
            "worker_ejections_total",
            "counter",
            ("worker",),
            "How often the worker was taken out for a while because its calls failed.",
        ),
        Series("inflight_requests", "gauge", (), "ModelInfer calls that are admitted now."),
        Series("requests_shed_total", "counter", (), "ModelInfer calls refused at the cap."),
        Series(
            "max_concurrent_requests",
            "gauge",
            (),
            "The cap: so many ModelInfer calls are admitted at a time, by the number of workers that are ready.",
        ),
        Series("routing_table_size", "gauge", (), "Models that some worker serves."),
        Series("models_not_ready", "gauge", (), "Models that workers have registered and none serves."),
        Series("worker_ready", "gauge", ("worker",), "1 when the worker's last answer was that it is ready."),
        Series("worker_draining", "gauge", ("worker",), "1 while the worker gets no new work."),
        Series("worker_ejected", "gauge", ("worker",), "1 while the worker is asked last because its calls failed."),
        Series("worker_inflight_requests", "gauge", ("worker",), "ModelInfer calls that the worker works on."),
        Series(
            "worker_waiting_requests",
            "gauge",
            ("worker",),
            "ModelInfer calls that wait for a free stream to the worker, or for the end of a registration.",
        ),
        Series(
            "worker_metrics_up",
            "gauge",
            ("worker",),
            "1 when the worker's metrics are part of this text. Only with an endpoint for them.",
        ),
        Series(
            "worker_inflight_work",
            "gauge",
            ("worker", "basis"),
            "The load that workers are compared by: items in flight, weighted by the work basis. Not under "
            "round_robin, and not before the first request.",
        ),
        Series(
            "placement_weight",
            "gauge",
            _REPLICA,
            "The worker's share in the model's placement; 0 = the worker has the model and it is not placed there. "
            "This and what follows: only under lpt_packing.",
        ),
        Series(
            "model_utilization",
            "gauge",
            ("model",),
            "Device seconds a second that the model needed, as of the last repack.",
        ),
        Series("model_replicas", "gauge", ("model",), "Workers that the model is placed on."),
        Series("replica_outstanding", "gauge", _REPLICA, "Items in flight."),
        Series(
            "replica_routed_total",
            "counter",
            _REPLICA,
            "Requests that went to the replica; flat for one that is starved.",
        ),
        Series("model_fill_quantum", "gauge", ("model",), "Items that a replica gets before the next one does."),
        Series("repacks_total", "counter", ("trigger",), "Placements: startup, compute, operator, membership, models."),
        Series("last_repack_moved_models", "gauge", (), "Models that the last repack moved to other workers."),
        Series("worker_assigned_bytes", "gauge", ("worker",), "Weights of the models that are placed on the worker."),
        Series("worker_budget_bytes", "gauge", ("worker",), "What it has room for; 0 = weights are no constraint."),
    )
}
"""By name, in the order of the exposition."""
