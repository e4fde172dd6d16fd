"""``rsrv cache``: listing and clearing, by age or altogether, and what is said when there is no cache."""

import json
import os

import pytest

from rsrv.cli.cache import age_seconds
from rsrv.cli.main import main
from rsrv.core.errors import UsageError
from rsrv.runtime.cache import DIRECTORY, open_cache
from rsrv.runtime.cache_directory import SUFFIX
from rsrv.runtime.compiled import Compiled
from rsrv.stablehlo import ProgramReport, ProgramSignature

COMPILED = Compiled(ProgramReport(ProgramSignature((), ())), b"x" * 5000, 0.5)


@pytest.fixture
def cache_dir(tmp_path):
    cache = open_cache(tmp_path, {"device": "cpu", "jaxlib": "0.10.2", "threads": "2"})
    for name, label in (("a" * 64, "old batch 1"), ("b" * 64, "new batch 8")):
        cache.store(name, COMPILED, label=label)
    cache.close()
    os.utime(tmp_path / DIRECTORY / ("a" * 64 + SUFFIX), (0, 0))
    return tmp_path


def test_ls_lists_programs_with_what_they_are_compiled_for(cache_dir, capsys):
    assert main(["cache", "ls", str(cache_dir)]) == 0
    title, _, first, second = capsys.readouterr().out.splitlines()
    assert "2 programs, 10." in title
    assert "new batch 8" in first
    assert "just now" in first
    assert "device cpu, jaxlib 0.10.2, threads 2" in first
    assert second.startswith("aaaaaaaaaaaa  old batch 1")


def test_ls_as_json_has_whole_numbers_and_whole_keys(cache_dir, capsys):
    assert main(["cache", "ls", str(cache_dir), "--json"]) == 0
    newest, oldest = json.loads(capsys.readouterr().out)
    assert (newest["key"], newest["program"], newest["problem"]) == ("b" * 64, "new batch 8", None)
    assert newest["bytes"] == (cache_dir / DIRECTORY / ("b" * 64 + SUFFIX)).stat().st_size
    assert oldest["last_used"] == 0
    assert newest["compiled_for"]["jaxlib"] == "0.10.2"


def test_ls_says_what_cannot_be_used(cache_dir, capsys):
    (cache_dir / DIRECTORY / f"c{SUFFIX}").write_bytes(b"nonsense")
    assert main(["cache", "ls", str(cache_dir)]) == 0
    assert "unusable: its 8 bytes are not an entry of this version" in capsys.readouterr().out


def test_clear_removes_what_was_not_used_for_long_or_everything(cache_dir, capsys):
    assert main(["cache", "clear", str(cache_dir), "--older-than", "30d"]) == 0
    assert capsys.readouterr().out.startswith("removed 1 programs, ")
    assert main(["cache", "clear", str(cache_dir), "--all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == 1
    assert list((cache_dir / DIRECTORY).iterdir()) == []


def test_the_directory_may_come_from_the_variable_of_the_servers(cache_dir, capsys, monkeypatch):
    monkeypatch.setenv("RSRV_WORKER_CACHE_DIR", str(cache_dir))
    assert main(["cache", "ls", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ls"], "which cache?"),
        (["ls", "{tmp}/none"], "holds no executable cache"),
        (["clear", "{tmp}"], "wanted either --all or --older-than"),
        (["clear", "{tmp}", "--all", "--older-than", "1d"], "wanted either --all or --older-than"),
        (["clear", "{tmp}", "--older-than", "soon"], "'soon' is no age"),
    ],
)
def test_what_makes_no_sense_is_wrong_usage(cache_dir, capsys, monkeypatch, arguments, words):
    monkeypatch.delenv("RSRV_WORKER_CACHE_DIR", raising=False)
    assert main(["cache", *(argument.format(tmp=cache_dir) for argument in arguments)]) == 2
    assert words in capsys.readouterr().err


def test_a_cache_that_others_may_write_to_is_not_touched(cache_dir, capsys):
    (cache_dir / DIRECTORY).chmod(0o777)
    assert main(["cache", "clear", str(cache_dir), "--all"]) == 1
    assert "mode 0777, wanted 0700" in capsys.readouterr().err


def test_ages_are_numbers_with_a_unit():
    assert [age_seconds(text) for text in ("90s", "2m", "1.5h", "1d", "2w")] == [90, 120, 5400, 86400, 1209600]
    with pytest.raises(UsageError):
        age_seconds("-1d")
