"""What is read from a ``config.pbtxt``, and what is refused before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.triton import config_pbtxt

from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError
from rsrv.export.repository.triton import (
    batch_ladder,
    find_model_file,
    forward_parameters,
    obstacle,
    parse_triton_model,
    read_triton_model,
    tensor_order,
)

REAL = """
# as people write them
name: "net"
platform: "pytorch_libtorch"
max_batch_size: 12
input [
  { name: "INPUT__0" data_type: TYPE_UINT8 format: FORMAT_NCHW dims: [ 3, 224, 224 ] },
  { name: "INPUT__1", data_type: 9, dims: 1; dims: 2 }
]
output { name: 'OUTPUT__0' data_type: TYPE_FP64 dims: [ -1 ] label_filename: "l.txt" }
instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0 ] } ]
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }
parameters: { key: "INFERENCE_MODE" value: { string_value: "true" } }
field_of_a_later_triton { deep: { list: [ 1, 2 ] } }
"""


def test_a_configuration_is_read_as_text_format_with_comments_and_unknown_fields() -> None:
    model = parse_triton_model(REAL)
    assert [(one.name, one.dtype, one.dims) for one in model.inputs] == [
        ("INPUT__0", DType.U8, (3, 224, 224)),
        ("INPUT__1", DType.I64, (1, 2)),
    ]
    assert [(one.name, one.dtype, one.dims) for one in model.outputs] == [("OUTPUT__0", DType.F64, (-1,))]
    assert (model.max_batch_size, model.ladder, model.framework) == (12, (1, 3, 6, 12), "pytorch_libtorch")
    assert obstacle(model) is None


def test_the_ladder_is_halved_down_to_one() -> None:
    assert [batch_ladder(largest) for largest in (0, 1, 2, 7, 12)] == [(), (1,), (1, 2), (1, 3, 7), (1, 3, 6, 12)]


def test_a_missing_batch_size_is_one_and_zero_means_that_nothing_is_batched() -> None:
    assert parse_triton_model("").ladder == (1,)
    assert parse_triton_model("max_batch_size: 0").ladder == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("input [ {", '1:9 : Expected "}"'),
        ("max_batch_size: many", "Couldn't parse integer: many"),
        ("max_batch_size: -1", "max_batch_size is -1, want 0 or more"),
        ("max_batch_size: 1 max_batch_size: 2", "should not have multiple"),
        ("input { data_type: TYPE_FP4 }", "no value named TYPE_FP4"),
        ("a { " * 5000, "not a model configuration"),
    ],
)
def test_a_broken_configuration_says_where(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.pbtxt").write_text(text)
    with pytest.raises(ExportError) as raised:
        read_triton_model(tmp_path)
    assert raised.value.message.startswith(f"{tmp_path / 'config.pbtxt'}: ")
    assert said in raised.value.message


def test_bytes_that_are_no_text_and_huge_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ExportError, match="not a text in UTF-8"):
        read_triton_model(tmp_path)
    path.write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(ExportError, match="more than 1048576 bytes"):
        read_triton_model(tmp_path)


GOOD = ("x", "TYPE_FP32", [4])


@pytest.mark.parametrize(
    ("text", "outcome", "said"),
    [
        (
            config_pbtxt([("x", "TYPE_STRING", [1])], [GOOD]),
            "failed",
            "input 'x' is TYPE_STRING, which is not supported",
        ),
        (config_pbtxt([GOOD], [("y", "TYPE_BF16", [1])]), "failed", "output 'y' is TYPE_BF16, which is not supported"),
        (config_pbtxt([("x", "TYPE_FP32", [3, -1])], [GOOD]), "skipped", "dynamic input shape: 'x' has dims [3, -1]"),
        (config_pbtxt([("x", "TYPE_FP32", [0])], [GOOD]), "failed", "hold no value"),
        (config_pbtxt([GOOD, GOOD], [GOOD]), "failed", "two inputs named 'x'"),
        (config_pbtxt([], [GOOD]), "failed", "declares no input"),
        (config_pbtxt([GOOD], []), "failed", "declares no output"),
        ('platform: "tensorrt_plan"', "skipped", "for 'tensorrt_plan', not for PyTorch"),
        ('backend: "onnxruntime"', "skipped", "for 'onnxruntime', not for PyTorch"),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: 4 reshape { shape: [ 2, 2 ] } } ' + config_pbtxt([], [GOOD]),
            "failed",
            "input 'x' has a reshape to [2, 2]",
        ),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: 4 allow_ragged_batch: true } ' + config_pbtxt([], [GOOD]),
            "failed",
            "is ragged",
        ),
        (
            config_pbtxt([GOOD], [GOOD]) + 'batch_input { target_name: "n" }',
            "failed",
            "tensors that Triton makes itself",
        ),
        ("input { dims: 1 } output { name: 'y' }", "failed", "an input without a name"),
    ],
)
def test_what_cannot_be_converted_is_known_before_anything_is_loaded(text: str, outcome: str, said: str) -> None:
    found = obstacle(parse_triton_model(text))
    assert found is not None
    assert found[0] == outcome
    assert said in found[1]


def test_names_decide_the_order_of_tensors_as_in_triton() -> None:
    assert forward_parameters(["INPUT__1", "INPUT__0"], ["a", "b"]) == {"b": "INPUT__1", "a": "INPUT__0"}
    assert forward_parameters(["b", "a"], ["a", "b"]) == {"b": "b", "a": "a"}
    assert forward_parameters(["second", "first"], ["a", "b"]) == {"a": "second", "b": "first"}
    assert forward_parameters(["x__1", "x__0"], ["x__1", "x__0"]) == {"x__1": "x__1", "x__0": "x__0"}
    assert tensor_order(["OUTPUT__1", "OUTPUT__0"]) == [1, 0]
    assert tensor_order(["scores", "boxes__0"]) == [0, 1]


def test_inputs_that_leave_out_an_optional_parameter_go_to_their_own() -> None:
    parameters = ["x", "mask", "bias"]
    assert forward_parameters(["bias", "x"], parameters) == {"bias": "bias", "x": "x"}
    assert forward_parameters(["INPUT__0", "INPUT__2"], parameters) == {"x": "INPUT__0", "bias": "INPUT__2"}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ["INPUT__1", "INPUT__2"],
            r"'INPUT__2' says that it is argument 2 of forward, counted from 0; there are 2: a, b",
        ),
        (["x__0", "y__0"], r"'x__0' and 'y__0' both say that they are argument 0"),
    ],
)
def test_numbers_of_inputs_that_forward_does_not_have_are_refused(names: list[str], said: str) -> None:
    with pytest.raises(ExportError, match=said):
        forward_parameters(names, ["a", "b"])


@pytest.mark.parametrize("names", [["y__1", "y__2"], ["y__0", "z__0"], ["y__0", "y__2"]])
def test_numbers_of_outputs_with_a_gap_are_refused(names: list[str]) -> None:
    with pytest.raises(ExportError, match=r"have the numbers \d, \d, want those from 0 to 1"):
        tensor_order(names)


def test_the_program_is_that_of_version_one(tmp_path: Path) -> None:
    model = parse_triton_model("")
    (tmp_path / "1").mkdir()
    with pytest.raises(ExportError, match=r"there is no 1/model.pt or 1/model.pt2"):
        find_model_file(tmp_path, model)
    (tmp_path / "1/model.pt2").touch()
    assert find_model_file(tmp_path, model).name == "model.pt2"
    (tmp_path / "1/model.pt").touch()
    assert find_model_file(tmp_path, model).name == "model.pt"
    named = parse_triton_model('default_model_filename: "net.pt"')
    with pytest.raises(ExportError, match=r"there is no 1/net.pt"):
        find_model_file(tmp_path, named)
    with pytest.raises(ExportError, match="there is no"):
        find_model_file(tmp_path, parse_triton_model('default_model_filename: "../1/model.pt"'))


def test_a_pipe_in_place_of_the_configuration_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.pbtxt")
    with pytest.raises(ExportError, match=r"config.pbtxt: not a file"):
        read_triton_model(tmp_path)
