"""A single whole number among a message's parameters, such as a deadline, is written without protobuf."""

import pytest

from rsrv.core.wire import encode_request, join
from rsrv.core.wire.parameters import deadline_params
from rsrv.protos import inference


@pytest.mark.parametrize(
    "value", [0, 1, 127, 128, 10_000_000_000, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63), True]
)
@pytest.mark.parametrize("name", ["n", "", "naïve", "k" * 200])
def test_its_bytes_are_those_of_protobuf(name, value):
    message = inference.ModelInferRequest(model_name="m")
    kind = "bool_param" if value is True else "uint64_param" if value > 2**63 - 1 else "int64_param"
    setattr(message.parameters[name], kind, value)
    assert join(encode_request("m", [], parameters={name: value})) == message.SerializeToString(deterministic=True)


def test_a_deadline_is_read_back():
    body = join(encode_request("m", [], parameters=deadline_params(12_345)))
    parameters = inference.ModelInferRequest.FromString(body).parameters
    assert [parameter.int64_param for parameter in parameters.values()] == [12_345]
