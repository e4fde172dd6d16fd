"""`AsyncKServeModel`: the faces of asyncio, many calls on one loop, and what is left when a task is cancelled."""

import asyncio
import threading

import grpc
import numpy as np
import pytest
from support.client_stub import own_shared_memory

from rsrv.client import AsyncKServeModel, InferenceIO, OutputSpec, RetryPolicy, aio, pool_view, scratch
from rsrv.client.transport import pools
from rsrv.core.errors import InvalidRequest, ServerUnreachable, UnknownModel, UsageError

X = np.arange(120, dtype=np.float32).reshape(30, 4)


pytestmark = pytest.mark.usefixtures("small_pools")


@pytest.fixture
def options(server, mode):
    server.outputs = [("y", "FP32", [-1, 4])]
    return {"shared_memory": mode, "max_batch_size": 4, "retry": RetryPolicy(enabled=False)}


def with_model(server, options, work):
    async def main():
        async with AsyncKServeModel(server.url, "twice", **options) as model:
            return await work(model)

    return asyncio.run(main())


async def read_until_error(stream, found):
    """Append to `found` what `stream` gives, until it raises."""
    async for one in stream:
        found.append(one)


class Doubled(InferenceIO):
    def __init__(self, n_items=30):
        self.n_items = n_items
        self.seen = {}
        self.threads = set()

    def __len__(self):
        return self.n_items

    def item_input_bytes(self):
        return 16

    def output_specs(self):
        return [OutputSpec("y", np.float32, (4,))]

    def encode_chunk(self, rows, slot):
        self.threads.add(threading.current_thread())
        x = scratch(slot, "x", (len(rows), 4), np.float32)
        pool_view(x)[:] = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None]
        return [x]

    def decode_chunk(self, rows, response):
        self.threads.add(threading.current_thread())
        for i, y in zip(rows, response.array("y"), strict=True):
            assert i not in self.seen
            self.seen[i] = y[0]

    def check(self):
        assert self.seen == {i: 2 * i for i in range(self.n_items)}


# --- one request --------------------------------------------------------------------------------------------------


def test_a_request_is_awaited(server, options, mode):
    outputs = with_model(server, options, lambda model: model.infer({"x": X}, ["y"], id="r-1"))
    np.testing.assert_array_equal(outputs["y"], 2 * X)
    (request,) = server.requests
    assert request.id == "r-1"
    assert ("shared_memory_region" in request.inputs[0].parameters) == (mode == "on")


def test_a_model_is_called_with_rows(server, options):
    np.testing.assert_array_equal(with_model(server, options, lambda model: model(X, ["y"])), 2 * X)


def test_many_requests_run_on_one_loop(server, options):
    async def work(model):
        rows = [np.full((1, 4), i, np.float32) for i in range(200)]
        return await asyncio.gather(*(model.infer({"x": row}, ["y"]) for row in rows))

    found = with_model(server, options, work)
    np.testing.assert_array_equal([one["y"][0, 0] for one in found], 2.0 * np.arange(200))


def test_errors_are_those_of_the_other_face(server, options):
    async def unknown():
        async with AsyncKServeModel(server.url, "thrice", **options) as model:
            await model.infer({"x": X})

    with pytest.raises(UnknownModel):
        asyncio.run(unknown())
    with pytest.raises(UsageError, match="shared_memory"):
        AsyncKServeModel(server.url, "twice", shared_memory="perhaps")

    async def away():
        async with AsyncKServeModel.at("127.0.0.1", 9, "twice", retry=RetryPolicy(enabled=False)) as model:
            await model.infer({"x": X})

    with pytest.raises(ServerUnreachable):
        asyncio.run(away())


def test_metadata_is_awaited(server, options):
    found = with_model(server, options, lambda model: model.metadata())
    assert [one.name for one in found.inputs] == ["x"]


def test_a_cancelled_request_cancels_its_call(server, options):
    arrived, cancelled = threading.Event(), threading.Event()
    honest = server.ModelInfer

    def ModelInfer(request, context):
        context.add_callback(cancelled.set)
        arrived.set()
        assert cancelled.wait(10)
        return honest(request, context)

    async def work(model):
        task = asyncio.create_task(model.infer({"x": X}))
        assert await asyncio.to_thread(arrived.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(cancelled.wait, 10)
        server.ModelInfer = honest
        return await model.infer({"x": X})

    server.ModelInfer = ModelInfer
    np.testing.assert_array_equal(with_model(server, options, work)["y"], 2 * X)
    assert own_shared_memory() == set()


# --- datasets -----------------------------------------------------------------------------------------------------


def test_a_dataset_runs_as_tasks_and_its_methods_in_threads(server, options):
    io, told = Doubled(60), []
    assert (
        with_model(server, options, lambda model: model.infer_async(io, progress=lambda *state: told.append(state)))
        is None
    )
    io.check()
    assert threading.main_thread() not in io.threads
    assert told[-1] == (60, 60)
    assert len(server.requests) == 15


def test_no_items_make_no_call(server, options):
    with_model(server, options, lambda model: model.infer_async(Doubled(0)))
    assert server.calls == []


def test_the_window_bounds_the_requests_in_flight(server, options):
    running, most, lock, together = set(), [], threading.Lock(), threading.Barrier(2)

    def rewrite(request, answer):
        with lock:
            running.add(id(request))
            most.append(len(running))
        together.wait(10)
        with lock:
            running.discard(id(request))
        return answer.SerializeToString()

    server.rewrite = rewrite
    io = Doubled(32)
    with_model(server, options, lambda model: model.infer_async(io, window=2))
    io.check()
    assert max(most) == 2


def test_an_error_of_decode_is_raised_with_the_items_and_the_rest_is_delivered(server, options, monkeypatch):
    class Failing(Doubled):
        def decode_chunk(self, rows, response):
            together.wait(10)
            if rows.start == 0:
                raise ValueError("no label")
            assert heard.wait(10)
            super().decode_chunk(rows, response)

    def told(task, honest=aio._failure):
        error = honest(task)
        if error is not None:
            heard.set()
        return error

    monkeypatch.setattr(aio, "_failure", told)
    together, heard = threading.Barrier(2), threading.Event()
    io = Failing(40)
    with pytest.raises(ValueError, match="no label") as caught:
        with_model(server, options, lambda model: model.infer_async(io, window=2))
    assert any("items 0 to 3" in note for note in caught.value.__notes__)
    assert sorted(io.seen) == [4, 5, 6, 7]
    assert len(server.requests) == 2


def test_a_cancelled_dataset_gives_its_slots_back_and_decodes_no_more(server, options, mode):
    arrived, hang = threading.Semaphore(0), threading.Event()

    def late(request, answer):
        arrived.release()
        hang.wait(10)
        return answer.SerializeToString()

    io = Doubled(100)

    async def work(model):
        task = asyncio.create_task(model.infer_async(io))
        for _ in range(3):
            assert await asyncio.to_thread(arrived.acquire, True, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert io.seen == {}
        shared = pools._pools._shared
        pool = shared.pool if shared else pools.inline_pool()
        assert pool.free + pool.withdrawn == 8
        assert (pool.withdrawn > 0) == (mode == "on")
        hang.set()
        server.rewrite = None
        again = Doubled(40)
        await model.infer_async(again)
        again.check()

    server.rewrite = late
    with_model(server, options, work)
    assert own_shared_memory() == set()


@pytest.mark.parametrize("impatient", [False, True])
def test_a_cancelled_task_waits_for_encode_before_its_slot_goes_to_others(server, options, impatient):
    inside, go_on = threading.Event(), threading.Event()
    free = []

    class Slow(Doubled):
        def encode_chunk(self, rows, slot):
            inside.set()
            assert go_on.wait(10)
            free.append(slot.live)
            return super().encode_chunk(rows, slot)

    async def work(model):
        task = asyncio.create_task(model.infer_async(Slow(4)))
        assert await asyncio.to_thread(inside.wait, 10)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        if impatient:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task  # nobody waits for the chunk now, which has its slot all the same
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    with_model(server, options, work)
    assert free == [True]
    assert server.requests == []


@pytest.mark.parametrize("recovers", [True, False])
def test_a_region_that_the_server_forgot_is_registered_again_or_done_without(server, options, recovers):
    class Breaking(Doubled):
        def decode_chunk(self, rows, response):
            super().decode_chunk(rows, response)
            if not recovers:
                server.refuse["SystemSharedMemoryRegister"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "no", "shm_limit")
            if rows.start == 8:
                server.regions.clear()

    io = Breaking(100)
    with_model(server, options | {"shared_memory": "auto"}, lambda model: model.infer_async(io))
    io.check()
    inline = ["shared_memory_region" not in request.inputs[0].parameters for request in server.requests]
    assert any(inline) != recovers
    assert not recovers or server.calls.count("SystemSharedMemoryRegister") == 2


# --- maps ---------------------------------------------------------------------------------------------------------


def test_a_map_over_arrays_is_awaited(server, options):
    async def work(model):
        return await model.map(X), await model.map({"x": X}, batch=7), await model.map(X[:0])

    plain, named, empty = with_model(server, options, work)
    np.testing.assert_array_equal(plain, 2 * X)
    np.testing.assert_array_equal(named["y"], 2 * X)
    assert empty.shape == (0, 4)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_map_over_items_is_an_asynchronous_iterator_in_order(server, options, asynchronous):
    async def source():
        for row in X:
            await asyncio.sleep(0)
            yield row

    async def work(model):
        told = []
        items = source() if asynchronous else iter(X)
        found = [y async for y in model.map(items, progress=lambda *state: told.append(state))]
        assert [done for done, _ in told] == [4, 8, 12, 16, 20, 24, 28, 30]
        return found

    np.testing.assert_array_equal(with_model(server, options, work), 2 * X)


def test_no_items_give_none(server, options):
    async def work(model):
        return [y async for y in model.map([])]

    assert with_model(server, options, work) == []
    assert server.calls == []


def test_an_endless_source_is_read_only_a_few_requests_ahead(server, options):
    read = []

    async def endless():
        while True:
            read.append(len(read))
            yield np.full(4, read[-1], np.float32)

    async def work(model):
        stream = model.map(endless())
        i = 0
        async for y in stream:
            assert y[0] == 2 * i
            assert len(read) <= i + 1 + 8 * 4
            i += 1
            if i == 40:
                break
        await stream.aclose()

    with_model(server, options, work)
    assert own_shared_memory() == set()


def test_errors_of_the_source_and_of_items_come_at_their_place(server, options):
    def source():
        yield from X[:10]
        raise OSError("the disk is gone")

    async def work(model):
        found = []
        with pytest.raises(OSError, match="the disk is gone"):
            await read_until_error(model.map(source()), found)
        np.testing.assert_array_equal(found, 2 * X[:10])
        found.clear()
        with pytest.raises(InvalidRequest, match="item 6"):
            await read_until_error(model.map([*X[:6], np.zeros(3, np.float32)]), found)
        np.testing.assert_array_equal(found, 2 * X[:6])

    with_model(server, options, work)


def test_a_refused_request_fails_at_its_place(server, options):
    honest = server.ModelInfer

    def ModelInfer(request, context):
        answer = honest(request, context)
        if len(server.requests) > 3:
            server.abort(context, grpc.StatusCode.INVALID_ARGUMENT, "enough", "invalid")
        return answer

    async def work(model):
        found = []
        with pytest.raises(InvalidRequest, match="enough") as caught:
            await read_until_error(model.map(iter(X)), found)
        np.testing.assert_array_equal(np.array(found).reshape(-1, 4), 2 * X[: len(found)])
        assert any(f"items {len(found)} to" in note for note in caught.value.__notes__)

    server.ModelInfer = ModelInfer
    with_model(server, options, work)


def test_many_maps_and_requests_share_a_loop(server, options):
    async def work(model):
        maps = [model.map(X + i) for i in range(10)]
        calls = [model.infer({"x": X[:1] + i}, ["y"]) for i in range(10)]
        return await asyncio.gather(*maps, *calls)

    found = with_model(server, options, work)
    for i in range(10):
        np.testing.assert_array_equal(found[i], 2 * (X + i))
        np.testing.assert_array_equal(found[10 + i]["y"], 2 * (X[:1] + i))
