"""Administration over HTTP beside the operations: who is let in, JSON that is none, and the stream of events."""

import contextlib
import json
import socket

import pytest
from admin_support import WAIT, Site

from rsrv.rpc.access import BearerToken


@pytest.fixture
def make(tmp_path):
    sites = []

    def build(**options):
        sites.append(Site(tmp_path, **options))
        return sites[-1]

    yield build
    for site in sites:
        site.close()


@pytest.fixture
def site(make):
    return make()


ROUTES = [
    ("GET", "/v1/models"),
    ("POST", "/v1/models/drain"),
    ("GET", "/v1/events"),
    ("PATCH", "/v1/reclaim"),
    ("POST", "/v1/repository/poll"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_the_token_nothing_is_done_or_told(make, method, path):
    site = make(token=BearerToken("s3cret"))
    site.put()
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
        status, body = site.call(method, path, b"{}" if method != "GET" else None, headers)
        assert (status, body["error"]["code"], body["error"]["reason"]) == (401, "UNAUTHENTICATED", "unauthenticated")


def test_with_the_token_it_is(make):
    site = make(token=BearerToken("s3cret"))
    site.put()
    status, body = site.post("models/drain", {"Authorization": "Bearer s3cret"}, model="net")
    assert (status, body["admission"]) == (200, "drained")


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}])
def test_a_page_of_somebody_else_is_refused_with_and_without_rebinding(site, method, path, headers):
    status, body = site.call(method, path, b"{}" if method != "GET" else None, headers)
    assert (status, body["error"]["reason"]) == (403, "foreign_origin")
    assert "evil.example" in body["error"]["message"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{", "the body is no JSON"),
        (b"\xff", "the body is no JSON"),
        (b"[]", "wanted a JSON object"),
        (b'"net"', "wanted a JSON object"),
        (b"", "field 'model' is missing"),
        (b"{}", "field 'model' is missing"),
        (b'{"model": 1}', "field 'model' is 1"),
        (b'{"model": ""}', "field 'model' is ''"),
        (b'{"model": null}', "field 'model' is None"),
        (b'{"model": "net", "wait_ms": "5"}', "field 'wait_ms' is '5'"),
        (b'{"model": "net", "wait_ms": 5.5}', "field 'wait_ms' is 5.5"),
        (b'{"model": "net", "wait_ms": true}', "field 'wait_ms' is True"),
        (b'{"model": "net", "wait_ms": -1}', "wanted integer"),
        (b'{"model": "net", "if_incarnation": 9223372036854775808}', "field 'if_incarnation'"),
        (b"[" * 100_000, "the body is no JSON"),
    ],
)
def test_a_body_that_is_no_request_is_refused_in_words(site, body, text):
    site.put()
    status, answer = site.call("POST", "/v1/models/drain", body)
    assert (status, answer["error"]["code"], answer["error"]["reason"]) == (400, "INVALID_ARGUMENT", "invalid")
    assert text in answer["error"]["message"]
    assert site.entry().gate == "open"


def test_a_query_of_a_post_is_not_silently_dropped(site):
    site.put()
    status, body = site.call("POST", "/v1/models/drain?model=net", {"model": "net"})
    assert (status, body["error"]["reason"]) == (400, "invalid")


def test_an_unknown_parameter_of_a_query_is_refused(site):
    status, body = site.get("models?nmae=x")
    assert (status, body["error"]["message"]) == (400, "unknown field 'nmae'")


def test_an_error_without_a_model_has_none(site):
    status, body = site.post("devices/trim", device=3)
    assert (status, body["model"], body["incarnation"]) == (404, None, None)


# --- events -------------------------------------------------------------------------------------------------------


class Reader:
    """Follows the events of a site."""

    def __init__(self, site, query="", headers=""):
        self.socket = socket.create_connection(("127.0.0.1", site.port), timeout=WAIT)
        self.socket.sendall(f"GET /v1/events{query} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())
        self.seen = b""

    def until(self, text):
        while text not in self.seen:
            more = self.socket.recv(1 << 16)
            assert more, f"the stream ended after {self.seen!r}"
            self.seen += more

    def events(self, count):
        """The first `count` events, as (id, data)."""
        while len(found := self._parsed()) < count:
            more = self.socket.recv(1 << 16)
            assert more, f"the stream ended after {self.seen!r}"
            self.seen += more
        return found

    def _parsed(self):
        found = []
        text = self.seen.decode()
        for block in text.split("\n\n")[:-1]:
            lines = dict(
                line.strip().split(": ", 1) for line in block.split("\n") if line.startswith(("id: ", "data: "))
            )
            if "id" in lines:
                found.append((int(lines["id"]), json.loads(lines["data"])))
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()


def test_events_come_as_they_happen(site):
    with Reader(site) as reader:
        reader.until(b"retry: ")
        assert b"Content-Type: text/event-stream" in reader.seen
        site.events.append("net", 3, "admission", "open", "draining", "why")
        ((seq, event),) = reader.events(1)
    assert seq == 1
    assert event.pop("time") > 1e9
    assert event == {
        "seq": 1,
        "model": "net",
        "incarnation": 3,
        "type": "admission",
        "from": "open",
        "to": "draining",
        "detail": "why",
    }


def test_events_of_one_model_and_from_a_number(site):
    for name in ("a", "b", "a", "a"):
        site.events.append(name, 1, "x", "", "")
    with Reader(site, "?model=a&from_seq=2") as reader:
        assert [seq for seq, _ in reader.events(2)] == [3, 4]


def test_a_reader_that_comes_back_goes_on_where_it_was(site):
    for _ in range(5):
        site.events.append("a", 1, "x", "", "")
    with Reader(site, "?from_seq=1", "Last-Event-ID: 3\r\n") as reader:
        assert [seq for seq, _ in reader.events(2)] == [4, 5]


@pytest.mark.parametrize("seen", ["9" * 5000, "-1", "x", "", "1.5"])
def test_a_reader_that_has_seen_what_is_no_number_of_ours_gets_what_it_asks_for(site, seen):
    for _ in range(3):
        site.events.append("a", 1, "x", "", "")
    with Reader(site, "?from_seq=2", f"Last-Event-ID: {seen}\r\n") as reader:
        assert [seq for seq, _ in reader.events(2)] == [2, 3]


def test_a_gap_is_told_with_the_first_number_that_is_left(site):
    for _ in range(1030):
        site.events.append("a", 1, "x", "", "")
    with Reader(site, "?from_seq=2") as reader:
        assert reader.events(1)[0][0] == 7
    assert b'event: gap\ndata: {"first_seq": 7}\n\n' in reader.seen


def test_streams_share_the_places_of_held_requests_and_give_them_back(make):
    site = make(admission={"held_requests": 1})
    with contextlib.closing(Reader(site).socket) as first:
        assert first.recv(16)
        status, body = site.get("events")
        assert (status, body["error"]["reason"]) == (429, "held_full")
    site.until(lambda: site.admission._places == 0)
    with Reader(site) as reader:
        reader.until(b"retry: ")


def test_a_bad_query_takes_no_place(site):
    status, body = site.get("events?from_seq=x")
    assert (status, body["error"]["reason"]) == (400, "invalid")
    assert site.admission._places == 0
