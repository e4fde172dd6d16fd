import json

import pytest
from support.bundles import write_affine

from rsrv.cli.main import main
from rsrv.cli.plan import parse_size
from rsrv.core.errors import UsageError


@pytest.fixture
def repo(tmp_path, monkeypatch):
    monkeypatch.setenv("RSRV_ALLOW_FAKE", "1")
    monkeypatch.setenv("RSRV_WORKER_RUNTIME_BACKEND", "fake")
    write_affine(tmp_path / "repo" / "affine", batch_sizes=(1, 8))
    return tmp_path / "repo"


def test_plan_prints_a_line_for_each_model_and_the_total(repo, capsys):
    assert main(["plan", str(repo), "--device-memory", "1MiB"]) == 0
    out, err = capsys.readouterr()
    title, header, model, total = out.splitlines()
    assert title == "arena 921.6 KiB of 1.0 MiB on cuda"
    assert header.split() == ["model", "weights", "scratch", "programs", "code", "placement"]
    assert model.startswith("affine  512 B    96 B (indicative)  2")
    assert model.endswith("pinned")
    assert total.startswith("total")
    assert "compiling affine batch 8" in err
    assert "compiled for fake and are indicative" in err


def test_plan_as_json_has_whole_numbers(repo, capsys):
    assert main(["plan", str(repo), "--device-memory", "1000", "--target", "cpu", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["device_memory"], plan["arena"], plan["weight_pool"], plan["indicative"]) == (1000, 1000, 904, True)
    (model,) = plan["models"]
    assert (model["name"], model["weights"], model["scratch"], model["placement"]) == ("affine", 24, 96, "pinned")
    assert [program["batch_size"] for program in model["programs"]] == [1, 8]


def test_a_bundle_that_cannot_be_served_is_named_and_fails_the_command(repo, capsys):
    (repo / "affine" / "weights.safetensors").unlink()
    assert main(["plan", str(repo), "--device-memory", "1GiB"]) == 1
    assert "unusable: bundle 'affine': no weights.safetensors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("80GiB", 80 << 30), ("24GB", 24 * 10**9), ("512M", 512 << 20), ("1.5 kib", 1536), ("7", 7), ("7B", 7)],
)
def test_sizes_are_numbers_with_a_binary_or_a_decimal_unit(text, n_bytes):
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "80 apples", "-1", "0", "iB", "1PiB"])
def test_what_is_no_size_is_wrong_usage(text):
    with pytest.raises(UsageError):
        parse_size(text)
