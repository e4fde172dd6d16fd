"""An engine per test on a free port, and channels to it that are closed afterwards."""

import contextlib
import threading

import grpc
import pytest

from rsrv.rpc import GrpcioEngine


@pytest.fixture
def serve():
    """``serve(routes, **options)`` starts an engine and returns it with a channel to it."""
    with contextlib.ExitStack() as stack:

        def start(routes, *, channel_options=(), **options):
            settings = {
                "host": "127.0.0.1",
                "port": 0,
                "threads": 8,
                "max_recv_bytes": 8 << 20,
                "max_send_bytes": 8 << 20,
            }
            engine = GrpcioEngine(routes, **{**settings, **options})
            port = engine.bind()
            engine.start()
            stack.callback(engine.stop, 0.0)
            options = [("grpc.use_local_subchannel_pool", 1), *channel_options]
            channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", options=options))
            return engine, channel

        yield start


@pytest.fixture
def wait_until():
    """``wait_until(condition)`` waits for what has no event to wait for."""

    def wait(condition, seconds=30):
        pause = threading.Event()
        for _ in range(seconds * 200):
            if condition():
                return
            pause.wait(0.005)
        raise AssertionError("the condition did not come true")

    return wait
