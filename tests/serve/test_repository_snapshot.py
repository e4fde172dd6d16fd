"""What a look at real directories finds."""

import os
import stat
import subprocess

import pytest
from repository_support import write_bundle

from rsrv.serve.repository.snapshot import BROKEN_LINK, DIRECTORY_LINK, FileStat, scan


@pytest.fixture
def repo(tmp_path):
    path = tmp_path / "repo"
    path.mkdir()
    return path


def test_a_directory_with_a_manifest_is_a_bundle_and_has_all_its_regular_files(repo):
    write_bundle(repo / "a", **{"vocab.txt": b"x", "model.v0.b4.mlir": b"p"})
    (repo / "a" / "tokenizer").mkdir()
    (repo / "a" / "tokenizer" / "merges.txt").write_bytes(b"m")
    (repo / "not-a-bundle").mkdir()
    (repo / "file").write_bytes(b"")
    found = scan([repo])
    assert list(found) == ["a"]
    assert sorted(found["a"].files) == [
        "manifest.yaml",
        "model.mlir",
        "model.v0.b4.mlir",
        "tokenizer/merges.txt",
        "vocab.txt",
        "weights.safetensors",
    ]
    status = os.stat(repo / "a" / "vocab.txt")
    assert found["a"].files["vocab.txt"] == FileStat(1, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    directory = os.stat(repo / "a")
    assert found["a"].identity == (directory.st_dev, directory.st_ino)
    assert list(found.bare) == [repo / "not-a-bundle"]


def test_swap_files_hidden_files_and_files_being_written_do_not_count(repo):
    write_bundle(repo / "a")
    before = scan([repo])["a"].files
    for name in [".manifest.yaml.swp", "manifest.yaml~", "w.tmp", "w.partial", ".git", "x.swo", ".#m", "4913.swx"]:
        (repo / "a" / name).write_bytes(b"x")
    write_bundle(repo / ".hidden")
    write_bundle(repo / "b.tmp")
    found = scan([repo])
    assert list(found) == ["a"]
    assert found["a"].files == before


def test_a_fifo_in_a_bundle_is_neither_counted_nor_opened(repo):
    os.mkfifo(write_bundle(repo / "a") / "pipe")
    assert "pipe" not in scan([repo])["a"].files


def test_only_included_names_are_found(repo):
    write_bundle(repo / "a")
    write_bundle(repo / "b")
    assert list(scan([repo], ["b", "c"])) == ["b"]


def test_of_two_bundles_with_one_name_the_one_in_the_first_root_is_found(tmp_path):
    for root in ("one", "two"):
        write_bundle(tmp_path / root / "a", weights=root.encode())
    roots = [tmp_path / "one", tmp_path / "two"]
    assert scan(roots)["a"].path == tmp_path / "one" / "a"
    assert scan(roots[::-1])["a"].path == tmp_path / "two" / "a"


def test_a_root_that_is_given_twice_counts_once(repo, tmp_path):
    write_bundle(repo / "a")
    (tmp_path / "link").symlink_to(repo)
    found = scan([repo, tmp_path / "link", str(repo) + "/../repo"])
    assert found["a"].path == repo / "a"
    assert list(found.roots) == [repo]
    assert not found.unreadable


def test_a_root_that_is_missing_is_left_out_and_the_others_are_read(repo, tmp_path):
    write_bundle(repo / "a")
    found = scan([tmp_path / "missing", repo])
    assert list(found) == ["a"]
    assert found.unreadable == {tmp_path / "missing"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_bundle_that_cannot_be_read_is_told_apart_from_one_that_is_gone(repo):
    write_bundle(repo / "a")
    (repo / "a").chmod(0)
    try:
        assert scan([repo]).unreadable == {repo / "a"}
    finally:
        (repo / "a").chmod(stat.S_IRWXU)


def test_a_bundle_behind_a_link_is_the_directory_that_it_leads_to(repo):
    write_bundle(repo / ".store" / "v1")
    (repo / "a").symlink_to(".store/v1")
    found = scan([repo])["a"]
    assert found.path == repo / "a"
    assert found.identity[1] == os.stat(repo / ".store" / "v1").st_ino


def test_files_behind_links_are_those_that_they_lead_to(repo, tmp_path):
    write_bundle(repo / "a")
    target = tmp_path / "shared.safetensors"
    target.write_bytes(b"12345")
    (repo / "a" / "weights.safetensors").unlink()
    (repo / "a" / "weights.safetensors").symlink_to(target)
    found = scan([repo])["a"]
    assert found.files["weights.safetensors"].size == 5
    assert str(tmp_path) in [place.path for place in found.places if place.only == target.name]


def test_a_link_to_a_directory_counts_as_which_one_it_is_and_a_broken_one_as_broken(repo):
    write_bundle(repo / "a")
    (repo / "assets-1").mkdir()
    (repo / "a" / "assets").symlink_to("../assets-1")
    (repo / "a" / "nothing").symlink_to("nowhere")
    (repo / "a" / "loop").symlink_to("loop")
    files = scan([repo])["a"].files
    assert files["assets"].size == DIRECTORY_LINK
    assert files["assets"].inode == os.stat(repo / "assets-1").st_ino
    assert files["nothing"].size == files["loop"].size == BROKEN_LINK


def test_a_directory_that_was_replaced_by_a_file_and_a_link_to_nothing_are_not_there(repo):
    write_bundle(repo / "a")
    (repo / "a").rename(repo / ".a")
    (repo / "a").write_bytes(b"")
    (repo / "b").symlink_to("nowhere")
    found = scan([repo])
    assert not found
    assert not found.bare
    assert not found.unreadable


def test_names_that_are_not_allowed_are_found_as_at_the_start_of_the_server(repo):
    names = ["tab\there", os.fsdecode(b"latin-\xe9")]
    for name in names:
        write_bundle(repo / name)
    assert sorted(scan([repo])) == sorted(names)
    assert all(found.signature for found in scan([repo]).values())


def test_a_bundle_that_is_kept_is_not_looked_at_but_one_that_left_is_gone(repo):
    write_bundle(repo / "a")
    write_bundle(repo / "b")
    before = scan([repo])
    (repo / "a" / "weights.safetensors").write_bytes(b"other")
    (repo / "b").rename(repo / "c")
    found = scan([repo], keep=before)
    assert found["a"] is before["a"]
    assert sorted(found) == ["a", "c"]


def test_the_signature_is_that_of_the_versions_of_all_files(repo):
    write_bundle(repo / "a")
    before = scan([repo])["a"].signature
    assert scan([repo])["a"].signature == before
    (repo / "a" / "vocab.txt").write_bytes(b"")
    assert scan([repo])["a"].signature != before


def test_a_bundle_with_a_thousand_nested_directories_is_walked(repo):
    path = write_bundle(repo / "a")
    fd = os.open(path, os.O_RDONLY)
    try:
        for _ in range(1100):
            os.mkdir("d", dir_fd=fd)
            inner = os.open("d", os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = inner
    finally:
        os.close(fd)
    found = scan([repo])
    assert len(found["a"].places) == 1101
    # Deeper than what Python's own removal can do.
    subprocess.run(["rm", "-r", path], check=True)
