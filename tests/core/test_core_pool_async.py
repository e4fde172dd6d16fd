"""The pool of buffers on event loops: one line for tasks and threads, and tasks that go while they wait."""

import asyncio
import gc
import random
import threading
import time
from collections import deque

import pytest

from rsrv.core.errors import PoolAcquireTimeout, PoolWithdrawn, UsageError
from rsrv.core.shm.pool import BufferPool

LONG = 30.0


@pytest.fixture
def pool():
    with BufferPool(4 * 64, n_slots=4, use_shm=False) as pool:
        yield pool
        assert pool.waiting == 0


def on_loop(main):
    """Run the coroutine function to its end, within bounds."""

    async def bounded():
        return await asyncio.wait_for(main(), LONG)

    return asyncio.run(bounded())


async def settle():
    """Let everything happen that can happen now."""
    for _ in range(6):
        await asyncio.sleep(0)


def thread(function, *args):
    worker = threading.Thread(target=function, args=args, daemon=True)
    worker.start()
    return worker


def test_a_task_gets_a_free_slot_at_once(pool):
    async def main():
        slot = await pool.aacquire(3)
        assert (slot.index, slot.span, pool.free) == (0, 3, 1)
        slot.release()

    on_loop(main)
    assert pool.free == 4


def test_a_task_is_refused_as_a_thread_is(pool):
    async def main():
        with pytest.raises(UsageError):
            await pool.aacquire(5)
        with pytest.raises(PoolAcquireTimeout):
            await pool.aacquire(1, time.monotonic() - 1)
        pool.close()
        with pytest.raises(PoolWithdrawn):
            await pool.aacquire(1)

    on_loop(main)


def test_a_waiting_task_wakes_by_itself_at_its_deadline(pool):
    async def main():
        pool.acquire(4)
        started = time.monotonic()
        with pytest.raises(PoolAcquireTimeout) as caught:
            await pool.aacquire(2, started + 0.1)
        assert caught.value.waited >= 0.09
        assert caught.value.span == 2

    on_loop(main)


def test_tasks_and_threads_stand_in_one_line(pool):
    order = []

    def blocking(name, span):
        slot = pool.acquire(span)
        order.append((name, slot.index))

    async def waiting(name, span):
        slot = await pool.aacquire(span)
        order.append((name, slot.index))

    async def main():
        held = pool.acquire(4)
        tasks, threads = [], []
        for i in range(4):
            if i % 2:
                threads.append(thread(blocking, f"thread {i}", 1))
                while pool.waiting <= i:
                    await asyncio.sleep(0.001)
            else:
                tasks.append(asyncio.create_task(waiting(f"task {i}", 1)))
                await settle()
        held.release()
        await asyncio.gather(*tasks)
        for worker in threads:
            await asyncio.to_thread(worker.join, LONG)

    on_loop(main)
    assert sorted(order, key=lambda entry: entry[0][-1]) == [
        ("task 0", 0),
        ("thread 1", 1),
        ("task 2", 2),
        ("thread 3", 3),
    ]


def test_a_cancelled_task_leaves_the_line(pool):
    async def main():
        held = pool.acquire(3)
        head = asyncio.create_task(pool.aacquire(4))
        await settle()
        next_one = asyncio.create_task(pool.aacquire(1))
        await settle()
        assert not next_one.done()
        head.cancel()
        await settle()
        assert head.cancelled()
        assert (await next_one).index == 3
        held.release()

    on_loop(main)
    assert pool.free == 3


def test_a_slot_that_comes_to_a_task_as_it_is_cancelled_goes_to_the_next(pool):
    async def main():
        held = pool.acquire(4)
        first, second = (asyncio.create_task(pool.aacquire(4)) for _ in range(2))
        await settle()
        held.release()  # granted to the first, which has not run yet
        assert pool.free == 0
        first.cancel()
        await settle()
        assert first.cancelled()
        assert (await second).index == 0
        (await second).release()

    on_loop(main)
    assert (pool.free, pool.lent) == (4, 0)


def test_closing_fails_the_tasks_that_wait(pool):
    async def main():
        held = pool.acquire(4)
        tasks = [asyncio.create_task(pool.aacquire(span)) for span in (1, 4)]
        await settle()
        await asyncio.to_thread(pool.close)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, PoolWithdrawn)
        held.release()

    on_loop(main)


def test_a_loop_that_ended_under_a_waiter_does_not_stall_the_line(pool):
    held = pool.acquire(4)
    loop = asyncio.new_event_loop()
    lost = pool.aacquire(4)
    task = loop.create_task(lost)
    loop.call_soon(loop.stop)
    loop.run_forever()
    task._log_destroy_pending = False
    loop.close()
    got = []
    worker = thread(lambda: got.append(pool.acquire(4, time.monotonic() + LONG)))
    while pool.waiting < 2:
        time.sleep(0.001)
    held.release()
    worker.join(LONG)
    assert got[0].live
    del task, lost
    gc.collect()  # the coroutine ends, and has nothing to give back
    got[0].release()
    assert (pool.free, pool.lent) == (4, 0)


def test_two_hundred_tasks_share_four_slots_and_none_is_lost(pool):
    async def main():
        rng = random.Random(5)
        users = [0] * 4

        async def work(i):
            slot = await pool.aacquire(rng.choice((1, 1, 2, 3)))
            taken = range(slot.index, slot.index + slot.span)
            assert not any(users[index] for index in taken)
            try:
                for index in taken:
                    users[index] = 1
                await asyncio.sleep(0)
            finally:
                for index in taken:
                    users[index] = 0
                slot.release()

        tasks = [asyncio.create_task(work(i)) for i in range(200)]
        await settle()
        for task in rng.sample(tasks, 50):
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} <= {type(None), asyncio.CancelledError}
        assert sum(outcome is None for outcome in outcomes) >= 150

    on_loop(main)
    assert (pool.free, pool.lent) == (4, 0)


def test_no_slot_is_lost_when_threads_and_tasks_give_up_just_as_slots_come(pool):
    users, guard, failures = [0] * 4, threading.Lock(), []

    def mark(slot, by):
        with guard:
            for index in range(slot.index, slot.index + slot.span):
                users[index] += by
                if users[index] not in (0, 1):
                    failures.append(slot)

    def blocking(me):
        rng = random.Random(me)
        for _ in range(150):
            try:
                slot = pool.acquire(rng.choice((1, 2, 4)), time.monotonic() + rng.choice((0.0003, 0.003, LONG)))
            except PoolAcquireTimeout:
                continue
            mark(slot, 1)
            mark(slot, -1)
            slot.release()

    async def waiting(rng):
        try:
            slot = await pool.aacquire(rng.choice((1, 3)), time.monotonic() + rng.choice((0.0003, 0.003, LONG)))
        except PoolAcquireTimeout:
            return
        mark(slot, 1)
        mark(slot, -1)
        slot.release()

    async def main():
        rng = random.Random(9)
        threads = [thread(blocking, me) for me in range(6)]
        for _ in range(40):
            tasks = [asyncio.create_task(waiting(rng)) for _ in range(10)]
            await asyncio.sleep(rng.choice((0, 0.001)))
            for task in rng.sample(tasks, 4):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for worker in threads:
            await asyncio.to_thread(worker.join, LONG)

    on_loop(main)
    assert not failures
    assert (pool.free, pool.lent, pool.waiting) == (4, 0, 0)


class Model:
    """What the pool should do, said in the simplest way: a list of owners, a line, first fit for its head."""

    def __init__(self, n_slots):
        self.slots = [None] * n_slots
        self.line = deque()
        self.granted = {}

    def fit(self, span):
        for start in range(len(self.slots) - span + 1):
            if all(owner is None for owner in self.slots[start : start + span]):
                return start
        return None

    def serve(self):
        while self.line and (start := self.fit(self.line[0][1])) is not None:
            who, span = self.line.popleft()
            self.slots[start : start + span] = [who] * span
            self.granted[who] = (start, span)

    def ask(self, who, span):
        self.line.append((who, span))
        self.serve()

    def give_back(self, who):
        start, span = self.granted.pop(who)
        self.slots[start : start + span] = [None] * span
        self.serve()

    def cancel(self, who):
        self.line = deque(entry for entry in self.line if entry[0] != who)
        self.serve()


@pytest.mark.parametrize("seed", range(12))
def test_any_course_of_events_ends_as_the_simple_model_says(seed):
    rng = random.Random(seed)
    n_slots = rng.choice((1, 3, 8))

    async def main():
        with BufferPool(64 * n_slots, n_slots=n_slots, use_shm=False) as pool:
            model, tasks = Model(n_slots), {}
            for step in range(120):
                waiting = [who for who, _ in model.line]
                choice = rng.random()
                if choice < 0.45 or not tasks:
                    span = rng.randint(1, n_slots)
                    tasks[step] = asyncio.create_task(pool.aacquire(span))
                    model.ask(step, span)
                elif choice < 0.85 and model.granted:
                    who = rng.choice(sorted(model.granted))
                    tasks.pop(who).result().release()
                    model.give_back(who)
                elif waiting:
                    who = rng.choice(waiting)
                    tasks.pop(who).cancel()
                    model.cancel(who)
                await settle()
                done = {who: task.result() for who, task in tasks.items() if task.done()}
                assert {who: (slot.index, slot.span) for who, slot in done.items()} == model.granted
                assert pool.free == model.slots.count(None)
                assert pool.waiting == len(model.line)
            for task in tasks.values():
                task.cancel()
            await settle()

    on_loop(main)
