"""Series as a table, and the text of Prometheus made of them at a scrape. What they tell is the rooms' business."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[str, tuple[str, ...], Any]
"""Name of the series without the prefix, the values of its labels, and its value: a number or a `HistogramValue`."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric: its name without the prefix, its labels beside the constant ones, and its help."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


class HistogramValue(NamedTuple):
    """What prometheus_client wants to know: (upper bound, how many were up to it), and the sum of all values."""

    buckets: list[tuple[str, int]]
    total: float


def histogram(bounds: Iterable[float], counts: Sequence[int], total: float) -> HistogramValue:
    """`counts` are those of each bound alone and, as the last, of what is above all."""
    return HistogramValue(list(zip((*map(str, bounds), "+Inf"), accumulate(counts), strict=True)), total)


class Exposition:
    """The text of one server, with a registry of its own; metrics of the process and of its memory come with it.

    Nothing here is kept between scrapes: `samples` is asked each time, and may give those of a series in any order.
    """

    def __init__(
        self,
        prefix: str,
        series: Mapping[str, Series],
        samples: Callable[[], Iterable[Sample]],
        *,
        constant_labels: Mapping[str, str] = {},
    ) -> None:
        self._prefix = prefix
        self._series = series
        self._samples = samples
        self._constant = dict(constant_labels)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        GCCollector(registry=self._registry)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """The text exposition, format 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at every scrape."""
        families: dict[str, Metric] = {}
        for name, labels, value in self._samples():
            family = families.get(name)
            if family is None:
                family = families[name] = self._family(self._series[name])
            self._add(family, self._series[name], labels, value)
        yield from (families[name] for name in self._series if name in families)

    def _family(self, series: Series) -> Metric:
        extra = [label for label in self._constant if label not in series.labels]
        labels = [*series.labels, *extra]
        name = self._prefix + series.name
        if series.type == "counter":
            return CounterMetricFamily(name, series.help, labels=labels)
        if series.type == "gauge":
            return GaugeMetricFamily(name, series.help, labels=labels)
        return HistogramMetricFamily(name, series.help, labels=labels)

    def _add(self, family: Metric, series: Series, labels: tuple[str, ...], value: Any) -> None:
        values = [*labels, *(text for label, text in self._constant.items() if label not in series.labels)]
        if isinstance(family, HistogramMetricFamily):
            family.add_metric(values, buckets=value.buckets, sum_value=value.total)
        elif isinstance(family, (CounterMetricFamily, GaugeMetricFamily)):
            family.add_metric(values, value)
