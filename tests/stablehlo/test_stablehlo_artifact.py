import hashlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from rsrv.core.errors import ExportError, ProgramError
from rsrv.stablehlo import DEFAULT_VERSION, artifact_version, parse, readable_versions, report, serialize

ADD = """func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %a, %a : tensor<4xf32>
  return %0 : tensor<4xf32> }"""


def chlo_module():
    """erf, top_k, lgamma: operations of the CHLO dialect, which a portable artifact does not have."""

    def fn(x):
        return jax.lax.erf(x), jax.lax.top_k(x, 2)[0], jax.lax.lgamma(x)

    return jax.jit(fn).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compiler_ir("stablehlo")


def test_the_default_version_is_written_and_read_back():
    artifact = serialize(ADD)
    assert DEFAULT_VERSION == "1.13.7"
    assert artifact_version(artifact) == "1.13.7"
    assert "stablehlo.add" in str(parse(artifact))


def test_any_version_of_the_window_can_be_written():
    oldest, newest = readable_versions()
    assert artifact_version(serialize(ADD, "1.9.0")) == "1.9.0"
    assert artifact_version(serialize(ADD, "min")) == oldest
    assert artifact_version(serialize(ADD, "current")) == newest


@pytest.mark.parametrize("version", ["9.9.9", "0.1.0", "latest", "1.13", ""])
def test_a_version_outside_the_window_names_the_window(version):
    with pytest.raises(ExportError, match=r'"min", "current" or a version from 0\.9\.0 to 1\.'):
        serialize(ADD, version)


@pytest.mark.parametrize("data", [b"", b"ML\xefR", b"func.func @main()", b"ML\xefR\rMLIR23.0.0git\x00rest"])
def test_data_that_is_no_portable_artifact_has_no_version(data):
    assert artifact_version(data) is None


def test_chlo_operations_are_written_as_composites_with_their_decomposition():
    module = chlo_module()
    assert "chlo.erf" in str(module)
    artifact = serialize(module)
    assert report(artifact).dialects == ("builtin", "func", "stablehlo")
    text = str(parse(artifact))
    assert 'stablehlo.composite "chlo.erf"' in text
    assert 'stablehlo.composite "chlo.top_k"' in text


def test_the_given_module_is_left_as_it_was():
    module = chlo_module()
    before = module.operation.get_asm(enable_debug_info=True)
    serialize(module)
    assert module.operation.get_asm(enable_debug_info=True) == before


def test_a_module_and_its_text_give_the_same_program():
    module = chlo_module()
    # The generic form: the short one of top_k has no is_stable from jaxlib 0.12 on.
    text = module.operation.get_asm(print_generic_op_form=True)
    from_text = serialize(text)
    assert from_text == serialize(text.encode())
    assert str(parse(from_text)) == str(parse(serialize(module)))


def test_source_locations_do_not_reach_the_artifact():
    located = ADD.replace("%a, %a : tensor<4xf32>", '%a, %a : tensor<4xf32> loc("secret/path.py":12:3)')
    assert serialize(located) == serialize(ADD)


def test_two_processes_write_the_same_bytes():
    script = """
import hashlib, jax, jax.numpy as jnp
{padding}
def fn(x, w):
    return jax.nn.gelu(x @ w, approximate=False), jax.lax.top_k(x, 2), jax.lax.digamma(x), jnp.sinh(x)
spec = jax.ShapeDtypeStruct((4, 4), jnp.float32)
from rsrv.stablehlo import serialize
module = jax.jit(fn, keep_unused=True).lower(spec, spec).compiler_ir("stablehlo")
print(hashlib.sha256(serialize(module)).hexdigest())
"""
    digests = {
        subprocess.run(
            [sys.executable, "-c", script.format(padding=padding)], capture_output=True, text=True, check=True
        ).stdout.strip()
        for padding in ("", "\n\n\n# another place in the file")
    }
    assert len(digests) == 1
    assert len(digests.pop()) == len(hashlib.sha256().hexdigest())


def test_a_dialect_that_an_artifact_cannot_hold_is_named():
    with pytest.raises(ProgramError, match="dialect 'arith'") as caught:
        serialize(ADD.replace("stablehlo.add", "arith.addf"))
    assert caught.value.rule == "B-69"


def test_a_program_that_is_too_new_for_the_wanted_version_is_refused():
    text = """func.func @main(%a: tensor<4xf4E2M1FN>) -> tensor<4xf4E2M1FN> { return %a : tensor<4xf4E2M1FN> }"""
    assert artifact_version(serialize(text, "1.9.0")) == "1.9.0"
    with pytest.raises(ProgramError, match=r"cannot be written at StableHLO 1\.0\.0"):
        serialize(text, "1.0.0")
