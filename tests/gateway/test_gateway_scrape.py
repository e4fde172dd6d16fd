"""Fetching the metrics of workers: those that answer are taken, the others cost little and rest for a while."""

import contextlib
import logging
import socket
import threading
from types import SimpleNamespace

import pytest

from rsrv.gateway.metrics import scrape
from rsrv.gateway.metrics.merge import merge
from rsrv.gateway.metrics.scrape import WorkerScrape
from rsrv.rpc.http import HttpListener
from rsrv.rpc.http_messages import HttpAnswer, HttpRoute

TEXT = b"# TYPE load gauge\nload 1\n"


@pytest.fixture
def listen():
    """``listen(answer)`` starts a metrics endpoint and returns its address."""
    with contextlib.ExitStack() as stack:

        def start(answer, **options):
            listener = HttpListener("127.0.0.1", 0, {("GET", "/metrics"): HttpRoute(answer, **options)})
            stack.callback(listener.stop)
            port = listener.bind()
            listener.start()
            return f"127.0.0.1:{port}"

        yield start


@pytest.fixture
def refusing():
    """An address at which nobody listens, and nobody else will meanwhile."""
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def hanging():
    """An address that takes connections and never says anything."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        yield f"127.0.0.1:{silent.getsockname()[1]}"


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def worker(name, metrics, ready=True):
    return SimpleNamespace(url=f"{name}:1", name=name, metrics=metrics, ready=ready, incarnation="1")


def of_one(metrics, **options):
    """The scrape of one worker, w0."""
    member = worker("w0", metrics)
    return WorkerScrape(lambda: [member], **options)


class Counting:
    """An endpoint that counts how often it was asked."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = 0

    def __call__(self, request):
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def test_the_metrics_of_all_workers_come_with_their_names(listen):
    members = [
        worker("w0", listen(Counting(HttpAnswer(200, TEXT)))),
        worker("w1", listen(Counting(HttpAnswer(200, TEXT)))),
    ]
    asked = WorkerScrape(lambda: members)
    assert asked.up == {}
    found = asked.fetch()
    assert list(found) == ["w0:1", "w1:1"]
    assert merge(found.values()) == b'# TYPE load gauge\nload{worker="w0"} 1\nload{worker="w1"} 1\n'
    assert asked.up == {"w0:1": True, "w1:1": True}


def test_a_worker_without_an_endpoint_is_not_asked_and_has_no_state():
    asked = of_one(None)
    assert asked.fetch() == {}
    assert asked.up == {}


def test_the_request_is_a_plain_get_of_metrics_without_compression(listen):
    seen = []

    def answer(request):
        seen.append((request.method, request.path, dict(request.query), request.headers))
        return HttpAnswer(200, TEXT)

    of_one(listen(answer)).fetch()
    ((method, path, query, headers),) = seen
    assert (method, path, query) == ("GET", "/metrics", {})
    assert headers["Accept-Encoding"] == "identity"
    assert headers["Accept"].startswith("text/plain")


def test_one_that_refuses_is_down_and_the_others_are_taken(listen, refusing):
    members = [worker("gone", refusing), worker("w1", listen(Counting(HttpAnswer(200, TEXT))))]
    asked = WorkerScrape(lambda: members)
    assert list(asked.fetch()) == ["w1:1"]
    assert asked.up == {"gone:1": False, "w1:1": True}


def test_one_that_hangs_is_given_up_and_the_others_are_taken(listen, hanging):
    class Impatient(WorkerScrape):
        """Soon gives up the one that hangs; the other one has time, for it may be slow where much is going on."""

        async def _ask(self, session, endpoint):
            self._total_seconds = 0.3 if endpoint == hanging else 30.0
            return await super()._ask(session, endpoint)

    members = [worker("hung", hanging), worker("w1", listen(Counting(HttpAnswer(200, TEXT))))]
    asked = Impatient(lambda: members)
    assert list(asked.fetch()) == ["w1:1"]
    assert asked.up == {"hung:1": False, "w1:1": True}


def test_one_that_sends_a_part_and_then_hangs_is_given_up(refusing):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        ended = threading.Event()

        def dribble():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nload 1\n")
                ended.wait(30)

        thread = threading.Thread(target=dribble)
        thread.start()
        member = worker("w0", f"127.0.0.1:{server.getsockname()[1]}")
        asked = WorkerScrape(lambda: [member], total_seconds=0.3)
        assert asked.fetch() == {}
        ended.set()
        thread.join()
        assert asked.up == {"w0:1": False}


@pytest.mark.parametrize(
    "answer",
    [
        HttpAnswer(404, TEXT),
        HttpAnswer(500, TEXT),
        HttpAnswer(302, "", headers={"Location": "/metrics"}),
        HttpAnswer(200, TEXT, headers={"Content-Encoding": "gzip"}),
        HttpAnswer(200, ""),
        HttpAnswer(200, "<html>welcome</html>"),
        HttpAnswer(200, b"\xff\xfe\x00"),
    ],
    ids=["404", "500", "redirect", "gzip", "empty", "html", "bytes"],
)
def test_what_is_no_text_of_metrics_counts_as_down(listen, answer):
    endpoint = Counting(answer)
    asked = of_one(listen(endpoint))
    assert asked.fetch() == {}
    assert asked.up == {"w0:1": False}
    assert endpoint.asked == 1


def test_what_is_no_http_is_told_in_a_few_words(caplog):
    def answer(listener):
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"\xff" * 8000 + b"\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        asked = of_one(f"127.0.0.1:{listener.getsockname()[1]}")
        assert asked.fetch() == {}
        thread.join()
    (record,) = [record for record in caplog.records if "up=false" in record.getMessage()]
    assert len(record.getMessage()) < 400


def test_garbage_between_good_lines_is_left_out(listen):
    body = TEXT + b"\xff\xff{{{\nload_more 2\n"
    asked = of_one(listen(Counting(HttpAnswer(200, body))))
    (text,) = asked.fetch().values()
    assert text.dropped == 1
    assert merge([text]).endswith(b'load_more{worker="w0"} 2\n')


def test_an_endless_body_is_cut_off(listen, monkeypatch):
    monkeypatch.setattr(scrape, "MAX_BODY_BYTES", 1000)
    asked = of_one(listen(Counting(HttpAnswer(200, TEXT * 100))))
    assert asked.fetch() == {}
    assert asked.up == {"w0:1": False}


def test_one_that_failed_is_left_alone_for_a_while(listen):
    endpoint, clock = Counting(HttpAnswer(500), HttpAnswer(200, TEXT)), Clock()
    member = worker("w0", listen(endpoint))
    asked = WorkerScrape(lambda: [member], retry_after_seconds=30.0, clock=clock)
    asked.fetch()
    clock.now += 29.9
    assert asked.fetch() == {}
    assert (endpoint.asked, asked.up) == (1, {"w0:1": False})
    clock.now += 0.2
    assert list(asked.fetch()) == ["w0:1"]
    assert (endpoint.asked, asked.up) == (2, {"w0:1": True})


def test_one_whose_worker_has_become_ready_again_is_asked_at_once(listen):
    endpoint, clock = Counting(HttpAnswer(500), HttpAnswer(500), HttpAnswer(200, TEXT)), Clock()
    member = worker("w0", listen(endpoint), ready=False)
    asked = WorkerScrape(lambda: [member], clock=clock)
    asked.fetch()
    asked.fetch()
    assert endpoint.asked == 1
    member.ready = True
    assert asked.fetch() == {}
    assert endpoint.asked == 2
    assert asked.fetch() == {}  # it was ready when it failed, so that is no news
    assert endpoint.asked == 2


@pytest.mark.parametrize("seen_while_away", [False, True])
def test_one_whose_worker_has_started_anew_is_asked_at_once(listen, seen_while_away):
    endpoint, clock = Counting(HttpAnswer(500), HttpAnswer(200, TEXT)), Clock()
    member = worker("w0", listen(endpoint))
    asked = WorkerScrape(lambda: [member], clock=clock)
    asked.fetch()  # it is gone, and no probe has noticed yet
    if seen_while_away:
        member.ready = False
        assert asked.fetch() == {}
        member.ready = True
    else:
        member.incarnation = "2"
    assert list(asked.fetch()) == ["w0:1"]
    assert endpoint.asked == 2


def test_a_failure_does_not_outlive_the_membership_of_its_worker(listen):
    endpoint, clock = Counting(HttpAnswer(500), HttpAnswer(200, TEXT)), Clock()
    members = [worker("w0", listen(endpoint))]
    asked = WorkerScrape(lambda: members, clock=clock)
    asked.fetch()
    gone, members = members, []
    asked.fetch()
    assert asked.up == {}
    members = gone
    assert list(asked.fetch()) == ["w0:1"]


def test_who_comes_while_workers_are_asked_gets_the_same_answers(listen):
    asked_now, go_on, second = threading.Event(), threading.Event(), threading.Event()

    def answer(request):
        asked_now.set()
        go_on.wait(30)
        return HttpAnswer(200, TEXT)

    calls, found = [], []

    def members():
        calls.append(1)
        return [member]

    def fetch(begun):
        begun.set()
        found.append(asked.fetch())

    member = worker("w0", listen(answer, where="thread"))
    asked = WorkerScrape(members, total_seconds=30.0)
    threads = [threading.Thread(target=fetch, args=(threading.Event(),))]
    threads[0].start()
    asked_now.wait(30)
    threads.append(threading.Thread(target=fetch, args=(second,)))
    threads[1].start()
    second.wait(30)
    go_on.set()
    for thread in threads:
        thread.join()
    assert [list(texts) for texts in found] == [["w0:1"], ["w0:1"]]
    if len(calls) == 1:
        assert found[0] is found[1]


def test_an_error_of_ours_is_logged_and_costs_only_the_workers_metrics(caplog):
    def members():
        raise RuntimeError("no members")

    asked = WorkerScrape(members)
    assert asked.fetch() == {}
    assert asked.fetch() == {}
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2


def test_changes_are_logged_once(listen, caplog):
    caplog.set_level(logging.INFO)
    endpoint, clock = Counting(HttpAnswer(200, TEXT), HttpAnswer(500), HttpAnswer(500), HttpAnswer(200, TEXT)), Clock()
    member = worker("w0", listen(endpoint))
    asked = WorkerScrape(lambda: [member], retry_after_seconds=1.0, clock=clock)
    for _ in range(5):
        asked.fetch()
        clock.now += 2.0
    told = [(record.levelname, record.getMessage()) for record in caplog.records if "w0" in record.getMessage()]
    assert [level for level, _ in told] == ["WARNING", "INFO"]
    assert "status 500" in told[0][1]
    assert member.metrics in told[0][1]


def test_one_that_never_answered_is_logged_at_the_first_look(refusing, caplog):
    asked = of_one(refusing, retry_after_seconds=0.0)
    asked.fetch()
    asked.fetch()
    assert len([record for record in caplog.records if "w0" in record.getMessage()]) == 1


def test_a_name_that_nobody_has_is_down(monkeypatch):
    def lookup(*args, **options):
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    asked = of_one("no-such-host.invalid:8002")
    assert asked.fetch() == {}
    assert asked.up == {"w0:1": False}


def test_a_name_that_is_looked_up_for_ever_holds_nothing_up(monkeypatch):
    answered, threads = threading.Event(), []

    def lookup(*args, **options):
        threads.append(threading.current_thread())
        answered.wait(30)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    asked = of_one("slow.invalid:8002", total_seconds=0.2)
    assert asked.fetch() == {}
    assert not answered.is_set()
    assert asked.up == {"w0:1": False}
    answered.set()
    for thread in threads:  # none, when it came so late that the lookup was given up before
        thread.join()


def test_no_thread_is_left_behind(listen, monkeypatch):
    me, start, begun = threading.current_thread(), threading.Thread.start, []

    def noted(thread):
        if threading.current_thread() is me:  # not those of the endpoint, nor of tests before
            begun.append(thread)
        start(thread)

    endpoint = listen(Counting(HttpAnswer(200, TEXT)))
    monkeypatch.setattr(threading.Thread, "start", noted)
    assert list(of_one(endpoint).fetch()) == ["w0:1"]
    assert [thread for thread in begun if thread.is_alive()] == []
