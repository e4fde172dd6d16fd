"""The workers behind a host name."""

import logging
import socket

from rsrv.core.config.gateway import MAX_WORKERS
from rsrv.gateway.discovery.dns import DnsEndpoints, addresses
from rsrv.gateway.workers.fleet import Endpoint


def test_each_address_is_a_worker_with_the_port_that_is_configured():
    source = DnsEndpoints("workers.example:8001", lookup=lambda host, port: ["10.0.0.1", "10.0.0.2"])
    assert source.look() == (
        Endpoint("10.0.0.1:8001", "10.0.0.1:8001", None, "dns"),
        Endpoint("10.0.0.2:8001", "10.0.0.2:8001", None, "dns"),
    )


def test_addresses_of_ipv6_are_written_in_brackets():
    source = DnsEndpoints("workers.example:8001", lookup=lambda host, port: ["fd00::1"])
    assert [endpoint.url for endpoint in source.look()] == ["[fd00::1]:8001"]


def test_a_lookup_that_fails_or_finds_nothing_changes_nothing_and_warns_once(caplog):
    answers = iter([["10.0.0.1"], socket.gaierror(-2, "Name or service not known"), [], OSError(5, "no"), ["10.0.0.2"]])

    def lookup(host, port):
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    source = DnsEndpoints("workers.example:8001", lookup=lookup)
    with caplog.at_level(logging.WARNING):
        assert [len(source.look()) for _ in range(4)] == [1, 1, 1, 1]
    assert [record.getMessage() for record in caplog.records] == [
        "membership.dns workers.example:8001: cannot be looked up, the workers stay as they are: "
        "Name or service not known"
    ]
    assert [endpoint.url for endpoint in source.look()] == ["10.0.0.2:8001"]


def test_a_name_with_addresses_of_both_kinds_gives_those_of_ipv4(monkeypatch):
    both = [
        (socket.AF_INET6, 1, 6, "", ("fd00::1", 1, 0, 0)),
        (socket.AF_INET, 1, 6, "", ("10.0.0.2", 1)),
        (socket.AF_INET, 1, 6, "", ("10.0.0.1", 1)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: both)
    assert addresses("workers.example", 1) == ["10.0.0.1", "10.0.0.2"]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: both[:1])
    assert addresses("workers.example", 1) == ["fd00::1"]


def test_numbers_need_no_server():
    assert addresses("127.0.0.1", 8001) == ["127.0.0.1"]


def test_more_addresses_than_a_gateway_can_have_workers_change_nothing(caplog):
    answers = iter([["10.0.0.1"], [f"10.0.{n // 256}.{n % 256}" for n in range(MAX_WORKERS + 1)]])
    source = DnsEndpoints("workers.example:8001", lookup=lambda host, port: next(answers))
    assert [len(source.look()) for _ in range(2)] == [1, 1]
    assert f"it has {MAX_WORKERS + 1} addresses; wanted at most {MAX_WORKERS}" in caplog.text
