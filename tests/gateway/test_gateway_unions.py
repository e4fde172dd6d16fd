import pytest

from rsrv.core.errors import Code
from rsrv.gateway.faces.answer import status_name
from rsrv.gateway.faces.unions import read, sum_of_statistics, union_of_indexes
from rsrv.gateway.workers.outcome import Outcome
from rsrv.protos import inference as pb


def index(*rows):
    models = [pb.RepositoryIndexResponse.ModelIndex(name=n, state=s, reason=r) for n, s, r in rows]
    return pb.RepositoryIndexResponse(models=models)


def union(answers):
    found = union_of_indexes(answers, lambda url: f"name of {url}")
    return [(row.name, row.version, row.state, row.reason) for row in found.models]


def test_a_model_is_ready_when_it_is_ready_anywhere():
    answers = {
        "a": index(("m", "UNAVAILABLE", "preparing"), ("only-a", "READY", "")),
        "b": index(("m", "READY", ""), ("only-b", "UNAVAILABLE", "manifest: broken")),
    }
    assert union(answers) == [
        ("m", "", "READY", ""),
        ("only-a", "", "READY", ""),
        ("only-b", "", "UNAVAILABLE", "manifest: broken"),
    ]


def test_a_ready_model_keeps_the_note_that_one_of_its_workers_has():
    note = "the last reload failed: weights"
    answers = {"b": index(("m", "READY", note)), "a": index(("m", "READY", "")), "c": index(("m", "UNAVAILABLE", "x"))}
    assert union(answers) == [("m", "", "READY", note)]


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (("preparing", "preparing"), "preparing"),
        (("", "preparing"), "preparing"),
        (("", ""), ""),
        (("preparing", "failed: x"), "name of a: preparing; name of b: failed: x"),
    ],
)
def test_the_reasons_of_a_model_that_nobody_serves(reasons, expected):
    answers = {url: index(("m", "UNAVAILABLE", reason)) for url, reason in zip("ab", reasons, strict=True)}
    assert union(answers) == [("m", "", "UNAVAILABLE", expected)]


def test_no_answers_are_an_empty_index():
    assert union({}) == []


def statistics(name, count, last, *, queue_ns=0, batch=None):
    row = pb.ModelStatistics(
        name=name, version="1", last_inference=last, inference_count=count, execution_count=count // 2
    )
    row.inference_stats.success.count, row.inference_stats.success.ns = count, 10 * count
    row.inference_stats.queue.ns = queue_ns
    if batch is not None:
        row.batch_stats.add(batch_size=batch).compute_infer.count = count
    return pb.ModelStatisticsResponse(model_stats=[row])


def test_statistics_are_summed_and_the_last_inference_is_the_latest():
    found = sum_of_statistics({"b": statistics("m", 4, 7), "a": statistics("m", 6, 5, queue_ns=3)})
    (row,) = found.model_stats
    assert (row.name, row.version) == ("m", "1")
    assert (row.inference_count, row.execution_count, row.last_inference) == (10, 5, 7)
    assert (row.inference_stats.success.count, row.inference_stats.success.ns) == (10, 100)
    assert row.inference_stats.queue.ns == 3


def test_statistics_of_batches_are_summed_by_size():
    found = sum_of_statistics({url: statistics("m", 2, 0, batch=size) for url, size in (("a", 1), ("b", 1), ("c", 8))})
    assert {batch.batch_size: batch.compute_infer.count for batch in found.model_stats[0].batch_stats} == {1: 4, 8: 2}


def test_models_on_different_workers_are_rows_of_their_own_sorted():
    found = sum_of_statistics({"a": statistics("z", 1, 0), "b": statistics("m", 1, 0)})
    assert [row.name for row in found.model_stats] == ["m", "z"]


def test_what_workers_answered_and_what_became_of_the_others():
    answers, failures = read(
        pb.IsSameIPCNamespaceResponse,
        {
            "a": Outcome(Code.OK, pb.IsSameIPCNamespaceResponse(same=True).SerializeToString()),
            "b": Outcome(Code.OK, b"\xff\xff"),
            "c": Outcome(Code.UNAVAILABLE, text="refused"),
            "d": Outcome(Code.INTERNAL),
        },
    )
    assert answers == {"a": pb.IsSameIPCNamespaceResponse(same=True)}
    assert failures["b"] == "it answers with 2 bytes that are no inference.IsSameIPCNamespaceResponse"
    assert (failures["c"], failures["d"]) == ("refused", "INTERNAL")


def test_statuses_are_named_as_in_metrics():
    names = [status_name(code) for code in (Code.OK, Code.NOT_FOUND, Code.RESOURCE_EXHAUSTED, Code.DEADLINE_EXCEEDED)]
    assert names == ["OK", "NotFound", "ResourceExhausted", "DeadlineExceeded"]
