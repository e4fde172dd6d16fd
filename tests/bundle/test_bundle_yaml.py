"""Manifest files as strangers write them: YAML traps, bombs, broken bytes; and text that comes back as written."""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrv.bundle.directory import bundle_problems
from rsrv.bundle.manifest import (
    KEYS,
    MAX_MANIFEST_BYTES,
    MAX_MANIFEST_NODES,
    load_manifest,
    load_mapping,
    manifest_problems,
)
from rsrv.bundle.outline import key_lines, replace_block
from rsrv.bundle.text import emit_block, emit_manifest
from rsrv.core.errors import ManifestError
from rsrv.core.tensors import BATCH

VALID = """format_version: {version}
executable_inputs: [{{name: x, dtype: f32, shape: {shape}, dims: {{{letter}: 4}}}}]
executable_outputs: []
"""


@pytest.mark.parametrize("version", ["3", "3.0", '"3.0"', "'3'", "!!str 3.0"])
def test_the_version_may_be_written_with_or_without_quotes(make_bundle, version):
    text = VALID.format(version=version, shape='"nc"', letter="c")
    assert load_manifest(make_bundle(manifest=text)).format_version == "3.0"


@pytest.mark.parametrize("version", ["2", "2.0", '"2.0"'])
def test_an_older_version_is_read_with_its_letters_reversed(make_bundle, version):
    manifest = load_manifest(make_bundle(manifest=VALID.format(version=version, shape='"cn"', letter="c")))
    assert (manifest.format_version, manifest.column_major) == ("2.0", True)
    assert [(spec.letters, spec.batch_axis) for spec in manifest.executable_inputs] == [("nc", 0)]


@pytest.mark.parametrize(
    ("shape", "letter", "batch_axis"), [("no", "o", 0), ("on", "o", 1), ("n", "", 0), ("y", "y", None)]
)
def test_shapes_that_other_readers_take_for_booleans_are_letters(make_bundle, shape, letter, batch_axis):
    text = VALID.format(version="3.0", shape=shape, letter=letter).replace("{: 4}", "{}")
    spec = load_manifest(make_bundle(manifest=text)).executable_inputs[0]
    assert spec.letters == shape
    assert spec.batch_axis == batch_axis
    assert spec.dims.count(BATCH) == (batch_axis is not None)


@pytest.mark.parametrize("value", ["yes", "no", "on", "off", "y"])
def test_only_true_and_false_are_booleans(make_bundle, value):
    text = VALID.format(version="3.0", shape='"nc"', letter="c") + f"batching: {{dynamic: {value}}}\n"
    with pytest.raises(ManifestError, match=f"must be true or false, got '{value}'"):
        load_manifest(make_bundle(manifest=text))


def nested(depth: int) -> str:
    return "x-deep: " + "[" * depth + "]" * depth


def laughs() -> str:
    levels = ["x-0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    levels += [f"x-{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    return "\n".join(levels)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"", "nothing"),
        (b"# only a comment\n", "nothing"),
        (b"- a\n- b\n", "a list"),
        (b"just words", "a str"),
        (b"format_version: '3.0'\n---\na: 1\n", "line 2"),
        (b"a: 1\nb: 2\na: 3\n", "line 3, column 1: the key 'a' is there twice"),
        (b"x-a: {k: 1, k: 2}\n", "'k' is there twice"),
        (b"a: [1, 2\n", "line 2"),
        (b"a: b: c\n", "line 1"),
        (b"\tformat_version: 3\n", "line 1"),
        (b"x-a: !!python/object/apply:os.system ['true']\n", "!!python/object/apply:os.system"),
        (b"x-a: !!python/name:os.system\n", "!!python/name:os.system"),
        (b"x-a: !custom 1\n", "!custom"),
        (b"x-a: &a {b: 1}\nx-b: {<<: *a}\n", "merge keys"),
        (b"x-a: &a [*a]\n", "contains itself"),
        (b"x-a: *nowhere\n", "nowhere"),
        (b"? [a]\n: 1\n", "cannot be a key"),
        (b"format_version: \x00\n", "#x0000"),
        (b"x-a: caf\xe9\n", "not UTF-8 at byte 8"),
        (b"\xff\xfea\x00:\x001\x00", "not UTF-8 at byte 0"),
        (b"x-a: " + b"1" * 5000 + b"\n", "manifest.yaml"),
        (nested(2000).encode(), "nested deeper"),
        (nested(33).encode(), "nested deeper"),
        (laughs().encode(), "values once aliases are expanded"),
        (b"x-a: &a [1]\nx-b: [" + b"*a, " * 300 + b"]\n", "aliases"),
    ],
)
def test_a_text_that_is_no_plain_mapping_is_refused(make_bundle, text, named):
    directory = make_bundle(manifest="")
    (directory / "manifest.yaml").write_bytes(text)
    with pytest.raises(ManifestError) as raised:
        load_manifest(directory)
    assert raised.value.rule == "B-14"
    assert raised.value.file == "manifest.yaml"
    assert named in raised.value.message
    assert [problem.message for problem in manifest_problems(directory)] == [raised.value.message]


def test_a_huge_manifest_is_refused_before_it_is_read(make_bundle):
    directory = make_bundle()
    with open(directory / "manifest.yaml", "ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(ManifestError, match=f"{1 << 40} bytes; at most {MAX_MANIFEST_BYTES}"):
        load_manifest(directory)


def test_anchors_that_stay_small_are_fine(make_bundle, manifest):
    text = yaml.safe_dump(manifest(), sort_keys=False) + "x-a: &a {k: [1]}\nx-b: *a\n"
    assert load_manifest(make_bundle(manifest=text)).extensions == {"x-a": {"k": [1]}, "x-b": {"k": [1]}}


# --- written text -------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
    st.sampled_from(
        ["no", "on", "y", "null", "~", "1e3", "0x10", "2026-01-01", "- a", "a: b", "#", "\u2028", "\x85", "12345e7"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5).filter(lambda k: k != "<<"), inner, max_size=3)
    ),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(
    st.sampled_from([*KEYS, "x-a", "x-b", "x-0.1", "x-ключ"]),
    st.dictionaries(st.text(max_size=6), VALUES, max_size=3),
    max_size=6,
)


@settings(deadline=None, max_examples=60)
@given(document=DOCUMENTS)
def test_what_is_written_is_read_back_by_us_and_by_stock_yaml(document):
    text = emit_manifest(document, KEYS)
    if not document:
        assert text == ""
    else:
        assert load_mapping(text.encode()) == document
        assert yaml.safe_load(text) == document
        assert text.endswith("\n")
    assert emit_manifest(dict(reversed(document.items())), KEYS) == text


def test_keys_come_in_the_fixed_order_and_files_and_extensions_by_name():
    mapping = {"x-b": 1, "files": {"b": {}, "a": {}}, "x-a": 2, "kind": "model", "format_version": "3.0"}
    assert emit_manifest(mapping, KEYS) == (
        'format_version: "3.0"\nkind: model\nfiles:\n  a: {}\n  b: {}\nx-a: 2\nx-b: 1\n'
    )


def test_tensors_are_one_line_each_with_quoted_shapes():
    text = emit_block("executable_inputs", [{"name": "x", "dtype": "f32", "shape": "no", "dims": {"o": 3, "y": -1}}])
    assert text == 'executable_inputs:\n  - {name: "x", dtype: f32, shape: "no", dims: {o: 3, "y": -1}}\n'
    assert emit_block("executable_inputs", []) == "executable_inputs: []\n"


def test_floats_keep_their_type_for_every_reader():
    for value in (1e16, 1.5e-7, 1e300, 0.0, -2.5, math.inf, -math.inf):
        assert yaml.safe_load(emit_block("x-a", value))["x-a"] == value
        assert load_mapping(emit_block("x-a", value).encode())["x-a"] == value
    assert math.isnan(load_mapping(emit_block("x-a", math.nan).encode())["x-a"])


@pytest.mark.parametrize(
    ("value", "named"), [(b"x", "bytes"), ({"a": object()}, "object"), ({1: 2}, "key 1"), ("\ud800", "valid Unicode")]
)
def test_what_yaml_cannot_hold_is_refused_by_name(value, named):
    with pytest.raises(ManifestError, match=named) as raised:
        emit_block("x-a", value)
    assert raised.value.rule == "X-13"


def test_lines_are_known_for_keys_and_items():
    lines = key_lines(
        "a: 1\nb:\n  - x\n  - {k: 1}\n# note\nc:\n  d:\n    e: |\n      text\n      text\nf: &z 1\ng: *z\n"
    )
    assert lines[("a",)] == 1
    assert lines[("b", 1)] == 4
    assert lines[("b", 1, "k")] == 4
    assert lines[("c", "d", "e")] == 8
    assert lines[("f",)] == 11
    assert lines[("g",)] == 12


BLOCK = "files:\n  a: {}\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("k: 1\n", "k: 1\n" + BLOCK),
        ("k: 1", "k: 1\n" + BLOCK),
        ("k: 1\nx-a: 2\n", "k: 1\n" + BLOCK + "x-a: 2\n"),
        ("k: 1\n# about a\nx-a: 2\n", "k: 1\n# about a\n" + BLOCK + "x-a: 2\n"),
        ("files: {b: 1}  # old\nk: 1\n", BLOCK + "k: 1\n"),
        (
            "k: 1\nfiles:\n  b: {size: 1,\n      sha256: x}\n  c: 1\n\n# kept\nx-a: 2\n",
            "k: 1\n" + BLOCK + "\n# kept\nx-a: 2\n",
        ),
        ("files: |\n  text\n  text\nk: 1\n", BLOCK + "k: 1\n"),
        ("files: {}\n", BLOCK),
        ("k: 1\n...\n", "k: 1\n" + BLOCK + "...\n"),
        ("# head\n---\nk: [1,\n 2]\nfiles:\n", "# head\n---\nk: [1,\n 2]\n" + BLOCK),
        ("k: {files: 1}\r\n", "k: {files: 1}\r\n" + BLOCK),
    ],
)
def test_one_block_is_replaced_and_every_other_byte_stays(before, after):
    assert replace_block(before, "files", BLOCK, before="x-") == after


def test_a_root_in_flow_style_has_no_lines_to_replace():
    assert replace_block('{"k": 1}\n', "files", BLOCK, before="x-") is None


HOSTILE = {
    "more values than any manifest has": "x-k: [" + "1," * 100_000 + "]\n",
    "anchors": "x-k: [" + ",".join(f"&a{i} 1" for i in range(20_000)) + "]\n",
    "keys": "x-k: {" + ",".join(f"k{i}: 1" for i in range(10_000)) + "}\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_manifest_of_many_values_is_refused_before_all_of_it_is_parsed(make_bundle, manifest, name):
    text = yaml.safe_dump(manifest()) + HOSTILE[name]
    with pytest.raises(ManifestError, match=f"more than {MAX_MANIFEST_NODES} values") as raised:
        load_manifest(make_bundle(manifest=text))
    assert len(raised.value.message) < 200


def test_the_digests_of_as_many_files_as_fit_into_a_manifest_are_read(make_bundle, manifest):
    count = 2300
    files = {f"f{i:04}": {"size": 1, "sha256": f"{i:064x}"} for i in range(count)}
    text = emit_manifest(manifest(files=files), KEYS)
    assert MAX_MANIFEST_BYTES * 0.8 < len(text) < MAX_MANIFEST_BYTES
    assert len(load_manifest(make_bundle(manifest=text)).files) == count


def test_a_shape_of_more_letters_than_axes_can_be_is_refused_in_one_sentence(make_bundle, manifest):
    tensor = {"name": "image", "dtype": "f32", "shape": "ac" * 100_000, "dims": {"a": 1, "c": 1}}
    problems = manifest_problems(make_bundle(manifest=manifest(executable_inputs=[tensor])))
    assert [(problem.rule, len(problem.message) < 200) for problem in problems] == [("B-17", True)]


def test_a_message_quotes_the_beginning_of_a_huge_value(make_bundle, manifest):
    tensor = {"name": "image", "dtype": "x" * 200_000, "shape": "n"}
    (problem,) = manifest_problems(make_bundle(manifest=manifest(executable_inputs=[tensor])))
    assert "xxxxxxxx" in problem.message
    assert len(problem.message) < 3000


def test_variants_times_batch_sizes_are_bounded(make_bundle, manifest):
    tensor = {"name": "image", "dtype": "f32", "shape": "na", "dims": {"a": -1}}
    text = manifest(
        executable_inputs=[tensor],
        batching={"compiled_batch_sizes": list(range(1, 2001))},
        input_shapes=[{"a": size} for size in range(1, 2001)],
    )
    (problem,) = bundle_problems(make_bundle(manifest=text, programs=("model.v0.b1.mlir",)))
    assert problem.rule == "B-46"
    assert "ask for 4000000 programs" in problem.message


def test_a_text_that_the_outline_cannot_read_has_no_lines_to_replace():
    assert replace_block('a: "\\ud800"\n', "files", "files: {}\n", before="x-") is None
