"""The short form of ``make zoo``: two models that need PyTorch alone, and what is done with results."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from zoo.__main__ import main
from zoo.child import XLA, Order
from zoo.models import all_models, find
from zoo.phases import DECOMPOSE, EXPORT, LOWER, SERIALISE, STEPS, TOTAL, Clock
from zoo.report import document
from zoo.results import FAILED, SERVED, Result, append, read
from zoo.run import run
from zoo.scaling import scaling_jobs, scaling_of
from zoo.weights import calibrate, enliven

pytestmark = pytest.mark.torch

RESULT = Result(
    "plain-conv",
    SERVED,
    batch_sizes=(1, 4),
    parameters_mb=1.25,
    programs_kb=3.4,
    cpu={EXPORT: 1.0, DECOMPOSE: 2.0, LOWER: 0.3, SERIALISE: 0.1, XLA: 0.7, TOTAL: 4.0},
    max_abs=3e-8,
    rel=1.4e-7,
    spread=0.2,
    batch_export="dynamic",
    facts={"cpu": "a processor", "cores": 2, "python": "3.11", "packages": {"torch": "2.13.0"}},
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_models_are_exported_checked_served_and_written_to_the_document(tmp_path, capfd):
    cache, written = tmp_path / "results.jsonl", tmp_path / "zoo.md"
    arguments = ["--only", "plain-conv,plain-attention", "--cache", str(cache), "--document", str(written)]
    code, log = main(arguments), cache.with_suffix(".log")
    assert code == 0, f"{capfd.readouterr().err}\n{log.read_text() if log.exists() else ''}"
    results = read(cache)
    assert list(results) == ["plain-conv", "plain-attention"]
    for result in results.values():
        assert result.served
        assert 0 <= result.rel <= 1e-5
        assert result.spread > 1e-2
        assert result.batch_export == "dynamic"
        assert set(STEPS) | {TOTAL, XLA} == set(result.cpu)
        assert result.cpu[TOTAL] >= result.cpu[EXPORT] + result.cpu[DECOMPOSE]
    assert "2 of 2 models are exported, checked and served" in written.read_text()
    assert "…" in capfd.readouterr().err
    assert main(arguments) == 0
    assert "…" not in capfd.readouterr().err, "what the cache has is not done again"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_process_that_dies_is_a_failed_model_and_the_run_goes_on(tmp_path):
    heard: list[str] = []
    orders = [Order("gone", "no-such-model"), Order("also gone", "no-such-model")]
    results = run(orders, tmp_path / "results.jsonl", say=heard.append)
    assert [result.status for result in results] == [FAILED, FAILED]
    assert results[0].error == "its process ended with 1; see results.log"
    assert heard[-1].startswith("[2/2] also gone failed at process")
    assert "the zoo has no 'no-such-model'" in (tmp_path / "results.log").read_text()


def test_the_table_has_the_numbers_of_each_model_and_the_facts_of_the_machine():
    text = document(all_models(), {"plain-conv": RESULT})
    row = "| plain-conv | torch.nn | seeded | 1.2 | 3.0 | 0.4 | 0.7 | 3 | 3.0e-08 | 1.4e-07 | yes |  |"
    assert row in text.splitlines()
    assert "**1 of 1 models are exported, checked and served**, 0 of them with trained weights." in text
    assert "Measured on a processor, 2 cores, Python 3.11, torch 2.13.0." in text
    assert "Not served" not in text
    assert f" {len(all_models()) - 1} more of the zoo have not been measured here yet." in text


def test_a_model_that_failed_is_listed_with_what_was_said():
    failed = Result("plain-attention", FAILED, stage="export", error="aten.nonzero: the size | depends on values")
    text = document(all_models(), {"plain-conv": RESULT, "plain-attention": failed})
    assert "**1 of 2 models" in text
    assert "- **plain-attention**, at *export*: aten.nonzero: the size | depends on values" in text
    assert "| plain-attention | torch.nn | seeded |  |  |  |  |  |  |  | **no** |  |" in text


def test_other_batch_sizes_and_graphs_for_each_of_them_are_noted():
    result = replace(RESULT, batch_sizes=(1, 2), batch_export="retraced")
    assert "| batch sizes 1, 2; retraced |" in document(all_models(), {"plain-conv": result})


def test_the_last_result_of_a_name_counts_and_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    append(path, Result("plain-conv", FAILED, stage="make", error="broken"))
    append(path, RESULT)
    assert read(path) == {"plain-conv": RESULT}
    assert len(path.read_text().splitlines()) == 2
    assert json.loads(path.read_text().splitlines()[1])["status"] == "served"
    assert read(tmp_path / "nothing.jsonl") == {}


def test_three_batch_sizes_are_compared_with_one_by_the_medians_of_their_runs():
    jobs = scaling_jobs(runs=3)
    assert [job.batch_sizes for job in jobs] == [(1,), (1, 8, 32)] * 3
    seconds = iter([2.0, 5.0, 9.0, 4.0, 3.0, 6.0])  # of one size: 2, 9, 3; of three: 5, 4, 6
    results = {}
    for job in jobs:
        spent = {TOTAL: next(seconds), EXPORT: 1.0}
        results[job.name] = replace(RESULT, name=job.name, cpu=spent, wall=spent)
    scaling = scaling_of(results)
    assert scaling is not None
    assert scaling.runs == 3
    assert scaling.ratio == pytest.approx(5 / 3)
    text = document(all_models(), results)
    assert "**1.67 × one** in processor time (1.67 on the wall); wanted ≤ 2.8." in text
    assert "| torch.export | 1.0 (1.0) | 1.0 (1.0) |" in text
    assert "| **export_bundle** | 3.0 (3.0) | 5.0 (5.0) |" in text
    assert scaling_of({job.name: results[job.name] for job in jobs[:1]}) is None


def test_the_clock_adds_up_and_counts_what_raises():
    clock = Clock()
    with pytest.raises(ValueError), clock.step("a"):
        raise ValueError
    assert clock.timed("a", lambda value: value + 1)(1) == 2
    assert clock.wall["a"] >= 0
    assert set(clock.cpu) == {"a"}


def test_the_list_needs_none_of_the_packages_and_has_models_of_each_source():
    models = all_models()
    assert len(models) >= 70
    assert {"torchvision", "timm", "transformers", "torchcrepe", "facenet-pytorch"} <= {
        m.source for m in models.values()
    }
    assert sum(model.weights == "trained" for model in models.values()) >= 7
    with pytest.raises(KeyError, match="did you mean 'tv-resnet50'"):
        find("tv-resnet500")


def test_an_unknown_name_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--only", "nonsense"])
    assert ended.value.code == 2
    assert "the zoo has no 'nonsense'; python -m zoo --list shows what it has" in capsys.readouterr().err


def test_a_head_that_begins_at_zero_answers_after_it_was_enlivened():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    nn.init.zeros_(module[1].weight)
    nn.init.zeros_(module[1].bias)
    before = module[0].weight.clone()
    answer = enliven(module)(torch.rand(2, 3))
    assert answer.std() > 0
    assert torch.equal(module[0].weight, before), "what varies is left as it is"


def test_calibrated_normalisation_has_the_statistics_of_the_batch_and_is_in_evaluation_mode():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Dropout(0.5))
    batch = torch.rand(8, 1, 4, 4) * 100
    calibrate(module, (batch,))
    assert not any(part.training for part in module.modules())
    assert module[1].momentum == 0.1
    answer = module(batch).detach().numpy()
    np.testing.assert_allclose(answer.mean((0, 2, 3)), 0, atol=1e-4)
    np.testing.assert_allclose(answer.std((0, 2, 3)), 1, rtol=0.05)
