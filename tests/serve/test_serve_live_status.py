"""A server whose models change while it runs: what status, metrics and the index say of it, read over the network."""

import json
import shutil
import urllib.error
import urllib.request

import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.bundles import write_affine

from rsrv.core.config import EndpointsConfig, RuntimeConfig, ServerConfig
from rsrv.core.status import WorkerStatus
from rsrv.core.wire import decode_response, encode_request, join
from rsrv.protos import inference as pb
from rsrv.serve import serve

SERVICE = "inference.GRPCInferenceService"


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Two versions of a model, and one that cannot be prepared."""
    made = tmp_path_factory.mktemp("made")
    write_affine(made / "old" / "net")
    write_affine(made / "new" / "net", shift=5.0)
    write_affine(made / "bad" / "net")
    (made / "bad" / "net" / "model.b4.mlir").write_bytes(b"nonsense")
    return made


@pytest.fixture
def repo(tmp_path, bundles):
    shutil.copytree(bundles / "old" / "net", tmp_path / "repo" / "net")
    shutil.copytree(bundles / "bad" / "net", tmp_path / "repo" / "broken")
    return tmp_path / "repo"


@pytest.fixture
def server(repo):
    """Models change when the test says so; all weights are on the device."""
    server = serve(config(repo, model_control_mode="explicit"), blocking=False)
    yield server
    server.stop()


def config(repo, **sections):
    return ServerConfig(
        model_dirs=[str(repo)],
        runtime=RuntimeConfig(backend="cpu"),
        endpoints=EndpointsConfig(grpc_port=0, http_port=0),
        **sections,
    )


def http(server, path, body=None):
    """Status and body, which is posted as JSON when there is one to post."""
    request = urllib.request.Request(f"http://127.0.0.1:{server.http_port}{path}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def status(server, name="net"):
    code, body = http(server, f"/v1/status?model={name}")
    assert code == 200
    (model,) = WorkerStatus.model_validate_json(body).models
    return model


def metrics(server, name="net"):
    families = text_string_to_metric_families(http(server, "/metrics")[1].decode())
    samples = [sample for family in families for sample in family.samples if sample.labels.get("model") == name]
    return {
        (sample.name.removeprefix("rsrv_worker_"), *([sample.labels["state"]] if "state" in sample.labels else [])): (
            sample.value
        )
        for sample in samples
    }


def index(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        body = channel.unary_unary(f"/{SERVICE}/RepositoryIndex")(b"", timeout=60)
    return {row.name: (row.state, row.reason) for row in pb.RepositoryIndexResponse.FromString(body).models}


def infer(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        body = join(encode_request("net", [("x", np.ones((1, 3), np.float32))]))
        return decode_response(channel.unary_unary(f"/{SERVICE}/ModelInfer")(body, timeout=60)).array("y").tolist()


def put(repo, bundle):
    """Exchange the bundle of `net` for another one."""
    shutil.rmtree(repo / "net")
    shutil.copytree(bundle, repo / "net")


def test_a_reload_that_failed_is_seen_everywhere_until_one_succeeds_and_the_old_version_answers(server, repo, bundles):
    before = status(server)
    put(repo, bundles / "bad" / "net")
    assert server.live.registrations.reload("net").exception(timeout=60) is not None
    model = status(server)
    assert (model.state, model.reason, model.incarnation) == ("ready", "", before.incarnation)
    assert (model.pending_error.phase, model.pending_error.type) == ("digests", "DigestMismatch")
    assert "model.b4.mlir has 8 bytes" in model.pending_error.message
    state, reason = index(server)["net"]
    assert state == "READY"
    assert reason.startswith("the last reload failed: digests: bundle 'net': model.b4.mlir has 8 bytes")
    found = metrics(server)
    assert (found["model_pending_error",], found["model_load_failures_total",], found["reloads_total",]) == (1, 1, 0)
    assert infer(server) == [[3.0, 3.0, 3.0]]

    put(repo, bundles / "new" / "net")
    server.live.registrations.reload("net").result(timeout=60)
    model = status(server)
    assert (model.pending_error, model.state) == (None, "ready")
    assert model.incarnation > before.incarnation
    assert index(server)["net"] == ("READY", "")
    found = metrics(server)
    assert (found["model_pending_error",], found["model_load_failures_total",], found["reloads_total",]) == (0, 1, 1)
    assert found["model_incarnation",] == model.incarnation
    assert infer(server) == [[7.0, 7.0, 7.0]]


def test_a_model_that_failed_at_the_start_is_counted_as_a_load_that_failed(server):
    assert status(server, "broken").state == "failed"
    assert metrics(server, "broken")["model_load_failures_total",] == 1
    assert index(server)["broken"][0] == "UNAVAILABLE"


def test_a_gate_that_is_closed_and_opened_is_seen_everywhere(server):
    code, _ = http(server, "/v1/models/drain", {"model": "net", "wait_ms": 60_000})
    assert code == 200
    model = status(server)
    assert (model.admission, model.reason, model.accepted.queued) == ("drained", "drained", 0)
    assert index(server)["net"] == ("UNAVAILABLE", "drained")
    found = metrics(server)
    assert (found["model_admission", "drained"], found["model_admission", "open"]) == (1, 0)
    assert http(server, "/v1/models/undrain", {"model": "net"})[0] == 200
    assert status(server).admission == "open"
    assert index(server)["net"] == ("READY", "")


def test_what_is_registered_later_says_who_did_and_what_is_gone_is_in_no_answer(server, repo, bundles):
    shutil.copytree(bundles / "new" / "net", repo / "late")
    code, body = http(server, "/v1/models/register", {"model": "late", "directory": str(repo / "late")})
    assert code == 202, body
    assert server.live.registrations.wait("late", "ready", 60).failure is None
    model = status(server, "late")
    assert (model.source, model.state, model.directory) == ("api", "ready", str(repo / "late"))
    assert http(server, "/v1/models/unregister", {"model": "late"})[0] == 202
    assert server.live.registrations.wait("late", "gone", 60) is None
    assert http(server, "/v1/status?model=late")[0] == 404
    code, body = http(server, "/v1/status?modell=net")
    assert (code, json.loads(body)["error"]["message"]) == (400, "unknown field 'modell'")
    assert "late" not in index(server)
    assert metrics(server, "late") == {}
    document = WorkerStatus.model_validate_json(http(server, "/v1/status")[1])
    assert [model.name for model in document.models] == ["broken", "net"]


def test_a_model_that_an_operator_removed_leaves_a_tombstone(repo):
    server = serve(config(repo, model_poll_seconds=0.05, model_settle_seconds=0.05), blocking=False)
    try:
        server.live.watcher.tombstone("net")
        server.live.registrations.unregister("net")
        assert server.live.registrations.wait("net", "gone", 60) is None
        document = WorkerStatus.model_validate_json(http(server, "/v1/status")[1])
        assert [model.name for model in document.models] == ["broken"]
        (tombstone,) = document.tombstones
        assert tombstone.name == "net"
        assert tombstone.signature
        assert tombstone.since > 1e9
    finally:
        server.stop()
