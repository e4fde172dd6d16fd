"""The library for callers: arrays to a model behind KServe V2 and arrays back, inline or through shared memory.

It rests on numpy and grpcio and imports neither JAX nor PyTorch.
"""

from rsrv._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Admin": ".admin",
        "AsyncKServeModel": ".aio",
        "client_init": ".transport.lifecycle",
        "client_shutdown": ".transport.lifecycle",
        "CompactedMemory": ".control",
        "Control": ".control",
        "ControlStatus": ".control",
        "Finding": ".validation.findings",
        "FleetChange": ".gateway_answers",
        "FleetWorker": ".gateway_answers",
        "Gateway": ".gateway",
        "InferInput": ".tensors",
        "InferOutput": ".tensors",
        "InferResponse": ".tensors",
        "infer_async": ".dataset.driver",
        "infer_sync": ".dataset.driver",
        "InferenceIO": ".dataset.io",
        "KServeModel": ".model",
        "manifest_io_spec": ".iospec",
        "model_io_spec": ".iospec",
        "ModelControl": ".control",
        "ModelCounts": ".server",
        "ModelEntry": ".server",
        "ModelIOSpec": ".iospec",
        "ModelMetadata": ".server",
        "OutputSpec": ".dataset.io",
        "PlacementChange": ".gateway_answers",
        "PolicyChange": ".gateway_answers",
        "pool_view": ".dataset.io",
        "PoolInferInput": ".dataset.io",
        "RepackDone": ".gateway_answers",
        "RetryPolicy": ".retry",
        "SchedulingPolicy": ".gateway_answers",
        "SchedulingStatus": ".gateway_answers",
        "scratch": ".dataset.io",
        "Server": ".server",
        "ServerMetadata": ".server",
        "TensorMeta": ".server",
        "fetch_status": ".status",
        "validate_io": ".validation.dry_run",
    },
)
