"""Provenance: facts of a real repository, a patch that applies, no credentials, and nothing that raises or hangs."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rsrv
from rsrv.bundle import provenance
from rsrv.bundle.git import Git, without_credentials
from rsrv.bundle.iospec import IOSpec
from rsrv.bundle.provenance import collect_provenance
from rsrv.bundle.writer import write_bundle

BINARY = bytes(range(256)) * 8


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", *identity, "-C", str(directory), *arguments],
        check=True,
        capture_output=True,
        env=environment,
    )
    return done.stdout.decode().strip()


@pytest.fixture
def repository(tmp_path):
    """One commit on branch `main`: a text file, one without a final newline, one in Latin-1, one binary."""
    directory = tmp_path / "sources"
    directory.mkdir()
    git(directory, "init", "-q", "-b", "main")
    (directory / "model.py").write_text("a = 1\n")
    (directory / "end.txt").write_text("last line\n")
    (directory / "latin.txt").write_bytes(b"caf\xe9\n")
    (directory / "weights.bin").write_bytes(BINARY)
    git(directory, "add", ".")
    git(directory, "commit", "-q", "-m", "one")
    return directory


@pytest.fixture
def dirty(repository):
    (repository / "model.py").write_text("a = 2\n")
    (repository / "end.txt").write_text("last line without an end")
    (repository / "latin.txt").write_bytes(b"na\xefve\r\n")
    (repository / "weights.bin").write_bytes(BINARY[::-1])
    (repository / "added.py").write_text("b = 1\n")
    git(repository, "add", "added.py")
    (repository / "untracked.py").write_text("c = 1\n")
    return repository


def test_a_clean_repository_gives_its_facts(repository):
    git(repository, "remote", "add", "origin", "https://user:token@example.org/team/net.git")
    facts = collect_provenance(repository, {"converter": "mine", "git_branch": "chosen"})
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", facts.pop("exported_at"))
    assert facts == {
        "python_version": platform.python_version(),
        "rsrv_version": rsrv.__version__,
        "git_commit": git(repository, "rev-parse", "HEAD"),
        "git_tree_sha1": git(repository, "rev-parse", "HEAD^{tree}"),
        "git_branch": "chosen",
        "git_dirty": False,
        "repo_remote": "https://example.org/team/net.git",
        "converter": "mine",
    }


def test_a_subdirectory_tells_of_the_whole_repository(dirty):
    (dirty / "sub").mkdir()
    facts = collect_provenance(dirty / "sub")
    assert facts["git_branch"] == "main"
    assert "model.py" in facts["git_diff"]


def test_a_detached_head_is_called_head(repository):
    git(repository, "checkout", "-q", "--detach")
    assert collect_provenance(repository)["git_branch"] == "HEAD"


def test_a_repository_without_commits_has_no_commit(tmp_path):
    git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "f").write_text("x")
    facts = collect_provenance(tmp_path)
    assert facts["git_dirty"] is True
    assert not {"git_commit", "git_tree_sha1", "git_diff", "repo_remote"} & set(facts)


def test_untracked_files_make_it_dirty_but_are_not_in_the_diff(repository):
    (repository / "untracked.py").write_text("c = 1\n")
    facts = collect_provenance(repository)
    assert facts["git_dirty"] is True
    assert "git_diff" not in facts


@pytest.mark.parametrize(
    "config",
    [
        {},
        {
            "diff.noprefix": "true",
            "diff.mnemonicPrefix": "true",
            "color.ui": "always",
            "diff.external": "false",
            "diff.renames": "copies",
            "diff.relative": "true",
            "diff.context": "0",
            "core.quotePath": "false",
            "status.showUntrackedFiles": "no",
            "core.pager": "false",
        },
    ],
)
def test_the_patch_of_a_bundle_restores_the_working_tree(dirty, tmp_path, config):
    for key, value in config.items():
        git(dirty, "config", key, value)
    facts = collect_provenance(dirty)
    spec = IOSpec("x", "f32", (1,))
    bundle = write_bundle(
        tmp_path / "net",
        name="net",
        executable_inputs=[spec],
        executable_outputs=[spec],
        modules={0: b""},
        weights=[],
        provenance=facts,
    )
    fresh = tmp_path / "fresh"
    git(tmp_path, "clone", "-q", str(dirty), str(fresh))
    git(fresh, "checkout", "-q", facts["git_commit"])
    git(fresh, "apply", "--binary", str(bundle / "working_tree.patch"))
    for name in ("model.py", "end.txt", "latin.txt", "weights.bin", "added.py"):
        assert (fresh / name).read_bytes() == (dirty / name).read_bytes()
    assert not (fresh / "untracked.py").exists()


def test_the_diff_can_be_left_out(dirty):
    facts = collect_provenance(dirty, diff=False)
    assert facts["git_dirty"] is True
    assert "git_diff" not in facts


def test_a_diff_above_the_limit_is_left_out_with_a_warning(dirty, monkeypatch, caplog):
    size = len(provenance.patch_bytes(collect_provenance(dirty)["git_diff"]))
    monkeypatch.setattr(provenance, "MAX_DIFF_BYTES", size)
    assert "git_diff" in collect_provenance(dirty)
    assert not caplog.records
    monkeypatch.setattr(provenance, "MAX_DIFF_BYTES", size - 1)
    facts = collect_provenance(dirty)
    assert "git_diff" not in facts
    assert facts["git_dirty"] is True
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(size - 1) in caplog.text


def test_the_environment_of_a_surrounding_hook_does_not_count(dirty, tmp_path, monkeypatch):
    wanted = collect_provenance(dirty)
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q", "-b", "elsewhere")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    monkeypatch.setenv("GIT_PREFIX", "sub/")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "remote.origin.url")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://evil.example.org")
    assert {**collect_provenance(dirty), "exported_at": wanted["exported_at"]} == wanted


def test_git_is_only_read(dirty):
    before = {path: path.stat().st_mtime_ns for path in (dirty / ".git").rglob("*")}
    collect_provenance(dirty)
    assert {path: path.stat().st_mtime_ns for path in (dirty / ".git").rglob("*")} == before


@pytest.mark.parametrize("place", ["plain", "missing", "file", "bare"])
def test_what_is_no_working_tree_gives_one_warning_and_the_other_facts(tmp_path, caplog, place):
    if place == "plain":
        (tmp_path / "plain").mkdir()
    elif place == "file":
        (tmp_path / "file").write_text("")
    elif place == "bare":
        git(tmp_path, "init", "-q", "--bare", "bare")
    facts = collect_provenance(tmp_path / place, {"a": 1})
    assert set(facts) == {"exported_at", "python_version", "rsrv_version", "a"}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(tmp_path / place) in caplog.text


def test_a_machine_without_git_gives_one_warning(repository, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(repository))
    assert "git_commit" not in collect_provenance(repository)
    assert ["git cannot be started" in record.getMessage() for record in caplog.records] == [True]


def fake_git(directory: Path, script: str) -> str:
    path = directory / "git"
    path.write_text(f"#!{sys.executable}\n{script}\n")
    path.chmod(0o755)
    return str(directory)


def test_a_git_that_hangs_is_ended(tmp_path, monkeypatch, caplog):
    script = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    monkeypatch.setenv("PATH", fake_git(tmp_path, script))
    monkeypatch.setattr(provenance, "GIT_SECONDS", 1.0)
    assert set(collect_provenance(tmp_path)) == {"exported_at", "python_version", "rsrv_version"}
    assert "took too long" in caplog.text
    pid = (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else ""
    if pid:  # else it was ended before it came so far
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_an_endless_output_is_cut_and_git_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", fake_git(tmp_path, "import os\nwhile True: os.write(1, b'x' * 65536)"))
    answer = Git(tmp_path, seconds=60)("diff", limit=1000)
    assert (answer.output, answer.error, answer.cut) == (b"x" * 1000, None, True)


def test_many_words_on_stderr_neither_block_nor_fill_memory(tmp_path, monkeypatch):
    script = (
        "import os\nfor _ in range(64): os.write(2, b'warning\\n' * 8192)\nos.write(1, b'fine')\nraise SystemExit(3)"
    )
    monkeypatch.setenv("PATH", fake_git(tmp_path, script))
    answer = Git(tmp_path, seconds=60)("status")
    assert (answer.output, answer.error, answer.line) == (b"fine", "warning", None)


def test_nothing_raises_whatever_goes_wrong_inside(repository, monkeypatch, caplog):
    monkeypatch.setattr(provenance, "without_credentials", lambda _: 1 / 0)
    git(repository, "remote", "add", "origin", "https://example.org/net")
    assert "git_commit" not in collect_provenance(repository)
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("remote", "published"),
    [
        ("https://user:token@example.org/net.git", "https://example.org/net.git"),
        ("https://ghp_token@github.com/team/net", "https://github.com/team/net"),
        ("HTTPS://x-oauth-basic:t@example.org:8443/net", "HTTPS://example.org:8443/net"),
        ("http://u:p%40ss@[::1]:80/net", "http://[::1]:80/net"),
        ("https://user:p@ss@example.org/net", "https://example.org/net"),
        ("https://user:p/ss@example.org/net", "https://example.org/net"),
        ("https://user:p?ss#x@example.org/net", "https://example.org/net"),
        ("https://example.org/net?access_token=abc#frag", "https://example.org/net"),
        ("https://example.org/@scope/net", "https://example.org/@scope/net"),
        ("https://example.org:8443/@scope/net", "https://example.org:8443/@scope/net"),
        ("ftp://user:pw@example.org/net", "ftp://example.org/net"),
        ("ssh://git@example.org:22/net.git", "ssh://git@example.org:22/net.git"),
        ("ssh://git:secret@example.org/net.git", "ssh://git@example.org/net.git"),
        ("git+ssh://git:secret@example.org/net.git", "git+ssh://git@example.org/net.git"),
        ("git@example.org:team/net.git", "git@example.org:team/net.git"),
        ("git:secret@example.org:team/net.git", "git@example.org:team/net.git"),
        ("/srv/git/net.git", "/srv/git/net.git"),
        ("../net@2", "../net@2"),
        ("file:///srv/git/net.git", "file:///srv/git/net.git"),
        ("codecommit::us-east-1://profile:key@net", "codecommit::us-east-1://net"),
        ("transport::https://user:token@example.org/net", "transport::https://example.org/net"),
    ],
)
def test_credentials_never_leave_a_remote(remote, published):
    assert without_credentials(remote) == published
    assert without_credentials(published) == published
