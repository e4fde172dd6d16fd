import logging

import pytest

from rsrv.serve import observe


@pytest.fixture
def events():
    seen = []
    yield seen
    for f in list(observe._heartbeats):
        observe.unregister_heartbeat(f)
    for f in list(observe._guards):
        observe.unregister_serve_guard(f)


def test_heartbeats_run_in_registration_order_and_registration_returns_the_callback(events):
    first = observe.register_heartbeat(lambda event, detail: events.append(("first", event, detail)))
    observe.register_heartbeat(lambda event, detail: events.append(("second", event, detail)))
    observe.beat("request", "m")
    assert events == [("first", "request", "m"), ("second", "request", "m")]
    observe.unregister_heartbeat(first)
    observe.beat("up", 1)
    assert events[2:] == [("second", "up", 1)]


def test_a_heartbeat_that_raises_is_logged_once_and_the_next_one_still_runs(events, caplog):
    @observe.register_heartbeat
    def broken(event, detail):
        raise RuntimeError("no")

    observe.register_heartbeat(lambda event, detail: events.append(event))
    with caplog.at_level(logging.ERROR, logger="rsrv.serve.observe"):
        observe.beat("request", "m")
        observe.beat("request", "m")
    assert events == ["request", "request"]
    assert len(caplog.records) == 1


def test_a_guard_refuses_with_its_own_exception(events):
    class Mine(Exception):
        pass

    @observe.register_serve_guard
    def refuse(config):
        raise Mine(config)

    with pytest.raises(Mine, match="cfg"):
        observe.check_guards("cfg")
    observe.unregister_serve_guard(refuse)
    observe.check_guards("cfg")
