import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrv.core.errors import Shed
from rsrv.gateway.shm.turns import EVERY_NAME, Turn, Turns


class Line:
    def __init__(self, limit=1024):
        self.turns = Turns(limit)
        self.begun = []

    def take(self, name, label=None):
        turn = Turn(name, lambda: self.begun.append(label or name))
        self.turns.take(turn)
        return turn


def test_operations_on_different_names_run_side_by_side():
    line = Line()
    line.take("a")
    line.take("b")
    assert line.begun == ["a", "b"]


def test_operations_on_one_name_run_one_after_the_other():
    line = Line()
    first = line.take("a", "first")
    second = line.take("a", "second")
    line.take("a", "third")
    assert line.begun == ["first"]
    line.turns.leave(first)
    assert line.begun == ["first", "second"]
    line.turns.leave(second)
    assert line.begun == ["first", "second", "third"]


def test_an_operation_on_all_names_waits_for_all_before_it_and_is_waited_for():
    line = Line()
    a, b = line.take("a"), line.take("b")
    every = line.take(EVERY_NAME, "every")
    line.take("c")
    line.turns.leave(a)
    assert line.begun == ["a", "b"]
    line.turns.leave(b)
    assert line.begun == ["a", "b", "every"]
    line.turns.leave(every)
    assert line.begun == ["a", "b", "every", "c"]


def test_a_long_line_that_ends_at_once_is_no_deep_stack():
    turns, ran = Turns(2000), []
    first = Turn("a", lambda: None)
    turns.take(first)

    def stand():
        turn = Turn("a", lambda: (ran.append(1), turns.leave(turn)))
        turns.take(turn)

    for _ in range(1500):
        stand()
    turns.leave(first)
    assert len(ran) == 1500


def test_a_line_that_is_full_takes_nobody_more():
    line = Line(limit=2)
    first = line.take("a")
    line.take("a")
    with pytest.raises(Shed, match="2 operations"):
        line.take("b")
    line.turns.leave(first)
    line.take("b")


def test_a_begin_that_raises_does_not_stop_the_others():
    turns, begun = Turns(10), []

    def broken():
        raise RuntimeError("broken")

    turn = Turn("a", broken)
    with pytest.raises(RuntimeError):
        turns.take(turn)
    turns.take(Turn("b", lambda: begun.append("b")))
    assert begun == ["b"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c", EVERY_NAME]), max_size=12), st.randoms(use_true_random=False))
def test_no_two_that_stand_in_each_others_way_run_at_a_time_and_all_get_their_turn(names, random):
    turns, running, ended, made = Turns(100), [], [], []
    for number, name in enumerate(names):
        made.append(Turn(name, lambda number=number, name=name: running.append((number, name, made[number]))))
        turns.take(made[number])
        assert_compatible(running)
        if running and random.random() < 0.5:
            leave(turns, running, ended, random)
    while running:
        assert_compatible(running)
        leave(turns, running, ended, random)
    assert len(ended) == len(names)
    for name in {"a", "b", "c"}:
        mine = [number for number, its in ended if its in (name, EVERY_NAME)]
        assert mine == sorted(mine)


def leave(turns, running, ended, random):
    number, name, turn = running.pop(random.randrange(len(running)))
    ended.append((number, name))
    turns.leave(turn)


def assert_compatible(running):
    names = [name for _, name, _ in running]
    assert len(set(names)) == len(names)
    assert EVERY_NAME not in names or len(names) == 1


def test_turns_on_many_threads_all_come():
    turns, done = Turns(1000), []

    def work(name):
        for _ in range(50):
            ended = threading.Event()
            turn = Turn(name, ended.set)
            turns.take(turn)
            assert ended.wait(10)
            turns.leave(turn)
            done.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "a", "b", EVERY_NAME)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(done) == 200
