"""The library for callers: arrays to a model behind KServe V2 and arrays back, inline or through shared memory.

It rests on numpy and grpcio and imports neither JAX nor PyTorch.
"""

from rsrv._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Admin": ".admin",
        "CompactedMemory": ".control",
        "Control": ".control",
        "ControlStatus": ".control",
        "FleetChange": ".gateway_answers",
        "FleetWorker": ".gateway_answers",
        "Gateway": ".gateway",
        "InferInput": ".tensors",
        "InferOutput": ".tensors",
        "InferResponse": ".tensors",
        "infer_sync": ".model",
        "KServeModel": ".model",
        "ModelControl": ".control",
        "ModelCounts": ".server",
        "ModelEntry": ".server",
        "ModelMetadata": ".server",
        "PlacementChange": ".gateway_answers",
        "PolicyChange": ".gateway_answers",
        "RepackDone": ".gateway_answers",
        "SchedulingPolicy": ".gateway_answers",
        "SchedulingStatus": ".gateway_answers",
        "Server": ".server",
        "ServerMetadata": ".server",
        "TensorMeta": ".server",
        "fetch_status": ".status",
    },
)
