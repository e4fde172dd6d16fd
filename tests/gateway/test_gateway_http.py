"""The HTTP face of a gateway: its paths, what it says when it is not ready, and who may ask."""

import contextlib
import http.client
import json
import threading
from types import SimpleNamespace

import pytest

from rsrv.gateway.faces.http import http_routes
from rsrv.rpc.http import HttpListener

WAIT = 30
LIVE = ("/healthz", "/livez", "/v2/health/live")
READY = ("/readyz", "/v2/health/ready")


class Gateway:
    ready = True

    def __init__(self):
        self.metrics = SimpleNamespace(text=lambda: b"rsrv_gateway_routing_table_size 3\n")

    def routes(self, host="127.0.0.1"):
        return http_routes(self.metrics, ready=lambda: self.ready, overview=lambda: {"mode": "round_robin"}, host=host)


@pytest.fixture
def gateway():
    return Gateway()


@pytest.fixture
def ask(gateway):
    """``ask(path)`` asks the face on a loopback address: status, headers, body; ``bound`` = what it was told it is."""
    with contextlib.ExitStack() as stack:
        ports = {}

        def request(path, *, method="GET", headers=None, bound="127.0.0.1", version=11):
            if bound not in ports:
                listener = HttpListener("127.0.0.1", 0, gateway.routes(bound))
                stack.callback(listener.stop)
                ports[bound] = listener.bind()
                listener.start()
            connection = http.client.HTTPConnection("127.0.0.1", ports[bound], timeout=WAIT)
            connection._http_vsn, connection._http_vsn_str = version, f"HTTP/1.{version - 10}"
            with contextlib.closing(connection):
                connection.putrequest(method, path, skip_host=headers is not None)
                for name, value in (headers or {}).items():
                    connection.putheader(name, value)
                connection.endheaders()
                answer = connection.getresponse()
                return answer.status, dict(answer.headers), answer.read()

        yield request


@pytest.mark.parametrize("path", LIVE)
def test_a_gateway_that_runs_is_alive_ready_or_not(gateway, ask, path):
    gateway.ready = False
    assert ask(path)[::2] == (200, b"ok")


@pytest.mark.parametrize("path", READY)
def test_readiness_flips(gateway, ask, path):
    assert ask(path)[::2] == (200, b"ok")
    gateway.ready = False
    assert ask(path)[::2] == (503, b"not ready")
    gateway.ready = True
    assert ask(path)[::2] == (200, b"ok")


def test_metrics_are_a_text_and_a_query_string_changes_nothing(ask):
    for path in ("/metrics", "/metrics?name=x"):
        status, headers, body = ask(path)
        assert (status, body) == (200, b"rsrv_gateway_routing_table_size 3\n")
        assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_the_page_for_people_is_json(ask):
    status, headers, body = ask("/v1/gateway")
    assert (status, json.loads(body)) == (200, {"mode": "round_robin"})
    assert headers["Content-Type"] == "application/json"


def test_anything_else_is_not_found(ask):
    for path in ("/", "/health", "/v3/models"):
        assert ask(path)[::2] == (404, b"not found")
    assert ask("/v1/status")[0] == 404
    assert ask("/readyz", method="POST")[0] == 405


@pytest.mark.parametrize("path", [*LIVE, *READY, "/metrics", "/v1/gateway"])
def test_a_page_of_a_foreign_name_is_refused_on_a_loopback_address(ask, path):
    status, _, body = ask(path, headers={"Host": "evil.example:8002"})
    assert status == 403
    assert json.loads(body)["error"]["reason"] == "foreign_origin"
    for host in ("localhost:8002", "127.0.0.1", "[::1]:8002"):
        assert ask(path, headers={"Host": host})[0] == 200


@pytest.mark.parametrize("path", [*LIVE, *READY, "/metrics", "/v1/gateway"])
def test_on_other_addresses_every_name_is_ours(ask, path):
    assert ask(path, headers={"Host": "gateway.example"}, bound="0.0.0.0")[0] == 200


def test_a_health_check_of_http_1_0_needs_no_host(ask):
    for path in (*LIVE, *READY, "/metrics"):
        assert ask(path, headers={}, version=10)[0] == 200
    assert ask("/v1/gateway", headers={}, version=10)[0] == 403


def test_slow_metrics_do_not_hold_up_health(gateway, ask):
    asked, go_on, answers = threading.Event(), threading.Event(), []

    def text():
        asked.set()
        go_on.wait(WAIT)
        return b"slow 1\n"

    gateway.metrics.text = text
    assert ask("/healthz")[0] == 200
    thread = threading.Thread(target=lambda: answers.append(ask("/metrics")[2]))
    thread.start()
    assert asked.wait(WAIT)
    assert ask("/healthz")[0] == 200
    assert ask("/readyz")[0] == 200
    assert answers == []
    go_on.set()
    thread.join()
    assert answers == [b"slow 1\n"]
