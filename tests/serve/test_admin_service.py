"""AdminService over a real engine: every RPC, every kind of refusal, the token, waiting and the event stream."""

import json
import threading

import grpc
import pytest
from support.administration import OPERATION, SHADOW, AdminServer

from rsrv.core import errors
from rsrv.core.errors import Code
from rsrv.protos import admin as pb
from rsrv.protos import services
from rsrv.serve.admin import requests
from rsrv.serve.admin.operations import MAX_MOVES
from rsrv.serve.admin.requests import ResidencyAnswer

PREFIX = "/rsrv.admin.v1.AdminService/"
WAIT = 30
TARGET = {"model": "net", "if_incarnation": 7}


@pytest.fixture
def server():
    with AdminServer() as running:
        yield running


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server.url, [("grpc.use_local_subchannel_pool", 1)]) as opened:
        yield opened


def method(name):
    return services()["rsrv.admin.v1.AdminService"].methods_by_name[name]


def ask(channel, name, body=b"", *, metadata=(), timeout=WAIT, **fields):
    request = body or getattr(pb, method(name).input_type.name)(**fields).SerializeToString()
    answer = channel.unary_unary(PREFIX + name, None, None)(request, timeout=timeout, metadata=metadata)
    return getattr(pb, method(name).output_type.name).FromString(answer)


def refused(channel, name, body=b"", **options):
    with pytest.raises(grpc.RpcError) as caught:
        ask(channel, name, body, **options)
    trailers = dict(caught.value.trailing_metadata())
    return Code(caught.value.code().value[0]), trailers["rsrv-reason"], caught.value.details()


ROWS = [  # RPC, fields of its message, method, the request that it must be
    ("GetStatus", {"model": "net"}, "get_status", requests.StatusRequest(model="net")),
    ("GetStatus", {}, "get_status", requests.StatusRequest()),
    ("ListModels", {}, "list_models", requests.EmptyRequest()),
    (
        "RegisterModel",
        {"model": "net", "directory": "/srv/net"},
        "register_model",
        requests.RegisterRequest(model="net", directory="/srv/net"),
    ),
    (
        "RegisterModel",
        {
            "model": "net",
            "directory": "/srv/net",
            "admission": "drained",
            "residency": "system",
            "weight": 2.5,
            "max_batch_size": 4,
            "pinned": True,
        },
        "register_model",
        requests.RegisterRequest(
            model="net",
            directory="/srv/net",
            admission="drained",
            residency="system",
            weight=2.5,
            max_batch_size=4,
            pinned=True,
        ),
    ),
    ("RetryModel", TARGET, "retry_model", requests.Target(**TARGET)),
    ("DrainModel", {"t": TARGET}, "drain_model", requests.DrainRequest(**TARGET)),
    ("DrainModel", {"t": TARGET, "wait_ms": 90}, "drain_model", requests.DrainRequest(**TARGET, wait_ms=90)),
    ("UndrainModel", {"model": "net"}, "undrain_model", requests.Target(model="net")),
    ("UnregisterModel", {"t": TARGET}, "unregister_model", requests.UnregisterRequest(**TARGET, mode="drain")),
    (
        "UnregisterModel",
        {"t": TARGET, "mode": "abort"},
        "unregister_model",
        requests.UnregisterRequest(**TARGET, mode="abort"),
    ),
    (
        "ActivateModel",
        {"t": TARGET, "allow_open": True},
        "activate_model",
        requests.ActivateRequest(**TARGET, allow_open=True),
    ),
    ("ActivateModel", {"t": TARGET}, "activate_model", requests.ActivateRequest(**TARGET)),
    (
        "DeactivateModel",
        {"t": TARGET, "host": True},
        "deactivate_model",
        requests.DeactivateRequest(**TARGET, host=True),
    ),
    ("PinModel", TARGET, "pin_model", requests.Target(**TARGET)),
    ("UnpinModel", TARGET, "unpin_model", requests.Target(**TARGET)),
    (
        "SetResidency",
        {"model": "net", "floor": "device"},
        "set_residency",
        requests.ResidencyRequest(model="net", floor="device"),
    ),
    ("SetReclaim", {}, "set_reclaim", requests.ReclaimPolicy()),
    (
        "SetReclaim",
        {"parameter_idle_ms": 0, "host_idle_ms": 2.5},
        "set_reclaim",
        requests.ReclaimPolicy(parameter_idle_ms=0, host_idle_ms=2.5),
    ),
    (
        "StageProgram",
        {"model": "net", "base_directory": "/srv/b"},
        "stage_program",
        requests.StageRequest(model="net", base_directory="/srv/b", base=0, sources=[], wait=True),
    ),
    (
        "StageProgram",
        {
            "model": "net",
            "base": 3,
            "base_directory": "/srv/b",
            "sources": ["a.mlir", "b.mlir"],
            "wait": False,
            "label": "fused",
            "shadow_percent": 5,
            "if_incarnation": 7,
        },
        "stage_program",
        requests.StageRequest(
            model="net",
            base=3,
            base_directory="/srv/b",
            sources=["a.mlir", "b.mlir"],
            wait=False,
            label="fused",
            shadow_percent=5,
            if_incarnation=7,
        ),
    ),
    ("ListPrograms", {"model": "net"}, "list_programs", requests.Target(model="net")),
    (
        "SelectProgram",
        {"t": TARGET, "program": 2, "expected": 1, "require_clean": True},
        "select_program",
        requests.SelectRequest(**TARGET, program=2, expected=1, require_clean=True),
    ),
    # No set is called 0, but that is for the operation to say: it answers with the one that is selected.
    (
        "SelectProgram",
        {"t": TARGET, "program": 2},
        "select_program",
        requests.SelectRequest(**TARGET, program=2, expected=0),
    ),
    ("RemoveProgram", {"t": TARGET, "program": 2}, "remove_program", requests.RemoveRequest(**TARGET, program=2)),
    ("SetShadow", {"t": TARGET, "program": 2}, "set_shadow", requests.ShadowRequest(**TARGET, program=2, percent=0)),
    (
        "SetShadow",
        {"t": TARGET, "program": 2, "percent": 12.5, "tolerances": {"f32": 1e-4}},
        "set_shadow",
        requests.ShadowRequest(**TARGET, program=2, percent=12.5, tolerances={"f32": 1e-4}),
    ),
    (
        "TrimDevice",
        {"device": 0, "target_bytes": 9, "compact": True},
        "trim_device",
        requests.TrimRequest(target_bytes=9, compact=True),
    ),
    (
        "WaitModel",
        {"t": TARGET, "until": "gone"},
        "wait_model",
        requests.WaitRequest(**TARGET, until="gone", timeout_ms=0),
    ),
    ("PollRepository", {}, "poll_repository", requests.EmptyRequest()),
]


@pytest.mark.parametrize(("name", "fields", "operation", "request_"), ROWS)
def test_an_rpc_asks_for_its_operation_with_what_its_message_says(server, channel, name, fields, operation, request_):
    ask(channel, name, **fields)
    assert server.calls == [(operation, request_)]


def test_every_rpc_of_the_service_is_served_and_in_the_rows_above(server):
    declared = {name.name for name in services()["rsrv.admin.v1.AdminService"].methods}
    assert {path.removeprefix(PREFIX) for path in server.service.routes()} == declared
    assert {row[0] for row in ROWS} == declared - {"WatchEvents"}


def test_where_a_model_stands_is_answered_in_full(channel):
    assert ask(channel, "PinModel", model="net") == pb.Operation(
        model="net",
        incarnation=7,
        registration="ready",
        admission="draining",
        parameter_operation="activating",
        accepted=True,
        pinned=True,
        error="it was full",
        requests={"queued": 3, "executing": 2, "hooks": 1},
    )


def test_program_sets_are_answered_with_what_their_shadows_found(channel):
    found = ask(channel, "ListPrograms", model="net")
    assert (found.selected, found.capacity, found.incarnation) == (1, 4, 7)
    first, second = found.programs
    assert (first.id, first.HasField("shadow")) == (1, False)
    assert (second.id, second.phase, second.label, second.created_unix) == (2, "ready", "fused", 1e9)
    shadow = second.shadow
    counts = (shadow.percent, shadow.batches, shadow.skipped, shadow.mismatches, shadow.errors, shadow.against)
    assert counts == (12.5, 40, 3, 2, 1, 1)
    assert (shadow.first_mismatch, shadow.first_error) == (SHADOW.first_mismatch, SHADOW.first_error)
    assert shadow.largest_difference["y"] == 0.25
    assert shadow.largest_difference["z"] != shadow.largest_difference["z"]  # NaN: not finite
    staged = ask(channel, "StageProgram", model="net", base_directory="/srv/b")
    assert (staged.id, staged.diagnostics, staged.incarnation) == (2, "all\nwell", 7)
    chosen = ask(channel, "SelectProgram", t=TARGET, program=2, expected=1)
    assert (chosen.selected, chosen.previous, chosen.incarnation) == (2, 1, 7)


def test_answers_without_a_message_of_their_own_are_the_json_of_http(channel):
    assert json.loads(ask(channel, "GetStatus").json)["server"] == {"name": "rsrv"}
    (row,) = json.loads(ask(channel, "ListModels").json)["models"]
    assert (row["name"], row["batch_sizes"]) == ("net", [1, 8])
    assert json.loads(ask(channel, "TrimDevice").json)["device"]["budget"]["resident_bytes"] == 1536
    _, renamed = json.loads(ask(channel, "PollRepository").json)["changes"]
    assert renamed == {"name": "new", "action": "rename", "directory": "/srv/new", "from": "old"}
    policy = ask(channel, "SetReclaim")
    assert (policy.parameter_idle_ms, policy.workspace_idle_ms, policy.host_idle_ms) == (1.5, 0, 3)
    assert policy.HasField("workspace_idle_ms")
    assert ask(channel, "SetResidency", model="net", floor="device").floor == "device"


# --- refusals -----------------------------------------------------------------------------------------------------

REFUSALS = [
    (errors.InvalidRequest("bad"), Code.INVALID_ARGUMENT, "invalid"),
    (errors.UnknownModel("who"), Code.NOT_FOUND, "unknown_model"),
    (errors.Removing("goes"), Code.NOT_FOUND, "removing"),
    (errors.WrongState("open", reason="not_drained"), Code.FAILED_PRECONDITION, "not_drained"),
    (errors.WrongState("static", reason="static"), Code.FAILED_PRECONDITION, "static"),
    (errors.NameTaken("taken"), Code.ALREADY_EXISTS, "name_taken"),
    (errors.IncarnationChanged("changed"), Code.ABORTED, "incarnation_changed"),
    (errors.ExpectedMismatch("other", selected=3), Code.ABORTED, "expected_mismatch"),
    (errors.CapacityFull("full", reason="model_capacity"), Code.RESOURCE_EXHAUSTED, "model_capacity"),
    (errors.HeldFull("full"), Code.RESOURCE_EXHAUSTED, "held_full"),
    (errors.DeviceOutOfMemory("never fits"), Code.RESOURCE_EXHAUSTED, "device_oom"),
    (errors.WaitTimeout("late"), Code.DEADLINE_EXCEEDED, "wait_timeout"),
    (errors.ServerStopping("stops"), Code.UNAVAILABLE, "stopping"),
    (RuntimeError("secret"), Code.INTERNAL, "internal"),
]


@pytest.mark.parametrize(("error", "code", "reason"), REFUSALS, ids=lambda value: getattr(value, "reason", None))
def test_what_an_operation_raises_is_answered_with_its_code_and_reason(server, channel, error, code, reason):
    server.administration.answers["drain_model"] = error
    found_code, found_reason, text = refused(channel, "DrainModel", t=TARGET)
    assert (found_code, found_reason) == (code, reason)
    assert "secret" not in text


def test_a_failed_comparison_says_which_set_is_selected(server, channel):
    server.administration.answers["select_program"] = errors.ExpectedMismatch("other", selected=3)
    with pytest.raises(grpc.RpcError) as caught:
        ask(channel, "SelectProgram", t=TARGET, program=2, expected=1)
    assert dict(caught.value.trailing_metadata())["rsrv-selected"] == "3"


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("DrainModel", {}, "field 'model' is missing"),
        ("DrainModel", {"t": {"model": "net"}, "wait_ms": -1}, "field 'wait_ms' is -1"),
        ("DrainModel", {"t": {"model": "net"}, "wait_ms": 3_600_001}, "field 'wait_ms' is 3600001"),
        ("WaitModel", {"t": {"model": "net"}, "until": "tomorrow"}, "field 'until' is 'tomorrow'"),
        ("WaitModel", {"t": {"model": "net"}}, "field 'until' is missing"),
        ("UnregisterModel", {"t": {"model": "net"}, "mode": "hard"}, "field 'mode' is 'hard'"),
        ("RegisterModel", {"model": "net"}, "field 'directory' is missing"),
        ("RegisterModel", {"model": "net", "directory": "/d", "weight": 0}, "field 'weight' is 0.0"),
        ("RegisterModel", {"model": "net", "directory": "/d", "weight": float("nan")}, "field 'weight' is nan"),
        ("SelectProgram", {"t": {"model": "net"}, "expected": 1}, "field 'program' is 0"),
        ("SetShadow", {"t": {"model": "net"}, "program": 2, "percent": 101}, "field 'percent' is 101"),
        ("SetShadow", {"t": {"model": "net"}, "program": 2, "tolerances": {"f32": -1}}, "tolerances.f32"),
        ("SetReclaim", {"host_idle_ms": -1}, "field 'host_idle_ms' is -1"),
        ("SetResidency", {"model": "net", "floor": "disk"}, "field 'floor' is 'disk'"),
    ],
)
def test_a_value_that_no_operation_takes_is_refused_by_its_name(server, channel, name, fields, said):
    code, reason, text = refused(channel, name, **fields)
    assert (code, reason) == (Code.INVALID_ARGUMENT, "invalid")
    assert said in text
    assert server.calls == []


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("PinModel", pb.Target(model="net").SerializeToString() + b"\x98\x06\x01"),
        ("DrainModel", b"\x0a\x03\x98\x06\x01"),  # within the target
        ("ListModels", b"\x98\x06\x01"),
    ],
)
def test_a_field_that_nobody_declared_is_refused(server, channel, name, body):
    code, _, text = refused(channel, name, body)
    assert code is Code.INVALID_ARGUMENT
    assert "has no field 99" in text
    assert server.calls == []


def test_a_body_that_is_no_message_is_refused(channel):
    code, _, text = refused(channel, "PinModel", b"\xff\xff")
    assert code is Code.INVALID_ARGUMENT
    assert "is no rsrv.admin.v1.Target" in text


# --- the token ----------------------------------------------------------------------------------------------------


def test_with_a_token_only_calls_that_carry_it_are_answered():
    with AdminServer(token="sesame") as server, grpc.insecure_channel(server.url) as channel:
        for value in ("Bearer sesame", "bearer sesame", "BEARER  sesame "):
            ask(channel, "ListModels", metadata=[("authorization", value)])
        answered = len(server.calls)
        assert refused(channel, "ListModels")[:2] == (Code.UNAUTHENTICATED, "unauthenticated")
        for value in ("Bearer sesam", "Bearer sesame2", "Basic sesame", "sesame", "Bearer ", "Bearer"):
            metadata = [("authorization", value)]
            assert refused(channel, "ListModels", metadata=metadata)[0] is Code.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as caught:
            next(channel.unary_stream(PREFIX + "WatchEvents", None, None)(b"", timeout=WAIT))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert len(server.calls) == answered == 3
        assert server.places == 0


# --- waiting ------------------------------------------------------------------------------------------------------


def test_a_call_that_waits_hears_that_its_caller_went_away_and_others_are_answered_meanwhile(server, channel):
    waiting, ended = threading.Event(), threading.Event()

    def wait(request):
        gone = server.administration.gone
        waiting.set()
        for _ in range(6000):
            if gone():
                ended.set()
                return OPERATION
            threading.Event().wait(0.005)
        return OPERATION

    server.administration.answers["wait_model"] = wait
    request = pb.WaitRequest(t=TARGET, until="gone", timeout_ms=60_000).SerializeToString()
    call = channel.unary_unary(PREFIX + "WaitModel", None, None).future(request, timeout=WAIT)
    assert waiting.wait(WAIT)
    assert ask(channel, "PinModel", model="net").model == "net"
    call.cancel()
    assert ended.wait(WAIT)


def test_as_many_calls_as_may_wait_leave_threads_for_the_others():
    with AdminServer(held=3) as server, grpc.insecure_channel(server.url) as channel:
        begun, release = threading.Semaphore(0), threading.Event()

        def wait(request):
            begun.release()
            release.wait(WAIT)
            return OPERATION

        def move(request):
            wait(request)
            return ResidencyAnswer(model="net", incarnation=7, floor="device")

        server.administration.answers["wait_model"] = wait
        server.administration.answers["set_residency"] = move
        request = pb.WaitRequest(t=TARGET, until="gone", timeout_ms=60_000).SerializeToString()
        stub = channel.unary_unary(PREFIX + "WaitModel", None, None)
        calls = [stub.future(request, timeout=WAIT) for _ in range(3)]
        # Beside what waits, as many as may move weights at a time.
        request = pb.ResidencyRequest(model="net", floor="device").SerializeToString()
        stub = channel.unary_unary(PREFIX + "SetResidency", None, None)
        moves = [stub.future(request, timeout=WAIT) for _ in range(MAX_MOVES)]
        for _ in (*calls, *moves):
            assert begun.acquire(timeout=WAIT)
        assert ask(channel, "DrainModel", t=TARGET).model == "net"
        release.set()
        assert all(pb.Operation.FromString(call.result(WAIT)).model == "net" for call in calls)


# --- events -------------------------------------------------------------------------------------------------------


def watch(channel, from_seq=0, model=""):
    request = pb.WatchRequest(from_seq=from_seq, model=model).SerializeToString()
    return channel.unary_stream(PREFIX + "WatchEvents", None, pb.Event.FromString)(request, timeout=WAIT)


def until(condition):
    for _ in range(WAIT * 200):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("the condition did not come true")


def test_events_come_as_they_happen_with_all_that_they_say(server, channel):
    stream = watch(channel)
    until(lambda: server.places == 1)
    server.events.append("net", 7, "admission", "open", "draining", "by hand")
    event = next(stream)
    assert (event.seq, event.time, event.model, event.incarnation) == (1, 1.5e9, "net", 7)
    assert (event.type, getattr(event, "from"), event.to, event.detail) == ("admission", "open", "draining", "by hand")
    stream.cancel()
    until(lambda: server.places == 0)


def test_a_watch_may_begin_with_the_past_and_may_be_of_one_model(server, channel):
    for name in ("a", "b", "a"):
        server.events.append(name, 1, "admission", "open", "drained")
    stream = watch(channel, from_seq=1)
    assert [next(stream).seq for _ in range(3)] == [1, 2, 3]
    only = watch(channel, from_seq=2, model="a")
    assert next(only).seq == 3
    server.events.append("b", 1, "admission", "open", "drained")
    server.events.append("a", 1, "admission", "open", "drained")
    assert next(only).seq == 5
    assert [next(stream).seq for _ in range(2)] == [4, 5]


def test_events_that_are_not_kept_any_more_are_a_gap_with_the_first_number_that_is():
    with AdminServer(capacity=4) as server, grpc.insecure_channel(server.url) as channel:
        for _ in range(10):
            server.events.append("a", 1, "admission", "open", "drained")
        stream = watch(channel, from_seq=3)
        found = [next(stream) for _ in range(5)]
        assert [(event.seq, event.type) for event in found] == [
            (7, "gap"),
            *((seq, "admission") for seq in (7, 8, 9, 10)),
        ]
        assert found[0].detail == "events before 7 are not kept any more"


def test_a_burst_comes_whole_and_in_order(server, channel):
    stream = watch(channel, from_seq=1)
    until(lambda: server.places == 1)
    for _ in range(1000):
        server.events.append("a", 1, "admission", "open", "drained")
    assert [next(stream).seq for _ in range(1000)] == list(range(1, 1001))


def test_a_stream_for_which_there_is_no_place_is_refused(server, channel):
    server.full = errors.HeldFull("an event stream cannot wait")
    with pytest.raises(grpc.RpcError) as caught:
        next(watch(channel))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert server.places == 0


def test_a_server_that_stops_ends_the_streams(server, channel):
    stream = watch(channel)
    until(lambda: server.places == 1)
    server.engine.stop(0.0)
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    until(lambda: server.places == 0)
