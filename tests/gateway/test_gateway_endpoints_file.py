"""The workers that a file lists."""

import logging
import os

import pytest

from rsrv.core.config.gateway import MAX_WORKERS
from rsrv.core.errors import ConfigError
from rsrv.gateway.discovery.endpoints_file import EndpointsFile, parse_endpoints
from rsrv.gateway.workers.fleet import Endpoint


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("[]", ()),
        ("[a:1, ' b:2 ']", (Endpoint("a:1", "a:1", None, "file"), Endpoint("b:2", "b:2", None, "file"))),
        ("endpoints: [a:1]", (Endpoint("a:1", "a:1", None, "file"),)),
        ("- {endpoint: 'a:1', metrics: 'a:9', name: one}", (Endpoint("a:1", "one", "a:9", "file"),)),
        ("[a:1, {endpoint: 'a:1', name: again}]", (Endpoint("a:1", "a:1", None, "file"),)),
        ("['[::1]:8001']", (Endpoint("[::1]:8001", "[::1]:8001", None, "file"),)),
        ("{x-note: why, endpoints: [a:1]}", (Endpoint("a:1", "a:1", None, "file"),)),
    ],
)
def test_a_list_of_addresses_or_of_mappings(text, endpoints):
    assert parse_endpoints(text, "f") == endpoints


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "wanted a list of workers, or endpoints: with such a list; got nothing"),
        ("endpoints:", "got nothing"),
        ("a:1", "got a str"),
        ("{workers: [a:1]}", "the key 'workers' is unknown; wanted endpoints"),
        ("[a]", r"endpoints\[0\]: endpoint: 'a' is not accepted; wanted host:port"),
        ("[a:0]", "a port of 1…65535"),
        ("[7]", "7 is not accepted; wanted host:port"),
        ("[{metrics: 'a:1'}]", "endpoint: None is not accepted"),
        ("[{endpoint: 'a:1', metrics: x}]", "metrics: 'x' is not accepted"),
        ("[{endpoint: 'a:1', name: ' '}]", "name: ' ' is not accepted"),
        ('[{endpoint: "a:1", name: "a\\nb"}]', "name: .* is not accepted; wanted the name of a worker"),
        ("[{endpoint: 'a:1', name: 3}]", "name: 3 is not accepted"),
        ("[{endpoint: 'a:1', weight: 2}]", "the key 'weight' is unknown; wanted endpoint, metrics, name"),
        ("[{endpoint: 'a:1', name: n}, {endpoint: 'b:1', name: n}]", "a:1 and b:1 both have the name 'n'"),
        ("[a:1", "f: line"),
    ],
)
def test_an_error_names_the_place_and_what_was_wanted(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_endpoints(text, "f")


def urls(source):
    return [endpoint.url for endpoint in source.look()]


def replace(path, text):
    staged = path.with_suffix(".new")
    staged.write_text(text)
    os.replace(staged, path)


def test_a_file_that_is_not_there_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match=r"membership.file .*gone.yaml: cannot be read"):
        EndpointsFile(tmp_path / "gone.yaml")


def test_a_replaced_file_is_taken_at_the_next_look(tmp_path):
    path = tmp_path / "workers.yaml"
    path.write_text("[a:1]")
    source = EndpointsFile(path)
    assert urls(source) == ["a:1"]
    replace(path, "[a:1, b:1]")
    assert urls(source) == ["a:1", "b:1"]


def test_a_file_written_in_place_is_taken_when_it_has_come_to_rest(tmp_path):
    path = tmp_path / "workers.yaml"
    path.write_text("[a:1]")
    source = EndpointsFile(path)
    path.write_text("[b:1, c:1]")
    assert urls(source) == ["a:1"]
    path.write_text("[b:1, c:1, d:1]")
    assert urls(source) == ["a:1"]
    assert urls(source) == ["b:1", "c:1", "d:1"]


def test_a_pipe_in_place_of_the_file_keeps_nobody_waiting(tmp_path, caplog):
    path = tmp_path / "workers.yaml"
    path.write_text("[a:1]")
    source = EndpointsFile(path)
    os.mkfifo(tmp_path / "pipe")
    os.replace(tmp_path / "pipe", path)
    assert urls(source) == ["a:1"]
    assert "no plain file" in caplog.text
    with pytest.raises(ConfigError, match="no plain file"):
        EndpointsFile(path)
    replace(path, "[b:1]")
    assert urls(source) == ["b:1"]


def test_a_mounted_file_is_taken_when_the_link_above_it_is_exchanged(tmp_path):
    for number, text in enumerate(("[a:1]", "[b:1]")):
        (tmp_path / f"v{number}").mkdir()
        (tmp_path / f"v{number}" / "workers.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("v0")
    (tmp_path / "workers.yaml").symlink_to("..data/workers.yaml")
    source = EndpointsFile(tmp_path / "workers.yaml")
    assert urls(source) == ["a:1"]
    (tmp_path / "..new").symlink_to("v1")
    os.replace(tmp_path / "..new", tmp_path / "..data")
    assert urls(source) == ["b:1"]


def test_more_workers_than_a_gateway_can_have_are_not_taken():
    lines = "".join(f"- h:{port}\n" for port in range(1, MAX_WORKERS + 2))
    with pytest.raises(ConfigError, match=f"{MAX_WORKERS + 1} workers; wanted at most {MAX_WORKERS}"):
        parse_endpoints(lines, "f")


def test_a_bad_file_leaves_the_workers_as_they_were_and_warns_once(tmp_path, caplog):
    path = tmp_path / "workers.yaml"
    path.write_text("[a:1]")
    source = EndpointsFile(path)
    with caplog.at_level(logging.WARNING):
        replace(path, "[a:1")
        assert urls(source) == urls(source) == ["a:1"]
        assert len(caplog.records) == 1
        path.unlink()
        assert urls(source) == urls(source) == ["a:1"]
        assert len(caplog.records) == 2
    replace(path, "[]")
    assert urls(source) == []
