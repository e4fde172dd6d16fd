"""The `files:` digests: what differs, the one read of a program, and sealing a manifest without touching the rest."""

from __future__ import annotations

import hashlib
import os
import stat

import pytest
import yaml

from rsrv.bundle import digests
from rsrv.bundle.blocks import FileDigest
from rsrv.bundle.digests import DigestFinding, digest_file, read_verified_program, seal, verify_files
from rsrv.bundle.directory import open_bundle
from rsrv.bundle.files import MAX_PROGRAM_BYTES
from rsrv.core.errors import BundleError, DigestMismatch, ManifestError


@pytest.fixture
def sealed(make_bundle):
    """A sealed bundle with two programs, weights, hooks and a side file in a subdirectory."""
    directory = make_bundle(files={"model.py": "def preprocess(inputs): ...\n", "tokenizer/vocab.txt": "[PAD]\n"})
    seal(directory)
    return directory


def test_a_digest_is_the_size_and_sha256_of_the_file(tmp_path):
    content = os.urandom(3_000_000)
    (tmp_path / "f").write_bytes(content)
    assert digest_file(tmp_path / "f") == FileDigest(3_000_000, hashlib.sha256(content).hexdigest())
    (tmp_path / "empty").touch()
    assert digest_file(tmp_path / "empty") == FileDigest(0, hashlib.sha256(b"").hexdigest())


def test_hashing_ends_where_its_caller_wants_it_to(sealed):
    looks = []

    def look():
        looks.append(1)
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        verify_files(open_bundle(sealed), "all", look=look)
    assert looks == [1]


def test_what_is_no_regular_file_has_no_digest(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BundleError, match=str(path)):
            digest_file(path)


def test_a_sealed_bundle_has_no_findings(sealed):
    bundle = open_bundle(sealed)
    assert bundle.manifest.files is not None
    assert sorted(bundle.manifest.files) == [
        "model.b1.mlir",
        "model.b4.mlir",
        "model.py",
        "tokenizer/vocab.txt",
        "weights.safetensors",
    ]
    assert verify_files(bundle, "all") == []


def test_a_bundle_without_digests_has_nothing_to_differ_from(make_bundle):
    bundle = open_bundle(make_bundle())
    assert bundle.manifest.files is None
    assert verify_files(bundle, "all") == []
    assert read_verified_program(bundle, bundle.programs[()][1], "strict") == b"ML\xefRmodel.b1.mlir"


def test_one_flipped_bit_of_a_program_is_an_error(sealed):
    path = sealed / "model.b4.mlir"
    content = bytearray(path.read_bytes())
    content[5] ^= 4
    path.write_bytes(content)
    bundle = open_bundle(sealed)
    actual = digest_file(path)
    declared = bundle.manifest.files["model.b4.mlir"]
    finding = DigestFinding("model.b4.mlir", declared, actual.size, actual.sha256, "error")
    assert verify_files(bundle) == [finding]
    assert verify_files(bundle, "all") == [finding]
    assert "model.b4.mlir has sha256" in finding.message


def test_a_file_of_another_size_is_not_hashed(sealed, monkeypatch):
    hashed = []
    real = digests.digest_file
    monkeypatch.setattr(digests, "digest_file", lambda path, **options: hashed.append(path.name) or real(path))
    (sealed / "weights.safetensors").write_bytes(b"other")
    (sealed / "surplus.bin").write_bytes(b"more")
    found = {finding.file: finding.message for finding in verify_files(open_bundle(sealed), "all")}
    assert found["weights.safetensors"].startswith("weights.safetensors has 5 bytes, files says ")
    assert found["surplus.bin"] == "surplus.bin is not listed in files"
    assert "weights.safetensors" not in hashed
    assert "surplus.bin" not in hashed
    assert "model.b1.mlir" in hashed


def test_a_program_of_absurd_size_is_refused_before_it_is_read(sealed):
    path, size = sealed / "model.b1.mlir", 1 << 40
    os.truncate(path, size)
    bundle = open_bundle(sealed)
    with pytest.raises(BundleError, match=rf"model\.b1\.mlir: {size} bytes; at most {MAX_PROGRAM_BYTES} are read"):
        read_verified_program(bundle, path, "off")
    with pytest.raises(BundleError, match=rf"model\.b1\.mlir: {size} bytes; at most {MAX_PROGRAM_BYTES} are read"):
        seal(sealed)
    manifest = sealed / "manifest.yaml"
    declared = bundle.manifest.files["model.b1.mlir"].size
    manifest.write_text(manifest.read_text().replace(f"size: {declared},", f"size: {size},"))
    messages = [finding.message for finding in verify_files(open_bundle(sealed)) if finding.file == path.name]
    assert messages == [f"model.b1.mlir has {size} bytes; programs above {MAX_PROGRAM_BYTES} are not read"]


def test_replaced_weights_and_hooks_are_warnings_and_only_looked_at_with_all(sealed):
    (sealed / "model.py").write_text("def postprocess(outputs): ...\n")
    (sealed / "weights.safetensors").write_bytes(b"other")
    (sealed / "labels.txt").write_text("new")
    os.unlink(sealed / "tokenizer" / "vocab.txt")
    bundle = open_bundle(sealed)
    assert verify_files(bundle, "programs") == []
    found = {finding.file: (finding.severity, finding.message) for finding in verify_files(bundle, "all")}
    assert {name: severity for name, (severity, _) in found.items()} == {
        "model.py": "warning",
        "weights.safetensors": "warning",
        "labels.txt": "warning",
        "tokenizer/vocab.txt": "error",
    }
    assert found["labels.txt"][1] == "labels.txt is not listed in files"
    assert found["tokenizer/vocab.txt"][1] == "tokenizer/vocab.txt is listed in files, but missing"
    assert "5 bytes, files says" in found["weights.safetensors"][1]


@pytest.mark.parametrize("mode", ["programs", "strict"])
def test_a_program_that_differs_is_refused_before_anybody_gets_its_bytes(sealed, mode):
    path = sealed / "model.b1.mlir"
    path.write_bytes(path.read_bytes() + b"\n")
    bundle = open_bundle(sealed)
    with pytest.raises(DigestMismatch, match=r"'net': model\.b1\.mlir has \d+ bytes, files says \d+") as raised:
        read_verified_program(bundle, path, mode)
    assert (raised.value.rule, raised.value.file, raised.value.reason) == ("B-15a", "model.b1.mlir", "digest")
    assert read_verified_program(bundle, path, "off") == path.read_bytes()


def test_a_program_that_the_list_lacks_is_refused(sealed):
    text = (sealed / "manifest.yaml").read_text()
    (sealed / "manifest.yaml").write_text(
        "".join(line for line in text.splitlines(True) if "  model.b1.mlir:" not in line)
    )
    bundle = open_bundle(sealed)
    with pytest.raises(DigestMismatch, match=r"model\.b1\.mlir is not listed in files"):
        read_verified_program(bundle, bundle.programs[()][1], "programs")


def test_the_bytes_that_were_hashed_are_the_bytes_that_come_back(sealed, monkeypatch):
    """Whoever swaps the file between two reads wins nothing: there is one read."""
    bundle = open_bundle(sealed)
    path = bundle.programs[()][1]
    good, reads = path.read_bytes(), []
    real = digests.read_program

    def read_then_swap(file):
        reads.append(file)
        data = real(file)
        path.write_bytes(b"evil")
        return data

    monkeypatch.setattr(digests, "read_program", read_then_swap)
    assert read_verified_program(bundle, path, "programs") == good
    assert reads == [path]


# --- sealing ------------------------------------------------------------------------------------------------------

HAND_WRITTEN = """\
# Our model.
format_version: 3
executable_inputs:
    - name: x          # the image
      dtype: f32
      shape: nc
      dims: {c: 4}
executable_outputs: []
batching: {compiled_batch_sizes: [1, 4]}
provenance:
  note: |
    two
    lines
  ratio: .nan
%s
# the end
"""


def sealed_text(directory):
    seal(directory)
    return (directory / "manifest.yaml").read_text()


def test_sealing_keeps_comments_and_layout_and_is_stable(make_bundle):
    text = HAND_WRITTEN % 'files:\n  gone.txt: {size: 1, sha256: "%s"}\nx-owner: me  # us' % ("0" * 64)
    directory = make_bundle(manifest=text)
    once = sealed_text(directory)
    head, _, tail = text.partition("files:\n")
    assert once.startswith(head + "files:\n  model.b1.mlir: {size: ")
    assert once.endswith("}\n" + tail.partition("\n")[2])
    assert "gone.txt" not in once
    assert sealed_text(directory) == once
    assert verify_files(open_bundle(directory), "all") == []


def test_sealing_adds_the_block_before_the_extensions(make_bundle):
    directory = make_bundle(manifest=HAND_WRITTEN % "x-owner: me")
    text = sealed_text(directory)
    assert text.index("\nfiles:\n") < text.index("\nx-owner: me\n")
    assert text.startswith(HAND_WRITTEN.partition("%s")[0] + "files:\n")


def test_sealing_repairs_a_broken_files_block(make_bundle):
    directory = make_bundle(manifest=HAND_WRITTEN % "files: [nonsense]")
    seal(directory)
    assert verify_files(open_bundle(directory), "all") == []


def test_a_manifest_in_flow_style_is_sealed_too(make_bundle, manifest):
    directory = make_bundle(manifest=yaml.safe_dump(manifest(), default_flow_style=True))
    before = open_bundle(directory).manifest
    text = sealed_text(directory)
    after = open_bundle(directory).manifest
    assert after.executable_inputs == before.executable_inputs
    assert after.batching == before.batching
    assert len(after.files) == 3
    assert sealed_text(directory) == text


def test_sealing_follows_the_files(sealed):
    before = (sealed / "manifest.yaml").read_text().splitlines()
    (sealed / "model.py").write_text("def postprocess(outputs): ...\n")
    after = sealed_text(sealed).splitlines()
    changed = [line for line in after if line not in before]
    assert len(after) == len(before)
    assert [line.split(":")[0].strip() for line in changed] == ["model.py"]


def test_passing_files_are_never_sealed(make_bundle):
    names = [".hidden", "vocab.txt~", "a.tmp", "b.partial", "model.py.swp"]
    directory = make_bundle(files={**dict.fromkeys(names, ""), "__pycache__/model.pyc": "", "vocab.txt": ""})
    assert sorted(seal(directory)) == ["model.b1.mlir", "model.b4.mlir", "vocab.txt", "weights.safetensors"]


def test_a_manifest_with_other_mistakes_is_not_sealed(make_bundle, manifest):
    directory = make_bundle(manifest=manifest(kind="x"))
    before = (directory / "manifest.yaml").read_bytes()
    with pytest.raises(ManifestError, match="'x'"):
        seal(directory)
    assert (directory / "manifest.yaml").read_bytes() == before


def test_sealing_keeps_the_permissions_and_leaves_nothing_behind(make_bundle, monkeypatch):
    directory = make_bundle()
    os.chmod(directory / "manifest.yaml", 0o640)
    names = set(os.listdir(directory))
    seal(directory)
    assert stat.S_IMODE(os.stat(directory / "manifest.yaml").st_mode) == 0o640
    assert set(os.listdir(directory)) == names

    (directory / "vocab.txt").write_text("new")
    before = (directory / "manifest.yaml").read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        seal(directory)
    assert (directory / "manifest.yaml").read_bytes() == before
    assert set(os.listdir(directory)) == names | {"vocab.txt"}


def test_a_file_name_that_no_manifest_can_hold_is_refused(make_bundle):
    directory = make_bundle()
    with open(os.fsencode(directory) + b"/n\xff.txt", "wb"):
        pass
    with pytest.raises(BundleError, match="UTF-8") as raised:
        seal(directory)
    assert raised.value.rule == "B-15a"
    assert raised.value.message.encode()


def test_a_link_out_of_the_repository_is_not_sealed(make_bundle, tmp_path):
    directory = make_bundle()
    (tmp_path / "secret").write_text("x")
    (directory / "vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(BundleError, match=r"vocab\.txt is a symbolic link") as raised:
        seal(directory)
    assert raised.value.rule == "B-1"


def test_a_manifest_that_would_grow_too_large_is_not_sealed(make_bundle, monkeypatch):
    directory = make_bundle()
    before = (directory / "manifest.yaml").read_bytes()
    monkeypatch.setattr(digests, "MAX_MANIFEST_BYTES", len(before) + 10)
    with pytest.raises(ManifestError, match="digests of 3 files") as raised:
        seal(directory)
    assert raised.value.rule == "X-13"
    assert (directory / "manifest.yaml").read_bytes() == before
