"""The control of the gateway: a bare grpcio server that hands each request's bytes on to another server, and no more.

``python -m benchmarks.relay TARGET THREADS CORE blocking|future``. Prints its port, serves until stdin closes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import grpc

from benchmarks.load import INFER, MESSAGE_LIMIT, open_channel, pin
from rsrv.core.memory import tune_malloc

Handler = Callable[[bytes, grpc.ServicerContext], bytes]


class Relay(grpc.GenericRpcHandler):
    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        return grpc.unary_unary_rpc_method_handler(self._handler) if details.method == INFER else None


def main() -> None:
    target, threads, core, form = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    pin(core)
    tune_malloc()
    call = open_channel(target).unary_unary(INFER)

    def blocking(body: bytes, context: grpc.ServicerContext) -> bytes:
        return call(body, timeout=60.0)

    def by_future(body: bytes, context: grpc.ServicerContext) -> bytes:
        done: SimpleQueue[Any] = SimpleQueue()
        call.future(body, timeout=60.0).add_done_callback(done.put)
        answer: bytes = done.get().result()
        return answer

    options = [
        ("grpc.max_send_message_length", MESSAGE_LIMIT),
        ("grpc.max_receive_message_length", MESSAGE_LIMIT),
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.server(ThreadPoolExecutor(threads), options=options)
    server.add_generic_rpc_handlers((Relay(blocking if form == "blocking" else by_future),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop(0).wait()


if __name__ == "__main__":
    main()
