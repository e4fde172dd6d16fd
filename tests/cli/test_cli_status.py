import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rsrv.cli import status as command
from rsrv.cli.main import main
from rsrv.core.status import WorkerStatus

COUNTERS = {
    "requests": {"OK": 10},
    "dispatches": 5,
    "served": 10,
    "rows": 30,
    "padding_rows": 10,
    "by_batch_size": {"8": 5},
    "compute_seconds": 0.5,
    "errors": {},
    "dropped": {"deadline": 2},
}
RESIDENCY = {
    "floor": "system",
    "state": "resident",
    "host_copy": True,
    "host_shared": False,
    "pinned": False,
    "pinned_by_operator": False,
    "committed_bytes": 24,
    "releasing_bytes": 0,
    "host_bytes": 24,
    "operation": "idle",
    "operation_error": None,
    "loads": 7,
    "evictions": 6,
    "load_seconds": 0.1,
    "uses_per_second": 2.0,
    "idle_s": 90.0,
}
BUDGET = {
    "arena_bytes": 4096,
    "pool_bytes": 3072,
    "scratch_bytes": 1024,
    "pinned_bytes": 0,
    "budget_bytes": 3072,
    "resident_bytes": 2048,
    "pending_bytes": 0,
    "releasing_bytes": 0,
    "evictable_bytes": 2048,
    "eviction": "lru",
    "uses": 20,
    "loads": 7,
    "load_seconds": 0.7,
    "evictions": {"room": 6},
    "idle_reclaims": 0,
    "compactions": 0,
    "lru_age_s": 90.0,
    "bytes_for_99_percent_hits": None,
}
MODEL = {
    "name": "net",
    "kind": "model",
    "source": "startup",
    "state": "ready",
    "admission": "open",
    "accepted": {"queued": 3, "executing": 1, "hooks": 0, "earlier": 0},
    "phase": "executing",
    "reason": "",
    "error": None,
    "pending_error": None,
    "incarnation": 1,
    "directory": "/models/net",
    "modified": [],
    "weights_bytes": 24,
    "residency": RESIDENCY,
    "hooks": [],
    "programs": {
        "batch_sizes": [8],
        "shape_variants": [[]],
        "max_batch_size": 8,
        "numerics": "auto",
        "selected": 1,
        "retained": 1,
        "capacity": 4,
    },
    "weight": 1.0,
    "recent_seconds": 0.1,
    "queue": {"requests": 3, "rows": 3, "oldest_wait_s": 0.01, "inflight_batches": 1},
    "counters": COUNTERS,
    "batch_fill": 0.75,
    "queue_wait_s": {"p50": 0.001, "p90": 0.002, "p99": 0.004},
    "cost_seconds": {"8": 0.1},
}
LATE = {
    **MODEL,
    "name": "late",
    "state": "failed",
    "reason": "compile: it is no program",
    **dict.fromkeys(
        (
            "programs",
            "queue",
            "counters",
            "batch_fill",
            "queue_wait_s",
            "weight",
            "recent_seconds",
            "residency",
            "weights_bytes",
        )
    ),
}
DOCUMENT = {
    "server": {
        "name": "rsrv",
        "version": "0.1.0",
        "worker": "w7",
        "state": "serving",
        "ready": True,
        "phase": "serving",
        "reason": "",
        "stuck": "",
        "uptime_s": 7300.0,
        "control_mode": "static",
        "residency_mode": "self_managed",
        "discipline": "fair",
        "numerics": {"mode": "auto", "tf32_active": None, "pinned_exact": None},
        "programs": {"total": 3, "cache": 1, "compiled": 1, "shared": 0, "compile_seconds": 1.0},
        "idle": {"parameter_ms": 0.0, "workspace_ms": 0.0, "host_ms": 0.0, "device_workspace": False},
        "limits": {
            "max_concurrent_requests": 64,
            "max_queue_depth": 1024,
            "held_requests": 32,
            "model_capacity": 1024,
            "program_capacity": 4,
            "variant_overtakes": 0,
        },
        "inflight": 4,
        "held_requests": 0,
        "shed": 0,
    },
    "devices": [
        {
            "device": 0,
            "platform": "cpu",
            "kind": "cpu",
            "weights_bytes": 24,
            "budget": None,
            "in_use_bytes": None,
            "peak_bytes": None,
            "limit_bytes": None,
            "largest_free_block_bytes": None,
        }
    ],
    "models": [LATE, MODEL],
    "tombstones": [],
}


@contextmanager
def answering(*answers):
    """An HTTP server that gives one answer after the other, and the last one for ever; yields its address."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status if self.path == "/v1/status" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def body(document=DOCUMENT):
    return 200, json.dumps(document).encode()


def test_status_shows_the_server_and_a_line_for_each_model(capsys):
    with answering(body()) as url:
        assert main(["status", "--url", url]) == 0
    out, err = capsys.readouterr()
    title, header, late, net = out.splitlines()
    assert title == (
        "rsrv 0.1.0 w7 · serving · up 2h · cpu (cpu) · 1/2 models · 4 of 64 requests in flight · compiled 2/3"
    )
    assert header.split("  ")[0] == "model"
    assert late.split() == ["late", "failed", *["-"] * 9]
    assert " ".join(net.split()) == "net ready 3 10 30 75% 100.00 0.5 s 1.0 ms 4.0 ms 2"
    assert err == "late: compile: it is no program\n"


def test_what_an_operator_changed_and_what_did_not_come_to_be_is_told():
    pending = {"phase": "digests", "type": "DigestMismatch", "message": "model.b8.mlir differs"}
    moved = {**RESIDENCY, "operation_error": {**pending, "phase": "activating", "message": "there is no room"}}
    net = {**MODEL, "admission": "draining", "reason": "draining", "pending_error": pending, "residency": moved}
    gone = {"name": "gone", "signature": "1a2b", "since": 1.0}
    server = {**DOCUMENT["server"], "held_requests": 2}
    found = WorkerStatus.model_validate({**DOCUMENT, "server": server, "models": [net], "tombstones": [gone]})
    assert " · 4 of 64 requests in flight · 2 held · " in command.headline(found)
    assert command.model_row(found.models[0])[1] == "ready, draining"
    assert command.remarks(found) == [
        "net: draining",
        "net: the last reload failed (digests: model.b8.mlir differs); the old version serves",
        "net: activating failed: there is no room",
        "gone: removed by an operator, until its files change",
    ]


def with_budget(*models, **changes):
    (device,) = DOCUMENT["devices"]
    return {**DOCUMENT, "devices": [{**device, "budget": {**BUDGET, **changes}}], "models": list(models)}


def test_where_weights_come_and_go_status_shows_where_they_are(capsys):
    cold = {**MODEL, "name": "cold", "residency": {**RESIDENCY, "state": "cold", "host_copy": False, "idle_s": None}}
    with answering(body(with_budget(LATE, MODEL, cold))) as url:
        assert main(["status", "--url", url]) == 0
    title, header, late, net, cold = capsys.readouterr().out.splitlines()
    assert title.endswith(" · weights 2.0 KiB of 3.0 KiB · compiled 2/3")
    assert header.split()[-6:] == ["floor", "on", "weights", "loads", "evicted", "idle"]
    assert late.split() == ["late", "failed", *["-"] * 15]
    assert net.split()[-7:] == ["system", "device+host", "24", "B", "7", "6", "2m"]
    assert cold.split()[-7:] == ["system", "file", "24", "B", "7", "6", "-"]


def test_the_headline_tells_of_pinned_weights_when_there_are_any():
    line = command.headline(WorkerStatus.model_validate(with_budget(pinned_bytes=512)))
    assert "weights 2.0 KiB of 3.0 KiB, 512 B pinned" in line


def test_loads_and_evictions_are_rates_between_two_looks():
    later = {**MODEL, "residency": {**RESIDENCY, "state": "loading", "loads": 12, "evictions": 11, "idle_s": 0.2}}
    before, now = (WorkerStatus.model_validate(with_budget(model)) for model in (MODEL, later))
    _, columns, [row] = command.view(now, before, 2.0)
    assert dict(zip(columns, row, strict=True))["on"] == "loading"
    assert row[-3:] == ("2.5/s", "2.5/s", "0s")
    again = now.models[0].model_copy(update={"incarnation": 2})
    assert command.residency_row(again, before.models[0], 2.0)[-3:-1] == ("12", "11")


def test_status_as_json_is_the_document_as_it_came(capsys):
    newer = {**DOCUMENT, "new": [1]}
    with answering(body(newer)) as url:
        assert main(["status", "--url", f"http://{url}/", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == newer


def test_fields_of_a_newer_server_are_ignored(capsys):
    with answering(body({**DOCUMENT, "new": [1]})) as url:
        assert main(["status", "--url", url]) == 0
    assert "net" in capsys.readouterr().out


def test_watch_shows_rates_between_two_looks_and_ends_with_ctrl_c(capsys, monkeypatch):
    later = {**COUNTERS, "served": 20, "rows": 70, "padding_rows": 10, "dispatches": 10, "compute_seconds": 1.5}
    now = iter([100.0, 102.0, 104.0])
    naps = iter([None, KeyboardInterrupt()])

    def sleep(seconds):
        if (nap := next(naps)) is not None:
            raise nap

    monkeypatch.setattr(command.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(command.time, "sleep", sleep)
    documents = iter([DOCUMENT, {**DOCUMENT, "models": [{**MODEL, "counters": later}]}])
    monkeypatch.setattr("rsrv.client.status.fetch_status", lambda url: next(documents))
    assert main(["status", "--watch"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert " ".join(last.split()) == "net ready 3 5/s 20/s 100% 200.00 50% 1.0 ms 4.0 ms 0/s"


def test_the_headline_says_why_the_server_is_not_ready_once():
    found = WorkerStatus.model_validate(DOCUMENT)
    for reason in ("not ready: a (failed)", "no model is ready"):
        server = found.server.model_copy(update={"ready": False, "reason": reason})
        line = command.headline(found.model_copy(update={"server": server}))
        assert line.count("not ready") + line.count("no model is ready") == 1 + (reason == "no model is ready")
        assert reason in line


def test_rates_start_anew_with_a_new_load_of_the_model():
    old, new = (WorkerStatus.model_validate(DOCUMENT).models[1] for _ in range(2))
    again = new.model_copy(update={"incarnation": 2})
    assert command.model_row(again, old, 2.0) == command.model_row(again)


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        ((404, b""), 1, "answered /v1/status with HTTP status 404"),
        ((200, b"<html>"), 1, "6 bytes that are no JSON object"),
        ((200, b"[]"), 1, "2 bytes that are no JSON object"),
        ((200, b"{}"), 1, "is not one that this version reads: server: Field required"),
    ],
)
def test_something_else_than_a_worker_is_told_apart(capsys, answer, code, words):
    with answering(answer) as url:
        assert main(["status", "--url", url]) == code
    assert words in capsys.readouterr().err


def test_nobody_there_is_unreachable(capsys):
    with socket.socket() as silent:  # it has the port, so that nobody else gets it, and does not listen
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        assert main(["status", "--url", f"127.0.0.1:{port}"]) == 3
    err = capsys.readouterr().err
    assert f"127.0.0.1:{port} cannot be reached: Connection refused" in err
    assert "the HTTP port of a worker" in err


@pytest.mark.parametrize("url", ["grpc://127.0.0.1:8001", "127.0.0.1:port", "http://", "127.0.0.1:8002/metrics"])
def test_a_url_of_another_kind_is_wrong_usage(url, capsys):
    assert main(["status", "--url", url]) == 2
    assert "wanted [http[s]://]host[:port]" in capsys.readouterr().err
