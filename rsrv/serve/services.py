"""The unary RPCs beside ModelInfer: health, metadata, configuration, statistics, the index, shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import rsrv
from rsrv.core.errors import Unimplemented, UnknownModel
from rsrv.core.shm import same_ipc_namespace
from rsrv.core.wire import encode_index, encode_metadata
from rsrv.protos import inference as pb
from rsrv.rpc.routes import Route, Routes
from rsrv.rpc.unary import unary
from rsrv.serve.counters import TRITON_STAGES
from rsrv.serve.residency.view import is_answered

if TYPE_CHECKING:
    from rsrv.bundle.manifest import Manifest
    from rsrv.core.shm import RegionRegistry
    from rsrv.core.tensors import TensorSpec
    from rsrv.serve.counters import ServerCounters
    from rsrv.serve.lifecycle import Lifecycle
    from rsrv.serve.registry import Entry, Registry
    from rsrv.serve.residency.manager import Residency
    from rsrv.serve.scheduler import Scheduler

SERVICE = "inference.GRPCInferenceService"
PLATFORM = "xla_stablehlo"
VERSIONS = ("", "1")


class Services:
    """Answers from snapshots; nothing here waits for the device.

    `administered` says that the routes of `rsrv.serve.admin` are there, too.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        lifecycle: Lifecycle,
        scheduler: Scheduler,
        counters: ServerCounters,
        regions: RegionRegistry | None,
        residency: Residency | None = None,
        administered: bool = False,
    ) -> None:
        self._registry = registry
        self._lifecycle = lifecycle
        self._scheduler = scheduler
        self._counters = counters
        self._regions = regions
        self._residency = residency
        self._administered = administered

    def routes(self) -> Routes:
        methods: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "ServerLive": (pb.ServerLiveRequest, self.server_live),
            "ServerReady": (pb.ServerReadyRequest, self.server_ready),
            "ModelReady": (pb.ModelReadyRequest, self.model_ready),
            "ServerMetadata": (pb.ServerMetadataRequest, self.server_metadata),
            "ModelMetadata": (pb.ModelMetadataRequest, self.model_metadata),
            "ModelConfig": (pb.ModelConfigRequest, self.model_config),
            "ModelStatistics": (pb.ModelStatisticsRequest, self.model_statistics),
            "RepositoryIndex": (pb.RepositoryIndexRequest, self.repository_index),
            "SystemSharedMemoryStatus": (pb.SystemSharedMemoryStatusRequest, self.shm_status),
            "SystemSharedMemoryRegister": (pb.SystemSharedMemoryRegisterRequest, self.shm_register),
            "SystemSharedMemoryUnregister": (pb.SystemSharedMemoryUnregisterRequest, self.shm_unregister),
            "CudaSharedMemoryStatus": (pb.CudaSharedMemoryStatusRequest, self.cuda_shm_status),
            "CudaSharedMemoryUnregister": (pb.CudaSharedMemoryUnregisterRequest, self.cuda_shm_unregister),
            "IsSameIPCNamespace": (pb.IsSameIPCNamespaceRequest, self.is_same_ipc_namespace),
        }
        return {f"/{SERVICE}/{name}": Route(unary(*method), "unary") for name, method in methods.items()}

    # --- health and metadata --------------------------------------------------------------------------------------

    def server_live(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    def server_ready(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._lifecycle.readiness().ready)

    def model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=request.version in VERSIONS and self.is_model_ready(request.name))

    def is_model_ready(self, name: str) -> bool:
        """False for unknown names too."""
        entry = self._registry.get(name)
        return entry is not None and self._is_ready(entry)

    def is_serving(self, service: str) -> bool | None:
        """The answer of ``grpc.health.v1``: "" is the server, other names are models or services; None = unknown."""
        if service in ("", SERVICE):
            return self._lifecycle.readiness().ready
        entry = self._registry.get(service)
        return None if entry is None else self._is_ready(entry)

    def server_metadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        present = {
            "system_shared_memory": self._regions is not None,
            "model_repository": self._administered,
            "model_configuration": True,
            "statistics": True,
            "rsrv_control": True,
            "rsrv_admin": self._administered,
        }
        extensions = [name for name, there in present.items() if there]
        return pb.ServerMetadataResponse(name="rsrv", version=rsrv.__version__, extensions=extensions)

    def model_metadata(self, request: pb.ModelMetadataRequest) -> Any:
        manifest = self._manifest(request.name, request.version)
        sizes = _batch_sizes(self._registry.find(request.name), manifest)
        return encode_metadata(request.name, PLATFORM, manifest.wire_inputs, manifest.wire_outputs, sizes)

    def model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        manifest = self._manifest(request.name, request.version)
        entry = self._registry.find(request.name)
        largest = _largest_batch(entry, manifest)
        config = pb.ModelConfig(name=request.name, platform=PLATFORM, max_batch_size=largest)
        skip = 1 if largest else 0
        for spec in manifest.wire_inputs:
            config.input.add(name=spec.name, data_type=_data_type(spec), dims=spec.wire_shape[skip:])
        for spec in manifest.wire_outputs:
            config.output.add(name=spec.name, data_type=_data_type(spec), dims=spec.wire_shape[skip:])
        return pb.ModelConfigResponse(config=config)

    def repository_index(self, request: pb.RepositoryIndexRequest) -> Any:
        rows = []
        for entry in self._registry.entries():
            ready = self._is_ready(entry)
            if ready or not request.ready:
                rows.append((entry.name, "READY" if ready else "UNAVAILABLE", self._reason(entry, ready)))
        return encode_index(rows)

    # --- statistics -----------------------------------------------------------------------------------------------

    def model_statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        if request.name:
            names = [self._entry(request.name, request.version).name]
        else:
            names = [entry.name for entry in self._registry.entries()]
        dispatches = {name: stats.dispatch_count for name, stats in self._scheduler.stats().items()}
        response = pb.ModelStatisticsResponse()
        for name in names:
            counted = self._counters.snapshot(name)
            # A version, because perf_analyzer reads it as a number.
            row = response.model_stats.add(
                name=name,
                version="1",
                last_inference=counted.last_unix_ms,
                inference_count=counted.rows,
                execution_count=dispatches.get(name, 0),
            )
            times = row.inference_stats
            times.success.count, times.success.ns = counted.success_count, counted.success_ns
            times.fail.count, times.fail.ns = counted.fail_count, counted.fail_ns
            for kind, stages in TRITON_STAGES.items():
                duration = getattr(times, kind)
                duration.count, duration.ns = counted.success_count, counted.stage_ns(*stages)
        return response

    # --- shared memory --------------------------------------------------------------------------------------------

    def shm_status(self, request: pb.SystemSharedMemoryStatusRequest) -> pb.SystemSharedMemoryStatusResponse:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._shm().status(request.name):
            row = response.regions[region.name]
            row.name, row.key, row.offset, row.byte_size = region.name, region.key, region.offset, region.byte_size
        return response

    def shm_register(self, request: pb.SystemSharedMemoryRegisterRequest) -> pb.SystemSharedMemoryRegisterResponse:
        self._shm().register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def shm_unregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        self._shm().unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    # No region of a card can be registered. Clients that used none of them unregister all of both kinds nevertheless.

    def cuda_shm_status(self, request: pb.CudaSharedMemoryStatusRequest) -> pb.CudaSharedMemoryStatusResponse:
        return pb.CudaSharedMemoryStatusResponse()

    def cuda_shm_unregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        return pb.CudaSharedMemoryUnregisterResponse()

    def is_same_ipc_namespace(self, request: pb.IsSameIPCNamespaceRequest) -> pb.IsSameIPCNamespaceResponse:
        same = self._regions is not None and same_ipc_namespace(request.name, request.nonce)
        return pb.IsSameIPCNamespaceResponse(same=same)

    def _shm(self) -> RegionRegistry:
        if self._regions is None:
            raise Unimplemented("shared memory is disabled on this server (shm.enabled: false)")
        return self._regions

    # --- registry -------------------------------------------------------------------------------------------------

    def _is_ready(self, entry: Entry) -> bool:
        if entry.prepared is None or not entry.serves or not self._lifecycle.running:
            return False
        return is_answered(self._residency, entry.prepared.model)

    def _reason(self, entry: Entry, ready: bool) -> str:
        """Why a model is not ready; of one that is, why it is not the version that its files are, "" when it is."""
        if ready:
            return "" if entry.pending is None else f"the last reload failed: {entry.pending}"
        if entry.reason:
            return entry.reason
        return "not resident" if self._lifecycle.running else f"the server is {self._lifecycle.state}"

    def _entry(self, name: str, version: str) -> Entry:
        entry = self._registry.find(name)
        if version not in VERSIONS:
            raise UnknownModel(f"model {name!r} has no version {version!r}; wanted '' or '1'")
        return entry

    def _manifest(self, name: str, version: str) -> Manifest:
        entry = self._entry(name, version)
        if entry.manifest is None:
            raise entry.unavailable()
        return entry.manifest


def _batch_sizes(entry: Entry, manifest: Manifest) -> Sequence[int]:
    """Rows that the programs take, ascending; none when nothing that callers send has a batch axis."""
    if all(spec.batch_axis is None for spec in manifest.wire_inputs):
        return ()
    if entry.prepared is None:
        return manifest.batching.compiled_batch_sizes
    return sorted({rows for sizes in entry.prepared.model.row_sizes_by_variant.values() for rows in sizes})


def _largest_batch(entry: Entry, manifest: Manifest) -> int:
    """The largest compiled batch size when Triton's convention fits the model: the batch axis leads every tensor."""
    tensors = (*manifest.wire_inputs, *manifest.wire_outputs)
    if not tensors or any(spec.batch_axis != 0 for spec in tensors):
        return 0
    if entry.prepared is None:
        return max(manifest.batching.compiled_batch_sizes, default=0)
    # Key 0 is a single program that takes exactly its own rows: no batching as Triton understands it.
    return max((keys[-1] for keys in entry.prepared.model.batch_keys_by_variant.values()), default=0)


def _data_type(spec: TensorSpec) -> Any:
    return pb.DataType.Value(f"TYPE_{spec.dtype.wire}")
