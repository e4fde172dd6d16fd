"""The node file: structure, choice of a worker, forced values, ports, and origins."""

import pytest

from rsrv.core.config import load_node, resolve
from rsrv.core.errors import ConfigError

TWO = """
model_repo: {repo}
base_port: 9000
metrics_base_port: 9100
global:
  scheduler: {max_queue_depth: 7, models: {m: {max_batch_size: 4}}}
  runtime: {cpu_threads: 2, map_weights: true}
workers:
  - name: a
  - name: b
    host: 0.0.0.0
    gpu: 3
    runtime: {cpu_threads: 1}
    scheduler: {models: {n: {max_batch_size: 2}}}
models: {m: [a, b]}
"""


@pytest.fixture
def node_file(tmp_path):
    repo = tmp_path / "repo"
    repo.mkdir()

    def write(text):
        path = tmp_path / "node.yaml"
        path.write_text(text.replace("{repo}", str(repo)))
        return path

    write.repo = str(repo)
    return write


def refusal(path):
    with pytest.raises(ConfigError) as caught:
        load_node(path)
    return caught.value


def test_a_worker_is_global_with_its_entry_and_the_node_on_top(node_file):
    resolved = resolve(load_node(node_file(TWO)).worker("b"), environ={})
    config, origins = resolved.config, resolved.origins
    assert config.model_dirs == [node_file.repo]
    assert config.endpoints.host == "0.0.0.0"
    assert (config.endpoints.grpc_port, config.endpoints.http_port) == (9001, 9101)
    assert config.runtime.device_ordinal == 3
    assert (config.runtime.cpu_threads, config.runtime.map_weights) == (1, True)
    assert {name: model.max_batch_size for name, model in config.scheduler.models.items()} == {"m": 4, "n": 2}
    assert (resolved.worker, resolved.workers_on_node) == ("b", 2)
    told = {key: origin for key, origin in origins.items() if origin != "default"}
    assert told == {
        "model_dirs": "node",
        "endpoints.host": "worker",
        "endpoints.grpc_port": "node",
        "endpoints.http_port": "node",
        "runtime.device_ordinal": "worker",
        "runtime.cpu_threads": "worker",
        "runtime.map_weights": "global",
        "scheduler.max_queue_depth": "global",
        "scheduler.models.m.max_batch_size": "global",
        "scheduler.models.n.max_batch_size": "worker",
        "scheduler.models.m.residency": "node",
    }


def test_models_of_the_node_stay_on_the_device_of_the_named_workers_unless_the_worker_says_otherwise(node_file):
    text = """
model_repo: {repo}
base_port: 9000
workers:
  - name: a
  - {name: b, scheduler: {models: {m: {residency: unpinned}, n: {pin_to_gpu: true}}}}
  - name: c
models: {m: [a, b]}
"""
    node = load_node(node_file(text))
    floors = {
        name: {m: s.residency for m, s in resolve(node.worker(name), environ={}).config.scheduler.models.items()}
        for name in "abc"
    }
    assert floors == {"a": {"m": "device"}, "b": {"m": "unpinned", "n": "device"}, "c": {}}


def test_the_first_worker_is_not_touched_by_the_second(node_file):
    config = resolve(load_node(node_file(TWO)).worker("a"), environ={}).config
    assert (config.endpoints.grpc_port, config.endpoints.http_port, config.endpoints.host) == (9000, 9100, "127.0.0.1")
    assert config.runtime.cpu_threads == 2
    assert config.runtime.device_ordinal == 0
    assert set(config.scheduler.models) == {"m"}


def test_variables_and_flags_lie_above_the_node(node_file):
    block = load_node(node_file(TWO)).worker("a")
    resolved = resolve(block, environ={"RSRV_WORKER_ENDPOINTS_GRPC_PORT": "5"}, flags={"endpoints.http_port": 0})
    assert (resolved.config.endpoints.grpc_port, resolved.config.endpoints.http_port) == (5, 0)
    assert resolved.origins["endpoints.grpc_port"] == "env RSRV_WORKER_ENDPOINTS_GRPC_PORT"


def test_the_name_may_be_left_out_when_there_is_one_worker(node_file):
    single = "model_repo: {repo}\nbase_port: 9000\nworkers: [{name: only}]\n"
    block = load_node(node_file(single)).worker()
    assert block.worker == "only"
    resolved = resolve(block, environ={})
    assert resolved.config.endpoints.http_port == 8002
    assert resolved.origins["endpoints.http_port"] == "default"
    with pytest.raises(ConfigError, match=r"2 workers \(a, b\) and none was chosen") as caught:
        load_node(node_file(TWO)).worker()
    assert caught.value.hint == "say which with --worker a"


def test_an_unknown_worker_is_refused_with_the_names(node_file):
    with pytest.raises(ConfigError, match="no worker 'c'; the workers are a, b"):
        load_node(node_file(TWO)).worker("c")


def test_an_entry_may_have_its_own_port(node_file):
    text = "model_repo: {repo}\nworkers: [{name: a, port: 7001}, {name: b, port: 0, endpoints: {http_port: 7002}}]\n"
    node = load_node(node_file(text))
    first, second = (resolve(node.worker(name), environ={}) for name in ("a", "b"))
    assert (first.config.endpoints.grpc_port, first.origins["endpoints.grpc_port"]) == (7001, "worker")
    assert (second.config.endpoints.grpc_port, second.config.endpoints.http_port) == (0, 7002)


def test_the_metrics_ports_replace_what_a_block_has_and_that_is_told(node_file):
    text = (
        "model_repo: {repo}\nbase_port: 9000\nmetrics_base_port: 9100\n"
        "global: {endpoints: {http_port: 1, grpc_port: 2}, model_dirs: [x]}\nworkers: [{name: a}]\n"
    )
    node = load_node(node_file(text))
    config = resolve(node.worker(), environ={}).config
    assert (config.endpoints.grpc_port, config.endpoints.http_port) == (9000, 9100)
    assert config.model_dirs == [node_file.repo]
    assert [warning.split(" is ")[0] for warning in node.warnings] == [
        "worker a: model_dirs: [x]",
        "worker a: endpoints.grpc_port: 2",
        "worker a: endpoints.http_port: 1",
    ]


def test_http_may_be_off_for_all_workers(node_file):
    text = (
        "model_repo: {repo}\nbase_port: 9000\nglobal: {endpoints: {http_port: null}}\nworkers: [{name: a}, {name: b}]\n"
    )
    node = load_node(node_file(text))
    assert node.warnings == ()
    resolved = resolve(node.worker("b"), environ={})
    assert resolved.config.endpoints.http_port is None
    assert resolved.origins["endpoints.http_port"] == "global"


def test_workers_that_share_the_default_http_port_are_told(node_file):
    node = load_node(node_file("model_repo: {repo}\nbase_port: 9000\nworkers: [{name: a}, {name: b}]\n"))
    assert node.warnings == ("the workers a, b share the default HTTP port 8002; set metrics_base_port",)


def test_older_names_in_global_and_an_entry_meet(node_file):
    text = (
        "model_repo: {repo}\nbase_port: 9000\nglobal: {endpoints: {metrics_port: 0}}\n"
        "workers: [{name: a}, {name: b, endpoints: {http_port: 77}}]\n"
    )
    node = load_node(node_file(text))
    assert resolve(node.worker("a"), environ={}).config.endpoints.http_port is None
    assert resolve(node.worker("b"), environ={}).config.endpoints.http_port == 77


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "a node file is a mapping of keys; this one holds nothing"),
        ("- 1", "a node file is a mapping of keys; this one holds a list"),
        ("model_repo: [", "node.yaml: line"),
        ("model_repo: a\nmodel_repo: b", "the key 'model_repo' is there twice"),
        ("base_port: 1\nworkers: [{name: a}]", "model_repo is missing; wanted string"),
        ("model_repo: ''\nbase_port: 1\nworkers: [{name: a}]", "model_repo: '' is not accepted"),
        ("model_repo: {repo}\nbase_port: 1", "workers is missing"),
        ("model_repo: {repo}\nbase_port: 1\nworkers: []", "workers: [] is not accepted"),
        ("model_repo: {repo}\nbase_port: 1\nworkers: {a: 1}", "workers: {'a': 1} is not accepted"),
        ("model_repo: {repo}\nbase_port: 1\nworkers: [a]", "workers[0]: 'a' is not accepted; wanted mapping"),
        ("model_repo: {repo}\nbase_port: 1\nworkers: [{gpu: 1}]", "workers[0].name is missing; wanted string"),
        ("model_repo: {repo}\nbase_port: 1\nworkers: [{name: 3}]", "workers[0].name: 3 is not accepted; wanted string"),
        ("model_repo: {repo}\nbase_port: 1\nworkers: [{name: a, gpu: -1}]", "workers[0].gpu: -1 is not accepted"),
        ("model_repo: {repo}\nbase_port: 1\nworkers: [{name: a, gpu: true}]", "workers[0].gpu: True is not accepted"),
        ("model_repo: {repo}\nworkers: [{name: a, port: 65536}]", "workers[0].port: 65536 is not accepted"),
        (
            "model_repo: {repo}\nbase_port: 0\nworkers: [{name: a}]",
            "base_port: 0 is not accepted; wanted integer, 1…65535",
        ),
        ("model_repo: {repo}\nbase_port: '1'\nworkers: [{name: a}]", "base_port: '1' is not accepted"),
        ("model_repo: {repo}\nbase_port: 1\nworkers: [{name: a}, {name: a}]", "two workers have the name 'a'"),
        (
            "model_repo: {repo}\nworkers: [{name: a, port: 5}, {name: b}]",
            "worker 'b' has no port and base_port is not set",
        ),
        ("model_repo: {repo}\nbase_port: 1\nglobal: 3\nworkers: [{name: a}]", "global: 3 is not accepted"),
        ("model_repo: {repo}\nbase_port: 1\nmodels: {m: []}\nworkers: [{name: a}]", "models.m: [] is not accepted"),
        ("model_repo: {repo}\nbase_port: 1\nmodels: {m: a}\nworkers: [{name: a}]", "models.m: 'a' is not accepted"),
        (
            "model_repo: {repo}\nbase_port: 1\nmodels: {m: [b]}\nworkers: [{name: a}]",
            "models.m: there is no worker 'b'",
        ),
        ("model_repo: {repo}\nbase_port: 1\nworkers: [{name: a}]\nglobals: {}", "unknown key globals"),
        ("model_repo: {repo}\nbase_port: 1\nworkers: [{name: a}]\ngateway: {}", "the key gateway is read by nobody"),
        (
            "model_repo: {repo}\nbase_port: 1\nglobal: {batch_policy: {}}\nworkers: [{name: a}]",
            "batch_policy was removed",
        ),
        (
            "model_repo: {repo}\nbase_port: 1\nworkers: [{name: a, runtime: {residency_mode: x}}]",
            "worker 'a': the key runtime.residency_mode was removed",
        ),
        (
            "model_repo: {repo}\nbase_port: 1\nworkers: [{name: a, host: h, endpoints: {host: g}}]",
            "worker 'a': host and endpoints.host are the same key",
        ),
    ],
)
def test_a_broken_structure_is_refused(node_file, text, problem):
    error = refusal(node_file(text))
    assert problem in error.message
    assert "node.yaml" in error.message
    assert error.exit_code == 78


@pytest.mark.parametrize(
    ("ports", "problem"),
    [
        (
            "workers: [{name: a, port: 5}, {name: b, port: 5}]",
            "port 5 is wanted for gRPC of worker 'a' and for gRPC of worker 'b'",
        ),
        ("base_port: 5\nworkers: [{name: a}, {name: b, port: 5}]", "port 5"),
        ("base_port: 5\nmetrics_base_port: 6\nworkers: [{name: a}, {name: b}]", "port 6"),
        ("base_port: 5\nmetrics_base_port: 5\nworkers: [{name: a}]", "gRPC of worker 'a' and for HTTP of worker 'a'"),
        ("base_port: 5\nworkers: [{name: a, endpoints: {http_port: 6}}, {name: b}]", "port 6"),
        ("base_port: 8001\nworkers: [{name: a}, {name: b}]", "port 8002"),
        ("base_port: 65535\nworkers: [{name: a}, {name: b}]", "gRPC of worker 'b' would get port 65536"),
        (
            "base_port: 5\nmetrics_base_port: 65535\nworkers: [{name: a}, {name: b}]",
            "HTTP of worker 'b' would get port 65536",
        ),
    ],
)
def test_ports_that_collide_or_run_out_are_refused(node_file, ports, problem):
    assert problem in refusal(node_file("model_repo: {repo}\n" + ports)).message


def test_port_zero_collides_with_nothing(node_file):
    load_node(node_file("model_repo: {repo}\nworkers: [{name: a, port: 0}, {name: b, port: 0}]"))


def test_what_is_wrong_in_a_block_names_file_worker_and_origin(node_file):
    text = "model_repo: {repo}\nbase_port: 9000\nglobal: {shm: {max_regions: 0}}\nworkers: [{name: a, hook: {}}]\n"
    path = node_file(text)
    with pytest.raises(ConfigError) as caught:
        resolve(load_node(path).worker(), environ={})
    assert caught.value.message.splitlines() == [
        f"{path}, worker 'a': 2 problems",
        "  shm.max_regions: 0 is not accepted; wanted integer, > 0 (from global)",
        "  unknown key hook (from worker)",
    ]
    assert caught.value.hint == "did you mean hooks?"


def test_a_section_that_is_no_mapping_is_refused_even_where_the_node_sets_a_part(node_file):
    text = "model_repo: {repo}\nbase_port: 9000\nworkers: [{name: a, endpoints: 3}]\n"
    with pytest.raises(ConfigError, match="endpoints: 3 is not accepted; wanted a mapping"):
        resolve(load_node(node_file(text)).worker(), environ={})


def test_x_keys_and_empty_parts_are_free(node_file):
    text = "x-a: 1\nmodel_repo: {repo}\nbase_port: 9000\nglobal:\nmodels:\nworkers:\n  - {name: a, x-b: 1, shm: }\n"
    assert resolve(load_node(node_file(text)).worker(), environ={}).config.shm.enabled is True


def test_a_file_that_cannot_be_read_is_a_configuration_error(tmp_path):
    assert "there is no such node file" in refusal(tmp_path / "nope.yaml").message
    assert "cannot be read" in refusal(tmp_path).message


def test_a_yaml_bomb_is_refused(node_file):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert "once aliases are expanded" in refusal(node_file("\n".join(lines))).message
