"""Precedence, origins, and error texts of a resolved configuration."""

import logging

import pytest

from rsrv.core.config import ResolvedConfig, ServerConfig, resolve
from rsrv.core.errors import ConfigError


@pytest.fixture
def raw(tmp_path):
    return {"model_dirs": [str(tmp_path)]}


def origin_of(resolved, key):
    return resolved.origins[key]


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(raw):
    key = "scheduler.max_queue_depth"
    environ = {"RSRV_WORKER_SCHEDULER_MAX_QUEUE_DEPTH": "3"}

    resolved = resolve(raw, environ={})
    assert (resolved.config.scheduler.max_queue_depth, resolved.origins[key]) == (1024, "default")

    raw["scheduler"] = {"max_queue_depth": 2}
    resolved = resolve(raw, environ={})
    assert (resolved.config.scheduler.max_queue_depth, resolved.origins[key]) == (2, "file")

    resolved = resolve(raw, environ=environ)
    expected = (3, "env RSRV_WORKER_SCHEDULER_MAX_QUEUE_DEPTH")
    assert (resolved.config.scheduler.max_queue_depth, resolved.origins[key]) == expected

    resolved = resolve(raw, environ=environ, flags={key: 4})
    assert (resolved.config.scheduler.max_queue_depth, resolved.origins[key]) == (4, "flag")
    assert resolved.overrides == [("RSRV_WORKER_SCHEDULER_MAX_QUEUE_DEPTH", "3")]


def test_a_flag_may_set_null(raw):
    resolved = resolve(raw, environ={}, flags={"endpoints.http_port": None})
    assert resolved.config.endpoints.http_port is None
    assert resolved.origins["endpoints.http_port"] == "flag"


def test_the_process_environment_is_read_unless_it_is_left_out(raw, monkeypatch):
    monkeypatch.setenv("RSRV_WORKER_HOOKS_MAX_LOST", "9")
    assert resolve(raw).config.hooks.max_lost == 9
    assert resolve(raw, environ=None).config.hooks.max_lost == 4


def test_every_key_has_an_origin(raw):
    resolved = resolve({**raw, "scheduler": {"models": {"a.b": {"max_batch_size": 4}}}}, environ={})
    assert set(resolved.origins) == {key for key, _, _ in resolved.rows()}
    assert resolved.origins["scheduler.models.a.b.max_batch_size"] == "file"
    assert resolved.origins["model_dirs"] == "file"
    assert resolved.origins["runtime.fake.seconds_per_row"] == "default"
    assert isinstance(resolved.config, ServerConfig)


def test_the_raw_values_stay_as_they_were(raw):
    raw["endpoints"] = {"metrics_port": 0, "x-note": 1}
    before = {"model_dirs": list(raw["model_dirs"]), "endpoints": {"metrics_port": 0, "x-note": 1}}
    resolved = resolve(raw, environ={"RSRV_WORKER_ENDPOINTS_HOST": "::1"}, flags={"hooks.allow": False})
    assert raw == before
    assert resolved.config.endpoints.http_port is None


def test_x_keys_are_free_everywhere_but_among_names(raw):
    raw.update({"x-a": object(), "shm": {"x-b": 1, "max_regions": 2}})
    raw["scheduler"] = {"models": {"x-model": {"max_batch_size": 3, "x-c": 1}}}
    config = resolve(raw, environ={}).config
    assert config.shm.max_regions == 2
    assert config.scheduler.models["x-model"].max_batch_size == 3


def test_an_empty_section_is_its_defaults(raw):
    config = resolve({**raw, "shm": None, "scheduler": {"models": {"m": None}}}, environ={}).config
    assert config.shm.max_regions == 1024
    assert config.scheduler.models["m"].max_batch_size is None


def test_the_older_port_names_are_read(raw):
    config = resolve({**raw, "endpoints": {"port": 5, "metrics_port": 6}}, environ={}).config
    assert (config.endpoints.grpc_port, config.endpoints.http_port) == (5, 6)
    config = resolve({**raw, "endpoints": {"metrics_port": 0}}, environ={}).config
    assert config.endpoints.http_port is None
    with pytest.raises(ConfigError, match=r"older name of endpoints.grpc_port, and both are there"):
        resolve({**raw, "endpoints": {"port": 5, "grpc_port": 5}}, environ={})


@pytest.mark.parametrize(
    ("more", "text", "hint"),
    [
        ({"runtme": {}}, "unknown key runtme", "did you mean runtime?"),
        ({"cpu_threads": 1}, "unknown key cpu_threads", "did you mean runtime.cpu_threads?"),
        ({"shm": {"max_region": 1}}, "unknown key shm.max_region", "did you mean shm.max_regions?"),
        ({"cache_dir": 3}, "cache_dir: 3 is not accepted; wanted string", None),
        ({"runtime": 3}, "runtime: 3 is not accepted; wanted a mapping", None),
        ({"hooks": {"allow": "yes"}}, "hooks.allow: 'yes' is not accepted; wanted true or false", None),
        (
            {"endpoints": {"grpc_port": "8001"}},
            "endpoints.grpc_port: '8001' is not accepted; wanted integer, 0…65535",
            None,
        ),
        (
            {"startup": {"ready_when": []}},
            "startup.ready_when: [] is not accepted; wanted one of all, any or list of strings",
            None,
        ),
        (
            {"shm": {"deny_keys": ["a", 3]}},
            "shm.deny_keys: 3 is not accepted; wanted list of strings",
            None,
        ),
        (
            {"model_control_mode": "live"},
            "model_control_mode: 'live' is not accepted; wanted one of static, dynamic, explicit",
            None,
        ),
        ({"endpoints": {"engine": "native"}}, "endpoints.engine: the engine 'native' is not built yet", None),
        ({"endpoints": {"http_port": 8001}}, "grpc_port and http_port are both 8001", None),
        (
            {"scheduler": {"models": {"a.b": {"max_batch_size": 0}}}},
            "scheduler.models.a.b.max_batch_size: 0 is not accepted; wanted integer, ≥ 1 or null",
            None,
        ),
        ({"batch_policy": {}}, "batch_policy was removed", "use scheduler.models.<name>.max_batch_size"),
        ({"runtime": {"residency_mode": "x"}}, "runtime.residency_mode was removed", "use model_control_mode"),
        ({3: 1}, "the key 3 is not text", None),
        ({"scheduler": {"models": {1: {}}}}, "scheduler.models: the name 1 is not text", None),
        ({"runtime": {True: 1}}, "the key True is not text", None),
    ],
)
def test_a_wrong_key_is_named_with_its_value_and_what_was_wanted(raw, more, text, hint):
    with pytest.raises(ConfigError) as caught:
        resolve({**raw, **more}, environ={})
    assert caught.value.message.startswith("configuration: ")
    assert text in caught.value.message
    assert caught.value.hint == hint
    assert caught.value.exit_code == 78


def test_all_problems_are_told_at_once(raw):
    with pytest.raises(ConfigError) as caught:
        resolve({**raw, "shm": {"max_regions": 0, "reap": 1}, "hooks": {"max_lost": -1}}, environ={})
    lines = caught.value.message.splitlines()
    assert lines[0] == "configuration: 3 problems"
    assert sorted(line.strip().split(":")[0] for line in lines[1:]) == [
        "hooks.max_lost",
        "shm.max_regions",
        "unknown key shm.reap",
    ]


def test_a_long_value_is_shortened_in_an_error(raw):
    with pytest.raises(ConfigError) as caught:
        resolve({**raw, "endpoints": {"grpc_port": "9" * 1000}}, environ={})
    assert len(caught.value.message) < 200


def test_an_error_says_where_a_value_came_from(raw):
    with pytest.raises(ConfigError, match=r"\(from flag\)"):
        resolve(raw, environ={}, flags={"endpoints.grpc_port": 70000})
    with pytest.raises(
        ConfigError, match=r"'/nope/x' is not an existing directory \(from env RSRV_WORKER_MODEL_DIRS\)"
    ):
        resolve(raw, environ={"RSRV_WORKER_MODEL_DIRS": "/nope/x"})


def test_a_wrong_section_stays_wrong_under_a_variable(raw):
    with pytest.raises(ConfigError, match="shm: 3 is not accepted; wanted a mapping"):
        resolve({**raw, "shm": 3}, environ={"RSRV_WORKER_SHM_MAX_REGIONS": "1"})


def test_an_unknown_flag_is_refused(raw):
    with pytest.raises(ConfigError, match=r"unknown key endpoints.grpcport") as caught:
        resolve(raw, environ={}, flags={"endpoints.grpcport": 1})
    assert caught.value.hint == "did you mean endpoints.grpc_port?"


def test_the_directories_must_exist(raw, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for bad in (tmp_path / "nope", file):
        with pytest.raises(ConfigError, match="is not an existing directory"):
            resolve({"model_dirs": [str(tmp_path), str(bad)]}, environ={})
    with pytest.raises(ConfigError, match="model_dirs is missing; wanted list of strings"):
        resolve({}, environ={})


def test_the_fake_device_has_to_be_permitted(raw):
    raw["runtime"] = {"backend": "fake"}
    for environ in ({}, {"RSRV_ALLOW_FAKE": "0"}, None):
        with pytest.raises(ConfigError, match=r"runtime\.backend") as caught:
            resolve(raw, environ=environ)
        assert "RSRV_ALLOW_FAKE=1" in caught.value.hint
    assert resolve(raw, environ={"RSRV_ALLOW_FAKE": "1"}).config.runtime.backend == "fake"


def test_the_configuration_and_its_variables_are_logged_once(raw, caplog):
    caplog.set_level(logging.INFO, logger="rsrv.core.config.resolution")
    resolve(raw, environ={"RSRV_WORKER_HOOKS_MAX_LOST": "1"}, flags={"hooks.allow": False})
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"configuration worker=- model_dirs=[{raw['model_dirs'][0]}] hooks.allow=false hooks.max_lost=1",
        "environment RSRV_WORKER_HOOKS_MAX_LOST=1",
    ]


def test_a_configuration_that_was_built_in_code_has_rows_too():
    resolved = ResolvedConfig(ServerConfig(model_dirs=["/m"]), {}, [])
    assert ("model_dirs", ["/m"], "default") in resolved.rows()


def test_options_of_xla_are_one_key_with_one_origin(raw):
    raw = {**raw, "runtime": {"xla_options": {"xla_a": 1}}}
    resolved = resolve(raw, environ={})
    assert {key: (value, origin) for key, value, origin in resolved.rows()}["runtime.xla_options"] == (
        {"xla_a": 1},
        "file",
    )
    resolved = resolve(raw, environ={"RSRV_WORKER_RUNTIME_XLA_OPTIONS": "xla_b=false"})
    assert resolved.config.runtime.xla_options == {"xla_b": False}
