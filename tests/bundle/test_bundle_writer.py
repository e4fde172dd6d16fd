"""`write_bundle`: what it writes, that equal input gives equal bytes, and that a failure changes nothing."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from rsrv.bundle import staging, writer
from rsrv.bundle.digests import seal, verify_files
from rsrv.bundle.directory import discover, open_bundle
from rsrv.bundle.iospec import IOSpec
from rsrv.bundle.safetensors import read_header
from rsrv.bundle.writer import write_bundle
from rsrv.core.errors import BundleError, ManifestError

PROGRAM = b"ML\xefR program"
X = IOSpec("x", "f32", (1, 3), batch_axis=0)
Y = IOSpec("y", "f32", (1, 2), batch_axis=0)
WEIGHTS = [("w", np.arange(16, dtype=np.float32)), ("b", np.zeros(2, dtype=np.float32))]


def write(target: Path, **changes: object) -> Path:
    arguments: dict[str, object] = {
        "name": target.name,
        "executable_inputs": [X],
        "executable_outputs": [Y],
        "modules": {1: PROGRAM + b"1", 4: PROGRAM + b"4"},
        "weights": WEIGHTS,
        "provenance": {"exported_at": "2026-01-01T00:00:00Z", "git_dirty": False},
    }
    return write_bundle(target, **{**arguments, **changes})  # type: ignore[arg-type]


def snapshot(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def refused(target: Path, rule: str, *named: str, **changes: object) -> BundleError:
    """The write is refused, and nothing is where there was nothing."""
    before = sorted(os.listdir(target.parent))
    with pytest.raises(BundleError) as raised:
        write(target, **changes)
    assert raised.value.rule == rule
    for word in named:
        assert word in raised.value.message
    assert sorted(os.listdir(target.parent)) == before
    return raised.value


def test_the_manifest_text_is_exactly_this(tmp_path):
    target = write(tmp_path / "net", description='says "hi"')
    digests = open_bundle(target).manifest.files
    assert digests is not None
    files = "".join(
        f'  {name}: {{size: {digest.size}, sha256: "{digest.sha256}"}}\n' for name, digest in sorted(digests.items())
    )
    assert (target / "manifest.yaml").read_text() == (
        'format_version: "3.0"\n'
        'name: "net"\n'
        'description: "says \\"hi\\""\n'
        "kind: model\n"
        "executable_inputs:\n"
        '  - {name: "x", dtype: f32, shape: "na", dims: {a: 3}}\n'
        "executable_outputs:\n"
        '  - {name: "y", dtype: f32, shape: "na", dims: {a: 2}}\n'
        "batching:\n"
        "  compiled_batch_sizes: [1, 4]\n"
        "provenance:\n"
        '  exported_at: "2026-01-01T00:00:00Z"\n'
        "  git_dirty: false\n"
        "axis_order: row_major\n"
        "files:\n" + files
    )
    assert sorted(digests) == ["model.b1.mlir", "model.b4.mlir", "weights.safetensors"]


def test_a_written_bundle_opens_verifies_and_is_found(tmp_path):
    target = write(tmp_path / "new" / "net")
    bundle = open_bundle(target)
    assert {key: path.read_bytes() for key, path in bundle.programs[()].items()} == {
        1: PROGRAM + b"1",
        4: PROGRAM + b"4",
    }
    assert verify_files(bundle, "all") == []
    assert read_header(target / "weights.safetensors").argument_order == ("w", "b")
    assert [found.name for found in discover([tmp_path / "new"])] == ["net"]
    assert os.listdir(tmp_path / "new") == ["net"]
    text = (target / "manifest.yaml").read_bytes()
    seal(target)
    assert (target / "manifest.yaml").read_bytes() == text
    assert yaml.safe_load(text)["executable_inputs"][0]["shape"] == "na"


def test_one_program_without_a_batch_size_is_model_mlir(tmp_path):
    manifest = open_bundle(write(tmp_path / "net", modules={0: PROGRAM})).manifest
    assert manifest.batching.compiled_batch_sizes == ()
    assert sorted(manifest.files or {}) == ["model.mlir", "weights.safetensors"]


def test_a_symbolic_batch_program_lists_its_sizes(tmp_path):
    bundle = open_bundle(write(tmp_path / "net", modules={0: PROGRAM}, dynamic_batch_sizes=[8, 1]))
    assert bundle.manifest.batching.dynamic
    assert set(bundle.programs[()]) == {1, 8}
    assert "  compiled_batch_sizes: [1, 8]\n  dynamic: true\n" in (bundle.path / "manifest.yaml").read_text()


def variable(name: str = "x") -> IOSpec:
    return IOSpec(name, "f32", (1, -1, -1), batch_axis=0, letters="hw")


def test_variants_get_the_files_of_their_position(tmp_path):
    modules = {(8, 6): {1: b"a", 2: b"b"}, (4, 4): {2: b"d", 1: b"c"}}
    target = write(tmp_path / "net", executable_inputs=[variable()], input_shapes=[(4, 4), [8, 6]], modules=modules)
    bundle = open_bundle(target)
    assert bundle.manifest.input_shapes == ((4, 4), (8, 6))
    assert bundle.programs[(4, 4)][1].name == "model.v0.b1.mlir"
    assert {v: {k: p.read_bytes() for k, p in programs.items()} for v, programs in bundle.programs.items()} == modules
    assert "  - {h: 4, w: 4}\n  - {h: 8, w: 6}\n" in (target / "manifest.yaml").read_text()


def test_letters_that_vary_in_two_inputs_are_written_qualified(tmp_path):
    shapes = [(1, 2, 3, 4), (2, 1, 4, 3)]
    modules = {shape: {0: PROGRAM} for shape in shapes}
    target = write(
        tmp_path / "net", executable_inputs=[variable("a"), variable("b")], input_shapes=shapes, modules=modules
    )
    assert "  - {a.h: 1, a.w: 2, b.h: 3, b.w: 4}\n" in (target / "manifest.yaml").read_text()
    assert open_bundle(target).manifest.input_shapes == tuple(shapes)


@pytest.mark.parametrize(
    ("changes", "rule", "named"),
    [
        ({"name": "other"}, "X-5", "'other'"),
        ({"weights": [*WEIGHTS, WEIGHTS[0]]}, "X-6", "'w'"),
        ({"modules": {}}, "X-7", "{}"),
        ({"modules": {0: b"", 1: b""}}, "X-7", "[0, 1]"),
        ({"modules": {-1: b""}}, "X-7", "-1"),
        ({"modules": {True: b""}}, "X-7", "True"),
        ({"modules": {"1": b""}}, "X-7", "'1'"),
        ({"modules": b""}, "X-7", "b''"),
        ({"modules": {1: "text"}}, "X-9", "model.b1.mlir"),
        ({"dynamic_batch_sizes": [1, 2]}, "B-12a", "[1, 4]"),
        ({"modules": {0: b""}, "dynamic_batch_sizes": []}, "B-12a", "compiled_batch_sizes is empty"),
        ({"input_shapes": [(1,)], "modules": {(1,): {1: b""}}}, "X-8", "[1]"),
        ({"executable_inputs": [variable()], "input_shapes": [(1,)], "modules": {(1,): {1: b""}}}, "X-8", "x.h, x.w"),
        ({"executable_inputs": [variable()], "input_shapes": [(1, 2)], "modules": {}}, "X-8", "[1, 2]"),
        (
            {
                "executable_inputs": [variable()],
                "input_shapes": [(1, 2)],
                "modules": {(1, 2): {1: b""}, (3, 4): {1: b""}},
            },
            "X-8",
            "(3, 4)",
        ),
        (
            {
                "executable_inputs": [variable()],
                "input_shapes": [(1, 2), (3, 4)],
                "modules": {(1, 2): {1: b""}, (3, 4): {2: b""}},
            },
            "X-8",
            "different batch sizes: [(1,), (2,)]",
        ),
        (
            {"executable_inputs": [variable()], "input_shapes": [(1, 2), (1, 2)], "modules": {(1, 2): {1: b""}}},
            "B-44",
            "input_shapes[1]",
        ),
        ({"executable_inputs": [variable()]}, "B-45", "x.h, x.w"),
        ({"client_inputs": [X]}, "B-50", "client_inputs"),
        ({"client_outputs": [Y]}, "B-50", "client_outputs"),
        ({"executable_inputs": [X, X]}, "B-26", "'x'"),
        ({"executable_inputs": [X, IOSpec("z", "f32", (3,))]}, "B-36", "'z'"),
        ({"executable_outputs": [IOSpec("y", "f8_e5m2", (1,))]}, "B-51", "'y'"),
        ({"provenance": {"object": object()}}, "X-13", "'object'"),
        ({"provenance": {"big": "x" * 600_000}}, "X-13", "bytes"),
        ({"hooks": "def preprocess(inputs:\n"}, "B-71", "model.py:1"),
        ({"hooks": "x = 1\n"}, "B-72", "registers nothing"),
        ({"hooks": "def run(inputs, call): ...\n"}, "B-72", "'run'"),
        ({"hooks": "missing.py"}, "X-10", "missing.py"),
        ({"hooks": Path("missing.txt")}, "X-10", "missing.txt"),
        ({"extra_files": {"../evil": b""}}, "X-12", "'../evil', which leaves"),
        ({"extra_files": {"/etc/evil": b""}}, "X-12", "'/etc/evil', which leaves"),
        ({"extra_files": {".hidden": b""}}, "X-12", "'.hidden'"),
        ({"extra_files": {"a/b.tmp": b""}}, "X-12", "'a/b.tmp'"),
        ({"extra_files": {"manifest.yaml": b""}}, "X-12", "'manifest.yaml', which is written by rsrv"),
        ({"extra_files": {"model.b9.mlir": b""}}, "X-12", "'model.b9.mlir'"),
        ({"extra_files": {"vocab.txt": Path("missing")}}, "X-12", "vocab.txt: missing is not a file"),
        ({"extra_files": {"vocab.txt": "text"}}, "X-9", "vocab.txt"),
    ],
)
def test_bad_arguments_are_refused_and_nothing_is_written(tmp_path, changes, rule, named):
    refused(tmp_path / "net", rule, named, **changes)


@pytest.mark.parametrize("name", [".hidden\n", "a\x01b"])
def test_a_name_that_no_bundle_can_have_is_refused(tmp_path, name):
    refused(tmp_path / name, "B-2", repr(name))


# --- hooks and other files ----------------------------------------------------------------------------------------

HOOKS = "def preprocess(inputs):\n    return inputs\n"


def test_hooks_come_as_source_text_or_as_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(HOOKS)
    clients = {"client_inputs": [IOSpec("jpeg", "u8", (-1,))], "client_outputs": [IOSpec("label", "i64", (1,))]}
    for i, hooks in enumerate((HOOKS, tmp_path / "mine.py", str(tmp_path / "mine.py"))):
        bundle = open_bundle(write(tmp_path / f"net{i}", hooks=hooks, **clients))
        assert bundle.hooks_path is not None
        assert bundle.hooks_path.read_text() == HOOKS
        assert [spec.name for spec in bundle.manifest.wire_inputs] == ["jpeg"]
        assert "model.py" in (bundle.manifest.files or {})


def test_extra_files_are_bytes_or_copies_also_in_subdirectories(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]")
    os.chmod(tmp_path / "vocab.txt", 0o600)
    files = {"labels.txt": b"cat", "tokenizer/vocab.txt": tmp_path / "vocab.txt"}
    target = write(tmp_path / "net", extra_files=files)
    assert (target / "labels.txt").read_bytes() == b"cat"
    assert (target / "tokenizer" / "vocab.txt").read_text() == "[PAD]"
    assert verify_files(open_bundle(target), "all") == []
    assert "tokenizer/vocab.txt" in (open_bundle(target).manifest.files or {})


@pytest.mark.parametrize("diff", ["diff --git a/f b/f\n-caf\udce9\n\\ No newline at end of file", b"diff\n\xe9"])
def test_a_git_diff_goes_to_its_own_file_byte_by_byte(tmp_path, diff):
    target = write(tmp_path / "net", provenance={"git_diff": diff, "git_commit": "abc"})
    wanted = diff if isinstance(diff, bytes) else diff.encode("utf-8", "surrogateescape")
    assert (target / "working_tree.patch").read_bytes() == wanted
    assert open_bundle(target).manifest.provenance == {"git_commit": "abc", "git_diff_file": "working_tree.patch"}
    assert b"diff --git" not in (target / "manifest.yaml").read_bytes()


def test_an_empty_git_diff_leaves_no_trace(tmp_path):
    target = write(tmp_path / "net", provenance={"git_diff": None})
    assert open_bundle(target).manifest.provenance == {}
    assert not (target / "working_tree.patch").exists()


# --- the same bytes -----------------------------------------------------------------------------------------------

IN_A_PROCESS = """
import os, sys
os.umask(int(sys.argv[2], 8))
import numpy as np
from rsrv.bundle import IOSpec, write_bundle
write_bundle(
    sys.argv[1], name="net",
    executable_inputs=[IOSpec("x", "f32", (1, 3), batch_axis=0)],
    executable_outputs=[IOSpec("y", "f32", (1, 2), batch_axis=0)],
    modules={4: b"4", 1: b"1"}, weights=[("w", np.arange(16.0)), ("b", np.arange(3, dtype=np.int8))],
    provenance={"exported_at": sys.argv[3], "packages": {"jax": "1", "flax": "2"}},
    extra_files={"z.txt": b"z", "a/b.txt": b"b"},
)
"""


def test_two_processes_write_the_same_bytes_and_modes_but_for_the_time(tmp_path):
    for i, (umask, seed) in enumerate((("0077", "1"), ("0000", "2"))):
        (tmp_path / str(i)).mkdir()
        subprocess.run(
            [sys.executable, "-c", IN_A_PROCESS, str(tmp_path / str(i) / "net"), umask, f"2026-01-0{i + 1}T00:00:00Z"],
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
    first, second = (snapshot(tmp_path / str(i) / "net") for i in (0, 1))
    lines = [content.pop("manifest.yaml").decode().splitlines() for content in (first, second)]
    assert first == second
    assert [pair for pair in zip(*lines, strict=True) if pair[0] != pair[1]] == [
        ('  exported_at: "2026-01-01T00:00:00Z"', '  exported_at: "2026-01-02T00:00:00Z"')
    ]
    for i in (0, 1):
        modes = {
            stat.S_IMODE(path.stat().st_mode): path.is_dir()
            for path in (tmp_path / str(i) / "net", *(tmp_path / str(i) / "net").rglob("*"))
        }
        assert modes == {0o755: True, 0o644: False}


def test_two_runs_in_one_process_write_the_same_bytes(tmp_path):
    assert snapshot(write(tmp_path / "a" / "net")) == snapshot(write(tmp_path / "b" / "net"))


# --- in one step or not at all ------------------------------------------------------------------------------------


def test_the_gate_sees_the_complete_bundle_beside_the_target(tmp_path):
    seen = []

    def gate(staged: Path) -> None:
        bundle = open_bundle(staged)
        assert verify_files(bundle, "all") == []
        seen.append((staged, discover([tmp_path])))
        assert not (tmp_path / "net").exists()

    write(tmp_path / "net", gate=gate)
    assert seen == [(tmp_path / f".net.{os.getpid()}.partial", [])]
    assert os.listdir(tmp_path) == ["net"]


class Stop(BaseException):
    """What Ctrl-C is: no Exception."""


def fail(*_: object, **__: object) -> None:
    raise Stop


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(
    "step", ["write_weights", "digest_file", "_set_modes", "gate", "_sync_tree", "_install", "_rename", "os.mkdir"]
)
def test_a_failure_at_any_step_changes_nothing(tmp_path, monkeypatch, step, existing):
    target = tmp_path / "net"
    if existing:
        write(target, description="old", extra_files={"old.txt": b"old"})
    before = snapshot(tmp_path)
    if step == "os.mkdir":
        monkeypatch.setattr(os, "mkdir", fail)
    elif step != "gate":
        monkeypatch.setattr(staging if hasattr(staging, step) else writer, step, fail)
    with pytest.raises(Stop):
        write(target, overwrite=existing, gate=fail if step == "gate" else None)
    monkeypatch.undo()
    assert snapshot(tmp_path) == before
    assert os.listdir(tmp_path) == (["net"] if existing else [])
    assert open_bundle(write(target, overwrite=existing)).manifest.description == ""


def test_an_existing_bundle_needs_overwrite(tmp_path):
    write(tmp_path / "net", description="old")
    before = snapshot(tmp_path)
    error = refused(tmp_path / "net", "X-12", str(tmp_path / "net"), "exists")
    assert "overwrite" in (error.hint or "")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("exchange", [True, False])
def test_overwriting_replaces_the_bundle_as_a_whole(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(staging, "_rename", lambda *_: False)
    write(tmp_path / "net", modules={1: b"1", 4: b"4", 8: b"8"}, extra_files={"old.txt": b"old"})
    write(tmp_path / "net", modules={1: b"new"}, overwrite=True)
    assert sorted(snapshot(tmp_path / "net")) == ["manifest.yaml", "model.b1.mlir", "weights.safetensors"]
    assert os.listdir(tmp_path) == ["net"]


def test_without_exchange_a_failed_second_rename_brings_the_old_bundle_back(tmp_path, monkeypatch):
    write(tmp_path / "net", description="old")
    before = snapshot(tmp_path)
    monkeypatch.setattr(staging, "_rename", lambda *_: False)
    real = os.rename

    def rename(source, target):
        if str(source).endswith(f"{os.getpid()}.partial"):
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "net", overwrite=True)
    assert snapshot(tmp_path) == before
    assert os.listdir(tmp_path) == ["net"]


def test_a_target_that_appears_meanwhile_is_not_replaced(tmp_path):
    def gate(_: Path) -> None:
        (tmp_path / "net").mkdir()

    with pytest.raises(BundleError, match=r"exists|appeared") as raised:
        write(tmp_path / "net", gate=gate)
    assert raised.value.rule == "X-12"
    assert os.listdir(tmp_path) == ["net"]
    assert os.listdir(tmp_path / "net") == []


def test_the_rename_itself_refuses_a_target_that_appeared(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(BundleError, match="appeared"):
        staging._rename(tmp_path / "a", tmp_path / "b", staging._NOREPLACE)
    with pytest.raises(OSError, match="No such file"):
        staging._rename(tmp_path / "missing", tmp_path / "b", staging._EXCHANGE)


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_what_is_no_bundle_is_never_replaced(tmp_path, kind):
    target = tmp_path / "net"
    if kind == "file":
        target.write_text("precious")
    elif kind == "link":
        write(tmp_path / "real" / "net")
        target.symlink_to(tmp_path / "real" / "net")
    else:
        target.mkdir()
        (target / "thesis.tex").write_text("precious")
    before = snapshot(tmp_path)
    refused(target, "X-12", str(target), "not replaced", overwrite=True)
    assert snapshot(tmp_path) == before


def test_an_empty_directory_may_be_overwritten(tmp_path):
    (tmp_path / "net").mkdir()
    refused(tmp_path / "net", "X-12", "exists")
    assert open_bundle(write(tmp_path / "net", overwrite=True)).name == "net"


def test_what_a_dead_process_of_the_same_id_left_is_removed(tmp_path):
    left = tmp_path / f".net.{os.getpid()}.partial"
    left.mkdir()
    (left / "half.bin").write_text("half")
    write(tmp_path / "net")
    assert os.listdir(tmp_path) == ["net"]
    assert "half.bin" not in snapshot(tmp_path / "net")


def test_two_writers_of_one_bundle_in_one_process_do_not_mix(tmp_path):
    inner = []

    def gate(staged: Path) -> None:
        before = snapshot(staged)
        with pytest.raises(BundleError, match="being written by another export") as raised:
            write(tmp_path / "net")
        inner.append(raised.value.rule)
        assert snapshot(staged) == before

    write(tmp_path / "net", gate=gate)
    assert inner == ["X-12"]


def test_leftovers_that_cannot_be_removed_do_not_fail_the_export(tmp_path, monkeypatch, caplog):
    write(tmp_path / "net", description="old")

    def rmtree(*_: object, **__: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(staging.shutil, "rmtree", rmtree)
    write(tmp_path / "net", description="new", overwrite=True)
    assert open_bundle(tmp_path / "net").manifest.description == "new"
    assert "Device or resource busy" in caplog.text
    assert [found.name for found in discover([tmp_path])] == ["net"]


def test_a_manifest_error_is_a_manifest_error(tmp_path):
    assert isinstance(refused(tmp_path / "net", "B-26", executable_inputs=[X, X]), ManifestError)


CRASH = """
import os, sys
from rsrv.bundle import IOSpec, write_bundle
spec = IOSpec("x", "f32", (1, 3), batch_axis=0)
write_bundle(sys.argv[1], name="net", executable_inputs=[spec], executable_outputs=[spec], modules={1: b""},
             weights=[], overwrite=True, gate=lambda staged: os._exit(9))
"""


def test_a_process_that_dies_while_it_writes_leaves_the_old_bundle_in_place(tmp_path):
    target = write(tmp_path / "net", description="old")
    before = snapshot(target)
    done = subprocess.run([sys.executable, "-c", CRASH, str(target)], check=False)
    assert done.returncode == 9
    assert snapshot(target) == before
    assert [found.name for found in discover([tmp_path])] == ["net"]
    assert open_bundle(write(target, overwrite=True)).manifest.description == ""
