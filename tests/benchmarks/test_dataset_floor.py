"""The two ends of the `dataset` case that are ours alone: its images with their answers, and its floor."""

import glob
import os

import numpy as np
import pytest

from benchmarks.dataset_floor import floor
from benchmarks.dataset_images import SHAPE, check, chunks, generate, totals


def test_every_image_is_another_and_its_total_is_exact():
    rows = range(19_990, 20_000)
    images = np.empty((len(rows), *SHAPE), np.float32)
    generate(rows, images)
    exact = images[:, :, ::32, ::32].astype(np.float64).sum((1, 2, 3))
    np.testing.assert_array_equal(totals(rows), exact)
    assert len(set(exact)) == len(rows)
    check(rows, totals(rows))
    for wrong in (None, totals(rows)[::-1], totals(rows)[:-1]):
        with pytest.raises(RuntimeError, match="images 19990 to 19999"):
            check(rows, wrong)


def test_chunks_are_full_but_for_the_last():
    assert chunks(7, 3) == [range(3), range(3, 6), range(6, 7)]


def test_the_floor_takes_every_chunk_across_and_leaves_nothing():
    with floor(2, 3) as bring:
        bring(15)
        bring(1)
    assert glob.glob(f"/dev/shm/rsrv-floor-{os.getpid()}-*") == []
