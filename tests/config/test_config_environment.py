"""Variables: each key's own, older names, the few exceptions, and what is refused."""

import logging

import pytest

from rsrv.core.config import hook_pool_size, key_table, process_variables, resolve, worker_name
from rsrv.core.config.environment import read_overrides
from rsrv.core.errors import ConfigError

SAMPLES = {
    "model_dirs": ("{tmp}:{tmp}", ["{tmp}", "{tmp}"]),
    "models_include": ("a::b:", ["a", "b"]),
    "allow_unhooked": ("net", ["net"]),
    "model_control_mode": ("explicit", "explicit"),
    "model_poll_seconds": ("2.5", 2.5),
    "model_settle_seconds": ("0.5", 0.5),
    "cache_dir": ("/var/cache/rsrv", "/var/cache/rsrv"),
    "cache_max_bytes": ("1000000", 1000000),
    "startup.ready_when": ("any", "any"),
    "bundles.digests": ("strict", "strict"),
    "hooks.allow": ("no", False),
    "hooks.timeout_seconds": ("2.5", 2.5),
    "hooks.import_timeout_seconds": ("90", 90.0),
    "hooks.max_lost": ("0", 0),
    "shm.enabled": ("off", False),
    "shm.reap_seconds": ("5", 5.0),
    "shm.max_regions": ("7", 7),
    "shm.max_total_bytes": ("1048576", 1048576),
    "shm.allow_keys": ("a*:b", ["a*", "b"]),
    "shm.deny_keys": ("", []),
    "shm.require_same_uid": ("1", True),
    "runtime.backend": ("gpu", "cuda"),
    "runtime.fake.seconds_per_row": ("0.01", 0.01),
    "runtime.fake.memory_bytes": ("1048576", 1 << 20),
    "runtime.device_memory_bytes": ("1073741824", 1 << 30),
    "runtime.weight_cache_fraction": ("0.5", 0.5),
    "runtime.weight_cache_wiggle_fraction": ("0.2", 0.2),
    "runtime.eviction": ("cost", "cost"),
    "runtime.scratch_source": ("compiled", "compiled"),
    "runtime.shared_host_weights": ("on", True),
    "runtime.shared_host_weights_mode": ("600", "600"),
    "runtime.map_weights": ("TRUE", True),
    "runtime.cpu_threads": ("2", 2),
    "runtime.device_ordinal": ("3", 3),
    "runtime.mem_fraction": ("0.5", 0.5),
    "runtime.preallocate": ("False", False),
    "runtime.allow_cpu_fallback": ("0", False),
    "runtime.compile_workers": ("2", 2),
    "runtime.compile_timeout_seconds": ("1e2", 100.0),
    "runtime.compile_memory_bytes": ("null", None),
    "runtime.xla_options": (
        "--xla_a=1 xla_b=true xla_c=x:y xla_d=0.5",
        {"xla_a": 1, "xla_b": True, "xla_c": "x:y", "xla_d": 0.5},
    ),
    "runtime.numerics": ("f32", "f32"),
    "runtime.autotune": ("off", False),
    "runtime.autotune_cache": ("yes", True),
    "runtime.autotune_cache_dir": ("/var/cache/tuning", "/var/cache/tuning"),
    "scheduler.discipline": ("edf", "edf"),
    "scheduler.fair_population": ("prepared", "prepared"),
    "scheduler.ema_halflife_seconds": ("10", 10.0),
    "scheduler.recency_penalty_cap": ("0.5", 0.5),
    "scheduler.coalescing_discount": ("0", 0.0),
    "scheduler.cost_ema_alpha": ("1", 1.0),
    "scheduler.max_queue_depth": ("9", 9),
    "scheduler.dispatch_timeout_seconds": ("5", 5.0),
    "scheduler.implicit_deadline": ("yes", True),
    "scheduler.variant_overtakes": ("8", 8),
    "scheduler.shed_late": ("off", False),
    "scheduler.compaction_interval": ("50", 50),
    "batching.max_wait_ms": ("2.5", 2.5),
    "batching.split_oversize": ("on", True),
    "endpoints.host": ("0.0.0.0", "0.0.0.0"),
    "endpoints.grpc_port": ("0", 0),
    "endpoints.http_port": ("9002", 9002),
    "endpoints.max_concurrent_requests": ("8", 8),
    "endpoints.engine": ("grpcio", "grpcio"),
    "endpoints.admin": ("off", False),
    "endpoints.admin_token_file": ("/etc/rsrv/token", "/etc/rsrv/token"),
    "metrics.triton_compat": ("yes", True),
    "grpc.max_recv_msg_bytes": ("1000", 1000),
    "grpc.max_send_msg_bytes": ("2000", 2000),
    "shutdown.pause_seconds": ("0.5", 0.5),
    "shutdown.grace_seconds": ("10", 10.0),
    "reload.policy": ("reject", "reject"),
    "admission.hold": ("always", "always"),
    "admission.held_requests": ("4", 4),
    "admin.model_capacity": ("16", 16),
    "admin.program_capacity": ("2", 2),
    "admin.allow_external_dirs": ("yes", True),
    "reclaim.parameter_idle_ms": ("1500", 1500.0),
    "reclaim.workspace_idle_ms": ("0.5", 0.5),
    "reclaim.host_idle_ms": ("60000", 60000.0),
}


@pytest.fixture
def raw(tmp_path):
    return {"model_dirs": [str(tmp_path)]}


def value_of(resolved, key):
    return next((value, origin) for name, value, origin in resolved.rows() if name == key)


def test_the_samples_cover_every_key_that_has_a_variable():
    assert set(SAMPLES) == {row.key for row in key_table() if row.env is not None}


@pytest.mark.parametrize("prefix", ["RSRV_WORKER_", "INFERENCE_SERVER_"])
@pytest.mark.parametrize("key", SAMPLES)
def test_a_variable_sets_its_key_under_both_prefixes(key, prefix, raw, tmp_path):
    text, value = SAMPLES[key]
    text = text.replace("{tmp}", str(tmp_path))
    expected = [str(tmp_path)] * 2 if key == "model_dirs" else value
    variable = prefix + key.upper().replace(".", "_")
    resolved = resolve(raw, environ={variable: text})
    assert value_of(resolved, key) == (expected, f"env {variable}")
    assert resolved.overrides == [(variable, text)]


@pytest.mark.parametrize("text", ["1", "true", "YES", "On", " yes "])
def test_words_for_true(text, raw):
    environ = {"RSRV_WORKER_RUNTIME_MAP_WEIGHTS": text}
    assert resolve(raw, environ=environ).config.runtime.map_weights is True


@pytest.mark.parametrize("text", ["0", "false", "NO", "Off"])
def test_words_for_false(text, raw):
    environ = {"RSRV_WORKER_HOOKS_ALLOW": text}
    assert resolve(raw, environ=environ).config.hooks.allow is False


@pytest.mark.parametrize("text", ["null", "None", "off"])
def test_words_for_nothing_turn_the_http_port_off(text, raw):
    environ = {"RSRV_WORKER_ENDPOINTS_HTTP_PORT": text}
    assert resolve(raw, environ=environ).config.endpoints.http_port is None


@pytest.mark.parametrize(
    ("text", "value"), [("off", False), ("no", False), ("on", True), ("null", None), ("none", None)]
)
def test_off_is_false_where_a_key_is_true_or_false_or_unset(text, value, raw):
    config = resolve(raw, environ={"RSRV_WORKER_ENDPOINTS_ADMIN": text}).config
    assert config.endpoints.admin is value


def test_ready_when_may_be_a_list_of_names(raw):
    environ = {"RSRV_WORKER_STARTUP_READY_WHEN": "a:b"}
    assert resolve(raw, environ=environ).config.startup.ready_when == ["a", "b"]
    assert resolve(raw, environ={"RSRV_WORKER_STARTUP_READY_WHEN": "one"}).config.startup.ready_when == ["one"]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("HOOKS_ALLOW", "maybe"),
        ("HOOKS_ALLOW", ""),
        ("HOOKS_MAX_LOST", "1.0"),
        ("HOOKS_MAX_LOST", ""),
        ("HOOKS_MAX_LOST", "1_0"),
        ("HOOKS_MAX_LOST", "٣"),
        ("SHM_REAP_SECONDS", "long"),
        ("SHM_REAP_SECONDS", "0"),
        ("SHM_REAP_SECONDS", "inf"),
        ("SHM_REAP_SECONDS", "nan"),
        ("ENDPOINTS_GRPC_PORT", "70000"),
        ("ENDPOINTS_GRPC_PORT", "null"),
        ("RUNTIME_BACKEND", "tpu"),
        ("MODEL_DIRS", ":"),
        ("STARTUP_READY_WHEN", ""),
        ("ENDPOINTS_HOST", ""),
    ],
)
def test_a_text_that_does_not_fit_is_refused_naming_the_variable_and_the_key(key, text, raw):
    variable = f"RSRV_WORKER_{key}"
    with pytest.raises(ConfigError, match=variable) as caught:
        resolve(raw, environ={variable: text})
    section, _, field = key.lower().partition("_")
    assert field in caught.value.message
    assert section in caught.value.message
    assert caught.value.exit_code == 78


def test_an_unknown_variable_is_refused_with_a_suggestion(raw):
    with pytest.raises(ConfigError, match="RSRV_WORKER_RUNTIME_CPU_THREAD names no key") as caught:
        resolve(raw, environ={"RSRV_WORKER_RUNTIME_CPU_THREAD": "1"})
    assert caught.value.hint == "did you mean RSRV_WORKER_RUNTIME_CPU_THREADS?"


@pytest.mark.parametrize("prefix", ["RSRV_WORKER_", "INFERENCE_SERVER_"])
@pytest.mark.parametrize(
    ("suffix", "instead"),
    [
        ("BATCH_POLICY_MAX", "scheduler.models.<name>.max_batch_size"),
        ("BATCH_POLICY", "scheduler.models.<name>.max_batch_size"),
        ("RUNTIME_RESIDENCY_MODE", "model_control_mode"),
    ],
)
def test_the_variable_of_a_removed_key_is_refused(prefix, suffix, instead, raw):
    with pytest.raises(ConfigError, match="removed") as caught:
        resolve(raw, environ={prefix + suffix: "x"})
    assert caught.value.hint == f"use {instead}"


def test_variables_of_others_and_the_exceptions_are_left_alone(raw):
    environ = {
        "RSRV_WORKER_NAME": "a",
        "RSRV_WORKER_THREADS": "2",
        "RSRV_META_CONCURRENCY": "2",
        "RSRV_GATEWAY_X": "1",
        "RSRV_ENDPOINTS_GRPC_PORT": "1",
        "PATH": "/bin",
    }
    resolved = resolve(raw, environ=environ)
    assert resolved.overrides == []
    assert resolved.config.endpoints.grpc_port == 8001


def test_older_names_are_told_in_one_line(raw, caplog):
    environ = {"INFERENCE_SERVER_HOOKS_MAX_LOST": "1", "INFERENCE_SERVER_SHM_MAX_REGIONS": "2"}
    with caplog.at_level(logging.INFO, logger="rsrv.core.config.environment"):
        resolve(raw, environ=environ)
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("environment")]
    assert lines == [
        "older_variables=INFERENCE_SERVER_HOOKS_MAX_LOST,INFERENCE_SERVER_SHM_MAX_REGIONS "
        "use=RSRV_WORKER_HOOKS_MAX_LOST,RSRV_WORKER_SHM_MAX_REGIONS"
    ]


def test_our_name_wins_over_an_older_one_whatever_that_holds(raw):
    environ = {"INFERENCE_SERVER_HOOKS_MAX_LOST": "rubbish", "RSRV_WORKER_HOOKS_MAX_LOST": "2"}
    resolved = resolve(raw, environ=environ)
    assert resolved.config.hooks.max_lost == 2
    assert resolved.overrides == [("RSRV_WORKER_HOOKS_MAX_LOST", "2")]


def test_an_older_variable_that_names_no_key_is_ignored_with_a_warning(raw, caplog):
    resolve(raw, environ={"INFERENCE_SERVER_RUNTIME_RESIDENCY_GROUPS": "0"})
    assert "ignored=INFERENCE_SERVER_RUNTIME_RESIDENCY_GROUPS" in caplog.text


def test_the_older_names_of_the_ports(raw):
    environ = {"INFERENCE_SERVER_ENDPOINTS_PORT": "9", "INFERENCE_SERVER_ENDPOINTS_METRICS_PORT": "0"}
    endpoints = resolve(raw, environ=environ).config.endpoints
    assert endpoints.grpc_port == 9
    assert endpoints.http_port is None
    environ["INFERENCE_SERVER_ENDPOINTS_METRICS_PORT"] = "10"
    assert resolve(raw, environ=environ).config.endpoints.http_port == 10


def test_the_name_of_the_worker_has_an_older_variable(caplog):
    caplog.set_level(logging.INFO)
    assert worker_name({}) is None
    assert worker_name({"RSRV_WORKER_NAME": ""}) is None
    assert worker_name({"RSRV_WORKER_NAME": "a", "REACTANT_WORKER_NAME": "b"}) == "a"
    assert caplog.text == ""
    assert worker_name({"REACTANT_WORKER_NAME": "b"}) == "b"
    assert "older_variables=REACTANT_WORKER_NAME use=RSRV_WORKER_NAME" in caplog.text


@pytest.mark.parametrize(
    ("cores", "workers", "size"), [(1, 1, 1), (8, 1, 8), (8, 3, 2), (2, 8, 1), (64, 1, 16), (64, 2, 16), (64, 8, 8)]
)
def test_the_hook_pool_is_this_workers_share_of_the_cores(cores, workers, size):
    assert hook_pool_size({}, workers=workers, cores=cores) == size


def test_the_hook_pool_follows_its_variable_verbatim():
    assert hook_pool_size({"RSRV_WORKER_THREADS": "40"}, cores=2) == 40
    assert hook_pool_size({"REACTANT_WORKER_THREADS": "3"}, cores=2) == 3
    assert hook_pool_size({"RSRV_WORKER_THREADS": "4", "REACTANT_WORKER_THREADS": "3"}) == 4


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_a_hook_pool_has_at_least_one_thread(text):
    with pytest.raises(ConfigError, match="RSRV_WORKER_THREADS"):
        hook_pool_size({"RSRV_WORKER_THREADS": text})


def test_the_exceptions_are_documented():
    assert [variable.name for variable in process_variables()] == [
        "RSRV_WORKER_NAME",
        "RSRV_WORKER_THREADS",
        "RSRV_ALLOW_FAKE",
    ]


def test_a_mapping_that_is_written_otherwise_is_told_how_it_is_written():
    with pytest.raises(ConfigError, match="wanted mapping") as caught:
        read_overrides({"RSRV_WORKER_RUNTIME_XLA_OPTIONS": '{"xla_a": 1}'})
    assert caught.value.hint == "a mapping is written name=value, with spaces between its entries"
