"""`KServeModel` inline: what it sends, what it makes of answers and of failures."""

import threading

import grpc
import ml_dtypes
import numpy as np
import pytest
from support.client_stub import StubServer

from rsrv.client import InferInput, InferOutput, KServeModel, RetryPolicy, infer_sync
from rsrv.core import errors
from rsrv.core.errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    InvalidRequest,
    InvalidResponse,
    RsrvError,
    ServerUnreachable,
    UnknownModel,
    UsageError,
)
from rsrv.protos import inference

X = np.arange(8, dtype=np.float32).reshape(2, 4)
ONCE = RetryPolicy(enabled=False)


@pytest.fixture
def model(server):
    with KServeModel(server.url, "twice", shared_memory="off", retry=ONCE) as handle:
        yield handle


def test_a_dictionary_of_arrays_goes_in_and_one_comes_out(server, model):
    outputs = model.infer({"x": X})
    assert list(outputs) == ["y", "total"]
    np.testing.assert_array_equal(outputs["y"], 2 * X)
    np.testing.assert_array_equal(outputs["total"], np.float32([28, 2, 7]))
    (request,) = server.requests
    assert (request.inputs[0].datatype, list(request.inputs[0].shape)) == ("FP32", [2, 4])
    assert request.raw_input_contents[0] == X.tobytes()
    assert not request.inputs[0].HasField("contents")
    assert model.transport == "inline"


def test_nothing_but_the_request_is_sent_when_shared_memory_is_off(server, model):
    model.infer({"x": X})
    assert server.calls == ["ModelInfer"]


def test_wanted_outputs_come_in_the_wanted_order(server, model):
    assert list(model.infer({"x": X}, ["total", "y"])) == ["total", "y"]
    assert list(model.infer({"x": X}, ["total"])) == ["total"]
    assert [o.name for o in server.requests[0].outputs] == ["total", "y"]


def test_strided_and_nested_input_arrives_in_c_order(model):
    wide = np.arange(16, dtype=np.float32).reshape(4, 4).T[::2]
    np.testing.assert_array_equal(model.infer({"x": wide})["y"], 2 * wide)
    assert model.infer({"x": np.float32(X.tolist())})["y"][1, 3] == 14


def test_answers_are_read_only_and_survive_later_calls(model):
    first = model.infer({"x": X})["y"]
    with pytest.raises(ValueError, match="read-only"):
        first[0, 0] = 1
    model.infer({"x": X + 100})
    np.testing.assert_array_equal(first, 2 * X)


def test_the_deadline_travels_as_transport_timeout_and_in_the_body(server):
    with KServeModel(server.url, "twice", shared_memory="off", deadline=20.0) as model:
        model.infer({"x": X})
    in_body = server.requests[0].parameters["reactant_timeout_ns"].int64_param
    assert 15e9 < in_body <= 20e9
    assert server.time_remaining is not None
    assert 15 < server.time_remaining <= 20.5


@pytest.mark.parametrize("deadline", [0, -1.0])
def test_no_deadline_sends_neither(server, deadline):
    with KServeModel(server.url, "twice", shared_memory="off", deadline=deadline) as model:
        model.infer({"x": X})
    assert "reactant_timeout_ns" not in server.requests[0].parameters
    assert server.time_remaining is None or server.time_remaining > 1e6


def test_a_server_that_does_not_answer_in_time_is_a_deadline_error(server):
    held = threading.Event()

    def hold(request, answer):
        held.wait(30)
        return answer

    server.rewrite = hold
    try:
        with (
            KServeModel(server.url, "twice", shared_memory="off", deadline=0.2) as model,
            pytest.raises(DeadlineExceeded, match=server.url) as caught,
        ):
            model.infer({"x": X})
        assert caught.value.code is Code.DEADLINE_EXCEEDED
    finally:
        held.set()


def test_the_request_id_and_metadata_travel(server):
    metadata = (("authorization", "Bearer abc"),)
    with KServeModel(server.url, "twice", shared_memory="off", metadata=metadata) as model:
        response = infer_sync(model, [InferInput("x", X)], id="r-17")
    assert response.id == "r-17"
    assert response.model_name == "twice"
    assert server.metadata["authorization"] == "Bearer abc"


def test_infer_sync_is_one_inline_request_even_with_shared_memory(server):
    with KServeModel(server.url, "twice", shared_memory="on") as model:
        response = infer_sync(model, [InferInput("x", [2, 4], X.ravel())], ["y"])
    assert server.calls == ["ModelInfer"]
    assert response.names == ["y"]
    np.testing.assert_array_equal(InferOutput("y", response), 2 * X)
    np.testing.assert_array_equal(InferOutput("y", response, np.float32), 2 * X)


def test_an_output_of_another_name_or_dtype_is_refused(model):
    response = infer_sync(model, [InferInput("x", X)])
    with pytest.raises(InvalidRequest, match="no output 'z'; it has: y, total"):
        InferOutput("z", response)
    with pytest.raises(InvalidRequest, match="'y' is float32, not float64"):
        InferOutput("y", response, np.float64)


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array(["text"]), "<U4"),
        (np.array([object()]), "object"),
        (np.array([1j]), "complex128"),
        (np.zeros(2, ml_dtypes.float8_e5m2), "float8_e5m2"),
    ],
)
def test_a_dtype_without_a_wire_form_is_a_type_error_that_names_it(model, array, dtype):
    with pytest.raises(TypeError, match=f"input 'x': dtype {dtype}"):
        model.infer({"x": array})


def test_elements_must_fill_the_shape():
    with pytest.raises(ValueError, match="input 'x': 8 elements do not fill the shape"):
        InferInput("x", [3, 3], X)
    with pytest.raises(ValueError, match="input 'x'"):
        InferInput("x", [-2, -4], X)
    assert InferInput("x", (4, 2), X).data.shape == (4, 2)


@pytest.mark.parametrize("scalar", [np.float32(3), 2.5, True])
def test_scalars_are_tensors_of_rank_0(scalar):
    assert InferInput("x", scalar).data.shape == ()


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "invalid", errors.InvalidRequest),
        (grpc.StatusCode.INVALID_ARGUMENT, "hook_rejected", errors.HookRejected),
        (grpc.StatusCode.NOT_FOUND, "unknown_model", errors.UnknownModel),
        (grpc.StatusCode.NOT_FOUND, "unloaded", errors.ModelUnloaded),
        (grpc.StatusCode.UNAVAILABLE, "preparing", errors.ModelPreparing),
        (grpc.StatusCode.UNAVAILABLE, "failed", errors.ModelFailed),
        (grpc.StatusCode.UNAVAILABLE, "stopping", errors.ServerStopping),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue_full", errors.QueueFull),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "shed", errors.Shed),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "device_oom", errors.DeviceOutOfMemory),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline", errors.DeadlineExceeded),
        (grpc.StatusCode.INTERNAL, "hook_error", errors.HookError),
        (grpc.StatusCode.FAILED_PRECONDITION, "shm_unregistered", errors.UnregisteredRegion),
        (grpc.StatusCode.INTERNAL, "a_reason_of_tomorrow", RsrvError),
    ],
)
def test_an_error_of_the_server_keeps_its_code_reason_and_text(server, model, status, reason, kind):
    server.refuse["ModelInfer"] = (status, "the server's own words", reason)
    with pytest.raises(kind, match="the server's own words") as caught:
        model.infer({"x": X})
    assert type(caught.value) is kind
    assert (caught.value.code, caught.value.reason) == (Code[status.name], reason)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "no", errors.InvalidRequest),
        (grpc.StatusCode.NOT_FOUND, "no", errors.UnknownModel),
        (grpc.StatusCode.UNIMPLEMENTED, "no", errors.Unimplemented),
        (grpc.StatusCode.CANCELLED, "no", errors.Cancelled),
        (grpc.StatusCode.INTERNAL, "failed: unregistered shared memory region 'r'", errors.UnregisteredRegion),
    ],
)
def test_servers_that_send_no_reason_are_understood_by_code(server, model, status, text, kind):
    server.refuse["ModelInfer"] = (status, text, "")
    with pytest.raises(kind) as caught:
        model.infer({"x": X})
    assert type(caught.value) is kind
    assert caught.value.code is Code[status.name]


def test_an_unexplained_error_has_no_reason(server, model):
    server.refuse["ModelInfer"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "received message larger than max", "")
    with pytest.raises(RsrvError, match="larger than max") as caught:
        model.infer({"x": X})
    assert (caught.value.code, caught.value.reason) == (Code.RESOURCE_EXHAUSTED, "")


def test_an_unknown_model_is_reported_with_its_name(server):
    with (
        KServeModel(server.url, "nobody", shared_memory="off") as model,
        pytest.raises(UnknownModel, match="nobody"),
    ):
        model.infer({"x": X})


def test_a_port_where_nobody_listens_is_unreachable():
    with StubServer() as server:
        url = server.url
    with KServeModel(url, "twice", retry=ONCE) as model, pytest.raises(ServerUnreachable, match=url) as caught:
        model.infer({"x": X})
    assert caught.value.exit_code == 3
    assert caught.value.hint


def test_a_server_that_dies_in_the_middle_of_a_call_is_unreachable(server, model):
    answered = threading.Event()

    def die(request, answer):
        server._server.stop(0)
        answered.wait(30)
        return answer

    server.rewrite = die
    try:
        with pytest.raises((ServerUnreachable, Cancelled)):
            model.infer({"x": X})
    finally:
        answered.set()


def test_a_server_that_comes_back_is_used_again_by_the_same_handle(server):
    with KServeModel(server.url, "twice", shared_memory="off", deadline=20, retry=ONCE) as model:
        model.infer({"x": X})
        port = server.port
        server.stop()
        with pytest.raises(ServerUnreachable):
            model.infer({"x": X})
        with StubServer(f"127.0.0.1:{port}"):
            for _ in range(1000):
                try:
                    np.testing.assert_array_equal(model.infer({"x": X})["y"], 2 * X)
                    break
                except ServerUnreachable:
                    threading.Event().wait(0.02)
            else:
                pytest.fail("the handle never found its server again")


def rewriting(change):
    def rewrite(request, answer):
        change(answer)
        return answer.SerializeToString()

    return rewrite


def test_an_answer_with_fewer_outputs_gives_only_those(server, model):
    def drop_total(answer):
        del answer.outputs[1], answer.raw_output_contents[1]

    server.rewrite = rewriting(drop_total)
    assert list(model.infer({"x": X})) == ["y"]


def test_an_answer_whose_bytes_do_not_fit_its_header_is_refused(server, model):
    def claim_float64(answer):
        answer.outputs[0].datatype = "FP64"

    server.rewrite = rewriting(claim_float64)
    with pytest.raises(InvalidResponse, match="'y'"):
        model.infer({"x": X})


def test_an_answer_with_a_raw_entry_too_many_is_refused(server, model):
    server.rewrite = rewriting(lambda answer: answer.raw_output_contents.append(b"x"))
    with pytest.raises(InvalidResponse, match="raw_output_contents"):
        model.infer({"x": X})


def test_an_answer_that_is_no_message_is_refused(server, model):
    server.rewrite = lambda request, answer: b"\xff\xff\xff"
    with pytest.raises(InvalidResponse):
        model.infer({"x": X})


def test_typed_contents_of_older_servers_are_read(server, model):
    def typed(answer):
        values = np.frombuffer(answer.raw_output_contents[0], np.float32).tolist()
        answer.outputs[0].contents.fp32_contents.extend(values)
        total = np.frombuffer(answer.raw_output_contents[1], np.float32).tolist()
        answer.outputs[1].contents.fp32_contents.extend(total)
        del answer.raw_output_contents[:]

    server.rewrite = rewriting(typed)
    outputs = model.infer({"x": X})
    np.testing.assert_array_equal(outputs["y"], 2 * X)
    assert not outputs["y"].flags.writeable


def test_an_output_in_a_region_that_was_never_offered_is_refused(server, model):
    def elsewhere(answer):
        answer.outputs[0].parameters["shared_memory_region"].string_param = "somebody-elses"
        answer.outputs[0].parameters["shared_memory_byte_size"].int64_param = 32
        answer.raw_output_contents[0] = b""

    server.rewrite = rewriting(elsewhere)
    with pytest.raises(InvalidResponse, match="'y' is in a shared memory region"):
        model.infer({"x": X})


def test_metadata_names_the_tensors(model):
    meta = model.metadata()
    assert [t.describe() for t in meta.inputs] == ["x FP32[-1,4]"]
    assert [t.describe() for t in meta.outputs] == ["y FP32[-1,4]", "total FP32[3]"]


@pytest.mark.parametrize(("options", "text"), [({"shared_memory": "always"}, "always"), ({}, "model_name")])
def test_wrong_options_are_refused_at_construction(options, text):
    with pytest.raises(UsageError, match=text):
        KServeModel("localhost:1", "" if not options else "m", **options)


def test_a_closed_handle_says_so(server, model):
    model.infer({"x": X})
    model.close()
    model.close()
    with pytest.raises(UsageError, match="closed"):
        model.infer({"x": X})


def test_handles_of_one_server_share_a_channel_which_the_last_one_closes(server):
    from rsrv.client import channels

    first = KServeModel(server.url, "twice", shared_memory="off")
    second = KServeModel(server.url, "twice", shared_memory="off")
    other_limits = KServeModel(server.url, "twice", shared_memory="off", max_send_message_length=1 << 20)
    assert first.endpoint.connection._channel is second.endpoint.connection._channel
    assert first.endpoint.connection._channel is not other_limits.endpoint.connection._channel
    first.close()
    np.testing.assert_array_equal(second.infer({"x": X})["y"], 2 * X)
    second.close()
    other_limits.close()
    assert not channels._pool._channels


def test_a_channel_of_the_callers_is_used_and_left_open(server):
    with grpc.insecure_channel(server.url) as channel:
        with KServeModel("ignored:1", "twice", shared_memory="off", channel=channel) as model:
            np.testing.assert_array_equal(model.infer({"x": X})["y"], 2 * X)
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert inference.ServerLiveResponse.FromString(live(b"")).live


def test_a_handle_is_found_by_host_and_port_and_over_a_unix_socket(tmp_path):
    with (
        StubServer(f"unix:{tmp_path}/socket") as server,
        KServeModel.at("127.0.0.1", server.port, "twice", shared_memory="off") as by_port,
        KServeModel(f"unix:{tmp_path}/socket", "twice", shared_memory="off") as by_path,
    ):
        np.testing.assert_array_equal(by_port.infer({"x": X})["y"], 2 * X)
        np.testing.assert_array_equal(by_path.infer({"x": X})["y"], 2 * X)


def test_an_ipv6_host_is_put_in_brackets():
    with KServeModel.at("::1", 8001, "twice") as model:
        assert model.endpoint.connection.target == "[::1]:8001"


def test_concurrent_calls_on_one_handle_get_their_own_answers(model):
    wrong = []

    def call(number):
        for _ in range(20):
            x = np.full((1 + number % 3, 4), number, np.float32)
            if not np.array_equal(model.infer({"x": x})["y"], 2 * x):
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_message_over_the_limit_is_refused_with_a_text_that_says_so(server):
    with (
        KServeModel(server.url, "twice", shared_memory="off", max_send_message_length=1000) as model,
        pytest.raises(RsrvError, match="larger than max") as caught,
    ):
        model.infer({"x": np.zeros((100, 4), np.float32)})
    assert caught.value.code is Code.RESOURCE_EXHAUSTED


def test_5_megabytes_pass_in_both_directions(server):
    channel_default = 4 << 20
    x = np.arange(330_000 * 4, dtype=np.float32).reshape(-1, 4)
    assert x.nbytes > channel_default
    with KServeModel(server.url, "twice", shared_memory="off") as model:
        np.testing.assert_array_equal(model.infer({"x": x})["y"], 2 * x)


# --- options and forms that are easily got wrong ------------------------------------------------------------------


def test_the_other_byte_order_is_turned_round(model):
    np.testing.assert_array_equal(model.infer({"x": X.astype(">f4")})["y"], 2 * X)
    np.testing.assert_array_equal(model({"x": X.astype(">f4")})["y"], 2 * X)


def test_what_makes_no_array_is_refused_by_name(model):
    with pytest.raises(ValueError, match=r"input 'x' is no array: .*inhomogeneous"):
        model.infer({"x": [[1.0], [1.0, 2.0]]})


def test_one_output_may_be_named_without_a_list(model):
    assert list(model.infer({"x": X}, "total")) == ["total"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"deadline": "10"}, "deadline='10' is not a number of seconds"),
        ({"deadline": float("nan")}, "deadline=nan"),
        ({"retry": True}, "retry=True is no RetryPolicy"),
        ({"max_batch_size": 1.5}, "max_batch_size=1.5 is neither"),
        ({"metadata": {"Upper": "x"}}, "metadata is named 'Upper'"),
        ({"metadata": (("two words", "x"),)}, "metadata is named 'two words'"),
        ({"metadata": {"grpc-timeout": "1S"}}, "gRPC's own"),
        ({"metadata": {"x-team": "two\nlines"}}, "'x-team' is not printable ASCII"),
        ({"metadata": {"x-team": b"\xff"}}, "'x-team' is not printable ASCII"),
        ({"metadata": (("a", 1),)}, "metadata 'a' has a value of type int; wanted text"),
        ({"metadata": (("a-bin", "x"),)}, "metadata 'a-bin' has a value of type str; wanted bytes"),
        ({"metadata": ("ab",)}, "metadata has 'ab'; wanted"),
        ({"metadata": (("a", "b", "c"),)}, "metadata has .*; wanted"),
    ],
)
def test_options_of_another_kind_are_refused_at_once(server, options, text):
    with pytest.raises(UsageError, match=text):
        KServeModel(server.url, "twice", **options)


@pytest.mark.parametrize("name", ["", None, 5, b"twice"])
def test_a_model_has_a_name(server, name):
    with pytest.raises(UsageError, match="model_name"):
        KServeModel(server.url, name)


def test_metadata_may_be_a_mapping(server):
    with KServeModel(server.url, "twice", shared_memory="off", metadata={"tenant": "blue"}) as model:
        model.infer({"x": X})
    assert server.metadata["tenant"] == "blue"


def test_a_farewell_that_never_ends_is_not_waited_for(server, monkeypatch):
    class Stuck:
        def add_done_callback(self, _):
            pass

        def result(self, timeout=None):
            assert timeout is not None, "would wait for ever"
            raise grpc.FutureTimeoutError

    class Method:
        def future(self, *_, **__):
            return Stuck()

    with KServeModel(server.url, "twice", shared_memory="off") as model:
        connection = model.endpoint.connection
        monkeypatch.setattr(connection, "_method", lambda name: Method())
        assert not connection.tell("SystemSharedMemoryUnregister", b"", 0.1, wait=True)
