"""The status document of a whole server on a fake device, read from its HTTP port as a caller reads it."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from support.bundles import write_affine, write_model

from rsrv.client.status import fetch_status
from rsrv.core.config import EndpointsConfig, MetricsConfig, RuntimeConfig, SchedulerConfig, ServerConfig
from rsrv.core.config.sections import ModelSchedulingConfig, ReclaimConfig
from rsrv.core.status import WorkerStatus
from rsrv.serve import serve
from rsrv.serve.status import program_name

SCHEMA = Path(__file__).parents[2] / "docs" / "status.schema.json"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    write_affine(repo / "affine", hooks="def preprocess(inputs):\n    return inputs\n")
    tensor = ((2, 3), np.float32)
    write_model(repo / "single", lambda x: (x,), {"x": tensor}, {"y": tensor}, batch_sizes=None)
    write_affine(repo / "broken")
    (repo / "broken" / "model.b4.mlir").write_bytes(b"nonsense")
    patch = pytest.MonkeyPatch()
    patch.setenv("RSRV_ALLOW_FAKE", "1")
    config = ServerConfig(
        model_dirs=[str(repo)],
        runtime=RuntimeConfig(backend="fake"),
        endpoints=EndpointsConfig(grpc_port=0, http_port=0),
        metrics=MetricsConfig(triton_compat=True),
        scheduler=SchedulerConfig(models={"affine": ModelSchedulingConfig(max_batch_size=4, weight=2.0)}),
        model_control_mode="static",
        reclaim=ReclaimConfig(workspace_idle_ms=1500.0),
    )
    server = serve(config, worker="w7", blocking=False)
    yield server
    server.stop()
    patch.undo()


@pytest.fixture
def url(server):
    return f"127.0.0.1:{server.http_port}"


@pytest.fixture
def models(url):
    return {model.name: model for model in WorkerStatus.model_validate(fetch_status(url)).models}


def infer(server, rows):
    from rsrv.client.model import KServeModel

    with KServeModel(f"127.0.0.1:{server.grpc_port}", "affine", shared_memory="off") as model:
        model.infer({"x": np.ones((rows, 3), np.float32)})
    # A model has a request until the scheduler is done with it, which may be after the answer.
    until = time.monotonic() + 60
    while server.registry.find("affine").accepted:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_the_document_has_every_field_of_its_description_and_no_other(url):
    document = fetch_status(url)

    def paths(value, at=""):
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return {path for item in value for path in paths(item, f"{at}[]")}
        if isinstance(value, dict) and at.rpartition(".")[2] not in MAPPINGS:
            return {path for name, item in value.items() for path in paths(item, f"{at}.{name}")}
        return {at.removeprefix(".")}

    MAPPINGS = ("requests", "by_batch_size", "errors", "dropped", "cost_seconds")
    described = {path for model in [WorkerStatus] for path in leaves(model, "")}
    # Objects that are null for a model that is not ready appear as leaves, too.
    parts = ("error", "pending_error", "residency", "programs", "queue", "counters", "queue_wait_s")
    nullable = {f"models[].{name}" for name in parts} | {"models[].residency.operation_error"}
    nullable |= {"devices[].budget", "tombstones"}
    assert paths(document) - nullable <= described
    assert {path.split("[]")[0].split(".")[0] for path in described} == {"server", "devices", "models", "tombstones"}
    assert document == json.loads(WorkerStatus.model_validate(document).model_dump_json())


def conforms(value, schema, definitions):
    """Whether `value` is what a JSON Schema wants, of the words that pydantic uses."""
    if "$ref" in schema:
        return conforms(value, definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
    if "anyOf" in schema:
        return any(conforms(value, one, definitions) for one in schema["anyOf"])
    kinds = {"null": type(None), "boolean": bool, "integer": int, "number": (int, float), "string": str}
    kind = schema["type"]
    if kind == "array":
        return isinstance(value, list) and all(conforms(item, schema["items"], definitions) for item in value)
    if kind == "object" and not isinstance(value, dict):
        return False
    if kind == "object" and "properties" in schema:
        names = set(schema["properties"])
        return set(schema["required"]) == set(value) == names and all(
            conforms(value[name], schema["properties"][name], definitions) for name in names
        )
    if kind == "object":
        return all(conforms(item, schema["additionalProperties"], definitions) for item in value.values())
    return isinstance(value, kinds[kind]) and (kind == "boolean" or not isinstance(value, bool))


def test_the_document_conforms_to_the_schema_of_the_documentation(server, url):
    infer(server, 1)
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    document = fetch_status(url)
    assert conforms(document, schema, schema["$defs"])
    document["server"]["uptime_s"] = "long"
    assert not conforms(document, schema, schema["$defs"])


def leaves(model, at):
    from typing import get_args

    for name, field in model.model_fields.items():
        inner = [a for a in (field.annotation, *get_args(field.annotation)) if hasattr(a, "model_fields")]
        many = "[]" if inner and str(field.annotation).startswith("list") else ""
        if inner:
            yield from leaves(inner[0], f"{at}{name}{many}.")
        else:
            yield f"{at}{name}"


def test_the_server_says_what_it_is_and_why_it_is_not_ready(url):
    server = WorkerStatus.model_validate(fetch_status(url)).server
    assert (server.name, server.worker, server.state, server.ready) == ("rsrv", "w7", "serving", False)
    assert server.reason == "not ready: broken (failed)"
    assert (server.discipline, server.control_mode, server.numerics.mode) == ("fair", "static", "auto")
    limits = server.limits
    assert (limits.max_concurrent_requests, limits.held_requests, limits.variant_overtakes) == (64, 32, 0)
    assert (limits.model_capacity, limits.program_capacity, limits.max_queue_depth) == (1024, 4, 1024)
    assert (server.idle.parameter_ms, server.idle.workspace_ms, server.idle.host_ms) == (0, 1500, 0)
    assert not server.idle.device_workspace
    assert (server.inflight, server.held_requests) == (0, 0)
    assert server.uptime_s >= 0
    assert server.stuck == ""


def test_the_device_counts_the_weights_of_all_models(url):
    (device,) = WorkerStatus.model_validate(fetch_status(url)).devices
    assert (device.platform, device.device, device.weights_bytes) == ("fake", 0, 24)
    assert (device.in_use_bytes, device.budget) == (None, None)


def test_a_model_that_is_ready_shows_what_it_is_made_of(models):
    affine, single = models["affine"], models["single"]
    assert (affine.state, affine.reason, affine.error, affine.weights_bytes) == ("ready", "", None, 24)
    assert affine.incarnation > 0
    assert affine.directory.endswith("/affine")
    assert affine.hooks == ["preprocess"]
    assert affine.weight == 2.0
    assert (affine.kind, affine.source, affine.admission, affine.phase) == ("model", "startup", "open", "idle")
    accepted = affine.accepted
    assert (accepted.queued, accepted.executing, accepted.hooks, accepted.earlier) == (0, 0, 0, 0)
    assert affine.pending_error is None
    assert (affine.programs.selected, affine.programs.retained, affine.programs.capacity) == (1, 1, 4)
    assert (affine.residency.floor, affine.residency.state, affine.residency.pinned) == ("unpinned", "resident", True)
    assert (affine.residency.loads, affine.residency.host_copy, affine.residency.idle_s) == (0, False, None)
    assert (affine.residency.committed_bytes, affine.residency.releasing_bytes) == (24, 0)
    assert (affine.residency.host_bytes, affine.residency.pinned_by_operator) == (0, False)
    assert (affine.residency.operation, affine.residency.operation_error) == ("idle", None)
    assert affine.programs.batch_sizes == [1, 4, 8]
    assert affine.programs.shape_variants == [[]]
    assert affine.programs.max_batch_size == 4
    assert (single.programs.batch_sizes, single.programs.max_batch_size) == ([0], 0)


def test_a_model_that_failed_says_why_and_has_no_numbers(models):
    broken = models["broken"]
    assert (broken.state, broken.error.phase, broken.error.type) == ("failed", "digests", "DigestMismatch")
    assert broken.reason.startswith("digests: ")
    assert (broken.programs, broken.queue, broken.counters, broken.weights_bytes) == (None, None, None, None)
    assert broken.residency is None
    assert (broken.kind, broken.admission, broken.phase) == ("model", "open", "idle")


def test_requests_show_up_in_the_numbers_of_their_model(server, url, models):
    before = models["affine"].counters
    infer(server, 3)
    after = {model.name: model for model in WorkerStatus.model_validate(fetch_status(url)).models}["affine"]
    counters = after.counters
    assert counters.requests["OK"] == before.requests.get("OK", 0) + 1
    assert counters.dispatches == before.dispatches + 1
    assert (counters.served, counters.rows) == (before.served + 1, before.rows + 3)
    # Which of the sizes that are large enough it ran at depends on what they were measured to cost.
    (key,) = [k for k, n in counters.by_batch_size.items() if n != before.by_batch_size.get(k, 0)]
    assert counters.padding_rows == before.padding_rows + int(key) - 3
    assert after.batch_fill == counters.rows / (counters.rows + counters.padding_rows)
    assert counters.compute_seconds > before.compute_seconds
    assert after.queue_wait_s.p50 <= after.queue_wait_s.p90 <= after.queue_wait_s.p99
    assert after.cost_seconds[key] > 0
    assert (after.queue.requests, after.queue.rows) == (0, 0)


def test_the_names_of_triton_are_beside_our_own_when_they_are_wanted(server):
    from urllib.request import urlopen

    infer(server, 2)
    with urlopen(f"http://127.0.0.1:{server.http_port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    assert 'nv_inference_request_success{model="affine",version="1",worker="w7"}' in text
    assert 'rsrv_worker_batch_rows_count{model="affine",worker="w7"}' in text
    assert 'rsrv_worker_stage_seconds_count{model="affine",stage="upload",worker="w7"}' in text


def test_programs_are_named_by_their_batch_size_and_where_there_are_several_by_their_shape():
    assert program_name((), 8) == "8"
    assert program_name((224, 160), 8) == "224x160/8"
