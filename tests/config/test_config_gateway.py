"""The gateway's configuration: every key by default, in a file and as a variable, and what is refused."""

import json
import logging
import os

import pytest
from pydantic import ValidationError

from rsrv.cli.main import main
from rsrv.core.config import GatewayConfig, chosen_gateway_file, gateway_key_table, gateway_schema, load_gateway
from rsrv.core.config import resolve_gateway as resolve
from rsrv.core.config.addresses import HostPort, parse_host_port
from rsrv.core.config.gateway import MAX_WORKERS
from rsrv.core.config.resolution import values_of
from rsrv.core.errors import ConfigError

ENDPOINTS = ["10.0.0.1:8080"]

# key: (default, text of a variable, its value, values that a file may have too, values that are refused)
KEYS = {
    "listen.grpc": (
        "127.0.0.1:8001",
        "[::1]:0",
        "[::1]:0",
        ["h:65535"],
        ["h", "h:", ":1", "h:65536", "::1:8", 8001, None],
    ),
    "listen.http": ("127.0.0.1:8002", "off", None, ["h:0"], ["h", "h:x", 8002]),
    "listen.max_connection_age_seconds": (None, "3600", 3600.0, [0.5, None], [0, -1, True, "1"]),
    "listen.max_connection_age_grace_seconds": (30.0, "5", 5.0, [0], [-1, None]),
    "endpoints": ([], "a:1, b:2,,a:1", ["a:1", "b:2"], [["[::1]:9"]], ["a:1", ["a"], ["a:0"], [1], None]),
    "metrics_endpoints": ([], "a:3,b:4", ["a:3", "b:4"], [[]], ["a:1", ["a"], [1]]),
    "worker_names": ([], "x", ["x"], [[]], ["x", [""], [1]]),
    "worker_client.request_timeout_seconds": (60, "5", 5, [1], [0, -1, 1.5, "5", True]),
    "worker_client.max_concurrent_streams": (32, "4", 4, [1], [0, -1, 1.5, True]),
    "grpc.max_recv_msg_bytes": (536870912, "1000", 1000, [1], [0, -1, True, 2**31]),
    "grpc.max_send_msg_bytes": (536870912, "2000", 2000, [1], [0, -1, True, 2**31]),
    "grpc.max_concurrent_requests_per_worker": (64, "100", 100, [1], [0, -1, True, 1.5]),
    "logging.level": ("info", "DEBUG", "debug", ["error", " Warning "], ["loud", 10, None]),
    "logging.format": ("json", "Text", "text", ["json"], ["xml", None]),
    "tls.cert_file": ("", "", "", [""], ["cert.pem", None]),
    "tls.key_file": ("", "", "", [""], ["key.pem", None]),
    "tls.client_ca_file": ("", "", "", [""], ["ca.pem", None]),
    "scheduling.mode": ("round_robin", "lpt_packing", "lpt_packing", ["Least_Outstanding"], ["random", None]),
    "scheduling.work_basis": ("compute", "items", "items", ["requests"], ["rows", None]),
    "scheduling.rebalance_compute_seconds": (300.0, "10", 10.0, [0.1], [0, -1, True]),
    "scheduling.first_rebalance_compute_seconds": (60.0, "0", 0.0, [1], [-1, True]),
    "scheduling.ema_halflife_compute_seconds": (0.0, "7", 7.0, [0], [-1, True]),
    "scheduling.hysteresis": (0.0, "0.25", 0.25, [0, 0.99], [1, -0.1, True]),
    "scheduling.default_replicas": (1, "ALL", "all", [1, 4, "all"], [0, -1, "some", 1.5, None, True]),
    "scheduling.routing_fill_factor": (1.0, "2", 2.0, [0.1], [0, -1, True]),
    "scheduling.routing_policy": ("fill_least", "fill_rr", "fill_rr", ["FILL_LEAST"], ["fill", "least_outstanding"]),
    "scheduling.routing_fill_mode": ("run", "spread", "spread", ["inflight"], ["inherit", None]),
    "scheduling.forbid_memory_oversubscription": (True, "off", False, [False], [0, "no", None]),
    "scheduling.compaction_mode": ("eager", "scheduled", "scheduled", ["off"], ["on", False, None]),
    "scheduling.compaction_interval": (1, "0", 0, [9], [-1, 1.0, True]),
    "scheduling.max_worker_share": (0.8, "1", 1.0, [0.01], [0, 1.1, True]),
    "control": (None, "no", False, [True, None], [1, "yes"]),
    "state_file": (None, "/var/lib/rsrv/gateway.json", "/var/lib/rsrv/gateway.json", [None], ["", 1]),
    "startup.wait_seconds": (0.0, "3.5", 3.5, [0], [-2, "long", True, None]),
    "lpt_min_workers": (1, "2", 2, [1], [0, -1, True, None]),
    "lame_duck_seconds": (0.0, "2", 2.0, [0], [-1, True]),
    "health_interval_seconds": (10.0, "0.5", 0.5, [1], [0, -1, True]),
    "wedge_exit_rounds": (3, "0", 0, [1], [-1, True, 1.5]),
    "membership.file": (None, "workers.yaml", "workers.yaml", [None], ["", 1]),
    "membership.dns": (None, "workers.example:8001", "workers.example:8001", [None], ["workers.example", "w:0"]),
    "membership.dns_seconds": (10.0, "1", 1.0, [0.5], [0, -1]),
    "membership.drain_seconds": (30.0, "0", 0.0, [1], [-1, None]),
    "retries.ratio": (0.1, "0", 0.0, [1], [-0.1, 1.1, True]),
    "retries.minimum": (64, "0", 0, [1], [-1, True]),
    "retries.window_seconds": (10.0, "1", 1.0, [0.5], [0, -1]),
    "retries.hedge_after_seconds": (None, "0.05", 0.05, [None], [0, -1, True]),
    "outliers.consecutive_failures": (5, "0", 0, [1], [-1, True]),
    "outliers.eject_seconds": (10.0, "1", 1.0, [0.5], [0, -1, 301]),
    "outliers.max_eject_seconds": (300.0, "20", 20.0, [10], [0, -1, 9]),
    "outliers.max_ejected_fraction": (0.5, "1", 1.0, [0], [-0.1, 1.1]),
    "outliers.cooldown_seconds": (1.0, "0", 0.0, [2], [-1, True]),
    "outliers.slow_start_seconds": (10.0, "0", 0.0, [2], [-1, True]),
    "scrape.total_seconds": (4.0, "2", 2.0, [0.5], [0, -1]),
    "scrape.retry_after_seconds": (30.0, "0", 0.0, [1], [-1]),
}
OTHER_VARIABLES = {"endpoints": "WORKERS", "metrics_endpoints": "WORKER_METRICS"}
OF_ONE_MODEL = {f"scheduling.models.<name>.{key}" for key in ("replicas", "fill_mode", "fill_factor")}


def variable(key, prefix="RSRV_GATEWAY_"):
    return prefix + OTHER_VARIABLES.get(key, key.upper().replace(".", "_"))


def nested(key, value):
    for name in reversed(key.split(".")):
        value = {name: value}
    return value if key == "endpoints" else {"endpoints": ENDPOINTS, **value}


def value_of(resolved, key):
    return next((value, origin) for name, value, origin in resolved.rows() if name == key)


def problem(raw, environ=None):
    with pytest.raises(ConfigError) as caught:
        resolve(raw, environ=environ or {})
    assert caught.value.exit_code == 78
    return caught.value


# --- keys -----------------------------------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_specification():
    defaults = {key: row[0] for key, row in KEYS.items()}
    assert dict(values_of(GatewayConfig(endpoints=ENDPOINTS))) == {**defaults, "endpoints": ENDPOINTS}


def test_the_samples_cover_every_key():
    assert set(KEYS) | OF_ONE_MODEL == {row.key for row in gateway_key_table()}
    assert {row.key for row in gateway_key_table() if row.env is None} == OF_ONE_MODEL
    assert all(row.meaning for row in gateway_key_table())


@pytest.mark.parametrize("key", KEYS)
def test_what_a_key_accepts_and_refuses(key):
    *_, accepted, refused = KEYS[key]
    for value in accepted:
        GatewayConfig.model_validate(nested(key, value))
    for value in refused:
        with pytest.raises(ValidationError):
            GatewayConfig.model_validate(nested(key, value))


@pytest.mark.parametrize("key", KEYS)
def test_a_variable_sets_its_key_over_the_file_under_both_prefixes(key):
    _, text, value, _, _ = KEYS[key]
    for prefix in ("RSRV_GATEWAY_", "REACTANT_GATEWAY_"):
        name = variable(key, prefix)
        resolved = resolve({"endpoints": ENDPOINTS}, environ={name: text})
        assert value_of(resolved, key) == (value, f"env {name}")
        assert resolved.overrides == [(name, text)]


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        ("LISTEN_GRPC", "8001"),
        ("WORKERS", "a"),
        ("WORKER_CLIENT_REQUEST_TIMEOUT_SECONDS", "1.5"),
        ("WORKER_CLIENT_MAX_CONCURRENT_STREAMS", "0"),
        ("GRPC_MAX_CONCURRENT_REQUESTS_PER_WORKER", "0"),
        ("SCHEDULING_MODE", "fastest"),
        ("SCHEDULING_DEFAULT_REPLICAS", "some"),
        ("SCHEDULING_FORBID_MEMORY_OVERSUBSCRIPTION", "maybe"),
        ("STARTUP_WAIT_SECONDS", "long"),
        ("STARTUP_WAIT_SECONDS", "nan"),
        ("LPT_MIN_WORKERS", "0"),
        ("CONTROL", "2"),
    ],
)
def test_a_text_that_does_not_fit_is_refused_naming_the_variable(suffix, text):
    assert f"RSRV_GATEWAY_{suffix}" in problem({"endpoints": ENDPOINTS}, {f"RSRV_GATEWAY_{suffix}": text}).message


def test_the_environment_alone_is_enough():
    config = resolve({}, environ={"RSRV_GATEWAY_WORKERS": "a:1,b:2", "RSRV_GATEWAY_WORKER_NAMES": "x"}).config
    assert config.static_workers == (("a:1", None, "x"), ("b:2", None, "b:2"))


def test_workers_are_named_by_their_places():
    config = GatewayConfig(endpoints=["a:1", "b:2"], metrics_endpoints=["a:8"], worker_names=["x", "y"])
    assert config.static_workers == (("a:1", "a:8", "x"), ("b:2", None, "y"))


def test_somebody_must_be_there_to_be_asked():
    assert "endpoints is empty" in problem({}).message
    assert "membership.file" in problem({"endpoints": [" "]}).message
    assert resolve({"membership": {"file": "workers.yaml"}}, environ={}).config.endpoints == []
    assert resolve({"membership": {"dns": "workers:80"}}, environ={}).config.membership.dns == "workers:80"


def test_names_are_there_once_and_not_for_nobody():
    assert "'a' is there twice" in problem({"endpoints": ["a:1", "b:1"], "worker_names": ["a", "a"]}).message
    assert "worker_names has 2 entries" in problem({"endpoints": ["a:1"], "worker_names": ["a", "b"]}).message


@pytest.mark.parametrize("value", ["inf", "forever", "FOREVER", -1, -1.0, float("inf")])
def test_waiting_without_limit_has_several_words(value):
    startup = GatewayConfig(endpoints=ENDPOINTS, startup={"wait_seconds": value}).startup
    assert (startup.wait_seconds, startup.limit) == ("forever", float("inf"))
    environ = {"RSRV_GATEWAY_STARTUP_WAIT_SECONDS": str(value)}
    assert resolve({"endpoints": ENDPOINTS}, environ=environ).config.startup.limit == float("inf")


@pytest.mark.parametrize("text", ["0", "-3", "soon", ""])
def test_an_interval_that_cannot_be_used_counts_as_none_and_is_told(text, caplog):
    environ = {"RSRV_GATEWAY_HEALTH_INTERVAL_SECONDS": text}
    resolved = resolve({"endpoints": ENDPOINTS}, environ=environ)
    assert value_of(resolved, "health_interval_seconds") == (10.0, "default")
    assert "ignored=RSRV_GATEWAY_HEALTH_INTERVAL_SECONDS" in caplog.text


def test_models_have_their_settings_and_inherit_the_rest():
    raw = {"endpoints": ENDPOINTS, "scheduling": {"models": {"a.b": {"fill_mode": "Spread"}, "c": None}}}
    models = resolve(raw, environ={}).config.scheduling.models
    assert (models["a.b"].replicas, models["a.b"].fill_mode, models["a.b"].fill_factor) == (None, "spread", None)
    assert models["c"].fill_mode == "inherit"
    for bad in ({"replicas": 0}, {"fill_factor": 0}, {"fill_mode": "most"}, {"weight": 1}):
        text = problem({"endpoints": ENDPOINTS, "scheduling": {"models": {"m": bad}}}).message
        assert f"scheduling.models.m.{next(iter(bad))}" in text


def test_a_variable_replaces_the_settings_of_models_as_json():
    raw = {"endpoints": ENDPOINTS, "scheduling": {"models": {"a": {"replicas": 2}}}}
    name = "RSRV_GATEWAY_SCHEDULING_MODELS"
    resolved = resolve(raw, environ={name: json.dumps({"b": {"replicas": "all"}})})
    assert set(resolved.config.scheduling.models) == {"b"}
    assert value_of(resolved, "scheduling.models.b.replicas") == ("all", f"env {name}")
    for text in ("{", "[]", "3"):
        assert f"{name}={text!r} is not accepted" in problem(raw, {name: text}).message
    assert f"(from env {name})" in problem(raw, {name: '{"b": {"replicas": 0}}'}).message


def test_the_half_life_is_the_rebalance_budget_unless_it_is_set():
    assert GatewayConfig(endpoints=ENDPOINTS).scheduling.ema_halflife == 300.0
    scheduling = {"ema_halflife_compute_seconds": 5.0}
    assert GatewayConfig(endpoints=ENDPOINTS, scheduling=scheduling).scheduling.ema_halflife == 5.0


# --- what is refused, and what is told ------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["cert_file", "key_file", "client_ca_file"])
def test_tls_is_refused_as_not_implemented_wherever_it_is_set(key):
    raw = {"endpoints": ENDPOINTS}
    for error in (
        problem({**raw, "tls": {key: "x.pem"}}),
        problem(raw, {f"RSRV_GATEWAY_TLS_{key.upper()}": "x.pem"}),
    ):
        assert f"tls.{key}: server TLS is not implemented yet" in error.message


def test_what_comes_later_is_refused_as_that():
    raw = {"endpoints": ENDPOINTS}
    for more in ({"auth": {"tokens_file": "t"}}, {"worker_client": {"tls": {}}}, {"listen": {"control": "h:1"}}):
        assert "not implemented yet" in problem({**raw, **more}).message
    for suffix in ("AUTH_TOKENS_FILE", "WORKER_CLIENT_TLS_CA_FILE", "LISTEN_CONTROL"):
        assert "not implemented yet" in problem(raw, {f"RSRV_GATEWAY_{suffix}": "x"}).message


def test_unknown_keys_and_variables_are_refused_with_a_suggestion():
    error = problem({"endpoints": ENDPOINTS, "scheduling": {"mod": "lpt_packing"}})
    assert ("unknown key scheduling.mod" in error.message, error.hint) == (True, "did you mean scheduling.mode?")
    error = problem({"endpoints": ENDPOINTS}, {"RSRV_GATEWAY_LISTEN_GPRC": "h:1"})
    assert "RSRV_GATEWAY_LISTEN_GPRC names no key" in error.message
    assert error.hint == "did you mean RSRV_GATEWAY_LISTEN_GRPC?"


def test_a_policy_that_is_a_mode_is_told_so():
    raw = {"endpoints": ENDPOINTS, "scheduling": {"routing_policy": "least_outstanding"}}
    assert "set scheduling.mode: least_outstanding" in problem(raw).message


def test_the_two_listeners_differ():
    raw = {"endpoints": ENDPOINTS, "listen": {"grpc": "h:1", "http": "h:1"}}
    assert "grpc and http are both h:1" in problem(raw).message
    resolve({**raw, "listen": {"grpc": "h:0", "http": "h:0"}}, environ={})


def test_the_older_name_of_the_http_listener_is_read():
    raw = {"endpoints": ENDPOINTS}
    assert resolve({**raw, "listen": {"metrics": "h:5"}}, environ={}).config.listen.http == "h:5"
    for prefix in ("RSRV_GATEWAY_", "REACTANT_GATEWAY_"):
        assert resolve(raw, environ={f"{prefix}LISTEN_METRICS": "h:6"}).config.listen.http == "h:6"
    both = {"RSRV_GATEWAY_LISTEN_METRICS": "rubbish", "RSRV_GATEWAY_LISTEN_HTTP": "h:7"}
    assert resolve(raw, environ=both).config.listen.http == "h:7"
    assert "older name of listen.http" in problem({**raw, "listen": {"metrics": "h:1", "http": "h:2"}}).message


def test_older_variables_are_told_in_one_line_and_those_of_others_left_alone(caplog):
    caplog.set_level(logging.INFO, logger="rsrv.core.config.environment")
    environ = {
        "REACTANT_GATEWAY_SCHEDULING_MODE": "lpt_packing",
        "REACTANT_GATEWAY_WORKERS": "a:1",
        "RSRV_WORKER_X": "1",
    }
    assert resolve({}, environ=environ).config.endpoints == ["a:1"]
    assert [record.getMessage() for record in caplog.records if record.name.endswith("environment")] == [
        "older_variables=REACTANT_GATEWAY_SCHEDULING_MODE,REACTANT_GATEWAY_WORKERS "
        "use=RSRV_GATEWAY_SCHEDULING_MODE,RSRV_GATEWAY_WORKERS"
    ]


def test_what_is_legal_and_probably_not_meant_is_warned_of():
    assert GatewayConfig(endpoints=ENDPOINTS).warnings == []
    config = GatewayConfig(
        endpoints=ENDPOINTS,
        metrics_endpoints=["a:1", "b:1"],
        grpc={"max_concurrent_requests_per_worker": 32},
        scheduling={"max_worker_share": 0.8},
    )
    cap, share, metrics = config.warnings
    assert "grpc.max_concurrent_requests_per_worker (32)" in cap
    assert "scheduling.max_worker_share" in share
    assert "metrics_endpoints" in metrics


@pytest.mark.parametrize(
    "key",
    [
        "worker_client.request_timeout_seconds",
        "worker_client.max_concurrent_streams",
        "grpc.max_recv_msg_bytes",
        "grpc.max_send_msg_bytes",
        "grpc.max_concurrent_requests_per_worker",
        "scheduling.default_replicas",
        "scheduling.compaction_interval",
        "scheduling.models.m.replicas",
        "lpt_min_workers",
        "wedge_exit_rounds",
        "retries.minimum",
        "outliers.consecutive_failures",
    ],
)
def test_a_number_that_grpc_or_the_control_plane_cannot_take_is_refused_at_the_start(key):
    for number in (2**31, 10**400):
        assert key in problem(nested(key, number)).message
    resolve(nested(key, 10**9), environ={})


@pytest.mark.parametrize("value", [[], [1], {}, {"a": 1}, 7, None])
def test_a_policy_that_is_no_word_is_refused_by_its_key(value):
    raw = {"endpoints": ENDPOINTS, "scheduling": {"routing_policy": value}}
    assert "scheduling.routing_policy" in problem(raw).message


@pytest.mark.parametrize("text", ["a\0b:1", "a\x7fb:1", "h" * 254 + ":1", "a b:1", "a,b:1"])
def test_what_is_no_host_is_refused_wherever_an_address_stands(text):
    for key in ("listen.grpc", "listen.http", "membership.dns"):
        assert key in problem(nested(key, text)).message
    for key in ("endpoints", "metrics_endpoints"):
        assert key in problem(nested(key, [text])).message


@pytest.mark.parametrize("name", ["a\nb", "a\0", "n" * 129, " "])
def test_a_name_of_a_worker_is_one_short_line(name):
    assert "worker_names" in problem({"endpoints": ENDPOINTS, "worker_names": [name]}).message
    assert resolve({"endpoints": ENDPOINTS, "worker_names": [" é b "]}, environ={}).config.worker_names == ["é b"]


@pytest.mark.parametrize("key", ["state_file", "membership.file"])
@pytest.mark.parametrize("path", ["a\0b", " ", ""])
def test_what_is_no_path_is_refused_by_its_key(key, path):
    assert key in problem(nested(key, path)).message


def test_more_workers_than_a_gateway_can_have_are_refused():
    many = [f"h:{port}" for port in range(1, MAX_WORKERS + 2)]
    assert f"endpoints has {MAX_WORKERS + 1} entries" in problem({"endpoints": many}).message
    assert len(resolve({"endpoints": many[1:]}, environ={}).config.static_workers) == MAX_WORKERS


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_one_is_refused_without_reading_all_of_it(tmp_path):
    large = tmp_path / "large.yaml"
    large.write_bytes(b"")
    os.truncate(large, 1 << 40)  # has holes only; read as a whole it would be all of the memory
    for path in (large, "/dev/zero", tmp_path, "a\0b.yaml"):
        with pytest.raises(ConfigError) as caught:
            load_gateway(path)
        assert caught.value.exit_code == 78


def test_the_example_of_the_specification_is_read(tmp_path):
    path = tmp_path / "gateway.yaml"
    path.write_text(
        """\
listen: {grpc: "0.0.0.0:8001", http: "0.0.0.0:8002"}
endpoints: ["10.0.0.5:8080", "10.0.0.5:8081", "10.0.0.6:8080"]
metrics_endpoints: ["10.0.0.5:9100", "10.0.0.5:9101", "10.0.0.6:9100"]
worker_names: [a0, a1, b0]
x-team: ours
scheduling:
  mode: lpt_packing
  default_replicas: 1
  models:
    resnet50: {replicas: 2, fill_mode: spread, x-note: hot}
"""
    )
    resolved = resolve(load_gateway(path), environ={})
    assert resolved.config.listen.grpc_address == HostPort("0.0.0.0", 8001)
    assert resolved.config.listen.http_address == ("0.0.0.0", 8002)
    assert resolved.config.static_workers[2] == ("10.0.0.6:8080", "10.0.0.6:9100", "b0")
    assert resolved.config.scheduling.models["resnet50"].replicas == 2
    assert value_of(resolved, "scheduling.mode") == ("lpt_packing", "file")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "there is no such gateway file"),
        ("- a\n", "holds a list"),
        ("", "holds nothing"),
        ("a: [", "line 1, column 5"),
        ("listen: 3\nendpoints: ['a:1']\n", "listen: 3 is not accepted; wanted a mapping"),
        ("endpoints: ['a:1']\nworkers: []\n", "unknown key workers"),
    ],
)
def test_a_file_that_does_not_hold_is_named(text, told, tmp_path):
    path = tmp_path / "gateway.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"gateway\.yaml: ") as caught:
        resolve(load_gateway(path), environ={})
    assert told in caught.value.message


def test_the_environment_may_name_the_file():
    assert chosen_gateway_file({}) is None
    assert str(chosen_gateway_file({"RSRV_GATEWAY_FILE": "g.yaml"})) == "g.yaml"
    assert str(chosen_gateway_file({"REACTANT_GATEWAY_FILE": "g.yaml"})) == "g.yaml"
    environ = {"RSRV_GATEWAY_FILE": "g.yaml", "REACTANT_GATEWAY_FILE": "g.yaml", "RSRV_GATEWAY_WORKERS": "a:1"}
    assert resolve({}, environ=environ).overrides == [("RSRV_GATEWAY_WORKERS", "a:1")]


def test_the_schema_has_every_key_and_lets_notes_pass():
    schema = gateway_schema()
    assert set(schema["properties"]) == {key.split(".")[0] for key in KEYS}
    assert schema["patternProperties"] == {"^x-": True}
    assert schema["$defs"]["SchedulingConfig"]["properties"]["mode"]["enum"][0] == "round_robin"


# --- addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port", "again"),
    [
        ("h:1", "h", 1, "h:1"),
        (" 10.0.0.1:65535 ", "10.0.0.1", 65535, "10.0.0.1:65535"),
        ("[::1]:80", "::1", 80, "[::1]:80"),
        ("h:007", "h", 7, "h:7"),
    ],
)
def test_an_address_is_split_at_its_last_colon(text, host, port, again):
    assert parse_host_port(text) == (host, port)
    assert str(parse_host_port(text)) == again


@pytest.mark.parametrize(
    "text", ["", "h", ":1", "h:", "h:0", "h:65536", "h:+1", "h:١", "a b:1", "[h]:1", "[]:1", "a,b:1"]
)
def test_what_is_no_address_is_refused_with_the_text(text):
    with pytest.raises(ValueError, match="is not accepted") as caught:
        parse_host_port(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["http://h:1", "grpc://h", "http://[::1]:1/"])
def test_a_url_is_told_from_an_address(text):
    with pytest.raises(ValueError, match=r"wanted host:port, without (http|grpc)://"):
        parse_host_port(text)


def test_port_0_is_for_listeners():
    assert parse_host_port("h:0", any_port=True) == ("h", 0)


# --- commands -------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "gateway.yaml"
    path.write_text("endpoints: ['a:1']\nscheduling: {mode: lpt_packing, max_worker_share: 0.5}\n")
    return path


def test_show_tells_the_values_of_a_gateway_and_their_origins(file, capsys, monkeypatch):
    monkeypatch.setenv("RSRV_GATEWAY_LPT_MIN_WORKERS", "2")
    assert main(["config", "show", str(file), "--gateway", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["values"]
    assert values["scheduling.mode"] == {"value": "lpt_packing", "origin": "file"}
    assert values["lpt_min_workers"] == {"value": 2, "origin": "env RSRV_GATEWAY_LPT_MIN_WORKERS"}


def test_show_needs_no_file_where_variables_say_it_all(capsys, monkeypatch):
    monkeypatch.setenv("RSRV_GATEWAY_WORKERS", "a:1")
    assert main(["config", "show", "--gateway", "--no-origin"]) == 0
    assert "endpoints" in capsys.readouterr().out
    assert main(["config", "show"]) == 2
    assert main(["config", "show", "--gateway", "--worker", "a"]) == 2


def test_check_tells_problems_and_warnings_of_a_gateways_file(file, tmp_path, capsys):
    assert main(["config", "check", "--gateway", str(file)]) == 0
    assert "scheduling.max_worker_share" in capsys.readouterr().err
    bad = tmp_path / "bad.yaml"
    bad.write_text("endpoints: ['a:1']\ntls: {cert_file: c}\n")
    assert main(["config", "check", "--gateway", str(file), str(bad), "--json"]) == 78
    good, failed = json.loads(capsys.readouterr().out)
    assert good["problem"] is None
    assert "server TLS is not implemented yet" in failed["problem"]


def test_schema_describes_the_gateway(capsys):
    assert main(["config", "schema", "--gateway"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "rsrv gateway file"
    assert main(["config", "schema", "--gateway", "--keys", "--json"]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["endpoints"]["variable"] == "RSRV_GATEWAY_WORKERS"
