"""A small KServe server that speaks the protocol with plain protobuf messages and misbehaves on request.

It shares no code with rsrv's codec and registry, so that it can tell when the client's side of the protocol is wrong.
Its model ``twice`` takes x FP32[-1,4] and answers y = 2x and the fixed-size total FP32[3] = (sum, rows, 7).
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from support.ports import held_port

from rsrv.client import RetryPolicy
from rsrv.protos import control, inference

SERVICE = "/inference.GRPCInferenceService/"
CONTROL = "/reactant_control.ControlService/"
INLINE_ONCE = {"shared_memory": "off", "max_batch_size": 4, "retry": RetryPolicy(enabled=False)}
"""Options of a handle whose requests are inline, small, and sent once."""


def own_shared_memory() -> set[str]:
    """The shared-memory objects of this process."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("rsrv-") and f"-{os.getpid()}-" in name}


NUMPY = {"FP32": np.float32, "FP16": np.float16, "INT64": np.int64, "BOOL": np.bool_, "FP64": np.float64}


class StubServer(grpc.GenericRpcHandler):
    """Start with ``with StubServer() as server``; change its attributes to change its behaviour."""

    def __init__(self, *also_on: str) -> None:
        self.requests: list[Any] = []  # every ModelInferRequest
        self.calls: list[str] = []  # every method name
        self.metadata: dict[str, str] = {}  # of the latest call
        self.time_remaining: float | None = None  # of the latest ModelInfer
        self.regions: dict[str, tuple[str, int]] = {}  # name -> (key, size)
        self.max_batch_size = 8
        self.outputs: list[tuple[str, str, list[int]]] = [("y", "FP32", [-1, 4]), ("total", "FP32", [3])]
        self.batch_sizes: list[int] = []  # in the metadata, as rsrv's servers say them
        self.batch_axes: dict[str, int] = {}  # tensor -> batch axis, likewise
        self.refuse: dict[str, tuple[grpc.StatusCode, str, str]] = {}  # method -> status, text, reason ("" = none)
        self.same_namespace: bool | None = None  # None: look for the object and compare the nonce, as a server does
        self.rewrite: Callable[[Any, Any], bytes] | None = None  # (request, honest answer) -> serialized answer
        self.unregistered = threading.Condition()
        self._pool = ThreadPoolExecutor(16)
        self._server = grpc.server(
            self._pool, options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)]
        )
        self._server.add_generic_rpc_handlers((self,))
        self._held = held_port()  # it stays ours after `stop`, so that nobody else answers there
        weakref.finalize(self, self._held.close)
        self.port = self._held.getsockname()[1]
        self.url = f"127.0.0.1:{self.port}"
        assert self._server.add_insecure_port(self.url) == self.port
        self.also_ports = [self._server.add_insecure_port(address) for address in also_on]
        assert all(self.also_ports)

    def __enter__(self) -> StubServer:
        self._server.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.stop(0).wait()
        self._pool.shutdown()

    def listen_with_tls(self, key: bytes, certificate: bytes, clients: bytes | None = None) -> str:
        """Before the server starts; returns the address. Clients need a certificate by the authority `clients`."""
        credentials = grpc.ssl_server_credentials([(key, certificate)], clients, clients is not None)
        return f"localhost:{self._server.add_secure_port('127.0.0.1:0', credentials)}"

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        messages: Any = control if details.method.startswith(CONTROL) else inference
        method = details.method.rpartition("/")[2]
        handler = getattr(self, method, None)
        if handler is None:
            return None
        self.metadata = dict(details.invocation_metadata)

        def answer(body: bytes, context: grpc.ServicerContext) -> bytes:
            self.calls.append(method)
            if method in self.refuse:
                self.abort(context, *self.refuse[method])
            message = getattr(messages, f"{method}Request").FromString(body)
            reply = handler(message, context)
            return reply if isinstance(reply, bytes) else reply.SerializeToString()

        return grpc.unary_unary_rpc_method_handler(answer)

    @staticmethod
    def abort(context: grpc.ServicerContext, code: grpc.StatusCode, text: str, reason: str = "") -> None:
        if reason:
            context.set_trailing_metadata((("rsrv-reason", reason),))
        context.abort(code, text)

    # --- methods ------------------------------------------------------------------------------------------------

    def ServerLive(self, request, context):
        return inference.ServerLiveResponse(live=True)

    def ServerReady(self, request, context):
        return inference.ServerReadyResponse(ready=False)

    def ModelReady(self, request, context):
        return inference.ModelReadyResponse(ready=request.name == "twice")

    def ServerMetadata(self, request, context):
        return inference.ServerMetadataResponse(name="stub", version="1.2", extensions=["system_shared_memory"])

    def RepositoryIndex(self, request, context):
        answer = inference.RepositoryIndexResponse()
        answer.models.add(name="twice", state="READY")
        if not request.ready:
            answer.models.add(name="broken", state="UNAVAILABLE", reason="weights.safetensors is missing")
        return answer

    def ModelMetadata(self, request, context):
        if request.name != "twice":
            self.abort(context, grpc.StatusCode.NOT_FOUND, f"unknown model {request.name!r}", "unknown_model")
        answer = inference.ModelMetadataResponse(name=request.name, platform="stub")
        answer.inputs.add(name="x", datatype="FP32", shape=[-1, 4])
        for name, datatype, shape in self.outputs:
            answer.outputs.add(name=name, datatype=datatype, shape=shape)
        answer.batch_sizes.extend(self.batch_sizes)
        for tensor in (*answer.inputs, *answer.outputs):
            if tensor.name in self.batch_axes:
                tensor.batch_axis = self.batch_axes[tensor.name]
        return answer

    def ModelConfig(self, request, context):
        return inference.ModelConfigResponse(config={"name": request.name, "max_batch_size": self.max_batch_size})

    def ModelStatistics(self, request, context):
        answer = inference.ModelStatisticsResponse()
        answer.model_stats.add(name=request.name, inference_count=12, execution_count=5)
        return answer

    def IsSameIPCNamespace(self, request, context):
        same = self.same_namespace
        if same is None:
            try:
                with open(f"/dev/shm/{request.name}", "rb") as file:
                    same = request.nonce != b"" and file.read(len(request.nonce)) == request.nonce
            except OSError:
                same = False
        return inference.IsSameIPCNamespaceResponse(same=same)

    def SystemSharedMemoryRegister(self, request, context):
        self.regions[request.name] = (request.key, request.byte_size)
        return inference.SystemSharedMemoryRegisterResponse()

    def SystemSharedMemoryUnregister(self, request, context):
        with self.unregistered:
            self.regions.pop(request.name, None)
            self.unregistered.notify_all()
        return inference.SystemSharedMemoryUnregisterResponse()

    def ModelInfer(self, request, context):
        self.requests.append(request)
        self.time_remaining = context.time_remaining()
        if request.model_name != "twice":
            self.abort(context, grpc.StatusCode.NOT_FOUND, f"unknown model {request.model_name!r}", "unknown_model")
        raw = list(request.raw_input_contents)
        inputs = {}
        for tensor in request.inputs:
            window = _window(tensor.parameters)
            data = raw.pop(0) if window is None else self._read(context, window)
            inputs[tensor.name] = np.frombuffer(data, NUMPY[tensor.datatype]).reshape(tuple(tensor.shape))
        assert not raw
        x = inputs["x"]
        results = {"y": 2 * x, "total": np.array([x.sum(), x.shape[0] if x.ndim else 0, 7], np.float32)}
        answer = inference.ModelInferResponse(model_name=request.model_name, id=request.id)
        for wanted in request.outputs or [
            inference.ModelInferRequest.InferRequestedOutputTensor(name=n) for n in results
        ]:
            if wanted.name not in results:
                self.abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"no output {wanted.name!r}", "invalid")
            array = results[wanted.name]
            tensor = answer.outputs.add(name=wanted.name, datatype="FP32", shape=array.shape)
            window = _window(wanted.parameters)
            if window is None:
                answer.raw_output_contents.append(array.tobytes())
                continue
            region, offset, size = window
            if array.nbytes > size:
                self.abort(
                    context, grpc.StatusCode.INVALID_ARGUMENT, f"{wanted.name} needs more than {size}", "invalid"
                )
            self._write(context, region, offset, array.tobytes())
            answer.raw_output_contents.append(b"")
            tensor.parameters["shared_memory_region"].string_param = region
            tensor.parameters["shared_memory_offset"].int64_param = offset
            tensor.parameters["shared_memory_byte_size"].int64_param = array.nbytes
        return answer if self.rewrite is None else self.rewrite(request, answer)

    # --- control ------------------------------------------------------------------------------------------------

    def ModelControlStatus(self, request, context):
        answer = control.ModelControlStatusResponse(
            residency_mode="externally_managed", discipline="fair", weight_cache_max_bytes=3 << 30
        )
        answer.models.add(
            name="twice",
            residency=control.PINNED_SYSTEM,
            device_resident=True,
            host_resident=True,
            weight_nbytes=1536,
            weight=2.5,
            queue_depth=3,
            total_compute_seconds=0.5,
            requests_served=7,
            dispatch_count=5,
            max_batch_size=8,
            batch_input_name="x",
            batch_axis=1,
            rows_served=20,
        )
        answer.models.add(name="cold", residency=9, weight_nbytes=64, weight=1.0)
        return answer

    def SetModelResidency(self, request, context):
        self.requests.append(request)
        if request.name != "twice":
            self.abort(context, grpc.StatusCode.NOT_FOUND, f"unknown model {request.name!r}", "unknown_model")
        return control.SetModelResidencyResponse(residency=request.target)

    def SetModelPolicy(self, request, context):
        self.requests.append(request)
        return control.SetModelPolicyResponse()

    def CompactMemory(self, request, context):
        self.requests.append(request)
        return control.CompactMemoryResponse(reloaded_models=len(request.reload_models), resident_bytes_after=1536)

    def _read(self, context: grpc.ServicerContext, window: tuple[str, int, int]) -> bytes:
        region, offset, size = window
        with (
            open(self._path(context, region, offset, size), "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping,
        ):
            return mapping[offset : offset + size]

    def _write(self, context: grpc.ServicerContext, region: str, offset: int, data: bytes) -> None:
        with open(self._path(context, region, offset, len(data)), "r+b") as file:
            file.seek(offset)
            file.write(data)

    def _path(self, context: grpc.ServicerContext, region: str, offset: int, size: int) -> str:
        if region not in self.regions:
            text = f"unregistered shared memory region {region!r}"
            self.abort(context, grpc.StatusCode.FAILED_PRECONDITION, text, "shm_unregistered")
        key, total = self.regions[region]
        assert 0 <= offset <= total - size
        assert offset % 64 == 0
        return "/dev/shm/" + key.lstrip("/")


def _window(parameters: Any) -> tuple[str, int, int] | None:
    if "shared_memory_region" not in parameters:
        return None
    return (
        parameters["shared_memory_region"].string_param,
        parameters["shared_memory_offset"].int64_param if "shared_memory_offset" in parameters else 0,
        parameters["shared_memory_byte_size"].int64_param,
    )
