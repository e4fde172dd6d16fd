import grpc
import pytest
from support.client_stub import StubServer

from rsrv.client import CompactedMemory, Control, ModelControl
from rsrv.client.connection import MAX_TIMEOUT_SECONDS
from rsrv.core.errors import ResidencyRefused, ServerUnreachable, Unimplemented, UnknownModel, UsageError


@pytest.fixture
def control(server):
    with Control(server.url) as handle:
        yield handle


def test_status_tells_mode_budget_and_each_model(control):
    status = control.status()
    assert (status.residency_mode, status.discipline) == ("externally_managed", "fair")
    assert status.weight_cache_max_bytes == 3 << 30
    twice, cold = status.models
    assert twice == ModelControl(
        name="twice",
        floor="system",
        device_resident=True,
        host_resident=True,
        weight_nbytes=1536,
        weight=2.5,
        queue_depth=3,
        compute_seconds=0.5,
        requests_served=7,
        rows_served=20,
        dispatch_count=5,
        max_batch_size=8,
        batch_input_name="x",
        batch_axis=1,
    )
    assert (cold.device_resident, cold.batch_input_name, cold.batch_axis) == (False, "", 0)


def test_a_floor_of_a_newer_server_is_not_taken_for_another(control):
    assert control.status().models[1].floor == ""


@pytest.mark.parametrize(("floor", "number"), [("unpinned", 1), ("system", 2), ("device", 3)])
def test_floors_have_their_numbers_on_the_wire(server, control, floor, number):
    assert control.set_residency("twice", floor) == floor
    (request,) = server.requests
    assert (request.name, request.target) == ("twice", number)


def test_a_floor_that_does_not_exist_is_refused_before_anybody_is_asked(server, control):
    with pytest.raises(UsageError, match="no residency is called 'disk'; wanted unpinned, system, device"):
        control.set_residency("twice", "disk")
    assert server.calls == []


def test_a_share_is_sent_only_when_it_is_given(server, control):
    control.set_policy("twice", weight=0.5)
    control.set_policy("twice")
    first, second = server.requests
    assert (first.name, first.has_weight, first.weight) == ("twice", True, 0.5)
    assert (second.name, second.has_weight) == ("twice", False)


def test_compaction_says_what_to_load_again_and_tells_what_is_left(server, control):
    assert control.compact(["a", "b"]) == CompactedMemory(reloaded=2, resident_bytes=1536)
    assert control.compact() == CompactedMemory(reloaded=0, resident_bytes=1536)
    assert [list(request.reload_models) for request in server.requests] == [["a", "b"], []]


def test_refusals_come_with_their_type(server, control):
    with pytest.raises(UnknownModel):
        control.set_residency("nobody", "device")
    server.refuse["SetModelResidency"] = (grpc.StatusCode.FAILED_PRECONDITION, "it moves weights itself", "residency")
    with pytest.raises(ResidencyRefused, match="it moves weights itself"):
        control.set_residency("twice", "device")
    server.refuse["CompactMemory"] = (grpc.StatusCode.UNIMPLEMENTED, "not here", "")
    with pytest.raises(Unimplemented):
        control.compact()


def test_nobody_there_is_unreachable():
    with StubServer() as server:
        url = server.url
    with Control(url) as handle, pytest.raises(ServerUnreachable):
        handle.status()


def test_a_closed_handle_says_so(server):
    control = Control(server.url)
    control.close()
    with pytest.raises(UsageError, match="closed"):
        control.status()


@pytest.mark.parametrize(
    ("timeout", "said"),
    [
        (float("inf"), "inf"),
        (1e300, "1e+300"),
        (1e12, "1e+12"),
        (86_401.0, "86401"),
        (0, "0"),
        (-1, "-1"),
        (float("nan"), "nan"),
    ],
)
def test_a_timeout_that_no_call_can_have_is_refused_by_its_value(server, timeout, said):
    with pytest.raises(UsageError) as raised:
        Control(server.url, timeout=timeout)
    assert raised.value.message == f"timeout is {said} seconds; wanted a number above 0, at most 86400 (a day)"


def test_a_timeout_of_a_day_gets_an_answer(server):
    with Control(server.url, timeout=MAX_TIMEOUT_SECONDS) as control:
        assert control.compact().reloaded == 0
