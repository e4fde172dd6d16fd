"""Signals at awkward moments: a long execution, a model that is being loaded or reloaded, requests that wait."""

import http.client
import json
import shutil
import signal
import time

import grpc
import numpy as np
import pytest
from support.bundles import write_affine
from support.server import ServerProcess

from rsrv.core.wire import decode_response, encode_request, join

INFER = "/inference.GRPCInferenceService/ModelInfer"
FAKE = {"RSRV_ALLOW_FAKE": "1", "RSRV_WORKER_RUNTIME_BACKEND": "fake"}
# fifo runs no warm-up, which would take a slow device for seconds.
SLOW = {**FAKE, "RSRV_WORKER_RUNTIME_FAKE_SECONDS_PER_ROW": "2", "RSRV_WORKER_SCHEDULER_DISCIPLINE": "fifo"}
LIVE = {**FAKE, "RSRV_WORKER_MODEL_POLL_SECONDS": "0.1", "RSRV_WORKER_MODEL_SETTLE_SECONDS": "0.1"}
HANGING = "import time\ntime.sleep(600)\ndef preprocess(inputs):\n    return inputs\n"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_affine(tmp_path_factory.mktemp("made") / "affine")


@pytest.fixture
def repo(bundle, tmp_path):
    shutil.copytree(bundle, tmp_path / "repo" / "affine")
    return tmp_path / "repo"


@pytest.fixture
def hanging(tmp_path):
    """A bundle whose hooks are never imported to their end."""
    return write_affine(tmp_path / "made" / "late", hooks=HANGING)


def request(**parameters):
    return join(encode_request("affine", [("x", np.ones((1, 3), np.float32))], parameters=parameters))


def outcome(future):
    try:
        decode_response(future.result(60))
        return "OK"
    except grpc.RpcError as error:
        return error.code().name, dict(error.trailing_metadata() or ()).get("rsrv-reason")


def until(server, condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, server.log
        assert server.process.poll() is None, server.log
        time.sleep(0.02)


def answered(futures):
    return sum(future.done() for future in futures)


def post(server, path, **body):
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=20)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


# --- executions -----------------------------------------------------------------------------------------------------


def test_an_execution_that_runs_is_waited_for_although_it_is_longer_than_the_grace(repo):
    with ServerProcess(repo, env={**SLOW, "RSRV_WORKER_SHUTDOWN_GRACE_SECONDS": "0"}) as server:
        server.wait_ready()
        with grpc.insecure_channel(server.url) as channel:
            future = channel.unary_unary(INFER).future(request(), timeout=60)
            # In the server and not in the queue any more: it is on the device, for two seconds.
            until(
                server,
                lambda: (
                    server.metric("rsrv_worker_inflight_requests") == 1
                    and server.metric("rsrv_worker_queue_depth") == 0
                ),
            )
            assert server.stop() == 0, server.log
            assert outcome(future) == "OK"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_process_at_once_with_all_that_waits(repo, number):
    with ServerProcess(repo, env=SLOW) as server:
        server.wait_ready()
        with grpc.insecure_channel(server.url) as channel:
            call = channel.unary_unary(INFER)
            futures = [call.future(request(), timeout=60) for _ in range(20)]
            # The first may have been answered by the time that the last arrives.
            until(server, lambda: server.metric("rsrv_worker_inflight_requests") + answered(futures) == 20)
            server.signal(signal.SIGTERM)
            until(server, lambda: server.readyz()[1]["state"] == "stopping")
            server.signal(number)
            assert server.wait() == 128 + number
            outcomes = [outcome(future) for future in futures]
    # Twenty rows take far longer than the test; those that had no answer yet lost their connection.
    assert ("UNAVAILABLE", None) in outcomes
    assert set(outcomes) <= {"OK", ("UNAVAILABLE", None)}


# --- models on their way ----------------------------------------------------------------------------------------------


def test_sigterm_while_hooks_are_imported_that_never_end_exits_0(repo, hanging):
    shutil.copytree(hanging, repo / "late")
    with ServerProcess(repo, env=FAKE) as server:
        server.wait_for(lambda status, body: body["progress"]["prepared"] == 1)
        assert server.stop() == 0, server.log


def test_a_second_signal_while_models_are_prepared_ends_the_process_at_once(repo, hanging):
    shutil.copytree(hanging, repo / "late")
    env = {**FAKE, "RSRV_WORKER_SHUTDOWN_PAUSE_SECONDS": "600"}
    with ServerProcess(repo, env=env) as server:
        server.wait_for(lambda status, body: body["progress"]["prepared"] == 1)
        server.signal(signal.SIGTERM)
        server.wait_for(lambda status, body: body["state"] == "stopping")
        server.signal(signal.SIGTERM)
        assert server.wait() == 143


def test_sigterm_while_the_watcher_loads_a_model_exits_0(repo, hanging, tmp_path):
    with ServerProcess(repo, env=LIVE) as server:
        server.wait_ready()
        hanging.rename(repo / "late")
        until(server, lambda: server.metric("rsrv_worker_model_state", model="late", state="preparing") == 1)
        assert server.stop() == 0, server.log


def test_sigterm_while_the_watcher_reloads_a_model_exits_0_and_the_old_version_answers_to_the_end(repo, tmp_path):
    new = write_affine(tmp_path / "made" / "affine", hooks=HANGING)
    env = {**LIVE, "RSRV_WORKER_SHUTDOWN_PAUSE_SECONDS": "3"}
    with ServerProcess(repo, env=env) as server, grpc.insecure_channel(server.url) as channel:
        server.wait_ready()
        infer = channel.unary_unary(INFER)
        np.testing.assert_array_equal(decode_response(infer(request(), timeout=20)).array("y"), [[3, 3, 3]])
        with server.paused():  # a name that is away for longer than changes settle is gone
            (repo / "affine").rename(tmp_path / "old")
            new.rename(repo / "affine")
        server.wait_for_log("watcher: change detected")
        server.signal(signal.SIGTERM)
        server.wait_for(lambda status, body: body["state"] == "stopping")
        np.testing.assert_array_equal(decode_response(infer(request(), timeout=20)).array("y"), [[3, 3, 3]])
        assert server.wait() == 0, server.log


# --- requests that wait -----------------------------------------------------------------------------------------------


def test_requests_that_wait_at_a_gate_are_refused_and_no_grace_is_spent_on_them(repo):
    with ServerProcess(repo, env={**FAKE, "RSRV_WORKER_SHUTDOWN_GRACE_SECONDS": "600"}) as server:
        server.wait_ready()
        status, body = post(server, "/v1/models/drain", model="affine", wait_ms=10_000)
        assert (status, body["admission"]) == (200, "drained")
        with grpc.insecure_channel(server.url) as channel:
            call = channel.unary_unary(INFER)
            refused = outcome(call.future(request(rsrv_hold=False), timeout=60))
            assert refused == ("UNAVAILABLE", "admission_closed")
            futures = [call.future(request(), timeout=60) for _ in range(3)]
            until(server, lambda: server.metric("rsrv_worker_held_requests") == 3)
            assert server.stop() == 0, server.log
            assert [outcome(future) for future in futures] == [("UNAVAILABLE", "stopping")] * 3
    assert "requests refused after the grace" not in server.log
