"""Traffic and caches on paper: Zipf sequences of requests, and what an LRU cache of so many bytes makes of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class CacheRun:
    """What a cache did with a sequence of requests.

    Attributes:
        hits: for each request, whether the model was there.
        evictions: models that were thrown out.
        loaded_bytes: of all loads.
        peak_bytes: the most that was in the cache.
    """

    hits: tuple[bool, ...]
    evictions: int
    loaded_bytes: int
    peak_bytes: int

    def hit_rate(self, skip: int = 0) -> float:
        """Share of the requests after the first `skip` that found their model."""
        counted = self.hits[skip:]
        return sum(counted) / len(counted) if counted else float("nan")

    def misses(self, skip: int = 0) -> int:
        return self.hits[skip:].count(False)


def lru(sequence: Sequence[int], sizes: Sequence[int], budget: int) -> CacheRun:
    """A cache of `budget` bytes that evicts the least recently used models until the next one fits.

    `sequence` has indices into `sizes`. A model that is larger than the budget is loaded into the empty cache, since it
    could never run otherwise; it goes with the next load.
    """
    cache: OrderedDict[int, int] = OrderedDict()
    resident = peak = loaded = evictions = 0
    hits = []
    for model in sequence:
        hits.append(model in cache)
        if model in cache:
            cache.move_to_end(model)
            continue
        need = sizes[model]
        while cache and resident + need > budget:
            resident -= cache.popitem(last=False)[1]
            evictions += 1
        cache[model] = need
        resident += need
        loaded += need
        peak = max(peak, resident)
    return CacheRun(tuple(hits), evictions, loaded, peak)


def zipf(models: int, exponent: float = 1.0) -> np.ndarray:
    """Probabilities of `models` ranks: that of rank k is proportional to k^-exponent; they add up to 1."""
    weights = np.arange(1, models + 1, dtype=np.float64) ** -exponent
    return weights / weights.sum()


def zipf_sequence(models: int, requests: int, *, exponent: float = 1.0, seed: int = 0) -> list[int]:
    """`requests` independent draws of a model; which of them are the popular ones is drawn, too."""
    rng = np.random.default_rng(seed)
    by_rank = rng.permutation(models)
    drawn: list[int] = by_rank[rng.choice(models, requests, p=zipf(models, exponent))].tolist()
    return drawn
