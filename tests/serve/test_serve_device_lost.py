"""A device that is gone: nobody gets in, everybody hears it, and the process ends so that it can be started again."""

import threading

import numpy as np
import pytest
from support.bundles import write_affine
from support.calls import FakeCall

from rsrv.core.config import EndpointsConfig, RuntimeConfig, ServerConfig
from rsrv.core.errors import DeviceLost
from rsrv.core.wire import encode_request, join
from rsrv.runtime.pjrt import _device_error
from rsrv.serve import serve

WAIT = 60
GONE = DeviceLost("the card fell off the bus")


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("RSRV_ALLOW_FAKE", "1")
    write_affine(tmp_path / "m", batch_sizes=(1,))
    return ServerConfig(
        model_dirs=[str(tmp_path)],
        model_control_mode="static",
        runtime=RuntimeConfig(backend="fake"),
        endpoints=EndpointsConfig(grpc_port=0, http_port=None),
    )


def ask(server):
    body = join(encode_request("m", [("x", np.ones((1, 3), np.float32))]))
    return FakeCall(body).serve(server._inference.handle)


def lose(server):
    def launch(executable, buffers):
        raise GONE

    server.device.launch = launch


def test_requests_hear_it_the_server_is_not_ready_and_it_can_be_stopped(config):
    server, told = serve(config, blocking=False), threading.Event()
    try:
        assert ask(server).error is None
        server.on_lost = lambda error: told.set()
        waiting = threading.Event()
        server.live.registrations.drain("m")
        body = join(encode_request("m", [("x", np.ones((1, 3), np.float32))]))
        held = FakeCall(body)
        thread = threading.Thread(target=lambda: (held.serve(server._inference.handle), waiting.set()))
        thread.start()
        while not server.admission.held:
            pass
        lose(server)
        server._lose(GONE)
        assert told.wait(WAIT)
        assert waiting.wait(WAIT)
        thread.join()
        assert (held.code.name, held.reason) == ("UNAVAILABLE", "device_lost")
        assert ask(server).code.name == "UNAVAILABLE"
        assert not server.lifecycle.readiness().ready
        assert server.lifecycle.readiness().reason == "the device is lost: the card fell off the bus"
    finally:
        server.stop()
    assert server.lifecycle.state == "stopped"


def test_a_server_in_the_foreground_ends_with_the_error(config):
    opened, ended, servers = threading.Event(), threading.Event(), []

    def run():
        try:
            serve(config, on_listening=lambda server: (servers.append(server), opened.set()))
        except DeviceLost as error:
            servers.append(error)
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    assert opened.wait(WAIT)
    assert servers[0].wait_ready(WAIT).ready
    lose(servers[0])
    call = ask(servers[0])
    assert (call.code.name, call.reason) == ("UNAVAILABLE", "device_lost")
    assert ended.wait(WAIT)
    assert servers[1] is GONE


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered", "device_lost"),
        ("INTERNAL: Failed to sync stream: CUDA_ERROR_LAUNCH_FAILED", "device_lost"),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes", "device_oom"),
        ("INTERNAL: cuBLAS status NOT_SUPPORTED", "device"),
    ],
)
def test_errors_after_which_a_card_does_nothing_any_more_are_told_apart(text, kind):
    assert _device_error("launch", RuntimeError(text)).reason == kind
