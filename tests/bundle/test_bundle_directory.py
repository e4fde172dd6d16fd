"""Repositories and bundle directories: what is found, what is opened, and files that are missing or traps."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from rsrv.bundle.directory import FoundBundle, bundle_problems, discover, enclosing_bundle, open_bundle
from rsrv.bundle.files import require_name
from rsrv.bundle.programs import program_name
from rsrv.core.errors import BundleError, ManifestError


def refused(path, rule, *named):
    with pytest.raises(BundleError) as raised:
        open_bundle(path)
    assert raised.value.rule == rule
    for word in named:
        assert word in raised.value.message
    return raised.value


# --- discovery ----------------------------------------------------------------------------------------------------


def test_directories_with_a_manifest_are_found_one_level_deep(make_bundle, tmp_path):
    for name in ("b", "a", ".hidden", "new.partial", ".net.12.partial"):
        make_bundle(name)
    repo = tmp_path / "repo"
    (repo / "notes").mkdir()
    (repo / "manifest.yaml").write_text("not a bundle")
    shutil.copytree(repo / "a", repo / "notes" / "inner")
    found = discover([repo])
    assert found == [FoundBundle("a", repo / "a"), FoundBundle("b", repo / "b")]
    assert found.not_found == ()


def test_a_file_lies_in_the_nearest_directory_with_a_manifest(make_bundle, tmp_path, monkeypatch):
    for name in ("net", "new.partial"):
        make_bundle(name)
    monkeypatch.chdir(tmp_path)
    assert enclosing_bundle("repo/net/manifest.yaml") == Path("repo/net")
    assert enclosing_bundle("repo/net/labels/deleted.txt") == Path("repo/net")
    assert enclosing_bundle(tmp_path / "repo" / "net" / "model.py") == tmp_path / "repo" / "net"
    assert enclosing_bundle("repo/new.partial/manifest.yaml") is None
    assert enclosing_bundle("repo/notes.txt") is None
    monkeypatch.chdir(tmp_path / "repo" / "net")
    assert enclosing_bundle("manifest.yaml") == Path(".")


def test_only_wanted_names_are_found_and_the_others_reported(make_bundle, tmp_path, caplog):
    make_bundle("a")
    make_bundle("broken", manifest="[")
    with caplog.at_level("WARNING"):
        found = discover([tmp_path / "repo"], ["a", "missing", "../repo/a"])
    assert [bundle.name for bundle in found] == ["a"]
    assert found.not_found == ("missing", "../repo/a")
    assert [record.getMessage() for record in caplog.records] == [
        "models_include names no bundle names=missing,../repo/a"
    ]


def test_the_first_root_wins_and_the_duplicate_says_of_what(make_bundle, tmp_path):
    first, second = make_bundle("net", repo="one"), make_bundle("net", repo="two")
    only = make_bundle("other", repo="two")
    found = discover([tmp_path / "one", tmp_path / "two"])
    assert found == [
        FoundBundle("net", first),
        FoundBundle("net", second, duplicate_of=first),
        FoundBundle("other", only),
    ]


def test_one_root_given_twice_makes_no_duplicates(make_bundle, tmp_path):
    make_bundle("net")
    os.symlink(tmp_path / "repo", tmp_path / "alias")
    other = make_bundle("net", repo="other")
    found = discover([tmp_path / "repo", other.parent, tmp_path / "alias", f"{tmp_path}/./repo/"])
    first = tmp_path / "repo" / "net"
    assert found == [FoundBundle("net", first), FoundBundle("net", other, duplicate_of=first)]


def test_a_missing_root_is_an_error_unless_it_may_be_missing(make_bundle, tmp_path):
    make_bundle("net")
    with pytest.raises(BundleError, match="nowhere: No such file") as raised:
        discover([tmp_path / "repo", tmp_path / "nowhere"])
    assert raised.value.rule == "B-5"
    with pytest.raises(BundleError, match=r"manifest\.yaml: Not a directory"):
        discover([tmp_path / "repo" / "net" / "manifest.yaml"])
    assert len(discover([tmp_path / "nowhere", tmp_path / "repo"], skip_missing_roots=True)) == 1


# --- opening ------------------------------------------------------------------------------------------------------


def test_an_opened_bundle_has_its_programs_weights_and_name(make_bundle):
    directory = make_bundle("renamed", files={"vocab.txt": "a", "model.old.mlir": "x", "model.jl": ""})
    bundle = open_bundle(f"{directory}/")
    assert bundle.name == bundle.manifest.name == "renamed"
    assert bundle.programs == {(): {1: directory / "model.b1.mlir", 4: directory / "model.b4.mlir"}}
    assert bundle.program_files() == (directory / "model.b1.mlir", directory / "model.b4.mlir")
    assert bundle.weights_path == directory / "weights.safetensors"
    assert bundle.hooks_path is None
    assert bundle_problems(directory) == []


def test_hooks_and_a_single_program_are_found(make_bundle, manifest):
    directory = make_bundle(
        manifest=manifest(batching={}), programs=("model.mlir",), files={"model.py": "def preprocess(inputs): ..."}
    )
    bundle = open_bundle(directory)
    assert bundle.programs == {(): {0: directory / "model.mlir"}}
    assert bundle.hooks_path == directory / "model.py"


def test_a_single_program_may_declare_its_one_size(make_bundle, manifest):
    mapping = manifest(batching={"compiled_batch_sizes": [4]})
    assert set(open_bundle(make_bundle(manifest=mapping, programs=("model.mlir",))).programs[()]) == {0}


def test_a_dynamic_program_stands_for_every_declared_size(make_bundle, manifest):
    mapping = manifest(batching={"compiled_batch_sizes": [8, 2], "dynamic": True})
    directory = make_bundle(manifest=mapping, programs=("model.mlir",))
    bundle = open_bundle(directory)
    assert bundle.programs == {(): {2: directory / "model.mlir", 8: directory / "model.mlir"}}
    assert bundle.program_files() == (directory / "model.mlir",)


def two_variants(manifest, **changes):
    inputs = [{"name": "x", "dtype": "f32", "shape": "nh", "dims": {"h": -1}}]
    return manifest(executable_inputs=inputs, input_shapes=[{"h": 8}, {"h": 6}], **changes)


def test_variants_own_the_files_of_their_position(make_bundle, manifest):
    names = [program_name(i, size) for i in (0, 1) for size in (1, 4)]
    assert names[-1] == "model.v1.b4.mlir"
    directory = make_bundle(manifest=two_variants(manifest), programs=tuple(names))
    assert open_bundle(directory).programs == {
        (8,): {1: directory / names[0], 4: directory / names[1]},
        (6,): {1: directory / names[2], 4: directory / names[3]},
    }


def test_dynamic_variants_have_one_program_each(make_bundle, manifest):
    mapping = two_variants(manifest, batching={"compiled_batch_sizes": [1, 4], "dynamic": True})
    directory = make_bundle(manifest=mapping, programs=("model.v0.mlir", "model.v1.mlir"))
    assert open_bundle(directory).programs[(6,)] == dict.fromkeys([1, 4], directory / "model.v1.mlir")


@pytest.mark.parametrize(
    ("batching", "programs", "rule", "file"),
    [
        ({"compiled_batch_sizes": [1, 4]}, ["model.b1.mlir"], "B-32", "model.b4.mlir"),
        ({"compiled_batch_sizes": [1, 4]}, [], "B-32", "model.b1.mlir"),
        ({}, [], "B-32", "model.mlir"),
        ({"compiled_batch_sizes": [1]}, ["model.b1.mlir", "model.b2.mlir"], "B-33", "model.b2.mlir"),
        ({}, ["model.mlir", "model.b1.mlir"], "B-33", "model.b1.mlir"),
        ({"compiled_batch_sizes": [1]}, ["model.mlir", "model.b1.mlir"], "B-33", "model.mlir"),
        ({"compiled_batch_sizes": [1]}, ["model.b1.mlir", "model.b01.mlir"], "B-33", "model.b01.mlir"),
        ({"compiled_batch_sizes": [1]}, ["model.b1.mlir", "model.v0.b1.mlir"], "B-33", "model.v0.b1.mlir"),
        ({}, ["model.mlir", "model.v0.mlir"], "B-33", "model.v0.mlir"),
        ({"compiled_batch_sizes": [1, 4]}, ["model.mlir"], "B-34", "model.mlir"),
        ({"compiled_batch_sizes": [1], "dynamic": True}, [], "B-12a", "model.mlir"),
        ({"compiled_batch_sizes": [1], "dynamic": True}, ["model.b1.mlir"], "B-12a", "model.mlir"),
        ({"compiled_batch_sizes": [1], "dynamic": True}, ["model.mlir", "model.b1.mlir"], "B-33", "model.b1.mlir"),
    ],
)
def test_a_missing_or_undeclared_program_is_refused_by_name(make_bundle, manifest, batching, programs, rule, file):
    directory = make_bundle(manifest=manifest(batching=batching), programs=tuple(programs))
    assert refused(directory, rule, "'net'", file).file == file


@pytest.mark.parametrize(
    ("programs", "rule", "file"),
    [
        (["model.v0.b1.mlir", "model.v0.b4.mlir"], "B-32", "model.v1.b1.mlir"),
        (["model.v0.b1.mlir", "model.v0.b4.mlir", "model.v1.b1.mlir"], "B-32", "model.v1.b4.mlir"),
        (["model.b1.mlir", "model.b4.mlir"], "B-32", "model.v0.b1.mlir"),
    ],
)
def test_a_variant_without_its_programs_is_refused(make_bundle, manifest, programs, rule, file):
    refused(make_bundle(manifest=two_variants(manifest), programs=tuple(programs)), rule, file)


def test_programs_of_a_variant_that_is_not_declared_are_refused(make_bundle, manifest):
    programs = [program_name(i, size) for i in (0, 1, 2) for size in (1, 4)]
    refused(make_bundle(manifest=two_variants(manifest), programs=tuple(programs)), "B-33", "model.v2.b1.mlir")


def test_variants_for_different_batch_sizes_are_refused(make_bundle, manifest):
    mapping = two_variants(manifest, batching={"compiled_batch_sizes": [4]})
    directory = make_bundle(manifest=mapping, programs=("model.v0.mlir", "model.v1.b4.mlir"))
    refused(directory, "B-46", "[8]: [0]", "[6]: [4]")


def test_a_model_without_a_weights_file_is_refused(make_bundle):
    refused(make_bundle(weights=False), "B-58", "weights.safetensors", "'net'")


def test_a_meta_needs_neither_programs_nor_weights(make_bundle, meta):
    hooks = {"model.py": "def run(inputs, call): ..."}
    bundle = open_bundle(make_bundle("pipeline", manifest=meta(), programs=(), weights=False, files=hooks))
    assert (bundle.programs, bundle.weights_path) == ({}, None)
    with_weights = open_bundle(make_bundle("own", manifest=meta(), programs=(), files=hooks))
    assert with_weights.weights_path is not None


def test_a_meta_with_programs_is_refused(make_bundle, meta):
    hooks = {"model.py": "def run(inputs, call): ..."}
    directory = make_bundle("pipeline", manifest=meta(), programs=("model.mlir",), weights=False, files=hooks)
    refused(directory, "B-52", "model.mlir")


def test_manifest_problems_come_first_and_all_problems_are_collected(make_bundle, manifest):
    directory = make_bundle(manifest=manifest(kind="x", batching={"dynamic": 3}), weights=False)
    with pytest.raises(ManifestError):
        open_bundle(directory)
    assert [problem.rule for problem in bundle_problems(directory)] == ["B-54", "B-12a", "B-58"]
    directory = make_bundle("other", programs=("model.b1.mlir", "model.b9.mlir"), weights=False)
    assert [problem.rule for problem in bundle_problems(directory)] == ["B-32", "B-33", "B-58"]


def test_a_path_that_is_no_bundle_is_refused(tmp_path, make_bundle):
    refused(tmp_path / "nothing", "B-1", "is not a directory")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "B-1", "manifest.yaml: cannot be opened")
    refused(make_bundle() / "manifest.yaml", "B-1", "is not a directory")


# --- names and links ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "a\\b", "a\x00b", "a\nb", "\udcff"])
def test_names_that_escape_or_cannot_travel_are_refused(name):
    with pytest.raises(BundleError) as raised:
        require_name(name)
    assert raised.value.rule == "B-2"
    assert raised.value.message.encode()


def test_a_directory_with_a_name_that_cannot_travel_is_refused(make_bundle):
    directory = make_bundle()
    strange = os.fsencode(directory.parent) + b"/n\xffet"
    os.rename(directory, strange)
    assert refused(os.fsdecode(strange), "B-2", "UTF-8").message.encode()


@pytest.mark.parametrize(
    "file", ["manifest.yaml", "model.b1.mlir", "weights.safetensors", "model.py", "vocab.txt", "sub"]
)
def test_a_link_out_of_the_repository_is_refused(make_bundle, tmp_path, file):
    directory = make_bundle(files={"model.py": "def preprocess(inputs): ...", "vocab.txt": ""})
    outside = tmp_path / "elsewhere"
    if file == "sub":
        outside.mkdir()
    else:
        os.rename(directory / file, outside)
    os.symlink(os.path.relpath(outside, directory), directory / file)
    refused(directory, "B-1", file, "symbolic link", str(outside))


def test_a_bundle_that_is_a_link_out_of_the_repository_is_refused(make_bundle, tmp_path):
    directory = make_bundle(repo="elsewhere")
    (tmp_path / "repo").mkdir()
    os.symlink(directory, tmp_path / "repo" / "net")
    assert [bundle.name for bundle in discover([tmp_path / "repo"])] == ["net"]
    refused(tmp_path / "repo" / "net", "B-1", "the bundle's directory is a symbolic link", str(directory))


def test_links_inside_of_the_repository_are_fine(make_bundle, tmp_path):
    directory = make_bundle("net-3")
    os.rename(directory / "weights.safetensors", directory.parent / "shared.safetensors")
    os.symlink("../shared.safetensors", directory / "weights.safetensors")
    os.symlink("net-3", directory.parent / "net")
    os.symlink(directory.parent, tmp_path / "alias")
    bundle = open_bundle(tmp_path / "alias" / "net")
    assert bundle.name == "net"
    assert bundle.weights_path == tmp_path / "alias" / "net" / "weights.safetensors"


@pytest.mark.parametrize("file", ["model.b1.mlir", "weights.safetensors", "model.py"])
def test_what_is_no_regular_file_is_refused_without_blocking(make_bundle, file):
    directory = make_bundle(files={"model.py": ""})
    os.unlink(directory / file)
    os.mkfifo(directory / file)
    refused(directory, "B-1", file, "is not a regular file")


def test_a_manifest_that_would_block_is_refused(make_bundle):
    directory = make_bundle()
    os.unlink(directory / "manifest.yaml")
    os.mkfifo(directory / "manifest.yaml")
    refused(directory, "B-1", "is not a regular file")


@pytest.mark.parametrize("target", ["weights.safetensors", "nothing"])
def test_a_link_to_nothing_or_to_itself_is_refused(make_bundle, target):
    directory = make_bundle()
    os.unlink(directory / "weights.safetensors")
    os.symlink(target, directory / "weights.safetensors")
    refused(directory, "B-1", "weights.safetensors", "is not a regular file")
