"""The request metrics of Triton Inference Server under their own names, for dashboards and alerts that exist already.

Names, labels and units are those of its ``docs/user_guide/metrics.md``: no ``_total`` at the end of a counter, which
prometheus_client would add, and microseconds. Every model has the version 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rsrv.serve.counters import TRITON_STAGES
from rsrv.serve.registry import ModelState

if TYPE_CHECKING:
    from rsrv.serve.counters import RequestSnapshot
    from rsrv.serve.scheduler.stats import ModelStats
    from rsrv.serve.sources import Sources

VERSION = "1"


@dataclass(frozen=True, slots=True)
class TritonSeries:
    """One metric: its whole name, its labels, and its help."""

    name: str
    type: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    help: str


_MODEL = ("model", "version")
TRITON_SERIES = {
    series.name: series
    for series in (
        TritonSeries("nv_inference_request_success", "counter", _MODEL, "Requests that were answered."),
        TritonSeries(
            "nv_inference_request_failure",
            "counter",
            (*_MODEL, "reason"),
            "Requests that were not: REJECTED (shed, a full queue, too late, not ready), CANCELED, BACKEND (internal "
            "errors), OTHER.",
        ),
        TritonSeries("nv_inference_count", "counter", _MODEL, "Rows that were answered."),
        TritonSeries("nv_inference_exec_count", "counter", _MODEL, "Executions."),
        TritonSeries("nv_inference_pending_request_count", "gauge", _MODEL, "Requests that wait."),
        TritonSeries(
            "nv_inference_request_duration_us", "counter", _MODEL, "Microseconds from arrival to answer, summed up."
        ),
        TritonSeries("nv_inference_queue_duration_us", "counter", _MODEL, "Those spent in the queue."),
        TritonSeries(
            "nv_inference_compute_input_duration_us", "counter", _MODEL, "Those of decode, preprocess and upload."
        ),
        TritonSeries("nv_inference_compute_infer_duration_us", "counter", _MODEL, "Those of the execution."),
        TritonSeries(
            "nv_inference_compute_output_duration_us", "counter", _MODEL, "Those of download, postprocess and encode."
        ),
    )
}

_REJECTED = frozenset(("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNAVAILABLE"))


def exposition(sources: Sources, constant_labels: Mapping[str, str]) -> str:
    """All of them in the Prometheus text format 0.0.4, for the models that are ready."""
    scheduled = sources.scheduled()
    lines: dict[str, list[str]] = {name: [] for name in TRITON_SERIES}
    for entry in sources.registry.entries():
        stats = scheduled.get(entry.name)
        if entry.state is not ModelState.READY or stats is None:
            continue
        for name, more, value in _samples(sources.counters.snapshot(entry.name), stats):
            labels = {"model": entry.name, "version": VERSION, **more}
            labels.update({label: text for label, text in constant_labels.items() if label not in labels})
            pairs = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            lines[name].append(f"{name}{{{pairs}}} {value}")
    text: list[str] = []
    for series in TRITON_SERIES.values():
        text += [f"# HELP {series.name} {series.help}", f"# TYPE {series.name} {series.type}", *lines[series.name]]
    return "\n".join(text) + "\n"


def _samples(requests: RequestSnapshot, stats: ModelStats) -> Iterator[tuple[str, Mapping[str, str], int]]:
    yield "nv_inference_request_success", {}, requests.success_count
    for reason, count in _failures(requests).items():
        yield "nv_inference_request_failure", {"reason": reason}, count
    yield "nv_inference_count", {}, requests.rows
    yield "nv_inference_exec_count", {}, stats.dispatch_count
    yield "nv_inference_pending_request_count", {}, stats.queue_depth
    yield "nv_inference_request_duration_us", {}, requests.success_ns // 1000
    for part, stages in TRITON_STAGES.items():
        yield f"nv_inference_{part}_duration_us", {}, requests.stage_ns(*stages) // 1000


def _failures(requests: RequestSnapshot) -> dict[str, int]:
    counts = dict.fromkeys(("REJECTED", "CANCELED", "BACKEND", "OTHER"), 0)
    for status, count in requests.statuses.items():
        if status in _REJECTED:
            counts["REJECTED"] += count
        elif status == "CANCELLED":
            counts["CANCELED"] += count
        elif status == "INTERNAL":
            counts["BACKEND"] += count
        elif status != "OK":
            counts["OTHER"] += count
    return counts


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
