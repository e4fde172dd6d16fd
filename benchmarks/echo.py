"""The control: a bare grpcio sync server that returns the request. Prints its port, serves until stdin closes.

A gateway takes it for a worker that has the model ``echo``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import grpc

from benchmarks.load import INFER, MESSAGE_LIMIT, pin
from rsrv.core.memory import tune_malloc


def _as_a_worker() -> dict[str, bytes]:
    """What a gateway asks besides: constant answers."""
    from rsrv.protos import control, inference

    index = inference.RepositoryIndexResponse()
    index.models.add(name="echo", state="READY")
    status = control.ModelControlStatusResponse(discipline="fifo", incarnation="1")
    status.models.add(name="echo")
    return {
        "/inference.GRPCInferenceService/ServerReady": inference.ServerReadyResponse(ready=True).SerializeToString(),
        "/inference.GRPCInferenceService/RepositoryIndex": index.SerializeToString(),
        "/reactant_control.ControlService/ModelControlStatus": status.SerializeToString(),
    }


class Echo(grpc.GenericRpcHandler):
    def __init__(self) -> None:
        self._constant = _as_a_worker()
        self._over = Event()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        if details.method in self._constant:
            constant = self._constant[details.method]
            return grpc.unary_unary_rpc_method_handler(lambda body, context: constant)
        if details.method == "/grpc.health.v1.Health/Watch":
            return grpc.unary_stream_rpc_method_handler(self._watch)
        if details.method != INFER:
            return None
        answer: Callable[[bytes, grpc.ServicerContext], bytes] = lambda body, context: body  # noqa: E731
        return grpc.unary_unary_rpc_method_handler(answer)

    def _watch(self, body: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"\x08\x01"  # SERVING
        context.add_callback(self._over.set)
        self._over.wait()


def main() -> None:
    threads, core = int(sys.argv[1]), int(sys.argv[2])
    pin(core)
    tune_malloc()
    options = [
        ("grpc.max_send_message_length", MESSAGE_LIMIT),
        ("grpc.max_receive_message_length", MESSAGE_LIMIT),
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.server(ThreadPoolExecutor(threads), options=options)
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop(0).wait()


if __name__ == "__main__":
    main()
