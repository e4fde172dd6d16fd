"""Every key: default, range edges, strictness, and the tables made from the models."""

import json

import pytest
from pydantic import ValidationError

from rsrv.core.config import EndpointsConfig, ServerConfig, json_schema, key_table, node_key_table
from rsrv.core.config.keys import find_leaf, split_key, suggest_key
from rsrv.core.config.resolution import values_of

DEFAULTS = {
    "models_include": [],
    "allow_unhooked": [],
    "model_control_mode": "static",
    "startup.ready_when": "all",
    "bundles.digests": "programs",
    "hooks.allow": True,
    "hooks.timeout_seconds": None,
    "hooks.max_lost": 4,
    "shm.enabled": True,
    "shm.reap_seconds": 60.0,
    "shm.max_regions": 1024,
    "shm.max_total_bytes": None,
    "shm.allow_keys": [],
    "shm.deny_keys": ["rsw-*"],
    "shm.require_same_uid": False,
    "runtime.backend": "auto",
    "runtime.fake.seconds_per_row": 0.0,
    "runtime.map_weights": False,
    "runtime.cpu_threads": None,
    "runtime.device_ordinal": 0,
    "runtime.mem_fraction": 0.9,
    "runtime.preallocate": True,
    "runtime.allow_cpu_fallback": True,
    "runtime.compile_workers": 1,
    "runtime.compile_timeout_seconds": 600.0,
    "runtime.compile_memory_bytes": None,
    "scheduler.max_queue_depth": 1024,
    "endpoints.host": "127.0.0.1",
    "endpoints.grpc_port": 8001,
    "endpoints.http_port": 8002,
    "endpoints.max_concurrent_requests": 64,
    "endpoints.engine": "grpcio",
    "grpc.max_recv_msg_bytes": 536870912,
    "grpc.max_send_msg_bytes": 536870912,
    "shutdown.pause_seconds": 0.0,
    "shutdown.grace_seconds": 30.0,
}

ACCEPTED = [
    ("startup.ready_when", ["all", "any", ["a"], ["a", "b"]]),
    ("bundles.digests", ["strict", "programs", "off"]),
    ("hooks.timeout_seconds", [0.001, 3, None]),
    ("hooks.max_lost", [0, 9]),
    ("shm.reap_seconds", [0.5, 1]),
    ("shm.max_regions", [1]),
    ("shm.max_total_bytes", [1, None]),
    ("runtime.backend", ["auto", "cpu", "cuda", "fake"]),
    ("runtime.fake.seconds_per_row", [0, 0.5]),
    ("runtime.cpu_threads", [1, None]),
    ("runtime.device_ordinal", [0, 7]),
    ("runtime.mem_fraction", [0.01, 1, 1.0]),
    ("runtime.compile_workers", [1, 4]),
    ("runtime.compile_timeout_seconds", [0.1, 1]),
    ("runtime.compile_memory_bytes", [1, None]),
    ("scheduler.max_queue_depth", [1]),
    ("endpoints.grpc_port", [0, 1, 65535]),
    ("endpoints.http_port", [0, 1, 65535, None]),
    ("endpoints.max_concurrent_requests", [1]),
    ("grpc.max_recv_msg_bytes", [1]),
    ("grpc.max_send_msg_bytes", [1]),
    ("shutdown.pause_seconds", [0, 0.5]),
    ("shutdown.grace_seconds", [0, 1.5]),
]

REFUSED = [
    ("model_dirs", [[], "x", [""], [1], None]),
    ("models_include", ["x", [1], [""]]),
    ("allow_unhooked", ["x", [1], [""]]),
    ("model_control_mode", ["dynamic", "explicit", "other", None]),
    ("startup.ready_when", ["some", [], [1], [""], True, None]),
    ("bundles.digests", ["all", False]),
    ("hooks.allow", [1, 0, "true", "yes", None]),
    ("hooks.timeout_seconds", [0, -1, "3", True, float("inf"), float("nan")]),
    ("hooks.max_lost", [-1, 1.0, True]),
    ("shm.enabled", [1, "on"]),
    ("shm.reap_seconds", [0, -1, "1", True]),
    ("shm.max_regions", [0, -1, 1.5, True]),
    ("shm.max_total_bytes", [0, True, "1"]),
    ("shm.allow_keys", ["a", [1]]),
    ("shm.deny_keys", ["a", [None]]),
    ("shm.require_same_uid", [1]),
    ("runtime.backend", ["gpus", "CPU", 1]),
    ("runtime.fake.seconds_per_row", [-0.1, True]),
    ("runtime.map_weights", [1, "false"]),
    ("runtime.cpu_threads", [0, 1.0, True]),
    ("runtime.device_ordinal", [-1, True]),
    ("runtime.mem_fraction", [0, 1.01, -1, True]),
    ("runtime.preallocate", [0]),
    ("runtime.allow_cpu_fallback", [0]),
    ("runtime.compile_workers", [0, True]),
    ("runtime.compile_timeout_seconds", [0, True]),
    ("runtime.compile_memory_bytes", [0, 1.0]),
    ("scheduler.max_queue_depth", [0, True, 1.0]),
    ("scheduler.models", [[], "x", {"m": 3}]),
    ("endpoints.host", ["", 1, None]),
    ("endpoints.grpc_port", [-1, 65536, None, True, "8001"]),
    ("endpoints.http_port", [-1, 65536, True]),
    ("endpoints.max_concurrent_requests", [0, -1, True]),
    ("endpoints.engine", ["native", "other"]),
    ("grpc.max_recv_msg_bytes", [0, -1, True]),
    ("grpc.max_send_msg_bytes", [0, -1, True]),
    ("shutdown.pause_seconds", [-1, True]),
    ("shutdown.grace_seconds", [-1, "30"]),
]


def nested(key, value):
    for name in reversed(key.split(".")):
        value = {name: value}
    return {"model_dirs": ["/m"], **value}


def lookup(config, key):
    return dict(values_of(config))[key]


def test_the_defaults_are_those_of_the_specification():
    assert dict(values_of(ServerConfig(model_dirs=["/m"]))) == {"model_dirs": ["/m"], **DEFAULTS}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in ACCEPTED for value in values])
def test_values_at_the_edge_of_their_range_are_accepted(key, value):
    assert lookup(ServerConfig.model_validate(nested(key, value)), key) == value


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in REFUSED for value in values])
def test_values_past_their_range_or_of_another_type_are_refused(key, value):
    with pytest.raises(ValidationError):
        ServerConfig.model_validate(nested(key, value))


def test_every_key_has_refused_values_in_this_file():
    assert {key for key, _ in REFUSED} | {"scheduler.models.<name>.max_batch_size"} == (
        {row.key for row in key_table()} | {"scheduler.models"}
    )


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "4"])
def test_a_model_cap_is_at_least_one(value):
    with pytest.raises(ValidationError):
        ServerConfig.model_validate({"model_dirs": ["/m"], "scheduler": {"models": {"m": {"max_batch_size": value}}}})


def test_gpu_is_another_word_for_cuda():
    assert lookup(ServerConfig.model_validate(nested("runtime.backend", "gpu")), "runtime.backend") == "cuda"


def test_an_integer_becomes_a_float_where_one_is_expected():
    grace = lookup(ServerConfig.model_validate(nested("shutdown.grace_seconds", 5)), "shutdown.grace_seconds")
    assert grace == 5.0
    assert type(grace) is float


def test_the_two_ports_differ_unless_the_system_chooses_them():
    EndpointsConfig(grpc_port=0, http_port=0)
    EndpointsConfig(grpc_port=9, http_port=None)
    with pytest.raises(ValidationError, match="both 9"):
        EndpointsConfig(grpc_port=9, http_port=9)


def test_a_configuration_cannot_be_changed():
    config = ServerConfig(model_dirs=["/m"])
    with pytest.raises(ValidationError):
        config.endpoints.grpc_port = 1


def test_two_configurations_share_no_default():
    one, other = ServerConfig(model_dirs=["/m"]), ServerConfig(model_dirs=["/m"])
    one.models_include.append("x")
    one.scheduler.models["m"] = None
    assert other.models_include == []
    assert ServerConfig(model_dirs=["/m"]).scheduler.models == {}


def test_the_key_table_has_every_key_with_a_meaning():
    rows = {row.key: row for row in key_table()}
    assert set(rows) == {"model_dirs", "scheduler.models.<name>.max_batch_size", *DEFAULTS}
    assert all(row.meaning.endswith(".") for row in [*rows.values(), *node_key_table()])
    assert rows["model_dirs"].default is None
    assert rows["shm.deny_keys"].default == "[rsw-*]"
    assert rows["hooks.allow"].default == "true"
    assert rows["scheduler.models.<name>.max_batch_size"].env is None
    assert rows["runtime.fake.seconds_per_row"].env == "RSRV_WORKER_RUNTIME_FAKE_SECONDS_PER_ROW"
    assert rows["endpoints.http_port"].type == "integer, 0…65535 or null"
    assert rows["runtime.mem_fraction"].type == "number, > 0 and ≤ 1"


def test_no_two_keys_share_a_variable():
    variables = [row.env for row in key_table() if row.env is not None]
    assert len(set(variables)) == len(variables)


def test_a_model_name_with_dots_is_one_part_of_a_key():
    assert find_leaf("scheduler.models.a.b.max_batch_size") is not None
    assert split_key("scheduler.models.a.b.max_batch_size") == ("scheduler", "models", "a.b", "max_batch_size")
    assert find_leaf("scheduler.models.max_batch_size") is None
    assert split_key("endpoints.grpc_port") == ("endpoints", "grpc_port")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("runtme", "runtime"),
        ("runtime.cpu_thread", "runtime.cpu_threads"),
        ("cpu_threads", "runtime.cpu_threads"),
        ("endpoints.max_queue_depth", "scheduler.max_queue_depth"),
        ("scheduler.models.m.max_batchsize", "scheduler.models.m.max_batch_size"),
        ("zzzzzzzz", None),
        ("a.b.c.d.e", None),
    ],
)
def test_a_misspelt_key_has_a_suggestion(typed, meant):
    assert suggest_key(typed.split(".")) == meant


def test_the_schema_names_every_key_and_is_json():
    schema = json.loads(json.dumps(json_schema()))
    definitions = schema["$defs"]
    assert set(schema["properties"]) == {"model_repo", "base_port", "metrics_base_port", "global", "workers", "models"}
    assert schema["required"] == ["model_repo", "workers"]
    assert schema["properties"]["global"]["$ref"] == "#/$defs/WorkerBlock"
    assert {"name", "gpu", "port", "host", "runtime", "endpoints"} <= set(definitions["WorkerEntry"]["properties"])
    assert definitions["WorkerEntry"]["required"] == ["name"]
    assert "required" not in definitions["WorkerBlock"]
    assert definitions["EndpointsConfig"]["properties"]["grpc_port"]["maximum"] == 65535
    for key in DEFAULTS:
        block = definitions["WorkerBlock"]
        for name in key.split("."):
            block = block["properties"][name]
            while "$ref" in block:
                block = definitions[block["$ref"].rsplit("/", 1)[-1]]


def test_every_object_of_the_schema_refuses_unknown_keys_and_permits_x_keys():
    schema = json_schema()
    for definition in [schema, *schema["$defs"].values()]:
        assert definition["additionalProperties"] is False
        assert "^x-" in definition["patternProperties"]
