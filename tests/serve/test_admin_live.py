"""The operations on a whole server, over HTTP: a fake device, and everything else as it is (spec worker 11.12)."""

import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import grpc
import numpy as np
import pytest
from support.bundles import write_affine

from rsrv.core.config import EndpointsConfig, RuntimeConfig, ServerConfig
from rsrv.core.config.sections import AdmissionConfig, FakeDeviceConfig
from rsrv.core.wire import decode_response, encode_request, join
from rsrv.serve import serve

WAIT = 60
INFER = "/inference.GRPCInferenceService/ModelInfer"
X = ("x", np.ones((1, 3), np.float32))
BUDGET = {"runtime": RuntimeConfig(backend="fake", fake=FakeDeviceConfig(memory_bytes=1 << 20))}
"""Weights come and go, as an operator says."""


class Live:
    def __init__(self, root, **sections):
        self.root = root
        self.server = serve(
            ServerConfig(
                **{
                    "model_dirs": [str(root)],
                    "model_control_mode": "explicit",
                    "runtime": RuntimeConfig(backend="fake"),
                    "endpoints": EndpointsConfig(grpc_port=0, http_port=0),
                    **sections,
                }
            ),
            blocking=False,
        )
        self.server.wait_ready(WAIT)
        self.channel = grpc.insecure_channel(
            f"127.0.0.1:{self.server.grpc_port}", options=[("grpc.use_local_subchannel_pool", 1)]
        )

    def close(self):
        self.channel.close()
        self.server.stop()

    def call(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.http_port, timeout=WAIT)
        with closing(connection):
            text = None if body is None else json.dumps(body)
            connection.request(method, path, body=text, headers={"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def post(self, path, **fields):
        return self.call("POST", f"/v1/{path}", fields)

    def done(self, path, **fields):
        status, body = self.post(path, **fields)
        assert status < 300, body
        return body

    def get(self, path):
        return self.call("GET", f"/v1/{path}")

    def wait(self, name, until):
        status, body = self.get(f"models/wait?model={name}&until={until}&timeout_ms={WAIT * 1000}")
        assert status == 200, body
        return body

    def status(self, name):
        status, body = self.get(f"status?model={name}")
        return body["models"][0] if status == 200 else status

    def infer(self, model, **kw):
        message = join(encode_request(model, (X,), **kw))
        return decode_response(self.channel.unary_unary(INFER)(message, timeout=WAIT))

    def refusal(self, model):
        with pytest.raises(grpc.RpcError) as error:
            self.infer(model, parameters={"rsrv_hold": False})
        return error.value.code().name, dict(error.value.trailing_metadata()).get("rsrv-reason")


@pytest.fixture
def live(tmp_path, monkeypatch):
    monkeypatch.setenv("RSRV_ALLOW_FAKE", "1")
    made = []

    def make(*names, **sections):
        root = tmp_path / "repo"
        root.mkdir(exist_ok=True)
        for name in names:
            write_affine(root / name, batch_sizes=(1, 4))
        made.append(Live(root, **sections))
        return made[-1]

    yield make
    for each in made:
        each.close()


def reason(answer):
    status, body = answer
    return status, body["error"]["reason"]


def test_a_bundle_that_is_registered_drained_opens_its_manifest_and_no_other_file(live, tmp_path):
    server = live("first")
    bundle = write_affine(server.root / "late", batch_sizes=(1,))
    for file in ("weights.safetensors", "model.b1.mlir"):
        (bundle / file).write_bytes(b"never opened")
    body = server.done("models/register", model="late", directory=str(bundle), admission="drained")
    assert (body["registration"], body["admission"]) == ("registered", "drained")
    assert server.refusal("late") == ("UNAVAILABLE", "admission_closed")
    assert server.status("late")["state"] == "registered"
    assert server.done("models/unregister", model="late")["admission"] == "removing"
    assert server.wait("late", "gone")["registration"] == "gone"
    assert server.status("late") == 404


def test_undrain_starts_preparing_and_the_held_request_completes(live):
    server = live("first", admission=AdmissionConfig(hold="always"))
    bundle = write_affine(server.root / "late", batch_sizes=(1,))
    server.done("models/register", model="late", directory="late", admission="drained")
    assert bundle.name == "late"
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(server.infer, "late")
        for _ in range(WAIT * 100):
            if server.server.admission.held:
                break
            threading.Event().wait(0.01)
        assert server.server.admission.held == 1
        assert server.done("models/undrain", model="late")["admission"] == "open"
        assert held.result(WAIT).model_name == "late"
    assert server.wait("late", "ready")["registration"] == "ready"


def test_a_registered_model_serves_and_a_second_one_of_its_name_is_refused(live):
    server = live("first")
    write_affine(server.root / "late", batch_sizes=(1,))
    server.done("models/register", model="late", directory="late")
    server.wait("late", "ready")
    assert server.infer("late").model_name == "late"
    assert reason(server.post("models/register", model="late", directory="late")) == (409, "name_taken")


def test_a_model_that_fails_says_why_and_is_tried_again(live):
    server = live("first")
    bundle = write_affine(server.root / "late", batch_sizes=(1,))
    good = (bundle / "weights.safetensors").read_bytes()
    (bundle / "weights.safetensors").write_bytes(b"broken")
    server.done("models/register", model="late", directory="late")
    body = server.wait("late", "ready")
    assert body["registration"] == "failed"
    assert "weights.safetensors" in body["error"]
    assert reason(server.post("models/undrain", model="late")) == (409, "failed")
    (bundle / "weights.safetensors").write_bytes(good)
    assert server.done("models/retry", model="late")["registration"] == "preparing"
    assert server.wait("late", "ready")["registration"] == "ready"
    assert server.infer("late").model_name == "late"


def test_drain_closes_the_gate_and_undrain_opens_it(live):
    server = live("first")
    body = server.done("models/drain", model="first", wait_ms=WAIT * 1000)
    assert (body["admission"], body["accepted"]["executing"]) == ("drained", 0)
    assert server.refusal("first") == ("UNAVAILABLE", "admission_closed")
    assert server.status("first")["admission"] == "drained"
    assert [row["admission"] for row in server.get("models")[1]["models"]] == ["drained"]
    server.done("models/undrain", model="first")
    server.infer("first")


def test_weights_are_activated_and_deactivated_behind_the_closed_gate(live):
    server = live("first", **BUDGET)
    assert reason(server.post("models/activate", model="first")) == (409, "not_drained")
    server.done("models/drain", model="first", wait_ms=WAIT * 1000)
    server.done("models/activate", model="first")
    server.wait("first", "idle")
    assert server.status("first")["residency"]["state"] == "resident"
    server.done("models/pin", model="first")
    assert reason(server.post("models/deactivate", model="first")) == (409, "pinned")
    server.done("models/unpin", model="first")
    server.done("models/deactivate", model="first")
    server.wait("first", "idle")
    assert server.status("first")["residency"]["state"] == "cold"


def test_trim_to_nothing_keeps_the_pinned_one(live):
    server = live("first", "second", **BUDGET)
    for name in ("first", "second"):
        server.done("models/drain", model=name, wait_ms=WAIT * 1000)
        server.done("models/activate", model=name)
        server.wait(name, "idle")
    server.done("models/pin", model="first")
    server.done("devices/trim")
    states = {name: server.status(name)["residency"]["state"] for name in ("first", "second")}
    assert states == {"first": "resident", "second": "cold"}


def test_unregister_ends_with_the_name_unknown_and_free(live):
    server = live("first", "second")
    before = server.status("first")["incarnation"]
    server.done("models/unregister", model="first", if_incarnation=before)
    server.wait("first", "gone")
    assert server.refusal("first") == ("NOT_FOUND", "unknown_model")
    server.done("models/register", model="first", directory="first")
    assert server.wait("first", "ready")["incarnation"] > before
    assert reason(server.post("models/drain", model="first", if_incarnation=before)) == (409, "incarnation_changed")
    server.infer("second")


def test_program_sets_are_staged_selected_and_rolled_back_without_a_load_of_weights(live):
    server = live("first", **BUDGET)
    server.done("models/drain", model="first", wait_ms=WAIT * 1000)
    server.done("models/activate", model="first")
    server.wait("first", "idle")
    server.done("models/undrain", model="first")
    before = server.infer("first")
    loads = server.status("first")["residency"]["loads"]
    made = server.done("models/programs", model="first", base_directory="first", label="again")
    assert (made["program"]["id"], made["program"]["phase"]) == (2, "ready")
    assert reason(server.post("models/programs/select", model="first", program=2, expected=2)) == (
        409,
        "expected_mismatch",
    )
    assert server.get("models/programs?model=first")[1]["selected"] == 1
    assert server.done("models/programs/select", model="first", program=2, expected=1)["selected"] == 2
    assert server.infer("first").model_name == "first"
    assert reason(server.post("models/programs/remove", model="first", program=2)) == (409, "selected")
    assert server.done("models/programs/select", model="first", program=1, expected=2)["previous"] == 2
    was, now = before.arrays(), server.infer("first").arrays()
    assert {name: array.tobytes() for name, array in was.items()} == {name: now[name].tobytes() for name in now}
    assert server.status("first")["residency"]["loads"] == loads
    assert [each["id"] for each in server.done("models/programs/remove", model="first", program=2)["programs"]] == [1]


def test_what_happens_is_in_the_events(live):
    server = live("first")
    server.done("models/drain", model="first", wait_ms=WAIT * 1000)
    server.done("models/undrain", model="first")
    with closing(http.client.HTTPConnection("127.0.0.1", server.server.http_port, timeout=WAIT)) as connection:
        connection.request("GET", "/v1/events?from_seq=1&model=first")
        response = connection.getresponse()
        gates = []
        for _ in range(1000):
            line = response.readline().decode()
            if line.startswith("data: ") and (event := json.loads(line[6:])).get("type") == "admission":
                gates.append((event["from"], event["to"]))
            if gates[-1:] == [("drained", "open")]:
                break
        response.close()
    assert gates == [("open", "draining"), ("draining", "drained"), ("drained", "open")]


def test_a_static_server_refuses_and_says_how_to_start_it(live):
    server = live("first", model_control_mode="static")
    status, body = server.post("models/unregister", model="first")
    assert (status, body["error"]["reason"]) == (409, "static")
    server.infer("first")


def test_administration_may_be_off(live):
    server = live("first", endpoints=EndpointsConfig(grpc_port=0, http_port=0, admin=False))
    with closing(http.client.HTTPConnection("127.0.0.1", server.server.http_port, timeout=WAIT)) as connection:
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 404
    assert server.get("status")[0] == 200


def test_a_status_of_one_model_and_of_none(live):
    server = live("first", "second")
    status, body = server.get("status?model=second")
    assert (status, [model["name"] for model in body["models"]]) == (200, ["second"])
    assert reason(server.get("status?model=nobody")) == (404, "unknown_model")


def test_a_stop_ends_a_call_that_waits(live):
    server = live("first")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.get, f"models/wait?model=first&until=gone&timeout_ms={WAIT * 1000}")
        for _ in range(WAIT * 100):
            if server.server.admission._places:
                break
            threading.Event().wait(0.01)
        assert server.server.admission._places == 1
        server.server.stop()
        assert reason(waiting.result(WAIT)) == (503, "stopping")


def until(condition):
    """Wait for what has no event to wait for."""
    for _ in range(WAIT * 100):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("the condition did not come true")


def test_the_gate_stays_closed_while_weights_are_moved(live):
    server = live("first", **BUDGET)
    server.done("models/drain", model="first", wait_ms=WAIT * 1000)
    server.server.live.registrations.busy = lambda name: True
    assert reason(server.post("models/undrain", model="first")) == (409, "operation_pending")
    server.server.live.registrations.busy = lambda name: False
    assert server.done("models/undrain", model="first")["admission"] == "open"


def test_held_requests_are_bounded_and_end_when_their_model_is_removed(live):
    server = live("first", admission=AdmissionConfig(held_requests=1))
    server.done("models/drain", model="first")
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(server.infer, "first")
        until(lambda: server.server.admission.held == 1)
        with pytest.raises(grpc.RpcError) as error:
            server.infer("first")
        assert error.value.code().name == "RESOURCE_EXHAUSTED"
        assert dict(error.value.trailing_metadata())["rsrv-reason"] == "held_full"
        assert reason(server.get("models/wait?model=first&until=gone&timeout_ms=1")) == (429, "held_full")
        server.done("models/unregister", model="first")
        error = held.exception(WAIT)
    assert (error.code().name, dict(error.trailing_metadata())["rsrv-reason"]) == ("NOT_FOUND", "removing")


def test_a_removal_that_drains_may_be_made_one_that_aborts(live):
    slow = RuntimeConfig(backend="fake", fake=FakeDeviceConfig(seconds_per_row=0.001))
    server = live("first", runtime=slow)
    go = threading.Event()
    server.server.device._sleep = lambda seconds: go.wait(WAIT)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.infer, "first")
        until(lambda: server.status("first")["accepted"]["executing"])
        body = server.done("models/unregister", model="first")
        assert (body["registration"], body["admission"]) == ("retiring", "removing")
        assert reason(server.post("models/undrain", model="first")) == (409, "removing")
        assert reason(server.post("models/register", model="first", directory="first")) == (409, "name_taken")
        server.done("models/unregister", model="first", mode="abort")
        error = running.exception(WAIT)
    assert (error.code().name, dict(error.trailing_metadata())["rsrv-reason"]) == ("NOT_FOUND", "unloaded")
    go.set()
    assert server.wait("first", "gone")["registration"] == "gone"


def test_a_model_is_activated_before_it_was_ever_prepared_and_its_gate_stays_closed(live):
    server = live("first", **BUDGET)
    write_affine(server.root / "late", batch_sizes=(1,))
    server.done("models/register", model="late", directory="late", admission="drained", pinned=True)
    assert server.done("models/activate", model="late")["underway"]
    body = server.wait("late", "idle")
    assert (body["registration"], body["admission"], body["pinned"], body["error"]) == ("ready", "drained", True, "")
    assert server.status("late")["residency"]["state"] == "resident"


def test_idle_weights_go_but_for_those_that_are_pinned(live):
    server = live("first", "second", **BUDGET)
    for name in ("first", "second"):
        server.done("models/activate", model=name, allow_open=True)
        server.wait(name, "idle")
        server.infer(name)
    server.done("models/pin", model="first")
    assert server.call("PATCH", "/v1/reclaim", {"parameter_idle_ms": 20})[1]["parameter_idle_ms"] == 20
    until(lambda: server.status("second")["residency"]["state"] == "cold")
    assert server.status("first")["residency"]["state"] == "resident"
    server.done("models/unpin", model="first")
    until(lambda: server.status("first")["residency"]["state"] == "cold")
    programs = server.status("first")["programs"]["batch_sizes"]
    assert programs == [1, 4]
