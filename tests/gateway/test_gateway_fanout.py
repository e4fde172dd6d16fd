import threading

import pytest
from support.scripted_workers import ScriptedWorker

from rsrv.core.errors import Code
from rsrv.gateway.faces.fanout import fan_out, gather, unanswered
from rsrv.gateway.workers.outcome import Outcome

PATH = "/inference.GRPCInferenceService/ServerReady"


def workers(count):
    made = [ScriptedWorker(str(number)) for number in range(count)]
    for worker in made:
        worker.hold_calls = True
    return made


def test_all_are_asked_at_once_and_the_outcomes_come_once_in_the_order_of_their_ends():
    asked, found = workers(3), []
    fan_out(asked, PATH, b"body", 7.5, found.append)
    assert [(told.body, told.timeout) for worker in asked for told in worker.open] == [(b"body", 7.5)] * 3
    for number in (2, 0):
        asked[number].answer()
    assert found == []
    asked[1].answer(Outcome(Code.INTERNAL))
    assert [list(outcomes) for outcomes in found] == [["2", "0", "1"]]
    assert found[0]["1"].code is Code.INTERNAL


def test_without_workers_there_is_nothing_to_wait_for():
    found = []
    fan_out([], PATH, b"", 1.0, found.append)
    assert found == [{}]


def test_calls_that_end_before_they_return_are_counted_as_well():
    asked, found = [ScriptedWorker("a"), ScriptedWorker("b")], []
    fan_out(asked, PATH, b"", 1.0, found.append)
    assert [list(outcomes) for outcomes in found] == [["a", "b"]]


def test_what_follows_may_fail_without_harm_to_the_thread_that_told(caplog):
    asked = workers(1)
    gather(asked, lambda worker, done: worker.call(PATH, b"", timeout=1.0, done=done), lambda outcomes: 1 / 0)
    asked[0].answer()
    assert "what follows a call to 1 workers failed" in caplog.text


def test_ends_on_many_threads_make_one_conclusion():
    asked, found = workers(16), []
    fan_out(asked, PATH, b"", 1.0, found.append)
    threads = [threading.Thread(target=worker.answer) for worker in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [len(outcomes) for outcomes in found] == [16]


@pytest.mark.parametrize(
    ("outcome", "silent"),
    [
        (Outcome(Code.UNAVAILABLE, text="refused"), True),
        (Outcome(Code.DEADLINE_EXCEEDED), True),
        (Outcome(Code.CANCELLED, text="Channel closed!"), True),
        (Outcome(Code.UNAVAILABLE, trailers={"rsrv-reason": "stopping"}), False),
        (Outcome(Code.INTERNAL), False),
        (Outcome(Code.OK), False),
    ],
)
def test_silence_is_what_no_worker_gave_a_reason_for(outcome, silent):
    assert unanswered(outcome) is silent
