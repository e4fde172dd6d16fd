"""``rsrv config show|schema|check`` from the outside."""

import json

import pytest

from rsrv.cli.main import main


@pytest.fixture
def node(tmp_path):
    (tmp_path / "repo").mkdir()
    path = tmp_path / "node.yaml"
    path.write_text(
        f"model_repo: {tmp_path}/repo\nbase_port: 9000\nworkers: [{{name: a}}, {{name: b, hooks: {{allow: false}}}}]\n"
    )
    return path


def test_show_prints_every_key_with_its_origin(node, capsys):
    assert main(["config", "show", str(node), "--worker", "b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["key", "value", "origin"]
    cells = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert cells["hooks.allow"] == ["false", "worker"]
    assert cells["endpoints.grpc_port"] == ["9001", "node"]
    assert cells["endpoints.http_port"] == ["8002", "default"]


def test_show_as_json_has_values_origins_and_overrides(node, capsys, monkeypatch):
    monkeypatch.setenv("RSRV_WORKER_SHM_MAX_REGIONS", "3")
    assert main(["config", "show", str(node), "--worker", "a", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["worker"] == "a"
    assert shown["values"]["shm.max_regions"] == {"value": 3, "origin": "env RSRV_WORKER_SHM_MAX_REGIONS"}
    assert shown["values"]["endpoints.grpc_port"] == {"value": 9000, "origin": "node"}
    assert shown["overrides"] == [{"variable": "RSRV_WORKER_SHM_MAX_REGIONS", "text": "3"}]


def test_show_takes_the_worker_from_the_environment(node, capsys, monkeypatch):
    monkeypatch.setenv("RSRV_WORKER_NAME", "b")
    assert main(["config", "show", str(node), "--json", "--no-origin"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["worker"] == "b"
    assert shown["values"]["hooks.allow"] is False


def test_show_of_a_repository_has_the_defaults(tmp_path, capsys):
    assert main(["config", "show", str(tmp_path), "--no-origin"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["key", "value"]
    assert lines[1].split() == ["model_dirs", f"[{tmp_path}]"]


def test_show_without_a_chosen_worker_is_a_configuration_error(node, capsys):
    assert main(["config", "show", str(node)]) == 78
    assert "2 workers (a, b)" in capsys.readouterr().err


def test_a_path_that_is_not_there_is_a_usage_error(tmp_path, capsys):
    for command in ("show", "check"):
        assert main(["config", command, str(tmp_path / "nope")]) == 2
        assert "no such file" in capsys.readouterr().err


def test_a_worker_of_a_directory_is_a_usage_error(tmp_path, capsys):
    assert main(["config", "show", str(tmp_path), "--worker", "a"]) == 2
    assert "only a node file has workers" in capsys.readouterr().err


def test_schema_is_json_schema(capsys):
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "rsrv node file"


def test_schema_lists_the_keys(capsys):
    assert main(["config", "schema", "--keys", "--json"]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["endpoints.grpc_port"]["default"] == "8001"
    assert rows["endpoints.grpc_port"]["variable"] == "RSRV_WORKER_ENDPOINTS_GRPC_PORT"


def test_check_passes_a_good_file_and_tells_warnings(node, capsys):
    assert main(["config", "check", str(node)]) == 0
    captured = capsys.readouterr()
    assert [line.split()[1:] for line in captured.out.splitlines()[1:]] == [["a", "ok"], ["b", "ok"]]
    assert "share the default HTTP port 8002" in captured.err


def test_check_tells_the_problems_of_every_worker(node, capsys):
    text = node.read_text().replace("{name: a}", "{name: a, shm: {max_regions: 0}}").replace("allow: false", "allow: 3")
    node.write_text(text)
    assert main(["config", "check", str(node), "--json"]) == 78
    reports = json.loads(capsys.readouterr().out)
    assert [report["worker"] for report in reports] == ["a", "b"]
    assert "shm.max_regions" in reports[0]["problem"]
    assert "hooks.allow" in reports[1]["problem"]


def test_check_tells_a_broken_structure(tmp_path, capsys):
    path = tmp_path / "node.yaml"
    path.write_text("model_repo: x\ngateway: {}\n")
    assert main(["config", "check", str(path)]) == 78
    captured = capsys.readouterr()
    assert "gateway" in captured.err
    assert captured.out == ""


def test_check_leaves_the_variables_out_of_account(node, monkeypatch, capsys):
    monkeypatch.setenv("RSRV_WORKER_SHM_MAX_REGIONS", "rubbish")
    assert main(["config", "check", str(node)]) == 0
