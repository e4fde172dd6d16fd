"""``rsrv gateway`` from the outside: its options, its line of JSON, its log, its signals and its exit codes."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import grpc
import pytest
from support.gateway_site import request_body, wait_until
from support.mock_worker import MockWorker

from rsrv.cli import foreground
from rsrv.cli.main import main

INFER = "/inference.GRPCInferenceService/ModelInfer"
PORTS = ("--grpc-port", "0", "--http-port", "0")
WAIT = 60


class Process:
    """A context manager; `log` is what it wrote to stderr."""

    def __init__(self, *arguments, env=()):
        clean = {name: text for name, text in os.environ.items() if not name.startswith("RSRV_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rsrv", "gateway", *arguments],
            env={**clean, **dict(env)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines = []
        self._reader = threading.Thread(target=lambda: self._lines.extend(iter(self.process.stderr.readline, "")))
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.end()

    def listening(self):
        line = self.process.stdout.readline()
        assert line, self.log
        return json.loads(line)

    def end(self):
        code = self.process.wait(WAIT)
        self._reader.join(WAIT)
        self.process.stdout.close()
        self.process.stderr.close()
        return code

    @property
    def log(self):
        return "".join(self._lines)


@pytest.fixture
def worker():
    with MockWorker(["m"]) as mock:
        yield mock


@pytest.fixture
def served(monkeypatch):
    """What the command would serve, without serving it."""
    found = []
    monkeypatch.setattr("rsrv.gateway.serve_gateway", lambda resolved, **_: found.append(resolved.config))
    monkeypatch.setattr("rsrv.core.logs.set_up_logging", lambda level, style: found.append((level, style)))
    monkeypatch.setattr("rsrv.core.logs.let_go", lambda records: None)
    monkeypatch.setattr("rsrv.cli.foreground.serves", lambda: None)
    return found


# --- options --------------------------------------------------------------------------------------------------------


def test_the_simple_case_needs_no_file(served):
    options = ["--worker", "a:1", "--worker", "b:2", "--mode", "lpt_packing", "--host", "::1", "--http-port", "9"]
    assert main(["gateway", *options, "--log-level", "warning"]) == 0
    logging, config = served
    assert config.endpoints == ["a:1", "b:2"]
    assert config.scheduling.mode == "lpt_packing"
    assert (config.listen.grpc, config.listen.http) == ("[::1]:8001", "[::1]:9")
    assert logging == ("warning", "json")


def test_options_go_before_variables_and_those_before_the_file(served, tmp_path, monkeypatch):
    path = tmp_path / "gateway.yaml"
    path.write_text(
        "endpoints: ['f:1']\nlisten: {grpc: '10.0.0.1:5', http: '10.0.0.1:6'}\n"
        "logging: {format: text}\nscheduling: {mode: least_outstanding}\n"
    )
    monkeypatch.setenv("RSRV_GATEWAY_WORKERS", "e:1")
    assert main(["gateway", str(path), "--grpc-port", "7"]) == 0
    config = served[-1]
    assert (config.endpoints, config.scheduling.mode) == (["e:1"], "least_outstanding")
    assert (config.listen.grpc, config.listen.http) == ("10.0.0.1:7", "10.0.0.1:6")
    assert served[0] == ("info", "text")
    assert main(["gateway", str(path), "--worker", "o:1", "--no-http"]) == 0
    assert (served[-1].endpoints, served[-1].listen.http) == (["o:1"], None)


def test_the_environment_may_name_the_file(served, tmp_path, monkeypatch):
    path = tmp_path / "gateway.yaml"
    path.write_text("endpoints: ['f:1']\nlisten: {http: null}\n")
    monkeypatch.setenv("RSRV_GATEWAY_FILE", str(path))
    assert main(["gateway", "--host", "0.0.0.0"]) == 0
    assert (served[-1].listen.grpc, served[-1].listen.http) == ("0.0.0.0:8001", None)
    assert main(["gateway", "--http-port", "0"]) == 0
    assert served[-1].listen.http == "127.0.0.1:0"


@pytest.mark.parametrize(
    ("arguments", "environ", "code", "told"),
    [
        ([], {}, 78, "endpoints is empty"),
        (["--worker", "a"], {}, 78, "endpoints: 'a' is not accepted; wanted host:port (from flag)"),
        (["nope.yaml"], {}, 78, "nope.yaml: there is no such gateway file"),
        (["--worker", "a:1", "--mode", "best"], {}, 2, "best"),
        (["--worker", "a:1", "--no-http", "--http-port", "1"], {}, 2, "contradict"),
        (["--worker", "a:1", "--grpc-port", "70000"], {}, 78, "70000"),
        (["--worker", "a:1"], {"RSRV_GATEWAY_LISTEN_GPRC": "h:1"}, 78, "RSRV_GATEWAY_LISTEN_GPRC names no key"),
        (["--worker", "a:1"], {"RSRV_GATEWAY_TLS_CERT_FILE": "c"}, 78, "server TLS is not implemented yet"),
    ],
)
def test_what_does_not_hold_is_told_with_its_exit_code(arguments, environ, code, told, served, monkeypatch, capsys):
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    assert main(["gateway", *arguments]) == code
    assert told in capsys.readouterr().err
    assert not [found for found in served if not isinstance(found, tuple)]


# --- processes ------------------------------------------------------------------------------------------------------


def test_it_tells_its_ports_serves_and_stops_on_a_signal(worker):
    with Process("--worker", worker.url, *PORTS, env={"RSRV_GATEWAY_LPT_MIN_WORKERS": "1"}) as gateway:
        ports = gateway.listening()
        with grpc.insecure_channel(f"127.0.0.1:{ports['grpc_port']}") as channel:
            assert channel.unary_unary(INFER)(request_body(), timeout=WAIT)
        connection = http.client.HTTPConnection("127.0.0.1", ports["http_port"], timeout=WAIT)
        connection.request("GET", "/readyz")
        assert connection.getresponse().status == 200
        connection.close()
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.end() == 0
    records = [json.loads(line) for line in gateway.log.splitlines() if line.startswith("{")]
    assert {"time", "level", "logger", "message"} == set(records[0])
    texts = [record["message"] for record in records]
    assert texts[0].startswith("configuration of the gateway listen.grpc=127.0.0.1:0 ")
    assert texts[1] == "environment RSRV_GATEWAY_LPT_MIN_WORKERS=1"
    assert "mode=round_robin" in texts
    assert texts[-1] == "stopped"


def test_a_hangup_before_there_is_a_server_ends_nothing_unless_a_terminal_hung_up(monkeypatch):
    before = signal.getsignal(signal.SIGHUP)
    for of_terminal, during in ((False, signal.SIG_IGN), (True, before)):
        monkeypatch.setattr(foreground.os, "isatty", lambda fd, answer=of_terminal: answer)
        with foreground.signals_end_it():
            assert signal.getsignal(signal.SIGHUP) == during
        assert signal.getsignal(signal.SIGHUP) == before


def test_a_second_signal_ends_it_at_once(worker):
    worker.hang("ModelInfer")
    with Process("--worker", worker.url, *PORTS) as gateway:
        channel = grpc.insecure_channel(f"127.0.0.1:{gateway.listening()['grpc_port']}")
        future = channel.unary_unary(INFER).future(request_body(), timeout=WAIT)
        wait_until(lambda: worker.count("ModelInfer"), WAIT)
        gateway.process.send_signal(signal.SIGINT)
        wait_until(lambda: "stopping" in gateway.log, WAIT)
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.end() == 128 + signal.SIGTERM
        assert future.exception(WAIT) is not None
        channel.close()


def test_a_signal_ends_the_wait_for_workers():
    options = ("--worker", "127.0.0.1:1", "--mode", "lpt_packing", *PORTS)
    with Process(*options, env={"RSRV_GATEWAY_STARTUP_WAIT_SECONDS": "forever"}) as gateway:
        wait_until(lambda: "waiting for workers" in gateway.log, WAIT)
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.end() == 0


def test_too_few_workers_and_a_taken_port_have_their_exit_codes():
    with Process("--worker", "127.0.0.1:1", "--mode", "lpt_packing", *PORTS) as gateway:
        assert gateway.end() == 1
    assert "lpt_min_workers" in gateway.log
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with Process("--worker", "127.0.0.1:1", "--grpc-port", port, "--no-http") as gateway:
            assert gateway.end() == 78
    assert f"127.0.0.1:{port} is taken" in gateway.log
