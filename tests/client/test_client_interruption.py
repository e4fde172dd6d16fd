"""Ctrl-C amid a call: the channel serves other threads afterwards, and nothing that waits for an answer hangs."""

import asyncio
import threading

import grpc
import numpy as np
import pytest

from rsrv.client import AsyncKServeModel, KServeModel
from rsrv.client.interruption import _condition, mend

X = np.ones((2, 4), np.float32)


class Interrupted:
    """A method of grpcio that Ctrl-C ends at the worst moment: it has just taken the channel's lock, twice."""

    def __init__(self, channel):
        self._channel = channel

    def __call__(self, *_, **__):
        guard = _condition(self._channel)
        guard.acquire()
        guard.acquire()
        raise KeyboardInterrupt

    future = __call__


def free(channel):
    """Whether another thread can take the lock of `channel`."""
    found = []

    def look():
        guard = _condition(channel)
        found.append(guard.acquire(blocking=False))
        if found[0]:
            guard.release()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def interrupt(connection, method):
    honest = connection._method(method)
    connection._methods[method] = Interrupted(connection._channel)
    return honest


CALLS = {
    "call": lambda one: one.call("ServerLive", b"", 10),
    "awaited": lambda one: asyncio.run(one.acall("ServerLive", b"", 10)),
    "goodbye": lambda one: one.tell("ServerLive", b"", 10, wait=True),
}


@pytest.mark.parametrize("how", CALLS)
def test_an_interrupted_call_leaves_no_lock_behind(connection, how):
    honest = interrupt(connection, "ServerLive")
    with pytest.raises(KeyboardInterrupt):
        CALLS[how](connection)
    assert free(connection._channel)
    connection._methods["ServerLive"] = honest
    for again in CALLS.values():
        assert again(connection)


def test_a_stream_that_is_interrupted_when_it_begins_leaves_no_lock_behind(connection, monkeypatch):
    interrupted = Interrupted(connection._channel)
    with monkeypatch.context() as patch:
        patch.setattr(connection._channel, "unary_stream", lambda *_: interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(connection.stream("ServerLive", b""))
    assert free(connection._channel)
    assert connection.call("ServerLive", b"", 10)


def test_a_lock_of_another_thread_is_left_alone(connection):
    guard = _condition(connection._channel)
    taken, go_on = threading.Event(), threading.Event()

    def hold():
        with guard:
            taken.set()
            go_on.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(30)
    mend(connection._channel)
    assert not free(connection._channel)
    go_on.set()
    thread.join()
    assert free(connection._channel)


def test_channels_with_interceptors_and_other_ones_are_looked_into(server):
    class Interceptor(grpc.UnaryUnaryClientInterceptor):
        def intercept_unary_unary(self, continuation, details, request):
            return continuation(details, request)

    with grpc.insecure_channel(server.url) as channel:
        outer = grpc.intercept_channel(channel, Interceptor())
        assert _condition(outer) is _condition(channel) is not None
        _condition(channel).acquire()
        mend(outer)
        assert free(channel)
    mend(object())


def test_after_an_interrupted_request_other_threads_and_event_loops_use_the_same_channel(server):
    with KServeModel(server.url, "twice", shared_memory="on") as model:
        model.infer({"x": X})
        connection = model.endpoint.connection
        honest = interrupt(connection, "ModelInfer")
        with pytest.raises(KeyboardInterrupt):
            model.infer({"x": X})
        connection._methods["ModelInfer"] = honest
        found = []
        thread = threading.Thread(target=lambda: found.append(model.infer({"x": X})["y"]), daemon=True)
        thread.start()
        thread.join(60)
        np.testing.assert_array_equal(found, [2 * X])

        async def awaited():
            async with AsyncKServeModel(server.url, "twice", shared_memory="on") as other:
                return (await other.infer({"x": X}))["y"]

        np.testing.assert_array_equal(asyncio.run(awaited()), 2 * X)


@pytest.mark.parametrize("method", ["ModelMetadata", "SystemSharedMemoryRegister"])
def test_without_a_deadline_what_prepares_a_request_still_has_one(server, monkeypatch, method):
    monkeypatch.setattr("rsrv.client.model.SETUP_SECONDS", 0.2)
    monkeypatch.setattr("rsrv.client.facts.SETUP_SECONDS", 30.0)
    honest, go_on = getattr(server, method), threading.Event()

    def hangs(request, context):
        go_on.wait(30)
        return honest(request, context)

    with KServeModel(server.url, "twice", shared_memory="on", deadline=0) as model:
        if method != "ModelMetadata":
            model.metadata()
        setattr(server, method, hangs)
        with pytest.raises(Exception, match="deadline"):
            model.metadata() if method == "ModelMetadata" else model.infer({"x": X})
        go_on.set()
