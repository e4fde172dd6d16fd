import contextlib

import pytest
from support.administration import AdminServer

from rsrv.client import Admin
from rsrv.client.admin_answers import Change, Event, Operation, Program, Reclaim, Selected, Shadow
from rsrv.client.connection import MAX_TIMEOUT_SECONDS
from rsrv.core import errors
from rsrv.core.errors import (
    InvalidResponse,
    RsrvError,
    ServerUnreachable,
    Unauthenticated,
    Unimplemented,
    UsageError,
    WrongState,
)
from rsrv.protos import admin as admin_pb
from rsrv.rpc import GrpcioEngine
from rsrv.rpc.routes import Route
from rsrv.serve.admin import requests

CHECKED = {"model": "net", "if_incarnation": 7}


@pytest.fixture
def server():
    with AdminServer() as running:
        yield running


@pytest.fixture
def admin(server):
    with Admin(server.url) as handle:
        yield handle


CALLS = [  # what is called, and the request that arrives
    (lambda a: a.register("net", "/d"), requests.RegisterRequest(model="net", directory="/d")),
    (
        lambda a: a.register(
            "net", "/d", admission="drained", residency="device", weight=2.0, max_batch_size=4, pinned=True
        ),
        requests.RegisterRequest(
            model="net",
            directory="/d",
            admission="drained",
            residency="device",
            weight=2.0,
            max_batch_size=4,
            pinned=True,
        ),
    ),
    (lambda a: a.retry("net", if_incarnation=7), requests.Target(**CHECKED)),
    (lambda a: a.drain("net"), requests.DrainRequest(model="net")),
    (lambda a: a.drain("net", wait=0.0015, if_incarnation=7), requests.DrainRequest(**CHECKED, wait_ms=2)),
    (lambda a: a.undrain("net", if_incarnation=7), requests.Target(**CHECKED)),
    (lambda a: a.unregister("net"), requests.UnregisterRequest(model="net", mode="drain")),
    (
        lambda a: a.unregister("net", mode="abort", if_incarnation=7),
        requests.UnregisterRequest(**CHECKED, mode="abort"),
    ),
    (
        lambda a: a.wait("net", "ready", timeout=1.5),
        requests.WaitRequest(model="net", until="ready", timeout_ms=1500),
    ),
    (lambda a: a.activate("net", allow_open=True), requests.ActivateRequest(model="net", allow_open=True)),
    (lambda a: a.deactivate("net", host=True), requests.DeactivateRequest(model="net", host=True)),
    (lambda a: a.pin("net"), requests.Target(model="net")),
    (lambda a: a.unpin("net", if_incarnation=7), requests.Target(**CHECKED)),
    (
        lambda a: a.set_residency("net", "device", if_incarnation=7),
        requests.ResidencyRequest(**CHECKED, floor="device"),
    ),
    (lambda a: a.reclaim(), requests.ReclaimPolicy()),
    (
        lambda a: a.reclaim(parameter_idle_ms=0, host_idle_ms=5),
        requests.ReclaimPolicy(parameter_idle_ms=0, host_idle_ms=5),
    ),
    (lambda a: a.trim(target_bytes=9), requests.TrimRequest(target_bytes=9)),
    (lambda a: a.programs("net"), requests.Target(model="net")),
    (lambda a: a.stage("net", "/b"), requests.StageRequest(model="net", base_directory="/b", wait=True)),
    (
        lambda a: a.stage("net", "/b", base=2, sources=["m.mlir"], label="l", wait=False, shadow_percent=5),
        requests.StageRequest(
            model="net", base_directory="/b", base=2, sources=["m.mlir"], label="l", wait=False, shadow_percent=5
        ),
    ),
    (
        lambda a: a.select("net", 2, expected=1, require_clean=True),
        requests.SelectRequest(model="net", program=2, expected=1, require_clean=True),
    ),
    (lambda a: a.remove("net", 2), requests.RemoveRequest(model="net", program=2)),
    (
        lambda a: a.shadow("net", 2, 10, tolerances={"f16": 0.01}),
        requests.ShadowRequest(model="net", program=2, percent=10, tolerances={"f16": 0.01}),
    ),
    (lambda a: a.status("net"), requests.StatusRequest(model="net")),
    (lambda a: a.models(), requests.EmptyRequest()),
    (lambda a: a.poll(), requests.EmptyRequest()),
]


@pytest.mark.parametrize(("call", "request_"), CALLS)
def test_a_method_asks_for_what_it_is_called_for(server, admin, call, request_):
    call(admin)
    ((_, arrived),) = server.calls
    assert arrived == request_


def test_where_a_model_stands_comes_as_a_value(admin):
    found = admin.pin("net")
    assert found == Operation(
        model="net",
        incarnation=7,
        registration="ready",
        admission="draining",
        parameter_operation="activating",
        underway=True,
        pinned=True,
        error="it was full",
        queued=3,
        executing=2,
        hooks=1,
    )
    assert found.accepted == 6


def test_program_sets_come_with_what_their_shadows_found(admin):
    found = admin.programs("net")
    assert (found.selected, found.capacity, found.incarnation) == (1, 4, 7)
    first, second = found.programs
    assert first == Program(1, "ready", "", "", "", 0.0, None)
    assert second.shadow == Shadow(
        percent=12.5,
        batches=40,
        skipped=3,
        mismatches=2,
        errors=1,
        largest_difference={"y": 0.25, "z": None},
        first_mismatch="y is off",
        first_error="it crashed",
        against=1,
    )
    assert admin.stage("net", "/b").diagnostics == "all\nwell"
    assert admin.select("net", 2, expected=1) == Selected(selected=2, previous=1)


def test_documents_come_as_what_they_hold(admin):
    assert admin.status()["server"] == {"name": "rsrv"}
    assert admin.models()[0]["batch_sizes"] == [1, 8]
    assert admin.trim()["budget"]["resident_bytes"] == 1536
    assert admin.reclaim() == Reclaim(1.5, 0, 3)
    assert admin.set_residency("net", "device") == "device"
    assert admin.poll() == [Change("net", "reload", "/srv/net", ""), Change("new", "rename", "/srv/new", "old")]


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest("x"),
        errors.UnknownModel("x"),
        errors.Removing("x"),
        errors.NameTaken("x"),
        errors.IncarnationChanged("x"),
        errors.CapacityFull("x", reason="program_capacity"),
        errors.CapacityFull("x", reason="model_capacity"),
        errors.HeldFull("x"),
        errors.WaitTimeout("x"),
        errors.ServerStopping("x"),
        errors.DeviceOutOfMemory("x"),
        errors.ResidencyRefused("x"),
        errors.AdmissionClosed("x"),
        *(
            errors.WrongState("x", reason=reason)
            for reason in ("not_drained", "pinned", "fixed", "static", "failed", "removing", "operation_pending")
        ),
    ],
    ids=lambda error: error.reason,
)
def test_refusals_come_with_their_type_code_and_reason(server, admin, error):
    server.administration.answers["drain_model"] = error
    with pytest.raises(RsrvError) as caught:
        admin.drain("net")
    assert type(caught.value) is type(error)
    assert (caught.value.code, caught.value.reason, caught.value.message) == (error.code, error.reason, "x")


def test_a_failed_comparison_says_which_set_is_selected(server, admin):
    server.administration.answers["select_program"] = errors.ExpectedMismatch("other", selected=3)
    with pytest.raises(errors.ExpectedMismatch) as caught:
        admin.select("net", 2, expected=1)
    assert caught.value.selected == 3


def test_an_error_of_a_bundle_keeps_its_reason_and_is_no_wrong_state(server, admin):
    server.administration.answers["register_model"] = errors.ManifestError("it is no YAML")
    with pytest.raises(RsrvError, match="it is no YAML") as caught:
        admin.register("net", "/d")
    assert not isinstance(caught.value, WrongState)
    assert caught.value.reason == "manifest"


METHODS = "GetStatus ListModels DrainModel SetReclaim ListPrograms SelectProgram TrimDevice PollRepository WatchEvents"


@contextlib.contextmanager
def answering(body):
    """An administration each of whose methods answers `body`; yields its URL."""

    def handle(call):
        call.send([body])
        call.finish()

    prefix = "/rsrv.admin.v1.AdminService/"
    routes = {
        prefix + name: Route(handle, "server_stream" if name == "WatchEvents" else "unary") for name in METHODS.split()
    }
    engine = GrpcioEngine(routes, host="127.0.0.1", port=0, threads=4, max_recv_bytes=1 << 20, max_send_bytes=1 << 20)
    port = engine.bind()
    engine.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        engine.stop(0.0)


ASKED = [
    lambda a: a.status(),
    lambda a: a.models(),
    lambda a: a.drain("net"),
    lambda a: a.reclaim(),
    lambda a: a.programs("net"),
    lambda a: a.select("net", 2, expected=1),
    lambda a: a.trim(),
    lambda a: a.poll(),
    lambda a: next(a.events()),
]


@pytest.mark.parametrize("asked", ASKED)
def test_an_answer_that_is_no_message_of_the_protocol_is_said_to_be(asked):
    with answering(b"\xff\xff") as url, Admin(url) as admin, pytest.raises(InvalidResponse, match="2 bytes is no"):
        asked(admin)


@pytest.mark.parametrize("asked", [ASKED[0], ASKED[1], ASKED[6], ASKED[7]])
@pytest.mark.parametrize("text", ["", "[]", "{", '{"models": 1, "changes": {}, "device": []}', '{"models": ["a"]}'])
def test_json_that_is_not_what_was_asked_for_is_said_to_be(asked, text):
    body = admin_pb.StatusResponse(json=text).SerializeToString()
    with answering(body) as url, Admin(url) as admin, pytest.raises(InvalidResponse):
        asked(admin)


@pytest.mark.parametrize("token", ["", "two words", "two\nlines", "schlüssel"])
def test_a_token_that_no_header_can_carry_is_refused_before_anything_is_sent(token):
    with pytest.raises(UsageError, match="token"):
        Admin("127.0.0.1:1", token=token)


def test_numbers_and_texts_that_no_message_can_carry_are_refused_before_anything_is_sent(admin, server):
    for call in (
        lambda: admin.drain("net", if_incarnation=2**64),
        lambda: admin.drain("net", if_incarnation=-1),
        lambda: admin.drain("\udcff"),
        lambda: next(admin.events(from_seq=2**64)),
        lambda: next(admin.events(model="\udcff")),
    ):
        with pytest.raises(UsageError, match="cannot take these arguments"):
            call()
    assert server.calls == []


def test_a_token_is_sent_with_every_call_and_stream():
    with AdminServer(token="sesame") as server:
        with Admin(server.url, token="sesame") as admin:
            assert admin.status()["models"] == []
            server.events.append("net", 7, "admission", "open", "drained")
            assert next(admin.events(from_seq=1)).seq == 1
        with Admin(server.url) as admin:
            with pytest.raises(Unauthenticated):
                admin.status()
            with pytest.raises(Unauthenticated):
                next(admin.events())


def test_events_come_as_values_until_the_iterator_is_closed(server, admin):
    server.events.append("net", 7, "registration", "preparing", "ready", "at last")
    with contextlib.closing(admin.events(from_seq=1)) as events:
        assert next(events) == Event(1, 1.5e9, "net", 7, "registration", "preparing", "ready", "at last")
        assert server.places == 1
    for _ in range(6000):
        if not server.places:
            return
        server.events.append("net", 7, "registration", "ready", "retiring")
    raise AssertionError("the stream is still open on the server")


def test_a_server_that_goes_away_ends_the_events_with_an_error(server, admin):
    server.events.append("net", 7, "registration", "preparing", "ready")
    events = admin.events(from_seq=1)
    next(events)
    server.engine.stop(0.0)
    with pytest.raises(RsrvError) as caught:
        next(events)
    assert caught.value.code is errors.Code.UNAVAILABLE


def test_a_server_without_administration_is_unimplemented_and_nobody_there_unreachable():
    from support.client_stub import StubServer

    with StubServer() as server:
        url = server.url
        with Admin(url) as admin, pytest.raises(Unimplemented):
            admin.status()
    with Admin(url) as admin:
        with pytest.raises(ServerUnreachable):
            admin.status()
        with pytest.raises(ServerUnreachable):
            next(admin.events())


def test_a_closed_handle_says_so(server):
    admin = Admin(server.url)
    admin.close()
    with pytest.raises(UsageError, match="closed"):
        admin.status()
    with pytest.raises(UsageError, match="closed"):
        next(admin.events())


@pytest.mark.parametrize("seconds", [float("inf"), 86_401, -1, float("nan")])
def test_a_time_that_no_call_can_wait_is_refused_by_its_value(server, admin, seconds):
    with pytest.raises(UsageError, match=f"{seconds:g}"):
        Admin(server.url, timeout=seconds)
    with pytest.raises(UsageError, match=f"cannot wait for {seconds:g} seconds"):
        admin.wait("net", "ready", timeout=seconds)
    with Admin(server.url, timeout=MAX_TIMEOUT_SECONDS) as patient:
        patient.status()


def test_arguments_that_no_message_can_hold_are_wrong_usage(admin):
    with pytest.raises(UsageError, match="SelectProgram cannot take these arguments"):
        admin.select("net", -1, expected=1)
    with pytest.raises(UsageError, match="PinModel cannot take these arguments"):
        admin.pin("\ud800")
