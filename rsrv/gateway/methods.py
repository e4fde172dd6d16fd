"""The gRPC services and methods that a gateway serves, and those that it calls at workers, by their full names."""

from __future__ import annotations

INFERENCE = "inference.GRPCInferenceService"
CONTROL = "reactant_control.ControlService"
GATEWAY_CONTROL = "reactant_control.GatewayControlService"


def path(service: str, method: str) -> str:
    """The full name of a method."""
    return f"/{service}/{method}"


INFER = path(INFERENCE, "ModelInfer")
LIVE = path(INFERENCE, "ServerLive")
READY = path(INFERENCE, "ServerReady")
INDEX = path(INFERENCE, "RepositoryIndex")
REGIONS = path(INFERENCE, "SystemSharedMemoryStatus")
REGISTER = path(INFERENCE, "SystemSharedMemoryRegister")
UNREGISTER = path(INFERENCE, "SystemSharedMemoryUnregister")
STATUS = path(CONTROL, "ModelControlStatus")
COMPACT = path(CONTROL, "CompactMemory")
