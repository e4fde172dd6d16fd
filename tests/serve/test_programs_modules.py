"""Which files of a directory are which programs of a model: bundles, bare directories, and parts of both."""

import os
import shutil
from dataclasses import replace

import pytest
from sched_support import paper_model, spec
from support.bundles import write_affine

from rsrv.bundle.blocks import BatchingSpec
from rsrv.core.errors import InvalidRequest
from rsrv.serve.programs.modules import read_modules


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_affine(tmp_path_factory.mktemp("affine") / "affine", batch_sizes=(1, 4))


def served(keys=(1, 4), *, dynamic=False, variants=((),)):
    """A model as the scheduler has it; only sizes and names matter."""
    inputs = (spec("x", "n", "?"),) if variants != ((),) else (spec("x", "n", 3),)
    made = paper_model(keys=keys, inputs=inputs, variants=variants)
    sizes = tuple(key for key in keys if key)
    shapes = () if variants == ((),) else tuple(variants)
    manifest = replace(made.manifest, batching=BatchingSpec(sizes, dynamic), input_shapes=shapes)
    return replace(made, manifest=manifest)


def listed(modules):
    return [(module.key, module.file, module.batch) for module in modules]


def bare(directory, *names):
    directory.mkdir()
    for name in names:
        (directory / name).write_text(f"text of {name}")
    return directory


def test_a_bundle_brings_its_programs_compared_with_their_digests(bundle):
    modules = read_modules(bundle, served())
    assert listed(modules) == [(((), 1), "model.b1.mlir", None), (((), 4), "model.b4.mlir", None)]
    assert modules[0].program == (bundle / "model.b1.mlir").read_bytes()


def test_a_program_that_differs_from_its_digest_is_refused_unless_nobody_compares(bundle, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(bundle, other)
    (other / "model.b4.mlir").write_bytes(b"edited")
    for sources in ((), ["model.b4.mlir"]):
        with pytest.raises(InvalidRequest, match=r"model\.b4\.mlir has 6 bytes") as caught:
            read_modules(other, served(), sources)
        assert "rsrv bundle seal" in caught.value.hint
    assert len(read_modules(other, served(), ["model.b1.mlir"])) == 1
    assert read_modules(other, served(), digests="off")[1].program == b"edited"
    with pytest.raises(InvalidRequest, match=r"model\.b4\.mlir"):
        read_modules(other, served(), digests="strict")


def test_a_directory_without_a_manifest_is_read_by_the_names_of_its_files(tmp_path):
    other = bare(tmp_path / "other", "model.b1.mlir", "model.b4.mlir", "notes.txt", "model.b4.mlir.tmp")
    modules = read_modules(other, served())
    assert listed(modules) == [(((), 1), "model.b1.mlir", None), (((), 4), "model.b4.mlir", None)]
    assert modules[1].program == b"text of model.b4.mlir"


def test_the_variants_of_a_bare_directory_are_numbered_as_in_the_manifest_of_the_model(tmp_path):
    other = bare(tmp_path / "other", *(f"model.v{v}.b{b}.mlir" for v in range(2) for b in (1, 4)))
    modules = read_modules(other, served(variants=((64,), (32,))))
    assert listed(modules) == [
        (((64,), 1), "model.v0.b1.mlir", None),
        (((64,), 4), "model.v0.b4.mlir", None),
        (((32,), 1), "model.v1.b1.mlir", None),
        (((32,), 4), "model.v1.b4.mlir", None),
    ]


def test_one_symbolic_program_is_made_into_the_sizes_that_the_model_is_served_with(tmp_path):
    other = bare(tmp_path / "other", "model.mlir")
    model = replace(served(keys=(2, 16), dynamic=True))
    assert listed(read_modules(other, model)) == [(((), 2), "model.mlir", 2), (((), 16), "model.mlir", 16)]


def test_a_program_without_a_batch_size_stays_one(tmp_path):
    other = bare(tmp_path / "other", "model.mlir")
    assert listed(read_modules(other, served(keys=(0,)))) == [(((), 0), "model.mlir", None)]


def test_sources_name_the_files_to_take_and_the_others_need_not_be_there(tmp_path):
    other = bare(tmp_path / "other", "model.b4.mlir")
    assert listed(read_modules(other, served(), ["model.b4.mlir"])) == [(((), 4), "model.b4.mlir", None)]
    with pytest.raises(InvalidRequest, match=r"sources: 'model\.b1\.mlir' is no program of .* it has model\.b4\.mlir"):
        read_modules(other, served(), ["model.b4.mlir", "model.b1.mlir"][::-1])
    with pytest.raises(InvalidRequest, match=r"model\.b1\.mlir: missing, although its batch size is declared"):
        read_modules(other, served())


@pytest.mark.parametrize(
    "name", ["../model.b4.mlir", "model.b4.mlir/", "/etc/passwd", "model.b9.mlir", "manifest.yaml"]
)
def test_a_source_that_is_no_program_of_the_directory_is_refused(tmp_path, name):
    other = bare(tmp_path / "other", "model.b4.mlir")
    with pytest.raises(InvalidRequest, match="is no program of"):
        read_modules(other, served(), [name])


def test_what_is_no_directory_of_programs_is_refused_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    for path, text in ((tmp_path / "file", "is not a directory"), (tmp_path / "gone", "is not a directory")):
        with pytest.raises(InvalidRequest, match=text):
            read_modules(path, served())
    with pytest.raises(InvalidRequest, match=r"neither a manifest\.yaml nor a program"):
        read_modules(bare(tmp_path / "empty", "README.md"), served())
    broken = bare(tmp_path / "broken", "model.b1.mlir")
    (broken / "manifest.yaml").write_text("not: [a bundle")
    with pytest.raises(InvalidRequest, match="base_directory"):
        read_modules(broken, served())


def test_a_link_that_leaves_the_place_of_the_directory_is_not_followed(tmp_path):
    (tmp_path / "outside.mlir").write_text("secret")
    other = bare(tmp_path / "repo", "x.txt") and bare(tmp_path / "repo" / "other", "model.b4.mlir")
    os.symlink(tmp_path / "outside.mlir", other / "model.b1.mlir")
    with pytest.raises(InvalidRequest, match=r"model\.b1\.mlir is a symbolic link"):
        read_modules(other, served())


def test_a_file_that_is_no_regular_file_is_refused_without_waiting_for_it(tmp_path):
    other = bare(tmp_path / "other", "model.b1.mlir")
    os.mkfifo(other / "model.b4.mlir")
    with pytest.raises(InvalidRequest, match=r"model\.b4\.mlir"):
        read_modules(other, served())
