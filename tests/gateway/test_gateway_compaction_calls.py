from contextlib import ExitStack

import grpc
import pytest
from support.gateway_front import SECONDS, Front, refusal
from support.gateway_site import wait_until

from rsrv.core.errors import Code
from rsrv.gateway.admin.compaction import MAX_OPEN
from rsrv.gateway.methods import COMPACT
from rsrv.protos import control as pb


@pytest.fixture
def front():
    with ExitStack() as stack:
        yield Front(stack)


def answer(front, *counts):
    for mock, (models, n_bytes) in zip(front.mocks, counts, strict=True):
        response = pb.CompactMemoryResponse(reloaded_models=models, resident_bytes_after=n_bytes)
        mock.answer("CompactMemory", response.SerializeToString())


def test_an_operators_call_goes_to_every_worker_and_the_answers_are_summed(front):
    answer(front, (2, 100), (1, 50))
    found = front.call("CompactMemory", reload_models=["m", "n"])
    assert (found.reloaded_models, found.resident_bytes_after) == (3, 150)
    for mock in front.mocks:
        (seen,) = mock.seen("CompactMemory")
        assert list(pb.CompactMemoryRequest.FromString(seen.body).reload_models) == ["m", "n"]
        assert 290 < seen.remaining <= 300
    assert set(front.counters.snapshot().worker_latency) == {("CompactMemory", mock.url) for mock in front.mocks}


def test_some_that_fail_are_a_warning_and_all_that_fail_unavailable(front, caplog):
    answer(front, (2, 100), (1, 50))
    front.mocks[1].fail("CompactMemory", Code.INTERNAL, "no")
    assert front.call("CompactMemory").reloaded_models == 2
    assert "memory was not compacted everywhere worker1: no" in caplog.text
    front.mocks[0].close()
    with pytest.raises(grpc.RpcError) as error:
        front.call("CompactMemory")
    code, reason, text = refusal(error)
    assert (code, reason) == ("UNAVAILABLE", "no_workers")
    assert text.startswith("CompactMemory failed on all workers: [")


def test_only_so_many_calls_of_operators_are_open_at_a_time(front):
    for mock in front.mocks:
        mock.hang("CompactMemory")
    method = front.channel.unary_unary(COMPACT, None, None)
    calls = [method.future(b"", timeout=SECONDS) for _ in range(MAX_OPEN)]
    for mock in front.mocks:
        for _ in calls:
            assert mock.entered.acquire(timeout=SECONDS)
    with pytest.raises(grpc.RpcError) as error:
        front.call("CompactMemory")
    assert refusal(error)[:2] == ("RESOURCE_EXHAUSTED", "shed")
    for mock in front.mocks:
        mock.resume("CompactMemory")
    assert [call.result() for call in calls] == [b""] * MAX_OPEN
    front.call("CompactMemory")


@pytest.mark.parametrize("method", ["ModelControlStatus", "SetModelResidency", "SetModelPolicy"])
def test_the_other_methods_are_for_workers_and_the_text_says_where_they_are(front, method):
    with pytest.raises(grpc.RpcError) as error:
        front.call(method)
    code, reason, text = refusal(error)
    assert (code, reason) == ("UNIMPLEMENTED", "unimplemented")
    assert f"a gateway does not answer {method}: ask a worker" in text
    assert all(mock.url in text for mock in front.mocks)


def test_after_a_repack_only_the_changed_workers_are_told_each_its_own_models(front):
    with front.router.lock:
        front.compaction.after_repack({front.mocks[1].url: ["b", "a"], "127.0.0.1:1": ["x"]})
    assert front.mocks[1].entered.acquire(timeout=SECONDS)
    (seen,) = front.mocks[1].seen("CompactMemory")
    assert list(pb.CompactMemoryRequest.FromString(seen.body).reload_models) == ["a", "b"]
    assert front.mocks[0].count("CompactMemory") == 0


def test_a_worker_that_still_compacts_is_left_out(front, caplog):
    first, second = front.mocks
    first.hang("CompactMemory")
    front.compaction.after_repack({first.url: []})
    assert first.entered.acquire(timeout=SECONDS)
    front.compaction.after_repack({first.url: [], second.url: []})
    assert second.entered.acquire(timeout=SECONDS)
    assert first.count("CompactMemory") == 1
    first.resume("CompactMemory")
    wait_until(lambda: not front.compaction._busy)
    front.compaction.after_repack({first.url: []})
    assert first.entered.acquire(timeout=SECONDS)


def test_a_worker_that_cannot_compact_is_a_warning(front, caplog):
    front.mocks[0].fail("CompactMemory", Code.FAILED_PRECONDITION, "not now")
    front.compaction.after_repack({front.mocks[0].url: ["m"]})
    wait_until(lambda: "memory was not compacted after a repack worker=worker0" in caplog.text)
    assert "FAILED_PRECONDITION not now" in caplog.text
