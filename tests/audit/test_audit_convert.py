"""Bundles of the column-major format 2.0: read, checked, and converted both ways (§1.11, X-60)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.bundles import N, lower, write_model
from support.column_major import write_column_major

from rsrv.audit import check_bundle, convert_bundle, diff_bundles
from rsrv.bundle import IOSpec, describe_bundle, open_bundle, read_header, seal, write_bundle
from rsrv.bundle.column_major import with_reversed_axes
from rsrv.bundle.tensors import load_tensors
from rsrv.cli.main import main
from rsrv.core.errors import BundleError, ManifestError, ProgramError, SignatureMismatch, UsageError
from rsrv.export import export_bundle
from rsrv.runtime import PjrtDevice
from rsrv.serve.residency.tensors import TensorPool, open_weights
from rsrv.stablehlo.artifact import artifact_version

SQUARE = np.arange(16, dtype=np.float32).reshape(4, 4)
TALL = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
HOOKS = "def postprocess(outputs):\n    return outputs\n"


@pytest.fixture(scope="module")
def cpu():
    device = PjrtDevice("cpu")
    yield device
    device.close()


@pytest.fixture
def row_major(tmp_path: Path) -> Path:
    """x @ square, whose transpose would fit as well, then a tensor of rank 3, a vector and a scalar."""
    return write_model(
        tmp_path / "new" / "net",
        lambda x, square, tall, v, s: (((x @ square) @ tall.reshape(4, 6)).reshape(-1, 3, 2) * v + s,),
        {"x": ((N, 4), np.float32)},
        {"y": ((N, 3, 2), np.float32)},
        weights={"square": SQUARE, "tall": TALL, "v": np.arange(2, dtype=np.float32), "s": np.array(3, np.float32)},
        batch_sizes=(1, 2),
    )


@pytest.fixture
def older(row_major: Path, tmp_path: Path) -> Path:
    return write_column_major(row_major, tmp_path / "old" / "net")


def edit(path: Path, **changes: Any) -> None:
    mapping = {**yaml.safe_load((path / "manifest.yaml").read_text()), **changes}
    mapping = {key: value for key, value in mapping.items() if value is not ...}
    (path / "manifest.yaml").write_text(yaml.safe_dump(mapping, sort_keys=False))


def answers(path: Path, cpu: PjrtDevice, x: np.ndarray) -> np.ndarray:
    """The answer as a server computes it: weights through the server's own loader."""
    bundle = open_bundle(path)
    weights = TensorPool(cpu).load(open_weights(bundle.weights_path, column_major=bundle.manifest.column_major))
    buffer = cpu.put(x)
    try:
        program = cpu.compile((path / f"model.b{len(x)}.mlir").read_bytes())
        return cpu.launch(program, [buffer, *weights.buffers]).result()[0]
    finally:
        cpu.free([buffer])
        weights.free()


def test_the_same_model_in_both_formats_is_one_manifest_one_description_and_one_answer(
    row_major: Path, older: Path, cpu: PjrtDevice
) -> None:
    new, old = open_bundle(row_major).manifest, open_bundle(older).manifest
    assert old.column_major
    assert old.format_version == "2.0"
    for field in ("executable_inputs", "executable_outputs", "wire_inputs", "input_batch_dim", "coalescable_specs"):
        assert getattr(new, field) == getattr(old, field)
    assert new.wire_batch() == old.wire_batch() == ("x", 1)
    assert describe_bundle(row_major).client_outputs == describe_bundle(older).client_outputs
    x = np.random.default_rng(0).integers(-4, 4, (2, 4)).astype(np.float32)
    expected = (((x @ SQUARE) @ TALL.reshape(4, 6)).reshape(-1, 3, 2) * np.arange(2) + 3).astype(np.float32)
    np.testing.assert_array_equal(answers(row_major, cpu, x), expected)
    np.testing.assert_array_equal(answers(older, cpu, x), expected)


@pytest.mark.parametrize("map_weights", [False, True])
def test_the_servers_loader_transposes_whatever_the_rank_dtype_and_place(
    tmp_path: Path, cpu: PjrtDevice, map_weights: bool
) -> None:
    from safetensors.numpy import save_file

    source = np.random.default_rng(1)
    weights = {
        "a": source.integers(0, 99, (5, 7)).astype(np.int8),
        "b": source.standard_normal((3, 4, 5, 2)),
        "c": source.standard_normal(3).astype(np.float16),
        "d": np.array(4, np.float32),
        "e": np.zeros((2, 0, 3), np.float32),
        "f": source.standard_normal((8, 16)).astype(np.float32),
    }
    path = tmp_path / "weights.safetensors"
    stored = {name: np.array(array.T, order="C") for name, array in weights.items()}
    save_file(stored, path, metadata={"argument_order": json.dumps(list(weights))})
    loaded = TensorPool(cpu, map_weights=map_weights).load(open_weights(path, column_major=True))
    assert [buffer.shape for buffer in loaded.buffers] == [array.shape for array in weights.values()]
    specs = [(array.shape, array.dtype) for array in weights.values()]
    program = cpu.compile(lower(lambda *arrays: arrays, specs))
    for array, found in zip(weights.values(), cpu.launch(program, loaded.buffers).result(), strict=True):
        np.testing.assert_array_equal(found, array)
    assert loaded.nbytes == sum(array.nbytes for array in weights.values())
    loaded.free()
    for name, array in load_tensors(path, column_major=True).items():
        np.testing.assert_array_equal(array, weights[name])


def test_a_header_of_the_other_order_is_not_the_one_that_was_checked(older: Path, cpu: PjrtDevice) -> None:
    path = older / "weights.safetensors"
    assert read_header(path, column_major=True) != read_header(path)
    assert read_header(path, column_major=True).tensors["tall"].shape == (4, 3, 2)


def test_check_accepts_the_older_format_and_says_what_it_costs(older: Path, pool: Any) -> None:
    report = check_bundle(older, pool=pool)
    assert report.passed()
    assert {finding.rule for finding in report.warnings} == {"B-66", "B-15a"}
    assert "transposed at every load" in report.warnings[0].message
    seal(older)
    assert {finding.rule for finding in check_bundle(older, pool=pool).warnings} == {"B-66"}


def test_unknown_keys_and_undeclared_programs_are_warnings_in_the_older_format(older: Path, pool: Any) -> None:
    inputs = yaml.safe_load((older / "manifest.yaml").read_text())["executable_inputs"]
    inputs[0]["layout"] = "fast"
    edit(older, owner="me", executable_inputs=inputs)
    shutil.copy(older / "model.b2.mlir", older / "model.b9.mlir")
    bundle = open_bundle(older)
    assert sorted(bundle.programs[()]) == [1, 2]
    found = [finding for finding in check_bundle(older, pool=pool).warnings if finding.rule in ("B-13", "B-33")]
    assert [(finding.check, finding.rule) for finding in found] == [
        ("manifest", "B-13"),
        ("manifest", "B-13"),
        ("files", "B-33"),
    ]
    assert "manifest.yaml:" in found[0].message


def test_upper_case_letters_are_ordinary_in_the_older_format_and_renamed_in_the_new(tmp_path: Path, pool: Any) -> None:
    new = write_model(
        tmp_path / "new" / "net", lambda x: (x + 1,), {"x": ((N, 4, 3), np.float32)}, {"y": ((N, 4, 3), np.float32)}
    )
    old = write_column_major(new, tmp_path / "old" / "net")
    edit(old, executable_inputs=[{"name": "x", "dtype": "f32", "shape": "BAn", "dims": {"A": 4, "B": 3}}])
    assert open_bundle(old).manifest.executable_inputs[0].letters == "nAB"
    done = convert_bundle(old, tmp_path / "converted" / "net", pool=pool)
    assert open_bundle(done.path).manifest.executable_inputs[0].letters == "nAa"


@pytest.mark.parametrize("what", ["the manifest", "the weights file", "all of it"])
def test_a_bundle_that_lies_about_its_version_is_told(row_major: Path, older: Path, what: str, pool: Any) -> None:
    if what in ("the manifest", "all of it"):
        lists = yaml.safe_load((row_major / "manifest.yaml").read_text())
        edit(older, executable_inputs=lists["executable_inputs"], executable_outputs=lists["executable_outputs"])
    if what in ("the weights file", "all of it"):
        shutil.copy(row_major / "weights.safetensors", older / "weights.safetensors")
    report = check_bundle(older, pool=pool)
    assert not report.passed()
    expected = f"{what} looks row-major although format_version is 2.0 (B-67)"
    assert all(expected in report.of(file)[-1].message for file in ("model.b1.mlir", "model.b2.mlir"))
    assert "column-major" not in report.errors[0].message


def test_a_difference_that_no_reversal_explains_is_only_reported(older: Path, pool: Any) -> None:
    edit(older, executable_outputs=[{"name": "y", "dtype": "f32", "shape": "abn", "dims": {"a": 9, "b": 3}}])
    assert not check_bundle(older, pool=pool).passed()
    edit(older, executable_outputs=[{"name": "y", "dtype": "f32", "shape": "acn", "dims": {"a": 9, "c": 3}}])
    assert "looks row-major" not in str(check_bundle(older, pool=pool).to_json())


def test_there_and_back_is_the_same_bundle_byte_for_byte(row_major: Path, tmp_path: Path, pool: Any) -> None:
    edit(row_major, description="a net", **{"x-team": {"id": 7}}, provenance={"git_commit": "1" * 40, "on": True})
    seal(row_major)
    first = convert_bundle(row_major, tmp_path / "a" / "net", to="3.0", pool=pool).path
    there = convert_bundle(first, tmp_path / "b" / "net", to="2.0", pool=pool).path
    back = convert_bundle(there, tmp_path / "c" / "net", to="3.0", pool=pool).path
    assert {p.name: p.read_bytes() for p in back.iterdir()} == {p.name: p.read_bytes() for p in first.iterdir()}
    assert yaml.safe_load((back / "manifest.yaml").read_text())["x-team"] == {"id": 7}
    assert check_bundle(back, pool=pool).passed(strict=True)


def test_the_older_form_is_what_its_own_writer_makes(row_major: Path, older: Path, tmp_path: Path, pool: Any) -> None:
    there = convert_bundle(row_major, tmp_path / "there" / "net", to="2.0", pool=pool).path
    mapping, wanted = (yaml.safe_load((path / "manifest.yaml").read_text()) for path in (there, older))
    assert mapping.pop("files").keys() == {"model.b1.mlir", "model.b2.mlir", "weights.safetensors"}
    assert mapping == wanted
    from safetensors.numpy import load_file

    for name, array in load_file(older / "weights.safetensors").items():
        np.testing.assert_array_equal(load_file(there / "weights.safetensors")[name], array)
    for name in ("model.b1.mlir", "model.b2.mlir"):
        assert (there / name).read_bytes() == (row_major / name).read_bytes()
    differences = diff_bundles(row_major, there).differences
    assert [(d.section, d.what) for d in differences] == [("manifest", "format_version")]


def test_a_converted_bundle_gives_the_same_answers(older: Path, tmp_path: Path, cpu: PjrtDevice, pool: Any) -> None:
    done = convert_bundle(older, tmp_path / "converted" / "net", verify=True, pool=pool)
    assert done.compared == ("model.b1.mlir", "model.b2.mlir")
    assert (done.left_out, done.rewritten) == ((), ())
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(answers(done.path, cpu, x), answers(older, cpu, x))
    assert check_bundle(done.path, pool=pool).passed(strict=True)


def variants(directory: Path) -> Path:
    """Two inputs that share a variable letter, with different sizes in one variant; the variable axes not last."""
    shapes = {(3, 5): [(1, 3, 2), (1, 5)], (3, 3): [(1, 3, 2), (1, 3)], (5, 3): [(1, 5, 2), (1, 3)]}
    modules = {
        key: {1: lower(lambda q, k, w: ((q @ w).sum((1, 2)) + k.sum(1),), [*((s, np.float32) for s in sizes), W])}
        for key, sizes in shapes.items()
    }
    return write_bundle(
        directory,
        name=directory.name,
        executable_inputs=[
            IOSpec("q", "f32", (1, -1, 2), batch_axis=0, letters="ad"),
            IOSpec("k", "f32", (1, -1), batch_axis=0),
        ],
        executable_outputs=[IOSpec("y", "f32", (1,), batch_axis=0)],
        modules=modules,
        input_shapes=list(shapes),
        weights=[("w", np.arange(4, dtype=np.float32).reshape(2, 2))],
    )


W = ((2, 2), np.float32)


def test_variants_keep_their_programs_in_both_directions(tmp_path: Path, pool: Any) -> None:
    new = variants(tmp_path / "new" / "net")
    there = convert_bundle(new, tmp_path / "there" / "net", to="2.0", verify=True, pool=pool).path
    mapping = yaml.safe_load((there / "manifest.yaml").read_text())
    # The older format has bare letters only, so the shared one was renamed.
    assert [entry["shape"] for entry in mapping["executable_inputs"]] == ["dan", "cn"]
    assert mapping["input_shapes"] == [{"a": 3, "c": 5}, {"a": 3, "c": 3}, {"a": 5, "c": 3}]
    back = convert_bundle(there, tmp_path / "back" / "net", verify=True, pool=pool).path
    for path in (new, there, back):
        manifest = open_bundle(path).manifest
        assert manifest.input_shapes == ((3, 5), (3, 3), (5, 3))
        assert manifest.variant_of({"q": (1, 5, 2), "k": (1, 3)}) == (5, 3)
        assert check_bundle(path, pool=pool).passed()


def test_a_variant_key_is_recomputed_in_the_order_of_the_axes(tmp_path: Path, pool: Any) -> None:
    key = (4, 6)
    modules = {key: {1: lower(lambda x: (x.sum((1, 2)),), [((1, *key), np.float32)])}}
    new = write_bundle(
        tmp_path / "new" / "net",
        name="net",
        executable_inputs=[IOSpec("x", "f32", (1, -1, -1), batch_axis=0, letters="hw")],
        executable_outputs=[IOSpec("y", "f32", (1,), batch_axis=0)],
        modules=modules,
        input_shapes=[key],
        weights=[],
    )
    manifest = open_bundle(new).manifest
    assert with_reversed_axes(manifest).input_shapes == ((6, 4),)
    assert with_reversed_axes(with_reversed_axes(manifest)) == manifest
    old = write_column_major(new, tmp_path / "old" / "net")
    assert open_bundle(old).manifest.input_shapes == (key,)
    assert check_bundle(old, pool=pool).passed()
    edit(old, executable_inputs=yaml.safe_load((new / "manifest.yaml").read_text())["executable_inputs"])
    assert "the manifest looks row-major" in check_bundle(old, pool=pool).errors[-1].message


def with_hooks(directory: Path) -> Path:
    tensor = {"y": ((N, 2), np.float32)}
    return write_model(
        directory, lambda x: (x * 2,), {"x": ((N, 2), np.float32)}, tensor, hooks=HOOKS, client_outputs=tensor
    )


def test_only_hooks_of_the_other_language_are_refused_unless_they_are_dropped(tmp_path: Path, pool: Any) -> None:
    old = write_column_major(with_hooks(tmp_path / "new" / "net"), tmp_path / "old" / "net")
    (old / "model.py").rename(old / "model.jl")
    with pytest.raises(ManifestError, match=r"needs a Python port of its hooks: model\.jl") as raised:
        open_bundle(old)
    assert raised.value.rule == "B-68"
    assert [finding.rule for finding in check_bundle(old, pool=pool).errors] == ["B-68"]
    with pytest.raises(ManifestError, match="Python port"):
        convert_bundle(old, tmp_path / "a" / "net", pool=pool)
    unhooked = open_bundle(old, unhooked=True)
    assert unhooked.manifest.client_outputs is None
    assert unhooked.hooks_path is None
    done = convert_bundle(old, tmp_path / "a" / "net", drop_hooks=True, pool=pool)
    assert done.left_out == ("model.jl",)
    assert open_bundle(done.path).manifest.client_outputs is None


def test_a_bundle_with_hooks_in_both_languages_uses_ours_and_goes_both_ways(tmp_path: Path, pool: Any) -> None:
    old = write_column_major(with_hooks(tmp_path / "new" / "net"), tmp_path / "old" / "net")
    (old / "model.jl").write_text('register_model("net")\n')
    assert open_bundle(old).hooks_path == old / "model.py"
    new = convert_bundle(old, tmp_path / "a" / "net", pool=pool).path
    assert open_bundle(new).manifest.client_outputs is not None
    assert (convert_bundle(new, tmp_path / "b" / "net", to="2.0", pool=pool).path / "model.jl").exists()


def test_python_hooks_do_not_go_into_the_older_format(tmp_path: Path, pool: Any) -> None:
    new = with_hooks(tmp_path / "new" / "net")
    with pytest.raises(BundleError, match=r"hooks in model\.py") as raised:
        convert_bundle(new, tmp_path / "a" / "net", to="2.0", pool=pool)
    assert "--drop-hooks" in str(raised.value.hint)
    done = convert_bundle(new, tmp_path / "a" / "net", to="2.0", drop_hooks=True, pool=pool)
    assert done.left_out == ("model.py",)
    assert "client_outputs" not in yaml.safe_load((done.path / "manifest.yaml").read_text())


META = {
    "format_version": "2.0",
    "kind": "meta",
    "meta": {"calls": ["net"]},
    "client_inputs": [{"name": "x", "dtype": "f32", "shape": "cn", "dims": {"c": 3}}],
    "client_outputs": [{"name": "y", "dtype": "f32", "shape": "n"}],
}


def test_a_meta_is_converted_with_its_python_hooks_and_refused_without(tmp_path: Path, pool: Any) -> None:
    old = tmp_path / "old" / "meta"
    old.mkdir(parents=True)
    edit_target = old / "manifest.yaml"
    edit_target.write_text(yaml.safe_dump(META))
    (old / "model.jl").write_text("\n")
    for unhooked in (False, True):
        with pytest.raises(ManifestError, match="Python port"):
            open_bundle(old, unhooked=unhooked)
    (old / "model.py").write_text("def run(inputs, call):\n    return inputs\n")
    done = convert_bundle(old, tmp_path / "new" / "meta", pool=pool)
    assert open_bundle(done.path).manifest.wire_inputs[0].letters == "nc"
    with pytest.raises(BundleError, match="without its hooks nothing is left"):
        convert_bundle(old, tmp_path / "a" / "meta", drop_hooks=True, pool=pool)


def test_text_programs_become_artifacts_and_versions_can_be_chosen(row_major: Path, tmp_path: Path, pool: Any) -> None:
    from rsrv.stablehlo import parse

    text = str(parse((row_major / "model.b1.mlir").read_bytes()))
    (row_major / "model.b1.mlir").write_text(text)
    seal(row_major)
    done = convert_bundle(row_major, tmp_path / "a" / "net", pool=pool)
    assert done.rewritten == ("model.b1.mlir",)
    done = convert_bundle(done.path, tmp_path / "b" / "net", stablehlo_version="1.0.0", verify=True, pool=pool)
    assert done.rewritten == ("model.b1.mlir", "model.b2.mlir")
    assert {artifact_version(p.read_bytes()) for p in done.path.glob("*.mlir")} == {"1.0.0"}


def test_an_artifact_that_is_too_new_names_both_versions(older: Path, tmp_path: Path, pool: Any) -> None:
    program = (older / "model.b1.mlir").read_bytes()
    version = artifact_version(program).encode()
    (older / "model.b1.mlir").write_bytes(program.replace(b"v" + version, b"v9" + version[1:], 1))
    report = check_bundle(older, pool=pool)
    assert [finding.rule for finding in report.errors] == ["B-70"]
    with pytest.raises(BundleError, match="written at StableHLO 9"):
        convert_bundle(older, tmp_path / "a" / "net", pool=pool)
    with pytest.raises(ProgramError, match=r"model\.b1\.mlir: .*written at StableHLO 9"):
        convert_bundle(older, tmp_path / "a" / "net", stablehlo_version="1.0.0", pool=pool)
    assert not (tmp_path / "a" / "net").exists()


def test_a_bundle_that_is_wrong_is_not_converted(older: Path, row_major: Path, tmp_path: Path, pool: Any) -> None:
    shutil.copy(row_major / "weights.safetensors", older / "weights.safetensors")
    with pytest.raises(SignatureMismatch, match="not written"):
        convert_bundle(older, tmp_path / "a" / "net", pool=pool)
    assert not list((tmp_path / "a").iterdir())


def test_a_symbolic_batch_axis_has_no_place_in_the_older_format(row_major: Path, tmp_path: Path, pool: Any) -> None:
    edit(row_major, batching={"compiled_batch_sizes": [1, 2], "dynamic": True}, files=...)
    (row_major / "model.b1.mlir").rename(row_major / "model.mlir")
    (row_major / "model.b2.mlir").unlink()
    with pytest.raises(BundleError, match="symbolic batch axis"):
        convert_bundle(row_major, tmp_path / "a" / "net", to="2.0", pool=pool)


def test_side_files_come_along(older: Path, tmp_path: Path, pool: Any) -> None:
    (older / "vocab").mkdir()
    (older / "vocab" / "words.txt").write_text("a b c")
    done = convert_bundle(older, tmp_path / "a" / "other", pool=pool)
    assert (done.path / "vocab" / "words.txt").read_text() == "a b c"
    assert yaml.safe_load((done.path / "manifest.yaml").read_text())["name"] == "other"


def test_the_command_converts_and_says_what_it_did(older: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "a" / "net"
    assert main(["bundle", "convert", str(older), "--to", "3.0", "--out", str(out), "--verify"]) == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(out)
    assert "2 programs give the same answers" in said.err
    assert main(["bundle", "convert", str(older), "--to", "3.0", "--out", str(out)]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert main(["bundle", "convert", str(out), "--to", "2.0", "--out", str(older), "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format_version"] == "2.0"
    assert main(["bundle", "convert", str(older), "--to", "4.0", "--out", str(tmp_path / "b" / "net")]) == 2
    assert main(["bundle", "convert", str(tmp_path / "none"), "--to", "3.0", "--out", str(tmp_path / "b" / "net")]) == 2
    with pytest.raises(UsageError, match=r"formats: 3\.0, 2\.0"):
        convert_bundle(older, out, to="1")


def test_goldens_stay_row_major_and_hold_in_either_format(tmp_path: Path, pool: Any) -> None:
    source = export_bundle(
        "jax",
        lambda p, x: x @ p["w"],
        {"w": SQUARE},
        "x=f32[1,4]",
        dir=tmp_path / "new" / "net",
        golden=2,
        collect_git=False,
        pool=pool,
    )
    there = convert_bundle(source, tmp_path / "there" / "net", to="2.0", pool=pool).path
    assert (there / "golden.safetensors").read_bytes() == (source / "golden.safetensors").read_bytes()
    report = check_bundle(there, pool=pool, run=True)
    assert report.passed()
    assert "model.b1.mlir goldens" in report.checks
    shutil.copy(source / "weights.safetensors", there / "weights.safetensors")
    # A square weight of the wrong format fits by its shape; only the numbers tell.
    findings = check_bundle(there, pool=pool, run=True).of("model.b1.mlir goldens")
    assert [finding.severity for finding in findings] == ["error"]
