"""Reading manifests: what a good one says, every rule that a bad one breaks, and the order of the checks."""

from __future__ import annotations

import pytest

from rsrv.bundle.blocks import BatchingSpec, FileDigest, HooksSpec
from rsrv.bundle.manifest import KEYS, load_manifest, manifest_problems, parse_manifest
from rsrv.bundle.rules import internal_names, meta_call_problems
from rsrv.core.dtypes import DType
from rsrv.core.errors import BundleError, Code, InvalidRequest, ManifestError
from rsrv.core.tensors import BATCH, VARIABLE, Dim, DimKind

SHA = "0123456789abcdef" * 4


def entry(name="x", dtype="f32", shape="nc", **dims):
    return {"name": name, "dtype": dtype, "shape": shape, "dims": dims or {"c": 3}}


def failure(mapping, *, has_hooks=False, name="net") -> ManifestError:
    with pytest.raises(ManifestError) as raised:
        parse_manifest(mapping, name=name, has_hooks=has_hooks)
    assert f"({raised.value.rule})" in raised.value.message
    return raised.value


# --- what a good manifest says ------------------------------------------------------------------------------------


def test_a_complete_manifest_is_read_as_values(manifest):
    read = parse_manifest(
        manifest(
            name="informational",
            description=12,
            client_inputs=[entry("jpeg", "u8", "k", k=-1)],
            client_outputs=[entry("labels", "i64", "n")],
            hooks={"mode": "process", "processes": 2, "timeout_seconds": 3},
            provenance={"git_commit": "abc"},
            axis_order="row_major",
            files={"model.b1.mlir": {"size": 7, "sha256": SHA}, "tokenizer/vocab.txt": {"size": 0, "sha256": SHA}},
            **{"x-owner": {"team": ["a"]}},
        )
        | {"client_outputs": [{"name": "labels", "dtype": "i64", "shape": "n"}]},
        name="net",
        has_hooks=True,
    )
    assert read.name == "net"
    assert read.format_version == "3.0"
    assert read.description == "12"
    assert (read.kind, read.is_meta) == ("model", False)
    image = read.executable_inputs[0]
    assert (image.name, image.dtype, image.letters, image.batch_axis) == ("image", DType.F32, "nchw", 0)
    assert image.dims == (BATCH, Dim(DimKind.FIXED, 3), Dim(DimKind.FIXED, 8), Dim(DimKind.FIXED, 8))
    assert [spec.name for spec in read.wire_inputs] == ["jpeg"]
    assert [spec.name for spec in read.wire_outputs] == ["labels"]
    assert read.wire_inputs[0].dims == (VARIABLE,)
    assert read.batching == BatchingSpec((1, 4), dynamic=False)
    assert read.hooks == HooksSpec("process", 2, 3.0)
    assert read.provenance == {"git_commit": "abc"}
    assert read.files == {"model.b1.mlir": FileDigest(7, SHA), "tokenizer/vocab.txt": FileDigest(0, SHA)}
    assert read.extensions == {"x-owner": {"team": ["a"]}}


def test_absent_blocks_have_their_defaults(manifest):
    read = parse_manifest(manifest(batching=...), name="net", has_hooks=False)
    assert read.batching == BatchingSpec()
    assert read.hooks == HooksSpec("thread", None, None)
    assert (read.provenance, read.files, read.client_inputs, read.input_shapes) == ({}, None, None, ())
    assert (read.variants, read.variable_axes, read.description) == (((),), (), "")
    assert read.wire_inputs is read.executable_inputs


def test_batch_sizes_come_out_ascending(manifest):
    read = parse_manifest(manifest(batching={"compiled_batch_sizes": [8, 1, 4]}), name="net", has_hooks=False)
    assert read.batching.compiled_batch_sizes == (1, 4, 8)


@pytest.mark.parametrize("provenance", [None, "text", [1], 3])
def test_a_provenance_that_is_no_mapping_counts_as_empty(manifest, provenance):
    assert parse_manifest(manifest(provenance=provenance), name="net", has_hooks=False).provenance == {}


@pytest.mark.parametrize(("value", "text"), [(None, ""), (True, "true"), (1.5, "1.5"), ("a", "a")])
def test_a_scalar_description_becomes_text(manifest, value, text):
    assert parse_manifest(manifest(description=value), name="net", has_hooks=False).description == text


@pytest.mark.parametrize("version", ["3.0", "3", 3, 3.0])
def test_the_version_may_be_a_yaml_number(manifest, version):
    assert parse_manifest(manifest(format_version=version), name="net", has_hooks=False).format_version == "3.0"


def test_letters_mean_nothing_across_tensors(manifest):
    read = parse_manifest(manifest(executable_inputs=[entry("a", c=3), entry("b", c=5)]), name="net", has_hooks=False)
    assert [spec.wire_shape for spec in read.executable_inputs] == [(-1, 3), (-1, 5)]


def test_batch_positions_may_differ_per_input(manifest):
    read = parse_manifest(
        manifest(executable_inputs=[entry("a", shape="sn", s=4), entry("b", shape="nc", c=2)]),
        name="net",
        has_hooks=False,
    )
    assert [spec.batch_axis for spec in read.executable_inputs] == [1, 0]
    assert read.input_batch_dim == 1
    assert read.wire_batch() == ("a", 2)
    assert read.coalescable_specs


def test_the_first_batched_wire_input_gives_the_wire_batch_axis(manifest):
    read = parse_manifest(
        manifest(client_inputs=[entry("query", shape="c"), entry("keys", shape="cn")]), name="net", has_hooks=True
    )
    assert read.wire_batch() == ("keys", 2)


def test_an_unbatched_output_keeps_a_model_from_merging_requests(manifest):
    read = parse_manifest(manifest(executable_outputs=[entry("y", shape="c")]), name="net", has_hooks=False)
    assert not read.coalescable_specs
    unbatched = manifest(executable_inputs=[entry(shape="c")], batching={"compiled_batch_sizes": []})
    read = parse_manifest(unbatched, name="net", has_hooks=False)
    assert (read.coalescable_specs, read.input_batch_dim, read.wire_batch()) == (False, None, None)


def test_a_meta_is_read_and_reports_no_batch_axis(meta):
    mapping = meta(client_inputs=[entry("x")])
    read = parse_manifest(mapping, name="pipeline", has_hooks=True)
    assert read.is_meta
    assert read.meta_calls == ("detector", "classifier")
    assert (read.executable_inputs, read.wire_batch(), read.coalescable_specs) == ((), None, False)


def test_a_meta_may_call_nobody(meta):
    assert parse_manifest(meta(meta={"calls": []}), name="pipeline", has_hooks=True).meta_calls == ()


def test_a_dynamic_batch_is_read(manifest):
    mapping = manifest(batching={"compiled_batch_sizes": [8, 2], "dynamic": True})
    assert parse_manifest(mapping, name="net", has_hooks=False).batching == BatchingSpec((2, 8), dynamic=True)


def test_f8_is_fine_inside_of_a_program(manifest):
    mapping = manifest(
        executable_inputs=[entry("x", "f8_e4m3")],
        executable_outputs=[entry("y", "f8_e5m2")],
        client_inputs=[entry("x")],
        client_outputs=[entry("y")],
    )
    assert parse_manifest(mapping, name="net", has_hooks=True).executable_inputs[0].dtype is DType.F8_E4M3


# --- shape variants -----------------------------------------------------------------------------------------------

VARIABLE_INPUT = entry("image", shape="nchw", c=3, h=-1, w=-1)


def variants(manifest, entries, inputs=(VARIABLE_INPUT,)):
    return manifest(executable_inputs=list(inputs), input_shapes=entries)


def test_variant_keys_follow_input_and_axis_order_not_the_text(manifest):
    mapping = variants(manifest, [{"w": 1448, "h": 720}, {"h": 1024, "w": 1000}])
    read = parse_manifest(mapping, name="net", has_hooks=False)
    assert read.input_shapes == ((720, 1448), (1024, 1000))
    assert [axis.qualified for axis in read.variable_axes] == ["image.h", "image.w"]
    assert read.variant_of({"image": (5, 3, 1024, 1000)}) == (1024, 1000)


def test_a_bare_letter_counts_for_every_input_and_a_qualified_one_wins(manifest):
    inputs = (entry("a", shape="nh", h=-1), entry("b.c", shape="nh", h=-1))
    mapping = variants(manifest, [{"h": 4}, {"h": 4, "b.c.h": 6}, {"a.h": 1, "b.c.h": 2}], inputs)
    assert parse_manifest(mapping, name="net", has_hooks=False).input_shapes == ((4, 4), (4, 6), (1, 2))


def test_variable_outputs_and_client_tensors_need_no_input_shapes(manifest):
    mapping = manifest(
        executable_outputs=[entry("y", shape="nk", k=-1)],
        client_inputs=[entry("x", shape="k", k=-1)],
        client_outputs=[entry("y", shape="k", k=-1)],
    )
    assert parse_manifest(mapping, name="net", has_hooks=True).variants == ((),)


def test_sizes_without_a_program_are_a_bad_request_that_lists_what_exists(manifest):
    read = parse_manifest(variants(manifest, [{"h": 8, "w": 9}]), name="net", has_hooks=False)
    with pytest.raises(InvalidRequest, match=r"\[9, 8\].*image\.h, image\.w.*\[8, 9\]"):
        read.variant_of({"image": (1, 3, 9, 8)})
    with pytest.raises(InvalidRequest, match="'image'"):
        read.variant_of({"image": (1, 3)})
    with pytest.raises(InvalidRequest, match="'image'"):
        read.variant_of({})


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"h": 1}, "{'h': 1}"),
        (["h"], "'h'"),
        ([{"hh": 1, "w": 2}], "'hh'"),
        ([{3: 1, "h": 1, "w": 2}], "3"),
        ([{"h": 0, "w": 2}], "0"),
        ([{"h": -1, "w": 2}], "-1"),
        ([{"h": True, "w": 2}], "True"),
        ([{"h": 1.0, "w": 2}], "1.0"),
        ([{"h": 1, "w": 2, "c": 3}], "'c'"),
        ([{"h": 1, "w": 2, "other.h": 3}], "'other.h'"),
        ([{"h": 1}], "'image.w'"),
        ([{"h": 1, "w": 2}, {"w": 2, "h": 1}], r"input_shapes[1]"),
    ],
)
def test_a_bad_input_shapes_block_is_refused(manifest, value, named):
    error = failure(variants(manifest, value))
    assert error.rule == "B-44"
    assert named in error.message


def test_input_shapes_without_a_variable_axis_is_refused(manifest):
    error = failure(manifest(input_shapes=[]))
    assert error.rule == "B-44"
    assert "no executable input has a variable axis" in error.message


@pytest.mark.parametrize("value", [..., []])
def test_a_variable_axis_needs_input_shapes(manifest, value):
    error = failure(manifest(executable_inputs=[VARIABLE_INPUT], input_shapes=value))
    assert error.rule == "B-45"
    assert "image.h, image.w" in error.message


def test_a_meta_has_no_input_shapes(meta):
    error = failure(meta(input_shapes=[{"h": 1}]), has_hooks=True)
    assert error.rule == "B-45"
    assert "input_shapes" in error.message


# --- every other rule ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "rule", "named"),
    [
        ({"format_version": ...}, "§1.11", "missing format_version"),
        ({"format_version": None}, "§1.11", "missing format_version"),
        ({"format_version": True}, "§1.11", "True"),
        ({"format_version": ["3.0"]}, "§1.11", "['3.0']"),
        ({"format_version": "3.1"}, "§1.11", "'3.1'"),
        ({"format_version": 4}, "§1.11", "'4'"),
        ({"format_version": "2.1"}, "§1.11", "supported: 3.0, 2.0"),
        ({"format_version": 2.0, "axis_order": "row_major"}, "§1.11", "'row_major'"),
        ({"axis_order": "column_major"}, "§1.11", "'column_major'"),
        ({"axis_order": "sideways"}, "§1.11", "'sideways'"),
        ({"name": 3}, "§1.3", "3"),
        ({"description": ["a"]}, "§1.3", "['a']"),
        ({"excutable_inputs": []}, "B-13", "'excutable_inputs'"),
        ({"watch": []}, "B-13", "'watch'"),
        ({7: 1}, "B-13", "7"),
        ({"batching": {"sizes": [1]}}, "B-13", "'sizes' in batching"),
        ({"hooks": {"timeout": 1}}, "B-13", "'timeout' in hooks"),
        ({"files": {"a": {"size": 1, "sha256": SHA, "md5": ""}}}, "B-13", "'md5' in files.a"),
        ({"executable_inputs": [entry() | {"layout": "nc"}]}, "B-13", "'layout' in executable_inputs[0]"),
        ({"kind": "pipeline"}, "B-54", "'pipeline'"),
        ({"kind": None}, "B-54", "None"),
        ({"meta": {"calls": []}}, "B-52", "kind is model"),
        ({"executable_inputs": ...}, "B-25", "executable_inputs is missing"),
        ({"executable_outputs": ...}, "B-25", "executable_outputs is missing"),
        ({"executable_inputs": {"name": "x"}}, "B-25", "executable_inputs must be a list"),
        ({"executable_inputs": None}, "B-25", "None"),
        ({"executable_inputs": ["x"]}, "B-25", "executable_inputs[0]"),
        ({"executable_inputs": [{"dtype": "f32", "shape": "n"}]}, "B-25", "name is missing"),
        ({"executable_inputs": [{"name": "x", "shape": "n"}]}, "B-25", "'x': dtype is missing"),
        ({"executable_inputs": [{"name": "x", "dtype": "f32"}]}, "B-25", "'x': shape is missing"),
        ({"executable_inputs": [entry(name="")]}, "B-25", "is empty"),
        ({"executable_inputs": [entry(name="a\x00b")]}, "B-25", "control character"),
        ({"executable_inputs": [entry(name=1)]}, "B-25", "name must be a string, got 1"),
        ({"executable_inputs": [entry(dtype=1)]}, "B-25", "dtype must be a string, got 1"),
        ({"executable_inputs": [entry(shape=False)]}, "B-25", "shape must be a string, got False"),
        ({"executable_inputs": [entry(dtype="float32")]}, "B-56", "'float32'"),
        ({"executable_inputs": [entry(dtype="BYTES")]}, "B-56", "'BYTES'"),
        ({"executable_inputs": [entry(shape="ncc")]}, "B-18", "'x'"),
        ({"executable_inputs": [entry() | {"dims": [3]}]}, "B-16", "'x'"),
        ({"executable_inputs": [entry(shape="Nc", N=1, c=2)]}, "B-28", "'N'"),
        ({"executable_inputs": [entry(), entry()]}, "B-26", "executable_inputs has two tensors named 'x'"),
        ({"executable_outputs": [entry(), entry()]}, "B-26", "executable_outputs has two tensors named 'x'"),
        ({"executable_inputs": [entry("a"), entry("b", shape="c"), entry("d", shape="c")]}, "B-36", "'b', 'd'"),
        ({"batching": [1]}, "B-30", "[1]"),
        ({"batching": None}, "B-30", "None"),
        ({"batching": {"compiled_batch_sizes": 4}}, "B-30", "4"),
        ({"batching": {"compiled_batch_sizes": [True]}}, "B-15", "True"),
        ({"batching": {"compiled_batch_sizes": [1, "4"]}}, "B-15", "compiled_batch_sizes[1] is '4'"),
        ({"batching": {"compiled_batch_sizes": [2.0]}}, "B-15", "2.0"),
        ({"batching": {"compiled_batch_sizes": [0]}}, "B-31", "0"),
        ({"batching": {"compiled_batch_sizes": [-4]}}, "B-31", "-4"),
        ({"batching": {"compiled_batch_sizes": [4, 1, 4]}}, "B-31", "4 twice"),
        ({"batching": {"dynamic": True}}, "B-12a", "compiled_batch_sizes is empty"),
        ({"batching": {"dynamic": "yes"}}, "B-12a", "'yes'"),
        ({"batching": {"dynamic": 1}}, "B-12a", "1"),
        ({"executable_inputs": [entry(shape="c")]}, "B-35", "[1, 4]"),
        (
            {"executable_inputs": [entry(shape="c")], "batching": {"compiled_batch_sizes": [1], "dynamic": True}},
            "B-12a",
            "no executable input has a batch axis",
        ),
        ({"client_inputs": [entry()]}, "B-50", "client_inputs"),
        ({"client_outputs": [entry()]}, "B-50", "client_outputs"),
        ({"executable_outputs": [entry("y", "f8_e4m3")]}, "B-51", "'y': f8_e4m3"),
        ({"executable_inputs": [entry("x", "f8_e5m2")]}, "B-51", "'x': f8_e5m2"),
        ({"hooks": "thread"}, "B-75", "'thread'"),
        ({"hooks": {"mode": "fork"}}, "B-75", "'fork'"),
        ({"hooks": {"processes": 0}}, "B-75", "0"),
        ({"hooks": {"processes": 257}}, "B-75", "1 to 256"),
        ({"hooks": {"timeout_seconds": True}}, "B-75", "True"),
        ({"hooks": {"timeout_seconds": float("inf")}}, "B-75", "inf"),
        ({"hooks": {"timeout_seconds": 1e300}}, "B-75", "at most 1e+09"),
        ({"hooks": {"timeout_seconds": 10**400}}, "B-75", "at most 1e+09"),
        ({"files": ["a"]}, "B-15a", "['a']"),
        ({"files": {"../../etc/passwd": {"size": 1, "sha256": SHA}}}, "B-15a", "'../../etc/passwd', which leaves"),
        ({"files": {"/etc/passwd": {"size": 1, "sha256": SHA}}}, "B-15a", "'/etc/passwd', which leaves"),
        ({"files": {"a//b": {"size": 1, "sha256": SHA}}}, "B-15a", "'a//b'"),
        ({"files": {"a\x00": {"size": 1, "sha256": SHA}}}, "B-15a", "control character"),
        ({"files": {1: {"size": 1, "sha256": SHA}}}, "B-15a", "1"),
        ({"files": {"manifest.yaml": {"size": 1, "sha256": SHA}}}, "B-15a", "'manifest.yaml'"),
        ({"files": {"a": SHA}}, "B-15a", "'a'"),
        ({"files": {"a": {"size": -1, "sha256": SHA}}}, "B-15a", "-1"),
        ({"files": {"a": {"size": True, "sha256": SHA}}}, "B-15a", "True"),
        ({"files": {"a": {"size": 1, "sha256": SHA.upper()}}}, "B-15a", SHA.upper()),
        ({"files": {"a": {"size": 1, "sha256": 12}}}, "B-15a", "12"),
        ({"files": {"a": {"size": 1}}}, "B-15a", "None"),
    ],
)
def test_a_bad_model_manifest_is_refused_with_its_rule(manifest, changes, rule, named):
    error = failure(
        manifest(**{k: v for k, v in changes.items() if isinstance(k, str)})
        | {k: v for k, v in changes.items() if not isinstance(k, str)}
    )
    assert error.rule == rule
    assert named in error.message
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "manifest")


@pytest.mark.parametrize(
    ("changes", "rule", "named"),
    [
        ({"meta": ...}, "B-52", "None"),
        ({"meta": ["a"]}, "B-52", "['a']"),
        ({"meta": {}}, "B-52", "meta.calls"),
        ({"meta": {"calls": "detector"}}, "B-52", "'detector'"),
        ({"meta": {"calls": [1]}}, "B-52", "meta.calls[0] is 1"),
        ({"meta": {"calls": [""]}}, "B-52", "meta.calls[0]"),
        ({"meta": {"calls": ["a", "a"]}}, "B-52", "'a' twice"),
        ({"meta": {"calls": ["pipeline"]}}, "B-52", "the bundle itself"),
        ({"meta": {"calls": [], "models": []}}, "B-13", "'models' in meta"),
        ({"client_inputs": ...}, "B-52", "client_inputs"),
        ({"client_outputs": []}, "B-52", "client_outputs"),
        ({"client_inputs": [entry(), entry()]}, "B-26", "client_inputs has two tensors named 'x'"),
        ({"client_outputs": [entry(), entry()]}, "B-26", "client_outputs has two tensors named 'x'"),
        ({"client_outputs": [entry(dtype="f8_e5m2")]}, "B-51", "'x'"),
        ({"client_inputs": [entry(shape="ccn")]}, "B-18", "'x'"),
    ],
)
def test_a_bad_meta_manifest_is_refused_with_its_rule(meta, changes, rule, named):
    error = failure(meta(**changes), has_hooks=True, name="pipeline")
    assert error.rule == rule
    assert named in error.message


def test_a_meta_needs_a_hook_file(meta):
    error = failure(meta(), has_hooks=False, name="pipeline")
    assert error.rule == "B-52"
    assert "model.py" in error.message


def test_a_meta_must_not_call_a_meta(manifest, meta):
    manifests = {
        "outer": parse_manifest(meta(meta={"calls": ["net", "inner", "elsewhere"]}), name="outer", has_hooks=True),
        "inner": parse_manifest(meta(meta={"calls": ["net"]}), name="inner", has_hooks=True),
        "net": parse_manifest(manifest(), name="net", has_hooks=False),
    }
    problems = meta_call_problems(manifests)
    assert list(problems) == ["outer"]
    assert problems["outer"].rule == "B-53"
    assert "'inner'" in problems["outer"].message
    assert internal_names(manifests.values()) == {"net", "inner", "elsewhere"}


def test_an_unknown_key_comes_with_the_known_one_that_was_meant(manifest):
    assert failure(manifest(descripton="x")).hint == "did you mean 'description'?"
    assert failure(manifest(executable_inputs=[entry() | {"dim": {}}])).hint == "did you mean 'dims'?"
    assert "format_version" in (failure(manifest(zzz=1)).hint or "")


@pytest.mark.parametrize(("token", "meant"), [("float32", "f32"), ("FP16", "f16"), ("i1", "bool"), ("int64", "i64")])
def test_a_dtype_of_another_vocabulary_comes_with_ours(manifest, token, meant):
    assert failure(manifest(executable_inputs=[entry(dtype=token)])).hint == f"did you mean {meant!r}?"


def test_unknown_keys_are_no_error_in_an_older_manifest(manifest):
    older = manifest(format_version="2.0", watch=[], batching={"sizes": []}, axis_order="column_major")
    assert parse_manifest(older, name="net", has_hooks=False).column_major


@pytest.mark.parametrize("dtype", [dtype.value for dtype in DType])
def test_all_fifteen_tokens_are_read(manifest, dtype):
    mapping = manifest(executable_inputs=[entry("x", dtype)], client_inputs=[entry()])
    assert parse_manifest(mapping, name="net", has_hooks=True).executable_inputs[0].dtype.value == dtype


# --- order, collecting, files -------------------------------------------------------------------------------------


def test_checks_run_in_the_order_of_the_specification(manifest):
    """§1.14: each manifest in this list also has all the later mistakes; the first one is reported."""
    late = {
        "format_version": "3.0",
        "executable_inputs": [entry("a"), entry("a", shape="c")],
        "executable_outputs": [entry("y", "f8_e5m2")],
        "client_inputs": [entry("q"), entry("q")],
        "batching": {"compiled_batch_sizes": [0]},
    }
    steps = [
        ("B-26", late),
        ("B-36", late | {"executable_inputs": [entry("a"), entry("b", shape="c")]}),
        ("B-31", late | {"executable_inputs": [entry("a")]}),
        ("B-45", late | {"executable_inputs": [entry("a", c=-1)], "batching": {}}),
        ("B-50", late | {"executable_inputs": [entry("a")], "batching": {}}),
    ]
    assert [(failure(mapping).rule, rule) for rule, mapping in steps] == [(rule, rule) for rule, _ in steps]
    with_hooks = late | {"executable_inputs": [entry("a")], "batching": {}}
    assert failure(with_hooks, has_hooks=True).rule == "B-26"
    assert failure(with_hooks | {"client_inputs": [entry("q")]}, has_hooks=True).rule == "B-51"
    parse_steps = [
        ("§1.11", {}),
        ("B-54", {"format_version": "9", "kind": "x"}),
        ("B-52", {"format_version": "9", "kind": "meta"}),
        ("B-25", {"format_version": "9", "client_inputs": 1, "batching": 1}),
        ("B-30", {**late, "format_version": "9", "batching": 1, "input_shapes": 1}),
        ("B-44", {**late, "format_version": "9", "input_shapes": 1}),
        ("§1.11", {**late, "format_version": "9"}),
    ]
    assert [(failure(mapping).rule, rule) for rule, mapping in parse_steps] == [(rule, rule) for rule, _ in parse_steps]


def test_all_problems_are_collected_with_file_and_line(make_bundle):
    text = """format_version: "3.0"
descriptio: hello
executable_inputs:
  - {name: a, dtype: f32, shape: "nc", dims: {c: 0}}
  - {name: b, dtype: float, shape: "c", dims: {c: 4}}
executable_outputs:
  - name: y
    dtype: f32
    shape: "nkk"
    dims: {k: 1}
batching:
  compiled_batch_sizes:
    - 4
    - true
client_outputs: []
"""
    problems = manifest_problems(make_bundle(manifest=text))
    found = [(problem.rule, problem.message.partition(": ")[0]) for problem in problems]
    assert found == [
        ("B-13", "manifest.yaml:2"),
        ("B-22", "manifest.yaml:4"),
        ("B-56", "manifest.yaml:5"),
        ("B-18", "manifest.yaml:9"),
        ("B-15", "manifest.yaml:14"),
        ("B-50", "manifest.yaml:15"),
    ]
    assert {problem.file for problem in problems} == {"manifest.yaml"}


def test_a_part_that_cannot_be_read_does_not_cause_more_findings(make_bundle, manifest):
    directory = make_bundle(
        manifest=manifest(executable_inputs=[entry("x", "nope", c=-1)], input_shapes=[{"c": 4}]), programs=()
    )
    assert [problem.rule for problem in manifest_problems(directory)] == ["B-56"]


def test_a_good_manifest_has_no_problems_and_takes_the_name_of_its_directory(make_bundle):
    directory = make_bundle("renamed")
    assert manifest_problems(directory) == []
    assert load_manifest(directory).name == "renamed"
    assert load_manifest(directory / "manifest.yaml").name == "renamed"
    assert load_manifest(f"{directory}/../renamed/.").name == "renamed"
    assert load_manifest(directory, name="other").name == "other"


def test_the_hook_file_beside_the_manifest_allows_client_lists(make_bundle, manifest):
    mapping = manifest(client_inputs=[entry()])
    assert [problem.rule for problem in manifest_problems(make_bundle("bare", manifest=mapping))] == ["B-50"]
    directory = make_bundle("hooked", manifest=mapping, files={"model.py": "def preprocess(inputs): ..."})
    assert manifest_problems(directory) == []


def test_a_missing_or_strange_manifest_file_is_refused(tmp_path):
    (tmp_path / "net").mkdir()
    with pytest.raises(BundleError, match=r"manifest\.yaml: cannot be opened") as raised:
        load_manifest(tmp_path / "net")
    assert raised.value.rule == "B-1"
    (tmp_path / "net" / "manifest.yaml").mkdir()
    with pytest.raises(BundleError, match="is not a regular file") as raised:
        load_manifest(tmp_path / "net" / "manifest.yaml" / "..")
    assert raised.value.rule == "B-1"


def test_every_top_level_key_of_the_format_is_known():
    assert len(KEYS) == len(set(KEYS)) == 15
