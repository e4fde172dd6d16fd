"""`golden.safetensors`: what is written is read back, by the stock library too; anything else is refused by rule."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from rsrv.bundle.golden import read_golden, write_golden
from rsrv.bundle.safetensors import write_weights
from rsrv.bundle.tensors import load_tensors, open_tensors
from rsrv.core.errors import BundleError, WeightsError

SAMPLES = [
    {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "a/b": np.array([[1], [2]], np.int64)},
    {"x": -np.arange(6, dtype=np.float32).reshape(2, 3), "a/b": np.array([[3], [4]], np.int64)},
]
ANSWERS = [{"y": np.array([0.5, 1.5], ml_dtypes.bfloat16)}, {"y": np.array([2.5, 3.5], ml_dtypes.bfloat16)}]


def test_goldens_are_read_back_in_order_with_their_dtypes(tmp_path: Path) -> None:
    write_golden(tmp_path / "golden.safetensors", SAMPLES, ANSWERS)
    goldens = read_golden(tmp_path / "golden.safetensors")
    assert len(goldens) == 2
    for golden, sample, answer in zip(goldens, SAMPLES, ANSWERS, strict=True):
        assert list(golden.inputs) == ["x", "a/b"]
        for name, array in {**sample, **answer}.items():
            found = {**golden.inputs, **golden.outputs}[name]
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)


def test_the_stock_library_reads_the_file_under_documented_names(tmp_path: Path) -> None:
    write_golden(tmp_path / "g", SAMPLES[:1], [{"y": np.float32([1])}])
    assert sorted(safetensors.numpy.load_file(tmp_path / "g")) == ["input/0/a/b", "input/0/x", "output/0/y"]


def test_equal_goldens_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_golden(tmp_path / name, [dict(sample) for sample in SAMPLES], ANSWERS)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_no_golden_at_all_is_a_file_too(tmp_path: Path) -> None:
    write_golden(tmp_path / "g", [], [])
    assert read_golden(tmp_path / "g") == []


@pytest.mark.parametrize(
    ("samples", "answers", "says"),
    [
        (SAMPLES, ANSWERS[:1], "2 samples, but 1 references"),
        ([{}], ANSWERS[:1], "golden 0 has no inputs"),
        (SAMPLES[:1], [{}], "golden 0 has no outputs"),
    ],
)
def test_incomplete_goldens_are_not_written(tmp_path: Path, samples: list, answers: list, says: str) -> None:
    with pytest.raises(BundleError, match=says) as error:
        write_golden(tmp_path / "g", samples, answers)
    assert error.value.rule == "X-58"
    assert not (tmp_path / "g").exists()


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["weight"], "'weight' is not called input/<i>/<name>"),
        (["input/x"], "is not called"),
        (["input/01/x", "output/01/y"], "is not called"),
        (["input/-1/x"], "is not called"),
        (["input/²/x"], "is not called"),
        (["input/1/x", "output/1/y"], "none with the number 0"),
        (["input/0/x"], "golden 0 has no outputs"),
        (["output/0/y"], "golden 0 has no inputs"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, names: list[str], says: str) -> None:
    write_weights(tmp_path / "g", [(name, np.float32([1])) for name in names])
    with pytest.raises(BundleError, match=says) as error:
        read_golden(tmp_path / "g")
    assert error.value.rule == "X-58"


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    write_golden(tmp_path / "g", SAMPLES, ANSWERS)
    os.truncate(tmp_path / "g", (tmp_path / "g").stat().st_size - 1)
    with pytest.raises(WeightsError, match="B-60"):
        read_golden(tmp_path / "g")


def test_tensors_come_in_argument_order_and_cannot_be_written(tmp_path: Path) -> None:
    write_weights(tmp_path / "w", [("b", np.float32([[1, 2]])), ("a", np.zeros((0, 2), np.int8)), ("c", np.int64(3))])
    tensors = load_tensors(tmp_path / "w")
    assert [(name, array.shape) for name, array in tensors.items()] == [("b", (1, 2)), ("a", (0, 2)), ("c", ())]
    with pytest.raises(ValueError, match="read-only"):
        tensors["b"][0, 0] = 5


def test_a_file_that_shrinks_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    write_weights(tmp_path / "w", [("a", np.arange(1000, dtype=np.float32))])
    with open_tensors(tmp_path / "w") as file:
        os.truncate(tmp_path / "w", 200)
        with pytest.raises(WeightsError, match="while it was read"):
            file.read("a")
