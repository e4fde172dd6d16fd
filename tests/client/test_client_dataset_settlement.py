"""What is raised when several requests of a dataset failed: the first error, and what is to be said of others, once."""

import asyncio

import grpc
import numpy as np
import pytest

from rsrv.client import AsyncKServeModel, KServeModel, RetryPolicy
from rsrv.client.budget import Budget
from rsrv.client.dataset.settlement import settle
from rsrv.client.notes import Detail, ItemsNote
from rsrv.core.errors import QueueFull, RsrvError


def failure(error, rows, *notes):
    for note in notes:
        error.add_note(note)
    error.add_note(ItemsNote(f"items {rows.start} to {rows.stop - 1} of the dataset for model 'net'", rows))
    return error


def settled(*failures):
    with pytest.raises(type(failures[0])) as caught:
        settle(failures)
    assert caught.value is failures[0]
    return caught.value.__notes__


def test_no_failure_is_no_error():
    settle([])


def test_an_error_without_notes_gets_none():
    error = ValueError("alone")
    with pytest.raises(ValueError, match="alone"):
        settle([error])
    assert not hasattr(error, "__notes__")


def test_failures_alike_are_one_note_that_names_their_items():
    numbers = [range(4, 8), range(16, 20), range(4), range(8, 12)]
    failures = [failure(QueueFull("busy"), rows, Detail(f"2 attempts, {rows.start} s left")) for rows in numbers]
    assert settled(*failures) == [
        "2 attempts, 4 s left",
        "items 4 to 7 of the dataset for model 'net'",
        "failed alike: items 0 to 3, items 8 to 11, items 16 to 19",
    ]


def test_the_items_in_a_message_do_not_make_it_another_one():
    failures = [
        failure(ValueError(f"items {rows.start} to {rows.stop - 1} have 3 rows"), rows)
        for rows in (range(4), range(4, 8))
    ]
    assert settled(*failures) == ["items 0 to 3 of the dataset for model 'net'", "failed alike: items 4 to 7"]


def test_one_error_that_several_requests_raised_is_said_once():
    error = RuntimeError("the pool is gone")
    for rows in (range(4), range(4, 8), range(8, 12)):
        failure(error, rows, Detail(f"raised by encode_chunk({rows})"))
    assert settled(error, error, error) == [
        "raised by encode_chunk(range(0, 4))",
        "items 0 to 3 of the dataset for model 'net'",
        "failed alike: items 4 to 11",
    ]


def test_other_failures_are_notes_each_kind_once():
    failures = [
        failure(QueueFull("busy"), range(4)),
        *(failure(ValueError("bad"), range(at, at + 4), Detail("raised by decode_chunk")) for at in (4, 8, 12)),
        KeyError("progress"),
    ]
    assert settled(*failures) == [
        "items 0 to 3 of the dataset for model 'net'",
        "also failed: ValueError: bad (raised by decode_chunk; items 4 to 7 of the dataset for model 'net'; "
        "alike: items 8 to 15)",
        "also failed: KeyError: 'progress'",
    ]


def test_notes_of_the_users_are_kept():
    failures = [failure(ValueError("bad"), range(at, at + 4), f"file {at}.jpg") for at in (0, 4, 8)]
    assert settled(*failures) == [
        "file 0.jpg",
        "items 0 to 3 of the dataset for model 'net'",
        "failed alike: items 4 to 7 (file 4.jpg), items 8 to 11 (file 8.jpg)",
    ]


@pytest.mark.parametrize("awaited", [False, True])
def test_a_dataset_that_the_server_refuses_says_so_once(server, small_pools, awaited):
    server.outputs = [("y", "FP32", [-1, 4])]
    server.refuse["ModelInfer"] = (grpc.StatusCode.INTERNAL, "boom", "execution")
    x = np.zeros((200, 4), np.float32)
    options = {"shared_memory": "off", "max_batch_size": 4, "retry": RetryPolicy(enabled=False)}

    async def map_awaited():
        async with AsyncKServeModel(server.url, "twice", **options) as model:
            await model.map(x)

    def map_in_threads():
        with KServeModel(server.url, "twice", **options) as model:
            model.map(x)

    with pytest.raises(RsrvError, match="boom") as caught:
        asyncio.run(map_awaited()) if awaited else map_in_threads()
    assert len([note for note in caught.value.__notes__ if "of the dataset for model 'twice'" in note]) == 1
    assert len(caught.value.__notes__) <= 2


def test_a_budget_goes_on_after_time_that_is_not_the_requests_and_keeps_its_name():
    now = [100.0]
    before = Budget(10.0, clock=lambda: now[0])
    now[0] += 4
    left = before.remaining()
    now[0] += 50
    after = before.resumed(left)
    assert (after.seconds, after.left) == (10.0, 6.0)
    assert Budget(None).resumed(None).left is None
