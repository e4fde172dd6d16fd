import subprocess
import sys

import pytest

from rsrv.core.errors import ProgramError
from rsrv.stablehlo import ProgramSignature, TensorType, parse, prepare, report, serialize

F32 = TensorType("f32", (2, 3))


def program(
    body="%0 = stablehlo.add %a, %a : tensor<2x3xf32>", *, module="", argument="", result="", visibility="public"
):
    return f"""module @m attributes {{{module}}} {{
      func.func {visibility} @main(%a: tensor<2x3xf32> {{{argument}}}) -> (tensor<2x3xf32> {{{result}}}) {{
        {body}
        return %0 : tensor<2x3xf32>
      }}
    }}"""


def test_text_and_artifact_of_one_program_have_the_same_signature():
    expected = ProgramSignature((F32,), (F32,))
    artifact = serialize(program())
    assert report(program()).signature == expected
    assert report(program().encode()).signature == expected
    assert report(artifact).signature == expected
    assert report(artifact).stablehlo_version == "1.13.7"
    assert report(program()).stablehlo_version is None


def test_signature_lists_every_argument_and_result_in_order_with_dynamic_axes_as_minus_one():
    text = """func.func @main(%a: tensor<i1>, %b: tensor<?x3xbf16>, %c: tensor<0x4xui8>, %d: tensor<2xcomplex<f32>>)
      -> (tensor<0x4xui8>, tensor<i1>) { return %c, %a : tensor<0x4xui8>, tensor<i1> }"""
    assert report(text).signature == ProgramSignature(
        (
            TensorType("i1", ()),
            TensorType("bf16", (-1, 3)),
            TensorType("ui8", (0, 4)),
            TensorType("complex<f32>", (2,)),
        ),
        (TensorType("ui8", (0, 4)), TensorType("i1", ())),
    )


def test_custom_calls_in_every_region_and_function_are_collected():
    text = """module {
      func.func public @main(%i: tensor<i32>, %a: tensor<4xf32>) -> tensor<4xf32> {
        %0 = "stablehlo.case"(%i) ({
          %x = stablehlo.custom_call @inner(%a) : (tensor<4xf32>) -> tensor<4xf32>
          stablehlo.return %x : tensor<4xf32>
        }) : (tensor<i32>) -> tensor<4xf32>
        %1 = call @other(%0) : (tensor<4xf32>) -> tensor<4xf32>
        return %1 : tensor<4xf32>
      }
      func.func private @other(%a: tensor<4xf32>) -> tensor<4xf32> {
        %0 = stablehlo.custom_call @also(%a) : (tensor<4xf32>) -> tensor<4xf32>
        return %0 : tensor<4xf32>
      }
    }"""
    found = report(serialize(text))
    assert found.custom_calls == ("also", "inner")
    assert found.dialects == ("builtin", "func", "stablehlo")


@pytest.mark.parametrize("attribute", ["tf.aliasing_output = 0 : i32", "jax.buffer_donor = true"])
def test_donated_arguments_are_reported_and_the_request_is_stripped(attribute):
    prepared = prepare(serialize(program(argument=attribute + ', jax.result_info = "kept"')))
    assert prepared.report.donated == (0,)
    cleaned = parse(prepared.code)
    assert report(prepared.code).donated == ()
    assert attribute.split()[0] not in str(cleaned)
    assert "kept" in str(cleaned)


def test_an_alias_that_the_module_declares_is_reported_and_stripped():
    alias = "{alias = {kind = 0, parameter_index = 0 : index, parameter_number = 0, output_index = []}}"
    prepared = prepare(program(module=f"mhlo.input_output_alias = [{alias}]"))
    assert prepared.report.donated == (0,)
    assert "input_output_alias" not in str(parse(prepared.code))


def test_layouts_that_are_not_row_major_are_stripped():
    layout = 'mhlo.layout_mode = "{0,1}"'
    prepared = prepare(program(argument=layout, result=layout))
    assert "layout_mode" not in str(parse(prepared.code))


def test_a_clean_program_reaches_the_compiler_as_it_is():
    artifact = serialize(program())
    assert prepare(artifact).code is artifact


@pytest.mark.parametrize(
    ("source", "rule", "words"),
    [
        (program(visibility="private"), "B-8", "@main is private"),
        ("func.func @other() { return }", "B-8", r"no function @main \(functions: @other\)"),
        ("module {}", "B-8", r"no function @main \(functions: none\)"),
        (program(module="mhlo.num_replicas = 2 : i32"), "B-8", "mhlo.num_replicas = 2, wanted 1"),
        (program(module="mhlo.num_partitions = 4 : i32"), "B-8", "mhlo.num_partitions = 4, wanted 1"),
        (
            """func.func @main(%a: tensor<3xf32>) -> tuple<tensor<3xf32>> {
            %0 = stablehlo.tuple %a : tuple<tensor<3xf32>>
            return %0 : tuple<tensor<3xf32>> }""",
            "B-8",
            r"result 0 of @main is tuple<tensor<3xf32>>, wanted a ranked tensor",
        ),
        ("func.func @main(%a: tensor<*xf32>) { return }", "B-8", "argument 0 of @main is tensor<.xf32>"),
        (program('%0 = "foo.bar"(%a) : (tensor<2x3xf32>) -> tensor<2x3xf32>'), "B-69", "dialect 'foo'.*re-export"),
        (program("%0 = foo.bar %a : tensor<2x3xf32>"), "B-69", "dialect 'foo', re-export needed"),
        (program(module="foo.x = #foo.bar<1>"), "B-69", "dialect 'foo', re-export needed"),
        (program("%0 = math.exp %a : tensor<2x3xf32>"), "B-69", "dialect 'math', re-export needed"),
        (program("%0 = stablehlo.add %a, %b : tensor<2x3xf32>"), None, "cannot be read: use of undeclared SSA value"),
        (
            program(
                """%0 = stablehlo.add %a, %a : tensor<2x3xf32>
                %t = stablehlo.create_token : !stablehlo.token
                %r:2 = "stablehlo.infeed"(%t) : (!stablehlo.token) -> (tensor<2xi32>, !stablehlo.token)"""
            ),
            None,
            "stablehlo.infeed, which would wait",
        ),
        (b"", None, r"program is empty \(0 bytes\)"),
        (b"\xff\xfe\x00garbage", None, "neither MLIR bytecode nor MLIR text.*start with ff fe 00"),
        (b"ML\xefR", None, "cannot be read"),
        (serialize(program())[:90], None, "cannot be read: attempting to parse"),
        (serialize(program()).replace(b"v1.13.7", b"v1.99.7"), "B-70", r"StableHLO 1\.99\.7.*reads 0\.9\.0 to 1\.\d+"),
        (serialize(program()).replace(b"v1.13.7", b"v0.1.7"), "B-70", r"StableHLO 0\.1\.7.*reads 0\.9\.0 to 1\.\d+"),
    ],
)
def test_a_program_that_no_bundle_may_hold_is_refused_with_its_reason(source, rule, words):
    with pytest.raises(ProgramError, match=words) as caught:
        report(source)
    assert caught.value.rule == rule


def test_dynamic_shapes_are_reported_but_not_prepared_for_the_compiler():
    text = "func.func @main(%a: tensor<2xf32>, %b: tensor<?x3xf32>) -> tensor<?x3xf32> { return %b : tensor<?x3xf32> }"
    assert report(text).signature.arguments[1] == TensorType("f32", (-1, 3))
    with pytest.raises(ProgramError, match=r"argument 1 is f32\[\?,3\]; wanted static shapes") as caught:
        prepare(text)
    assert caught.value.rule == "B-10"


def test_an_element_type_that_numpy_cannot_hold_is_not_prepared():
    text = "func.func @main(%a: tensor<2xi7>) -> tensor<2xi7> { return %a : tensor<2xi7> }"
    with pytest.raises(ProgramError, match=r"i7\[2\], an element type that no array can hold"):
        prepare(text)


def test_reading_a_program_needs_neither_jax_nor_a_device_client():
    code = (
        "import sys; from rsrv.stablehlo import report; report('func.func @main() { return }'); "
        "print('jax' in sys.modules, 'jaxlib.xla_client' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
    assert done.stderr == ""
