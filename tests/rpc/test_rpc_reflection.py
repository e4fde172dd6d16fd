"""Reflection, asked by the stock client and by hand, in both versions."""

import queue

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from rsrv.protos import FILES, reflection, reflection_v1alpha, services
from rsrv.rpc import reflection_routes

WAIT = 30
V1 = ("grpc.reflection.v1.ServerReflection", reflection)
V1ALPHA = ("grpc.reflection.v1alpha.ServerReflection", reflection_v1alpha)
SERVED = ["inference.GRPCInferenceService", "grpc.health.v1.Health"]
ALL = sorted([*SERVED, V1[0], V1ALPHA[0]])


@pytest.fixture
def channel(serve):
    return serve(reflection_routes(SERVED))[1]


@pytest.fixture(params=[V1, V1ALPHA], ids=["v1", "v1alpha"])
def ask(request, channel):
    """``ask(**request)`` sends one request on an open stream and returns the response."""
    service, messages = request.param
    outgoing = queue.SimpleQueue()
    stream = channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=messages.ServerReflectionRequest.SerializeToString,
        response_deserializer=messages.ServerReflectionResponse.FromString,
    )(iter(outgoing.get, None), timeout=WAIT)

    def send(**fields):
        outgoing.put(messages.ServerReflectionRequest(**fields))
        return next(stream)

    yield send
    outgoing.put(None)
    assert list(stream) == []


def files_of(response):
    return [
        descriptor_pb2.FileDescriptorProto.FromString(data).name
        for data in response.file_descriptor_response.file_descriptor_proto
    ]


def test_the_services_that_are_served_are_listed(ask):
    response = ask(list_services="")
    assert [service.name for service in response.list_services_response.service] == ALL


def test_an_answer_repeats_its_request(ask):
    response = ask(host="h", list_services="*")
    assert response.valid_host == "h"
    assert response.original_request.list_services == "*"


def test_a_file_comes_with_its_imports(ask):
    response = ask(file_by_filename="inference/grpc_predict_v2.proto")
    names = files_of(response)
    assert names[0] == "inference/grpc_predict_v2.proto"
    imported = descriptor_pb2.FileDescriptorProto.FromString(FILES[names[0]]).dependency
    assert set(imported) <= set(names)
    assert list(response.file_descriptor_response.file_descriptor_proto) == [FILES[name] for name in names]


@pytest.mark.parametrize(
    ("symbol", "file"),
    [
        ("inference.ModelInferRequest", "inference/grpc_predict_v2.proto"),
        ("inference.ModelInferRequest.InferInputTensor", "inference/grpc_predict_v2.proto"),
        ("inference.GRPCInferenceService", "inference/grpc_predict_v2.proto"),
        ("inference.GRPCInferenceService.ModelInfer", "inference/grpc_predict_v2.proto"),
        ("inference.ModelInferRequest.model_name", "inference/grpc_predict_v2.proto"),
        ("grpc.health.v1.HealthCheckResponse.ServingStatus", "health/health.proto"),
    ],
)
def test_a_symbol_leads_to_its_file(ask, symbol, file):
    assert files_of(ask(file_containing_symbol=symbol))[0] == file


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"file_by_filename": "no/such.proto"}, "file 'no/such.proto' is not known"),
        ({"file_by_filename": "../../etc/passwd"}, "file '../../etc/passwd' is not known"),
        ({"file_containing_symbol": "no.Such"}, "symbol 'no.Such' is not known"),
        ({"file_containing_symbol": ""}, "symbol '' is not known"),
        (
            {"file_containing_symbol": "inference.GRPCInferenceService.Nope"},
            "symbol 'inference.GRPCInferenceService.Nope' is not known",
        ),
        ({"all_extension_numbers_of_type": "no.Such"}, "type 'no.Such' is not known"),
    ],
)
def test_what_is_not_known_is_answered_as_not_found_and_the_stream_goes_on(ask, fields, text):
    response = ask(**fields)
    assert response.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    assert response.error_response.error_message == text
    assert ask(list_services="").WhichOneof("message_response") == "list_services_response"


def test_there_are_no_extensions(ask):
    wanted = {"containing_type": "inference.ModelInferRequest", "extension_number": 100}
    response = ask(file_containing_extension=wanted)
    assert response.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    response = ask(all_extension_numbers_of_type="inference.ModelInferRequest")
    assert response.all_extension_numbers_response.base_type_name == "inference.ModelInferRequest"
    assert list(response.all_extension_numbers_response.extension_number) == []


def test_an_empty_request_is_answered_as_invalid(ask):
    assert ask().error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def test_bytes_that_are_no_message_end_the_stream(channel):
    stream = channel.stream_stream(f"/{V1[0]}/ServerReflectionInfo")(iter([b"\xff\xff"]), timeout=WAIT)
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_stock_client_rebuilds_every_service_from_what_we_tell(channel):
    database = ProtoReflectionDescriptorDatabase(channel)
    assert sorted(database.get_services()) == ALL
    pool = descriptor_pool.DescriptorPool(database)
    for name in ALL:
        rebuilt = pool.FindServiceByName(name)
        ours = services()[name]
        assert [(m.name, m.input_type.full_name, m.output_type.full_name) for m in rebuilt.methods] == [
            (m.name, m.input_type.full_name, m.output_type.full_name) for m in ours.methods
        ]
