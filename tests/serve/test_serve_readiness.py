"""Live, ready, model-ready and draining: every cell of the two tables of docs/serving.md, asked of a whole server."""

import json
import queue
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.bundles import write_affine

from rsrv.core.config import EndpointsConfig, RuntimeConfig, ServerConfig
from rsrv.core.wire import encode_request, join
from rsrv.protos import health
from rsrv.protos import inference as pb
from rsrv.serve import serve
from rsrv.serve.registry import Failure, ModelState

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
SERVICE = "inference.GRPCInferenceService"
FAILURE = Failure("compile", "ProgramError", "it is no program")
SERVING, NOT_SERVING = health.HealthCheckResponse.SERVING, health.HealthCheckResponse.NOT_SERVING


def tables():
    """The rows of the two tables, as lists of cells."""
    text = DOCS.read_text(encoding="utf-8").split("## Live, ready, model-ready, draining")[1].split("\n## ")[0]
    rows, blocks = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            blocks.append(rows[2:])
            rows = []
    return blocks


SERVER_ROWS, MODEL_ROWS = tables()


@contextmanager
def serving(repo, **sections):
    patch = pytest.MonkeyPatch()
    patch.setenv("RSRV_ALLOW_FAKE", "1")
    config = ServerConfig(
        **{
            "model_dirs": [str(repo)],
            "model_control_mode": "static",
            "runtime": RuntimeConfig(backend="fake"),
            "endpoints": EndpointsConfig(grpc_port=0, http_port=0),
            **sections,
        }
    )
    server = serve(config, blocking=False)
    try:
        yield server
    finally:
        server.stop()
        patch.undo()


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    for name in ("net", "other"):
        write_affine(repo / name)
    return repo


@pytest.fixture(scope="module")
def server(repo):
    with serving(repo) as server:
        yield server


@pytest.fixture(scope="module")
def explicit(repo):
    """Weights are nowhere until an operator says so."""
    runtime = RuntimeConfig(backend="fake", device_memory_bytes=1 << 20)
    with serving(repo, model_control_mode="explicit", runtime=runtime) as server:
        yield server


class Faces:
    """What the faces of a server say."""

    def __init__(self, server):
        self.server = server
        self.channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.channel.close()

    def call(self, method, **fields):
        request, response = getattr(pb, f"{method}Request"), getattr(pb, f"{method}Response")
        body = request(**fields).SerializeToString()
        return response.FromString(self.channel.unary_unary(f"/{SERVICE}/{method}")(body, timeout=60))

    def health(self, name):
        """Of Check, "NOT_FOUND" for a name that is unknown; the first answer of Watch says the same."""
        body = health.HealthCheckRequest(service=name).SerializeToString()
        watch = self.channel.unary_stream("/grpc.health.v1.Health/Watch")(body, timeout=60)
        watched = health.HealthCheckResponse.FromString(next(watch)).status
        watch.cancel()
        try:
            answer = self.channel.unary_unary("/grpc.health.v1.Health/Check")(body, timeout=60)
        except grpc.RpcError as error:
            assert watched == health.HealthCheckResponse.SERVICE_UNKNOWN
            return error.code().name
        status = health.HealthCheckResponse.FromString(answer).status
        assert watched == status
        return status

    def http(self, path):
        """Status and body."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.server.http_port}{path}", timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def readyz(self):
        """Status and what the body says."""
        status, body = self.http("/readyz")
        return status, json.loads(body)

    def index(self):
        return {row.name: (row.state, row.reason) for row in self.call("RepositoryIndex").models}

    def infer(self, model="net", **parameters):
        body = join(encode_request(model, [("x", np.ones((1, 3), np.float32))], parameters=parameters))
        return self.channel.unary_unary(f"/{SERVICE}/ModelInfer").future(body, timeout=60)


@pytest.fixture
def faces(server):
    with Faces(server) as faces:
        yield faces


def refusal(future):
    """The reason that a call ends with."""
    error = future.exception()
    assert isinstance(error, grpc.RpcError), "it was answered"
    return dict(error.trailing_metadata() or ()).get("rsrv-reason")


def agreed(answers):
    (answer,) = set(answers)
    return "yes" if answer else "no"


# --- the server -----------------------------------------------------------------------------------------------------


def of_server(monkeypatch, server):
    """What brings the server into the state of each row."""
    registry, lifecycle = server.registry, server.lifecycle

    def nothing_read():
        monkeypatch.setattr(lifecycle, "_state", "starting")
        monkeypatch.setattr(registry, "_entries", {})
        monkeypatch.setattr(registry, "_scanned", False)

    def other(state, **changes):
        entries = dict(registry._entries)
        entries["other"] = replace(entries["other"], state=state, prepared=None, **changes)
        monkeypatch.setattr(registry, "_entries", entries)

    def preparing():
        monkeypatch.setattr(lifecycle, "_state", "starting")
        other(ModelState.PREPARING)

    def failed_any():
        other(ModelState.FAILED, failure=FAILURE)
        monkeypatch.setattr(lifecycle, "_ready_when", "any")

    return {
        "starts, and has not read the directories": nothing_read,
        "starts, and models are being prepared": preparing,
        "serves": lambda: None,
        "serves, one failed, `startup.ready_when: all`": lambda: other(ModelState.FAILED, failure=FAILURE),
        "serves, one failed, `startup.ready_when: any`, or a list without it": failed_any,
        "serves, and an execution is stuck": lambda: monkeypatch.setattr(lifecycle, "_stuck", lambda: "it is stuck"),
        "stops, in its pause or its grace": lambda: monkeypatch.setattr(lifecycle, "_state", "stopping"),
    }


@pytest.mark.parametrize("row", SERVER_ROWS, ids=[row[0] for row in SERVER_ROWS])
def test_a_row_of_the_table_of_server_states_is_what_every_face_says(row, faces, server, monkeypatch):
    state, live, ready, model_ready = row
    of_server(monkeypatch, server)[state]()
    paths = ("/healthz", "/livez", "/v2/health/live")
    assert agreed([faces.call("ServerLive").live, *(faces.http(path)[0] == 200 for path in paths)]) == live
    status, body = faces.readyz()
    said = [
        faces.call("ServerReady").ready,
        status == 200,
        body["ready"],
        faces.http("/v2/health/ready")[0] == 200,
        faces.health("") == SERVING,
        faces.health(SERVICE) == SERVING,
    ]
    assert agreed(said) == ready
    assert status in (200, 503)
    assert (body["reason"] == "") == (ready == "yes")
    assert body["phase"]
    said = [
        faces.call("ModelReady", name="net").ready,
        faces.health("net") == SERVING,
        faces.index().get("net", ("",))[0] == "READY",
        "net" in {row.name for row in faces.call("RepositoryIndex", ready=True).models},
    ]
    assert agreed(said) == model_ready


def test_the_table_has_every_state_of_the_server_once(server, monkeypatch):
    assert [row[0] for row in SERVER_ROWS] == list(of_server(monkeypatch, server))


def test_a_list_of_models_that_are_prepared_is_enough_even_while_others_are_not(faces, server, monkeypatch):
    monkeypatch.setattr(server.lifecycle, "_ready_when", ["net"])
    of_server(monkeypatch, server)["starts, and models are being prepared"]()
    assert faces.call("ServerReady").ready
    monkeypatch.setattr(server.lifecycle, "_ready_when", ["net", "other"])
    assert faces.readyz()[1]["reason"] == "not ready: other (preparing)"


@pytest.mark.parametrize("source", ["watcher", "api"])
@pytest.mark.parametrize("state", [ModelState.PREPARING, ModelState.FAILED, ModelState.REGISTERED, ModelState.RETIRING])
def test_what_comes_after_the_start_does_not_take_the_server_out_of_rotation(faces, server, monkeypatch, source, state):
    failure = FAILURE if state is ModelState.FAILED else None
    entries = dict(server.registry._entries)
    entries["other"] = replace(entries["other"], source=source, state=state, prepared=None, failure=failure)
    monkeypatch.setattr(server.registry, "_entries", entries)
    assert faces.call("ServerReady").ready
    assert faces.readyz()[0] == 200


def test_a_closed_gate_and_a_failed_reload_do_not_make_the_server_unready(faces, server):
    with changed(server, gate="drained", pending=FAILURE):
        assert faces.call("ServerReady").ready
        assert not faces.call("ModelReady", name="net").ready


# --- one model ------------------------------------------------------------------------------------------------------

STATES = {
    "`registered`": {"state": ModelState.REGISTERED, "prepared": None},
    "`preparing`": {"state": ModelState.PREPARING, "prepared": None},
    "`ready`": {},
    "`ready`, and its last reload failed": {"pending": FAILURE},
    "`failed`": {"state": ModelState.FAILED, "prepared": None, "failure": FAILURE},
    "`retiring`": {"state": ModelState.RETIRING},
    "`release_failed`": {"state": ModelState.RELEASE_FAILED, "prepared": None},
}
ELSEWHERE = "`ready`, and its weights are elsewhere in explicit mode"
NOBODY = "none of that name"


@contextmanager
def changed(server, **changes):
    """The entry of `net` is like that for a while; a gate that is not open takes no request."""
    registry, gate = server.registry, changes.get("gate", "open")
    before = registry.get("net")
    accepted, last = before.prepared.accepted, object()
    if gate == "draining":
        # Without one the server would find the gate drained.
        accepted.enter(last)
    if gate != "open":
        accepted.close()
    registry.change("net", **changes)
    try:
        yield
    finally:
        accepted.open()
        accepted.leave(last)
        registry.change("net", **{name: getattr(before, name) for name in changes})


def require_row(faces, row, name="net"):
    _, _, ready, index, request = row
    ready, _, unknown = ready.partition("; health: ")
    assert agreed([faces.call("ModelReady", name=name).ready]) == ready
    assert faces.health(name) == (unknown or (SERVING if ready == "yes" else NOT_SERVING))
    listed = faces.index().get(name)
    ready_rows = {row.name for row in faces.call("RepositoryIndex", ready=True).models}
    if index == "not listed":
        assert listed is None
    else:
        state, _, reason = index.replace("`", "").partition(" ")
        assert listed[0] == state.rstrip(",")
        assert (name in ready_rows) == (state == "READY")
        if reason == "with phase and error":
            assert listed[1] == "compile: it is no program"
        elif reason.endswith(": …"):
            assert listed[1] == reason.replace("…", "compile: it is no program")
        else:
            assert listed[1] == reason
    require_request(faces, request, name)


def require_request(faces, expected, name):
    if expected == "answered":
        faces.infer(name).result()
        return
    reason = expected.rpartition("`")[0].rpartition("`")[2]
    waits = expected.startswith("waits")
    assert refusal(faces.infer(name, **({"rsrv_hold": False} if waits else {}))) == reason
    if not waits:
        return
    admission, waiting = faces.server.admission, faces.infer(name)
    until(lambda: admission.held == 1)
    waiting.cancel()
    until(lambda: admission.held == 0)


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("row", MODEL_ROWS, ids=[f"{row[0]} {row[1]}" for row in MODEL_ROWS])
def test_a_row_of_the_table_of_model_states_is_what_every_face_says(row, faces, server, request):
    state, gate = row[0], row[1].strip("`")
    if state == NOBODY:
        require_row(faces, row, "nobody")
    elif state == ELSEWHERE:
        with Faces(request.getfixturevalue("explicit")) as faces:
            require_row(faces, row)
    else:
        with changed(server, gate=gate, **STATES[state]):
            require_row(faces, row)
        # Nothing of it stays.
        require_row(faces, next(row for row in MODEL_ROWS if row[:2] == ["`ready`", "`open`"]))


def test_the_table_has_every_state_of_a_registration_and_every_gate():
    assert {row[0] for row in MODEL_ROWS} == {*STATES, ELSEWHERE, NOBODY}
    named = {row[0].partition(",")[0].strip("`") for row in MODEL_ROWS} - {NOBODY}
    assert named == {state.value for state in ModelState}
    assert {row[1] for row in MODEL_ROWS} == {"`open`", "`draining`", "`drained`", "`removing`", ""}


def test_a_server_that_stops_says_so_of_every_model(faces, server, monkeypatch):
    monkeypatch.setattr(server.lifecycle, "_state", "stopping")
    assert faces.index() == dict.fromkeys(("net", "other"), ("UNAVAILABLE", "the server is stopping"))


def test_watch_sends_every_change_of_a_gate_and_the_end_of_a_name(faces, server):
    statuses = queue.SimpleQueue()
    body = health.HealthCheckRequest(service="net").SerializeToString()
    watch = faces.channel.unary_stream("/grpc.health.v1.Health/Watch")(body, timeout=60)

    def read():
        try:
            for message in watch:
                statuses.put(health.HealthCheckResponse.FromString(message).status)
        except grpc.RpcError:
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert statuses.get(timeout=60) == SERVING
        with changed(server, gate="draining"):
            assert statuses.get(timeout=60) == NOT_SERVING
        assert statuses.get(timeout=60) == SERVING
        entry = server.registry.get("net")
        server.registry.remove("net")
        assert statuses.get(timeout=60) == health.HealthCheckResponse.SERVICE_UNKNOWN
        server.registry.add(entry)
        assert statuses.get(timeout=60) == SERVING
    finally:
        watch.cancel()
        reader.join()
