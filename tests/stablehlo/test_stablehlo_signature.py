import json

import ml_dtypes
import numpy as np
import pytest

from rsrv.core.dtypes import DType
from rsrv.stablehlo import (
    ProgramReport,
    ProgramSignature,
    TensorType,
    element_type,
    numpy_dtype,
    tensor_type,
)


@pytest.mark.parametrize("dtype", list(DType))
def test_every_declarable_dtype_has_the_element_name_of_the_dtype_table(dtype):
    assert element_type(dtype.numpy) == dtype.stablehlo
    assert numpy_dtype(dtype.stablehlo) == dtype.numpy


def test_element_types_that_no_bundle_declares_are_known_too():
    assert element_type(np.complex64) == "complex<f32>"
    assert element_type(np.dtype(ml_dtypes.int4)) == "i4"
    assert numpy_dtype("ui4") == ml_dtypes.uint4


@pytest.mark.parametrize("dtype", [">f4", "U3", "datetime64[s]", object])
def test_a_dtype_that_no_program_can_take_is_refused_by_name(dtype):
    with pytest.raises(TypeError, match="no StableHLO element type"):
        element_type(np.dtype(dtype))


def test_a_report_survives_the_way_through_json():
    report = ProgramReport(
        signature=ProgramSignature(
            arguments=(TensorType("f32", (2, -1)), TensorType("i1", ())), results=(TensorType("bf16", (0, 3)),)
        ),
        custom_calls=("lapack_spotrf_ffi",),
        dialects=("func", "stablehlo"),
        donated=(1,),
        stablehlo_version="1.13.7",
    )
    assert ProgramReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_types_print_as_manifests_write_them_and_dynamic_axes_as_question_marks():
    assert str(TensorType("f32", (1, -1, 3))) == "f32[1,?,3]"
    assert str(TensorType("i64", ())) == "i64[]"


def test_the_first_dynamic_type_of_a_signature_is_named():
    static, dynamic = TensorType("f32", (2,)), TensorType("f32", (-1,))
    assert ProgramSignature((static,), (static,)).dynamic() is None
    assert ProgramSignature((static, dynamic), (dynamic,)).dynamic() == "argument 1 is f32[?]"
    assert ProgramSignature((static,), (static, dynamic)).dynamic() == "result 1 is f32[?]"


def test_interned_types_are_one_object():
    assert tensor_type("f32", (4, 4)) is tensor_type("f32", (4, 4))
    assert tensor_type("f32", (4, 4)) == TensorType("f32", (4, 4))
