from __future__ import annotations

from typing import Any

import pytest

from rsrv.audit import check_signature, require_signature
from rsrv.bundle.manifest import Manifest, parse_manifest
from rsrv.bundle.safetensors import WeightEntry, WeightsHeader
from rsrv.core.dtypes import DType
from rsrv.core.errors import SignatureMismatch
from rsrv.stablehlo.signature import ProgramReport, ProgramSignature, TensorType


def tensor(text: str) -> TensorType:
    """``f32[2,?]`` → TensorType."""
    dtype, _, rest = text.partition("[")
    sizes = rest.rstrip("]")
    return TensorType(dtype, tuple(-1 if s == "?" else int(s) for s in sizes.split(",")) if sizes else ())


def program(arguments: list[str], results: list[str]) -> ProgramReport:
    return ProgramReport(ProgramSignature(tuple(map(tensor, arguments)), tuple(map(tensor, results))))


def weights(**shapes: str) -> WeightsHeader:
    entries = {}
    for name, text in shapes.items():
        found = tensor(text)
        entries[name] = WeightEntry(name, DType.from_stablehlo(found.dtype), found.shape, 0, 0)
    return WeightsHeader(entries, tuple(entries), {}, 0, 0)


def manifest(**changes: Any) -> Manifest:
    mapping = {
        "format_version": "3.0",
        "executable_inputs": [
            {"name": "x", "dtype": "f32", "shape": "nc", "dims": {"c": 3}},
            {"name": "m", "dtype": "i64", "shape": "cn", "dims": {"c": 2}},
        ],
        "executable_outputs": [{"name": "y", "dtype": "f32", "shape": "nk", "dims": {"k": 5}}],
        "batching": {"compiled_batch_sizes": [4]},
        **changes,
    }
    return parse_manifest(mapping, name="net", has_hooks=False)


WEIGHTS = weights(w="f32[3,5]", b="f32[5]")
GOOD = ["f32[4,3]", "i64[2,4]", "f32[3,5]", "f32[5]"]


def problems(
    arguments: list[str],
    results: list[str] | None = None,
    *,
    batch: int = 4,
    of: Manifest | None = None,
    **options: Any,
) -> list[str]:
    header = options.get("header", WEIGHTS)
    variant = options.get("variant", ())
    report = program(arguments, ["f32[4,5]"] if results is None else results)
    return check_signature(of or manifest(), variant, batch, report, header)


def test_a_program_that_takes_and_returns_what_is_declared_has_no_problem() -> None:
    assert problems(GOOD) == []


def test_each_argument_that_differs_is_named_with_both_types() -> None:
    found = problems(["f32[4,3]", "i32[2,4]", "f32[3,5]", "f32[1,5]"])
    assert found == [
        "argument 1 is i32[2,4], but input 'm' is declared as i64[2,4]",
        "argument 3 is f32[1,5], but weight 'b' is declared as f32[5]",
    ]


def test_the_batch_extent_is_that_of_the_programs_batch_key() -> None:
    assert problems(GOOD, batch=8)[0] == "argument 0 is f32[4,3], but input 'x' is declared as f32[8,3]"


def test_results_are_compared_in_number_dtype_and_shape() -> None:
    assert problems(GOOD, []) == ["returns 0 results, but 1 executable_outputs are declared (B-9)"]
    assert problems(GOOD, ["f64[4,5]"]) == ["result 0 is f64[4,5], but output 'y' is declared as f32[4,5]"]
    assert problems(GOOD, ["f32[5,4]"]) == ["result 0 is f32[5,4], but output 'y' is declared as f32[4,5]"]


def test_a_captured_random_key_is_recognised() -> None:
    (problem,) = problems(["ui64[2]", *GOOD])
    assert "takes 5 arguments, but 2 inputs + 2 weights = 4 are declared: 1 surplus (B-8)" in problem
    assert "argument 0 is ui64[2], most likely a random key that was captured" in problem


def test_another_surplus_argument_is_named() -> None:
    (problem,) = problems([*GOOD[:2], "f32[7,7]", *GOOD[2:]])
    assert "undeclared: argument 2 (f32[7,7]), most likely a captured value" in problem


def test_a_pruned_input_is_named() -> None:
    (problem,) = problems([GOOD[0], *GOOD[2:]])
    assert "takes 3 arguments" in problem
    assert "1 short" in problem
    assert "nothing takes input 'm', most likely left out by the exporter because it is unused" in problem


def test_a_pruned_weight_is_named() -> None:
    (problem,) = problems(GOOD[:3])
    assert "nothing takes weight 'b'" in problem


def test_weights_in_another_order_are_recognised() -> None:
    found = problems([*GOOD[:2], "f32[5]", "f32[3,5]"])
    assert found[-1] == "the same weights in another order would fit: argument_order does not match this program"


def test_column_major_weights_are_recognised() -> None:
    assert problems([*GOOD[:2], "f32[5,3]", "f32[5]"])[-1] == (
        "all weights would fit with reversed axes: they look column-major"
    )


def test_without_a_weights_header_inputs_and_results_are_still_compared() -> None:
    assert problems(GOOD, header=None) == []
    assert problems(["f32[4,9]", *GOOD[1:]], header=None) == [
        "argument 0 is f32[4,9], but input 'x' is declared as f32[4,3]"
    ]
    assert problems(GOOD[:1], header=None) == ["takes 1 arguments, fewer than the 2 executable_inputs (B-8)"]


def test_a_long_list_of_differences_is_cut() -> None:
    many = weights(**{f"w{i}": "f32[2]" for i in range(20)})
    found = problems([*GOOD[:2], *["f32[3]"] * 20], header=many)
    assert len(found) == 9
    assert found[-1] == "and 12 more arguments differ"


def test_a_dynamic_axis_is_refused_in_a_static_bundle() -> None:
    assert problems(["f32[?,3]", *GOOD[1:]]) == [
        "argument 0 is f32[?,3], but input 'x' is declared as f32[4,3]",
        "argument 0 is f32[?,3]: shapes have to be static (B-10)",
    ]


@pytest.mark.parametrize("sizes", [[], [4]])
def test_the_one_program_may_have_any_batch_extent_that_the_manifest_does_not_contradict(sizes: list[int]) -> None:
    single = manifest(batching={"compiled_batch_sizes": sizes})
    assert problems(GOOD, batch=0, of=single) == []
    assert problems(GOOD, ["f32[8,5]"], batch=0, of=single) == [
        "result 0 is f32[8,5], but output 'y' is declared as f32[4,5]"
    ]


@pytest.mark.parametrize("sizes", [[8], [4, 8]])
def test_declared_sizes_that_the_one_program_does_not_have_are_refused(sizes: list[int]) -> None:
    (problem,) = problems(GOOD, batch=0, of=manifest(batching={"compiled_batch_sizes": sizes}))
    assert problem.startswith(f"is compiled for batch size 4, but compiled_batch_sizes is {sizes}")
    assert problem.endswith("(B-34)")


def test_a_declared_size_without_any_batch_axis_is_refused() -> None:
    flat = manifest(
        executable_inputs=[{"name": "x", "dtype": "f32", "shape": "c", "dims": {"c": 3}}],
        executable_outputs=[{"name": "y", "dtype": "f32", "shape": ""}],
    )
    found = problems(["f32[3]"], ["f32[]"], batch=0, of=flat, header=weights())
    assert found == ["has no batch axis, but compiled_batch_sizes is [4]; want [] or the one size there is (B-34)"]


def test_a_symbolic_batch_axis_is_wanted_and_enough_with_dynamic_batching() -> None:
    dynamic = manifest(batching={"compiled_batch_sizes": [1, 8], "dynamic": True})
    symbolic = ["f32[?,3]", "i64[2,?]", *GOOD[2:]]
    assert problems(symbolic, ["f32[?,5]"], batch=0, of=dynamic) == []
    assert problems(["f32[?,3]", *GOOD[1:]], ["f32[?,5]"], batch=0, of=dynamic) == [
        "argument 1 is i64[2,4], but the batch axis of input 'm' has to be symbolic (B-12a)"
    ]
    assert problems(["f32[?,?]", *symbolic[1:]], ["f32[?,5]"], batch=0, of=dynamic) == [
        "argument 0 is f32[?,?], but input 'x' is declared as f32[?,3]"
    ]


def test_variable_axes_take_the_sizes_of_the_variant_in_input_order() -> None:
    variable = manifest(
        executable_inputs=[
            {"name": "x", "dtype": "f32", "shape": "nhw", "dims": {"h": -1, "w": -1}},
            {"name": "m", "dtype": "f32", "shape": "nk", "dims": {"k": -1}},
        ],
        executable_outputs=[{"name": "y", "dtype": "f32", "shape": "nq", "dims": {"q": -1}}],
        input_shapes=[{"h": 6, "w": 7, "k": 8}],
    )
    header = weights()
    assert problems(["f32[4,6,7]", "f32[4,8]"], ["f32[4,99]"], of=variable, variant=(6, 7, 8), header=header) == []
    assert problems(["f32[4,7,6]", "f32[4,8]"], ["f32[4,99]"], of=variable, variant=(6, 7, 8), header=header) == [
        "argument 0 is f32[4,7,6], but input 'x' is declared as f32[4,6,7]"
    ]


def test_requiring_a_signature_raises_with_all_problems_and_the_file() -> None:
    require_signature(manifest(), (), 4, program(GOOD, ["f32[4,5]"]), WEIGHTS)
    with pytest.raises(SignatureMismatch) as raised:
        require_signature(manifest(), (), 4, program(GOOD, ["f32[4]", "f32[4]"]), WEIGHTS, file="model.b4.mlir")
    assert raised.value.message == "net: model.b4.mlir returns 2 results, but 1 executable_outputs are declared (B-9)"
    assert raised.value.rule == "B-11"
    assert raised.value.file == "model.b4.mlir"
