"""What follows the fleet: the standing of its workers and the watches over their health."""

import threading

import pytest
from support.gateway_site import wait_until

from rsrv.core.config.gateway import OutliersConfig
from rsrv.gateway.metrics.counters import GatewayCounters
from rsrv.gateway.routing.router import Router
from rsrv.gateway.routing.standing import Standing
from rsrv.gateway.scheduling.simple import RoundRobin
from rsrv.gateway.timers import Timers
from rsrv.gateway.workers.attendance import Attendance
from rsrv.gateway.workers.channels import ChannelSettings
from rsrv.gateway.workers.fleet import Endpoint, Fleet
from rsrv.gateway.workers.health_watch import HealthWatch
from rsrv.gateway.workers.worker import Worker

A, B = "127.0.0.1:1", "127.0.0.1:2"


@pytest.fixture
def house():
    timers = Timers()
    fleet = Fleet(
        lambda endpoint: Worker(
            endpoint.url,
            endpoint.name,
            settings=ChannelSettings(1 << 20, 1 << 20),
            streams=1,
            timers=timers,
            counters=GatewayCounters(),
        )
    )
    standing = Standing(OutliersConfig(), lambda: 0.0)
    attendance = Attendance(fleet, Router(RoundRobin(), standing), lambda: None)
    yield fleet, standing, attendance
    attendance.close()
    fleet.close()
    timers.close()


def watches():
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("rsrv-gateway-watch"))


def test_who_is_not_ready_or_drained_is_to_be_avoided(house):
    fleet, standing, _ = house
    fleet.add(Endpoint(A))
    fleet.add(Endpoint(B))
    assert standing.avoid("m") == {A, B}
    fleet.probed(A, True)
    fleet.probed(B, True)
    assert standing.avoid("m") == frozenset()
    fleet.drain(A)
    assert standing.avoid("m") == {A}
    fleet.undrain(A)
    fleet.probed(B, False)
    assert standing.avoid("m") == {B}


def test_a_worker_that_joins_those_that_serve_starts_slowly(house):
    fleet, standing, _ = house
    fleet.add(Endpoint(A))
    fleet.probed(A, True)
    fleet.add(Endpoint(B))
    fleet.probed(B, True)
    avoided = [B in standing.avoid("m") for _ in range(20)]
    assert avoided.count(False) == 2  # a tenth of the requests at its first moment
    assert not any(A in standing.avoid("m") for _ in range(20))


def test_a_worker_whose_health_flaps_starts_few_rounds():
    now, told = [0.0], []

    class Flapping:
        name = "flapping"

        def watch(self, path, body):
            return iter([b"\x08\x01", b"\x08\x02"] * 100)

    watch = HealthWatch(Flapping(), lambda: told.append(now[0]), lambda: now[0])
    watch._listen()
    assert len(told) == 8
    now[0] = 5.0
    watch._listen()
    assert told[8:] == [5.0] * 8


def test_each_member_is_watched_and_another_one_at_its_address_anew(house):
    fleet, standing, attendance = house
    fleet.add(Endpoint(A, "first"))
    fleet.add(Endpoint(B, "other"))
    wait_until(lambda: watches() == ["rsrv-gateway-watch first", "rsrv-gateway-watch other"])
    fleet.probed(A, True)
    with attendance._lock:  # both changes come in one look
        fleet.on_change.remove(attendance.update)
    fleet.remove(A)
    fleet.add(Endpoint(A, "second"))
    fleet.on_change.append(attendance.update)
    attendance.update()
    assert A in standing.avoid("m")
    wait_until(lambda: watches() == ["rsrv-gateway-watch other", "rsrv-gateway-watch second"])
    attendance.close()
    wait_until(lambda: watches() == [])
