"""What the residency benchmarks compare a server with: LRU on paper, Zipf traffic, models with known answers."""

import os
import random
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.budget_curve import Point, draw
from benchmarks.caching import lru, zipf, zipf_sequence
from benchmarks.catalogue import COLUMNS, MIB, write_catalogue
from benchmarks.linechart import ticks
from benchmarks.replay import memory, pss
from rsrv.bundle import open_bundle
from rsrv.bundle.safetensors import ordered, read_header
from rsrv.core.wire import encode_response, join, parse_request


def answer(row):
    return join(encode_response("any", "", [("y", row[None].astype(np.float32))]))


def naive_lru(sequence, sizes, budget):
    """By looking back: a list in order of use, searched every time."""
    held, hits, evictions, loaded, peak = [], [], 0, 0, 0
    for model in sequence:
        hits.append(model in held)
        if model in held:
            held.remove(model)
        else:
            loaded += sizes[model]
            while held and sum(sizes[other] for other in held) + sizes[model] > budget:
                held.pop(0)
                evictions += 1
        held.append(model)
        peak = max(peak, sum(sizes[other] for other in held))
    return tuple(hits), evictions, loaded, peak


def test_the_least_recently_used_model_goes_first():
    run = lru([0, 1, 0, 2, 0, 1], [1, 1, 1], 2)
    assert run.hits == (False, False, True, False, True, False)
    assert (run.evictions, run.loaded_bytes, run.peak_bytes) == (2, 4, 2)
    assert run.hit_rate() == pytest.approx(2 / 6)
    assert (run.hit_rate(skip=2), run.misses(skip=2)) == (0.5, 2)


def test_a_model_larger_than_the_budget_is_loaded_alone():
    run = lru([0, 1, 1, 0], [1, 9], 4)
    assert run.hits == (False, False, True, False)
    assert run.peak_bytes == 9
    assert run.evictions == 2


@pytest.mark.parametrize("seed", range(20))
def test_the_simulation_does_what_a_naive_one_does(seed):
    rng = random.Random(seed)
    sizes = [rng.randint(1, 9) for _ in range(12)]
    sequence = [rng.randrange(12) for _ in range(300)]
    budget = rng.randint(1, sum(sizes) + 2)
    run = lru(sequence, sizes, budget)
    assert (run.hits, run.evictions, run.loaded_bytes, run.peak_bytes) == naive_lru(sequence, sizes, budget)
    if budget >= max(sizes):
        assert run.peak_bytes <= budget


def test_a_budget_for_all_loads_each_model_once():
    sizes = [3, 1, 2]
    run = lru([0, 1, 2] * 50, sizes, sum(sizes))
    assert (run.misses(), run.evictions, run.loaded_bytes) == (3, 0, 6)


def test_zipf_probabilities_fall_with_the_rank_and_add_up_to_one():
    p = zipf(100)
    assert p.sum() == pytest.approx(1)
    assert p[0] / p[9] == pytest.approx(10)
    assert zipf(4, 0.0) == pytest.approx([0.25] * 4)


def test_a_zipf_sequence_follows_its_seed_and_its_probabilities():
    sequence = zipf_sequence(50, 20_000, seed=3)
    assert sequence == zipf_sequence(50, 20_000, seed=3)
    assert sequence != zipf_sequence(50, 20_000, seed=4)
    shares = np.sort(np.bincount(sequence, minlength=50))[::-1] / len(sequence)
    assert shares[:5] == pytest.approx(zipf(50)[:5], rel=0.1)


def test_the_answer_of_a_catalogue_model_is_the_sum_of_every_weight_in_its_file(tmp_path):
    entries = write_catalogue(tmp_path, [MIB // 2, MIB // 4], tensor_bytes=MIB // 4)
    for entry, tensors in zip(entries, (2, 1), strict=True):
        bundle = open_bundle(entry.path)
        header = read_header(bundle.weights_path)
        data = bundle.weights_path.read_bytes()[header.data_offset :]
        arrays = [np.frombuffer(data[w.begin : w.end], np.float32).reshape(w.shape) for w in ordered(header)]
        assert len(arrays) == tensors
        assert sum(array.nbytes for array in arrays) == entry.nbytes
        (x,) = parse_request(entry.stream.body).tensors(None)
        assert x.data.shape == (1, COLUMNS)
        right = x.data[0] + np.sum([array.sum(0) for array in arrays], axis=0)
        assert entry.stream.check(answer(right))
        right[7] += 1
        assert not entry.stream.check(answer(right))
    assert not entries[0].stream.check(answer(np.zeros(COLUMNS, np.float32)))


def test_equal_sizes_give_equal_programs_and_different_weights(tmp_path):
    one, other = write_catalogue(tmp_path, [MIB // 4, MIB // 4], tensor_bytes=MIB // 4)
    assert (one.path / "model.b4.mlir").read_bytes() == (other.path / "model.b4.mlir").read_bytes()
    assert one.weights.read_bytes() != other.weights.read_bytes()


@pytest.mark.parametrize(
    ("largest", "wanted"),
    [(100, [0, 20, 40, 60, 80, 100]), (0.31, [0, 0.1, 0.2, 0.3, 0.4]), (23, [0, 5, 10, 15, 20, 25])],
)
def test_ticks_are_round_numbers_up_to_the_largest_value(largest, wanted):
    assert ticks(largest) == pytest.approx(wanted)


def test_the_figure_is_well_formed_and_has_every_point_of_every_line():
    points = [Point(0.2, 0.5, 0.6, 0.51, 9.0, 20.0, 2.0, 5.5), Point(1.0, 1.0, 1.0, 1.0, None, None, 2.0, 2.0)]
    facts = {"models": 100, "requests": 10, "cores": 2, "cpu": "A & B <C>"}
    root = ElementTree.fromstring(draw(points, facts))
    space = {"s": "http://www.w3.org/2000/svg"}
    lines = [line.get("points").split() for line in root.findall(".//s:polyline", space)]
    assert [len(line) for line in lines] == [2, 2, 2, 1, 2, 2]
    assert any("A & B <C>" in (text.text or "") for text in root.findall(".//s:text", space))
    width, height = (float(root.get(name)) for name in ("width", "height"))
    for x, y in (map(float, point.split(",")) for line in lines for point in line):
        assert 0 < x < width
        assert 0 < y < height


def test_memory_of_a_process_is_read_in_bytes():
    assert 1 << 20 < pss(os.getpid()) <= memory(os.getpid()) <= memory(os.getpid(), "VmHWM")
