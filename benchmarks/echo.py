"""The control: a bare grpcio sync server that returns the request. Prints its port, serves until stdin closes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from benchmarks.load import INFER, MESSAGE_LIMIT, pin
from rsrv.core.memory import tune_malloc


class Echo(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        if details.method != INFER:
            return None
        answer: Callable[[bytes, grpc.ServicerContext], bytes] = lambda body, context: body  # noqa: E731
        return grpc.unary_unary_rpc_method_handler(answer)


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
