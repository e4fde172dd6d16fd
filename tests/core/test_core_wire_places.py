"""Outputs that were asked for in shared memory, in answers that do not say where they are (Triton's)."""

import pytest

from rsrv.core.tensors import OutputTarget
from rsrv.core.wire.headers import RequestedOutput
from rsrv.core.wire.response import decode_response
from rsrv.protos import inference

PLACE = OutputTarget("region", 64, 512)
REQUESTED = [RequestedOutput("a", PLACE), RequestedOutput("b"), "c"]


def answer(*outputs, raw=()):
    message = inference.ModelInferResponse(model_name="m")
    for name, shape, datatype in outputs:
        message.outputs.add(name=name, shape=shape, datatype=datatype)
    message.raw_output_contents.extend(raw)
    return message


def targets(message, requested=REQUESTED):
    return {
        output.name: output.target
        for output in decode_response(message.SerializeToString()).with_places(requested).outputs
    }


@pytest.mark.parametrize("raw", [[b"", bytes(8)], []])
def test_an_output_without_bytes_is_where_it_was_asked_for_with_the_size_of_its_shape(raw):
    message = answer(("a", [3, 4], "FP32"), ("b", [2], "FP32"), raw=raw)
    assert targets(message) == {"a": OutputTarget("region", 64, 48), "b": None}


def test_an_output_that_brings_its_bytes_is_where_they_are():
    message = answer(("a", [1], "FP32"), ("b", [0], "FP32"), raw=[bytes(4), b""])
    assert targets(message) == {"a": None, "b": None}
    assert decode_response(message.SerializeToString()).with_places(REQUESTED).arrays()["b"].shape == (0,)


def test_typed_contents_and_a_place_of_its_own_count_as_bytes():
    message = answer(("a", [1], "FP32"))
    message.outputs[0].contents.fp32_contents.append(2.0)
    assert targets(message) == {"a": None}
    message = answer(("a", [1], "FP32"), raw=[b""])
    parameters = message.outputs[0].parameters
    parameters["shared_memory_region"].string_param = "elsewhere"
    parameters["shared_memory_byte_size"].int64_param = 4
    assert targets(message) == {"a": OutputTarget("elsewhere", 0, 4)}


@pytest.mark.parametrize("output", [("a", [2], "BYTES"), ("a", [0], "FP32"), ("c", [2], "FP32"), ("z", [2], "FP32")])
def test_nothing_is_made_up_for_what_has_no_known_size_or_no_place(output):
    assert targets(answer(output, raw=[b""])) == {output[0]: None}
