"""Every key: default, range edges, strictness, and the tables made from the models."""

import json

import pytest
from pydantic import ValidationError

from rsrv.core.config import EndpointsConfig, ServerConfig, json_schema, key_table, node_key_table
from rsrv.core.config.keys import find_leaf, split_key, suggest_key
from rsrv.core.config.resolution import values_of
from rsrv.core.config.sections import AdmissionConfig

DEFAULTS = {
    "models_include": [],
    "allow_unhooked": [],
    "model_control_mode": "dynamic",
    "model_poll_seconds": 15.0,
    "model_settle_seconds": 1.0,
    "cache_dir": "",
    "cache_max_bytes": 8 << 30,
    "startup.ready_when": "all",
    "bundles.digests": "programs",
    "hooks.allow": True,
    "hooks.timeout_seconds": 60.0,  # the specification has none: a call that hangs would never fail
    "hooks.import_timeout_seconds": 120.0,
    "hooks.max_lost": 4,
    "shm.enabled": True,
    "shm.reap_seconds": 60.0,
    "shm.max_regions": 1024,
    "shm.max_total_bytes": None,
    "shm.allow_keys": [],
    "shm.deny_keys": ["rsw-*", "rsrvw-*"],
    "shm.require_same_uid": False,
    "runtime.backend": "auto",
    "runtime.fake.seconds_per_row": 0.0,
    "runtime.fake.memory_bytes": None,
    "runtime.device_memory_bytes": None,
    "runtime.weight_cache_fraction": 1.0,
    "runtime.weight_cache_wiggle_fraction": 0.1,
    "runtime.eviction": "lru",
    "runtime.scratch_source": "max",
    "runtime.shared_host_weights": False,
    "runtime.shared_host_weights_mode": "660",
    "runtime.map_weights": False,
    "runtime.cpu_threads": None,
    "runtime.device_ordinal": 0,
    "runtime.mem_fraction": 0.9,
    "runtime.preallocate": True,
    "runtime.allow_cpu_fallback": True,
    "runtime.compile_workers": 1,
    "runtime.compile_timeout_seconds": 600.0,
    "runtime.compile_memory_bytes": None,
    "runtime.xla_options": {},
    "runtime.numerics": "auto",
    "runtime.autotune": True,
    "runtime.autotune_cache": None,
    "runtime.autotune_cache_dir": "",
    "scheduler.discipline": "fair",
    "scheduler.fair_population": "active",
    "scheduler.ema_halflife_seconds": 30.0,
    "scheduler.recency_penalty_cap": 0.25,
    "scheduler.coalescing_discount": 0.1,
    "scheduler.cost_ema_alpha": 0.2,
    "scheduler.max_queue_depth": 1024,
    "scheduler.dispatch_timeout_seconds": 30.0,
    "scheduler.implicit_deadline": False,
    "scheduler.variant_overtakes": 0,
    "scheduler.shed_late": True,
    "scheduler.compaction_interval": 0,
    "batching.max_wait_ms": 0.0,
    "batching.split_oversize": False,
    "endpoints.host": "127.0.0.1",
    "endpoints.grpc_port": 8001,
    "endpoints.http_port": 8002,
    "endpoints.max_concurrent_requests": 64,
    "endpoints.engine": "grpcio",
    "endpoints.admin": None,
    "endpoints.admin_token_file": None,
    "metrics.triton_compat": False,
    "grpc.max_recv_msg_bytes": 536870912,
    "grpc.max_send_msg_bytes": 536870912,
    "shutdown.pause_seconds": 0.0,
    "shutdown.grace_seconds": 30.0,
    "reload.policy": "drain",
    "admission.hold": "auto",
    "admission.held_requests": None,
    "admin.model_capacity": 1024,
    "admin.program_capacity": 4,
    "admin.allow_external_dirs": False,
    "reclaim.parameter_idle_ms": 0.0,
    "reclaim.workspace_idle_ms": 0.0,
    "reclaim.host_idle_ms": 0.0,
}

OF_ONE_MODEL = {
    f"scheduler.models.<name>.{key}" for key in ("weight", "max_wait_ms", "max_batch_size", "residency", "batch_sizes")
}

ACCEPTED = [
    ("startup.ready_when", ["all", "any", ["a"], ["a", "b"]]),
    ("bundles.digests", ["strict", "programs", "off"]),
    ("hooks.timeout_seconds", [0.001, 3, None]),
    ("hooks.import_timeout_seconds", [1, 0.5]),
    ("hooks.max_lost", [0, 9]),
    ("shm.reap_seconds", [0.5, 1]),
    ("shm.max_regions", [1]),
    ("shm.max_total_bytes", [1, None]),
    ("runtime.backend", ["auto", "cpu", "cuda", "fake"]),
    ("runtime.fake.seconds_per_row", [0, 0.5]),
    ("runtime.fake.memory_bytes", [1, None]),
    ("model_control_mode", ["static", "dynamic", "explicit"]),
    ("model_poll_seconds", [0.05, 1]),
    ("model_settle_seconds", [0.05, 1]),
    ("runtime.device_memory_bytes", [1, 80 << 30, None]),
    ("runtime.weight_cache_fraction", [0, 0.5, 1]),
    ("runtime.weight_cache_wiggle_fraction", [0, 0.99]),
    ("runtime.eviction", ["lru", "cost"]),
    ("runtime.scratch_source", ["probe", "compiled", "max"]),
    ("runtime.shared_host_weights_mode", ["600", "660", "777"]),
    ("scheduler.compaction_interval", [0, 100]),
    ("runtime.cpu_threads", [1, None]),
    ("runtime.device_ordinal", [0, 7]),
    ("runtime.mem_fraction", [0.01, 1, 1.0]),
    ("runtime.compile_workers", [1, 4]),
    ("runtime.compile_timeout_seconds", [0.1, 1]),
    ("runtime.compile_memory_bytes", [1, None]),
    ("runtime.xla_options", [{}, {"xla_a": 1, "xla_b": True, "xla_c": "x", "xla_d": 0.5}]),
    ("runtime.numerics", ["auto", "f32", "tf32"]),
    ("runtime.autotune_cache", [True, False, None]),
    ("cache_max_bytes", [1, None]),
    ("scheduler.discipline", ["fair", "fifo", "edf"]),
    ("scheduler.fair_population", ["active", "prepared"]),
    ("scheduler.ema_halflife_seconds", [0.1, 1]),
    ("scheduler.recency_penalty_cap", [0.01, 1]),
    ("scheduler.coalescing_discount", [0, 0.99]),
    ("scheduler.cost_ema_alpha", [0.01, 1]),
    ("scheduler.max_queue_depth", [1]),
    ("scheduler.dispatch_timeout_seconds", [0.1, 1]),
    ("scheduler.variant_overtakes", [0, 1]),
    ("batching.max_wait_ms", [0, 0.5]),
    ("endpoints.grpc_port", [0, 1, 65535]),
    ("endpoints.http_port", [0, 1, 65535, None]),
    ("endpoints.max_concurrent_requests", [1]),
    ("endpoints.admin", [True, False, None]),
    ("endpoints.admin_token_file", ["/etc/rsrv/token", None]),
    ("grpc.max_recv_msg_bytes", [1, 2**31 - 1]),
    ("grpc.max_send_msg_bytes", [1, 2**31 - 1]),
    ("shutdown.pause_seconds", [0, 0.5]),
    ("shutdown.grace_seconds", [0, 1.5]),
    ("reload.policy", ["drain", "reject", "evict_first"]),
    ("admission.hold", ["auto", "always"]),
    ("admission.held_requests", [0, 1, 63, None]),
    ("admin.model_capacity", [1]),
    ("admin.program_capacity", [1]),
    ("reclaim.parameter_idle_ms", [0, 0.5]),
    ("reclaim.workspace_idle_ms", [0, 0.5]),
    ("reclaim.host_idle_ms", [0, 0.5]),
]

REFUSED = [
    ("model_dirs", [[], "x", [""], [1], None]),
    ("models_include", ["x", [1], [""]]),
    ("allow_unhooked", ["x", [1], [""]]),
    ("model_control_mode", ["Dynamic", "other", None]),
    ("model_poll_seconds", [0, -1, "15", True, None, float("inf")]),
    ("model_settle_seconds", [0, -1, "1", True, None, float("nan")]),
    ("runtime.device_memory_bytes", [0, -1, 1.5, "80GiB", True]),
    ("runtime.weight_cache_fraction", [-0.1, 1.1, True]),
    ("runtime.weight_cache_wiggle_fraction", [-0.1, 1, True]),
    ("runtime.eviction", ["LRU", "fifo", None]),
    ("runtime.scratch_source", ["measured", None]),
    ("runtime.shared_host_weights", [1, "on"]),
    ("runtime.shared_host_weights_mode", ["888", "66", 660, "1660", ""]),
    ("scheduler.compaction_interval", [-1, 1.0, True]),
    ("startup.ready_when", ["some", [], [1], [""], True, None]),
    ("bundles.digests", ["all", False]),
    ("hooks.allow", [1, 0, "true", "yes", None]),
    ("hooks.timeout_seconds", [0, -1, "3", True, float("inf"), float("nan")]),
    ("hooks.import_timeout_seconds", [0, -1, None, "60"]),
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
    ("runtime.fake.memory_bytes", [0, 1.5, "1GiB"]),
    ("runtime.map_weights", [1, "false"]),
    ("runtime.cpu_threads", [0, 1.0, True]),
    ("runtime.device_ordinal", [-1, True]),
    ("runtime.mem_fraction", [0, 1.01, -1, True]),
    ("runtime.preallocate", [0]),
    ("runtime.allow_cpu_fallback", [0]),
    ("runtime.compile_workers", [0, True]),
    ("runtime.compile_timeout_seconds", [0, True]),
    ("runtime.compile_memory_bytes", [0, 1.0]),
    ("runtime.xla_options", [[], "xla_a=1", {"": 1}, {"xla_a": None}, {"xla_a": [1]}]),
    ("runtime.numerics", ["F32", "bf16", None]),
    ("runtime.autotune", [1, None]),
    ("runtime.autotune_cache", [1, "on"]),
    ("runtime.autotune_cache_dir", [None, 1]),
    ("cache_dir", [None, 1]),
    ("cache_max_bytes", [0, True, 1.0]),
    ("scheduler.discipline", ["lifo", "FAIR", None]),
    ("scheduler.fair_population", ["all", None]),
    ("scheduler.ema_halflife_seconds", [0, -1, True, float("inf")]),
    ("scheduler.recency_penalty_cap", [0, 1.01, True]),
    ("scheduler.coalescing_discount", [-0.1, 1, True]),
    ("scheduler.cost_ema_alpha", [0, 1.1, True]),
    ("scheduler.max_queue_depth", [0, True, 1.0]),
    ("scheduler.dispatch_timeout_seconds", [0, -1, True]),
    ("scheduler.implicit_deadline", [1, "on"]),
    ("scheduler.variant_overtakes", [-1, 1.0, True]),
    ("scheduler.shed_late", [0, None]),
    ("batching.max_wait_ms", [-1, True, "5"]),
    ("batching.split_oversize", [1, None]),
    ("scheduler.models", [[], "x", {"m": 3}]),
    ("endpoints.host", ["", 1, None]),
    ("endpoints.grpc_port", [-1, 65536, None, True, "8001"]),
    ("endpoints.http_port", [-1, 65536, True]),
    ("endpoints.max_concurrent_requests", [0, -1, True]),
    ("endpoints.engine", ["native", "other"]),
    ("endpoints.admin", [1, "on"]),
    ("endpoints.admin_token_file", ["", 1]),
    ("metrics.triton_compat", [1, "yes", None]),
    ("grpc.max_recv_msg_bytes", [0, -1, True, 2**31]),
    ("grpc.max_send_msg_bytes", [0, -1, True, 2**31]),
    ("shutdown.pause_seconds", [-1, True]),
    ("shutdown.grace_seconds", [-1, "30"]),
    ("reload.policy", ["keep", "DRAIN", None]),
    ("admission.hold", ["never", True, None]),
    ("admission.held_requests", [-1, 64, 65, 1.5, True, "8"]),
    ("admin.model_capacity", [0, -1, True, 1.5]),
    ("admin.program_capacity", [0, -1, True, 1.5]),
    ("admin.allow_external_dirs", [1, "yes", None]),
    ("reclaim.parameter_idle_ms", [-1, True, "5", None]),
    ("reclaim.workspace_idle_ms", [-1, True, "5", None]),
    ("reclaim.host_idle_ms", [-1, True, "5", None]),
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
    assert {key for key, _ in REFUSED} | OF_ONE_MODEL == ({row.key for row in key_table()} | {"scheduler.models"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("max_batch_size", value) for value in (0, -1, True, 1.5, "4")],
        *[("weight", value) for value in (0, -1, True, "1", None, float("nan"), float("inf"))],
        *[("max_wait_ms", value) for value in (-1, True, "1")],
        *[("batch_sizes", value) for value in ([], [0], [1, 1], [1.0], [True], [2**31], "1,8", list(range(1, 258)))],
    ],
)
def test_settings_of_one_model_are_checked(key, value):
    with pytest.raises(ValidationError):
        ServerConfig.model_validate({"model_dirs": ["/m"], "scheduler": {"models": {"m": {key: value}}}})


def test_a_cpu_does_not_compute_in_tf32():
    with pytest.raises(ValidationError, match="numerics is tf32, which no CPU computes in"):
        ServerConfig.model_validate({"model_dirs": ["/m"], "runtime": {"numerics": "tf32", "backend": "cpu"}})


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


@pytest.mark.parametrize(("limit", "held"), [(64, 32), (5, 2), (1, 0)])
def test_half_of_the_requests_may_wait_unless_the_configuration_says_how_many(limit, held):
    endpoints = EndpointsConfig(max_concurrent_requests=limit)
    assert ServerConfig(model_dirs=["/m"], endpoints=endpoints).held_requests == held
    admission = AdmissionConfig(held_requests=0)
    assert ServerConfig(model_dirs=["/m"], endpoints=endpoints, admission=admission).held_requests == 0


def test_requests_that_wait_leave_room_for_others():
    with pytest.raises(ValidationError, match=r"held_requests is 8; wanted less than .* which is 8"):
        ServerConfig(
            model_dirs=["/m"],
            endpoints=EndpointsConfig(max_concurrent_requests=8),
            admission=AdmissionConfig(held_requests=8),
        )


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
    assert set(rows) == {"model_dirs", *OF_ONE_MODEL, *DEFAULTS}
    assert all(row.meaning.endswith(".") for row in [*rows.values(), *node_key_table()])
    assert rows["model_dirs"].default is None
    assert rows["shm.deny_keys"].default == "[rsw-*, rsrvw-*]"
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


@pytest.mark.parametrize(
    "key", ["batching.max_wait_ms", "scheduler.dispatch_timeout_seconds", "shutdown.grace_seconds"]
)
def test_a_time_that_no_clock_can_hold_is_refused(key):
    section, name = key.split(".")
    with pytest.raises(ValidationError, match="less than or equal"):
        ServerConfig(model_dirs=["m"], **{section: {name: 1e300}})
