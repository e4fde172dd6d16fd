"""`infer_sync` and `infer_async` over an `InferenceIO`: the requests they make, and everything that can go wrong."""

import logging
import threading
import time

import grpc
import numpy as np
import pytest
from support.client_stub import own_shared_memory

from rsrv.client import (
    InferenceIO,
    InferOutput,
    KServeModel,
    OutputSpec,
    PoolInferInput,
    RetryPolicy,
    infer_async,
    infer_sync,
    pool_view,
    scratch,
)
from rsrv.client.budget import Budget
from rsrv.client.transport import pools
from rsrv.client.transport.lifecycle import client_init
from rsrv.client.windows import OutOfSharedMemory
from rsrv.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    InvalidResponse,
    PoolAcquireTimeout,
    RegionLimit,
    ServerUnreachable,
    ShmUnrecoverable,
    UsageError,
)

DRIVERS = [infer_sync, infer_async]
NO_RETRY = RetryPolicy(enabled=False)


pytestmark = pytest.mark.usefixtures("small_pools")


@pytest.fixture
def model(server, mode):
    with KServeModel(server.url, "twice", shared_memory=mode, max_batch_size=4, retry=NO_RETRY) as handle:
        yield handle


class Doubled(InferenceIO):
    """Item i is [i, i, i, i]; `seen` has what came back."""

    def __init__(self, n_items=30, *, declare=True):
        self.n_items = n_items
        self.specs = [OutputSpec("y", np.float32, (4,))] if declare else []
        self.seen = np.full((n_items, 4), -1, np.float32)
        self.totals = []
        self.encoded = []
        self.decoded = []

    def __len__(self):
        return self.n_items

    def item_input_bytes(self):
        return 16

    def output_specs(self):
        return self.specs

    def encode_chunk(self, rows, slot):
        self.encoded.append(rows)
        x = scratch(slot, "x", (len(rows), 4), np.float32)
        pool_view(x)[:] = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None]
        return x

    def decode_chunk(self, rows, response):
        self.decoded.append(rows)
        self.seen[rows.start : rows.stop] = InferOutput("y", response, np.float32)
        if not self.specs:
            self.totals.append(response.array("total")[0])

    def check(self):
        expected = 2.0 * np.arange(self.n_items)[:, None] * np.ones(4)
        np.testing.assert_array_equal(self.seen, expected)


def in_regions(request):
    return ["shared_memory_region" in tensor.parameters for tensor in (*request.inputs, *request.outputs)]


# --- what is sent -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drive", DRIVERS)
@pytest.mark.parametrize("declare", [True, False])
def test_every_item_comes_back_in_its_place(server, model, mode, drive, declare):
    io = Doubled(30, declare=declare)
    assert drive(model, io) is None
    io.check()
    assert sorted(rows.start for rows in io.decoded) == list(range(0, 30, 4))
    assert len(server.requests) == 8
    for request in server.requests:
        wanted = [] if not declare else ["y"]
        assert [output.name for output in request.outputs] == wanted
        assert all(in_regions(request)) == (mode == "on")
    if not declare:
        # x are 16 bytes for each item: the sum over all of them is that of 4·i.
        assert sum(io.totals) == 4 * sum(range(30))


def test_infer_sync_sends_chunks_one_after_another(server, model):
    io = Doubled(10)
    infer_sync(model, io)
    assert io.encoded == io.decoded == [range(4), range(4, 8), range(8, 10)]


def test_nothing_is_sent_for_no_items(server, model):
    infer_async(model, Doubled(0))
    assert server.calls == []


def test_an_io_needs_no_base_class_and_no_output_specs(server, model):
    seen = []

    class Plain:
        def __len__(self):
            return 3

        def item_input_bytes(self):
            return 16

        def encode_chunk(self, rows, slot):
            return [scratch(slot, "x", (len(rows), 4), np.float32)]

        def decode_chunk(self, rows, response):
            seen.append((rows, response.names))

    infer_async(model, Plain())
    assert seen == [(range(3), ["y", "total"])]


def test_auto_asks_the_server_for_the_batch_size_and_rounds_to_a_compiled_one(server):
    server.max_batch_size = 7
    server.batch_sizes = [1, 5]
    with KServeModel(server.url, "twice", max_batch_size="auto") as model:
        io = Doubled(12)
        infer_sync(model, io)
    io.check()
    assert io.encoded == [range(5), range(5, 10), range(10, 12)]


def test_a_chunk_wider_than_a_slot_takes_adjacent_ones(server, mode):
    with KServeModel(server.url, "twice", shared_memory=mode, max_batch_size=1000) as model:
        io = Doubled(1000)
        infer_async(model, io)
    io.check()
    widest = {"off": 128, "on": 64}[mode]  # four slots of 512 bytes, with outputs or without
    assert max(map(len, io.encoded)) == widest


def test_several_chunks_are_in_flight_and_never_more_than_the_window(server, model):
    running, most = set(), []
    lock, together = threading.Lock(), threading.Barrier(3)

    def rewrite(request, answer):
        with lock:
            running.add(id(request))
            most.append(len(running))
        together.wait(10)  # three requests have to be here at the same time
        with lock:
            running.discard(id(request))
        return answer.SerializeToString()

    server.rewrite = rewrite
    io = Doubled(36)
    infer_async(model, io, window=3)
    io.check()
    assert max(most) == 3


def test_calls_of_encode_do_not_overlap(server, model):
    class Careful(Doubled):
        inside = 0

        def encode_chunk(self, rows, slot):
            self.inside += 1
            assert self.inside == 1
            found = super().encode_chunk(rows, slot)
            self.inside -= 1
            return found

    io = Careful(200)
    infer_async(model, io)
    io.check()


def test_several_threads_may_drive_one_model(server, model):
    ios = [Doubled(40) for _ in range(4)]
    threads = [threading.Thread(target=infer_async, args=(model, io)) for io in ios]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for io in ios:
        io.check()


def test_progress_is_told_in_the_callers_thread(server, model):
    told, threads = [], set()

    def progress(done, total):
        told.append((done, total))
        threads.add(threading.current_thread())

    infer_async(model, Doubled(30), progress=progress)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1] == (30, 30)
    assert len(told) == 8
    assert threads == {threading.current_thread()}


def test_outputs_may_be_views_of_shared_memory_that_live_inside_decode(server):
    views = []

    class Views(Doubled):
        def decode_chunk(self, rows, response):
            super().decode_chunk(rows, response)
            array = response.array("y")
            assert not array.flags.writeable
            views.append(not array.flags.owndata)

    with KServeModel(server.url, "twice", shared_memory="on", max_batch_size=4) as model:
        io = Views(8)
        infer_async(model, io, copy_outputs=False)
        io.check()
        assert views == [True, True]
        infer_async(model, io)
        assert views == [True, True, False, False]


def test_no_thread_and_no_shared_memory_is_left(server, model):
    before = set(threading.enumerate())
    infer_async(model, Doubled(100))
    assert not {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("rsrv-dataset")}
    model.close()
    assert own_shared_memory() == set()


# --- what users get wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drive", DRIVERS)
def test_an_error_of_encode_is_raised_as_it_is_with_the_items_in_its_notes(server, model, drive):
    class Failing(Doubled):
        def encode_chunk(self, rows, slot):
            if 9 in rows:
                raise OSError("image 9 is broken")
            return super().encode_chunk(rows, slot)

    io = Failing(30)
    with pytest.raises(OSError, match="image 9 is broken") as caught:
        drive(model, io)
    assert any("items 8 to 11" in note for note in caught.value.__notes__)
    assert any("encode_chunk" in note for note in caught.value.__notes__)
    assert (io.seen[:4, 0] == [0, 2, 4, 6]).all()


def test_an_error_of_decode_ends_it_and_what_runs_is_still_delivered(server, model, monkeypatch):
    from rsrv.client.dataset.driver import Crew

    class Failing(Doubled):
        def decode_chunk(self, rows, response):
            arrived.wait(10)  # two chunks are answered before one of them fails
            if rows.start == 0:
                raise ValueError("no label for 0")
            assert heard.wait(10)
            super().decode_chunk(rows, response)

    def told(crew, honest=Crew.next):
        outcome = honest(crew)
        if outcome.error is not None:
            heard.set()
        return outcome

    monkeypatch.setattr(Crew, "next", told)
    arrived, heard = threading.Barrier(2), threading.Event()
    io = Failing(100)
    with pytest.raises(ValueError, match="no label for 0") as caught:
        infer_async(model, io, window=2)
    assert any("items 0 to 3" in note for note in caught.value.__notes__)
    assert io.decoded == [range(4, 8)]
    assert len(server.requests) == 2
    monkeypatch.undo()
    assert model.endpoint.connection  # the handle goes on
    io = Doubled(30)
    infer_async(model, io)
    io.check()


def test_further_failures_are_notes_of_the_first(server, model):
    together = threading.Barrier(2)

    class Failing(Doubled):
        def decode_chunk(self, rows, response):
            together.wait(10)
            raise ValueError(f"chunk {rows.start}")

    with pytest.raises(ValueError, match="chunk") as caught:
        infer_async(model, Failing(100), window=2)
    others = [note for note in caught.value.__notes__ if note.startswith("also failed: ValueError: chunk")]
    assert len(others) == 1
    assert "items" in others[0]


@pytest.mark.parametrize("drive", DRIVERS)
def test_an_error_of_progress_ends_it(server, model, drive):
    def progress(done, total):
        raise ZeroDivisionError(str(done))

    with pytest.raises(ZeroDivisionError):
        drive(model, Doubled(30), progress=progress)


def test_writing_past_the_declared_bytes_is_refused_by_numpy_or_by_the_slot(server, model):
    class Greedy(Doubled):
        def encode_chunk(self, rows, slot):
            return scratch(slot, "x", (len(rows), 400), np.float32)

    with pytest.raises(UsageError, match="cannot carve") as caught:
        infer_async(model, Greedy(4))
    assert "item_input_bytes" in caught.value.hint


def test_inputs_that_leave_no_room_for_declared_outputs_are_refused(server):
    class Greedy(Doubled):
        def encode_chunk(self, rows, slot):
            x = super().encode_chunk(rows, slot)
            slot.subslot(slot.capacity - 128)
            return x

    with (
        KServeModel(server.url, "twice", shared_memory="on", max_batch_size=8) as model,
        pytest.raises(UsageError, match="cannot carve 128"),
    ):
        infer_sync(model, Greedy(8))
    assert server.requests == []


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda slot: None, "returned NoneType"),
        (lambda slot: [], "no input"),
        (lambda slot: [np.zeros(3)], "ndarray"),
        (lambda slot: [scratch(slot, "x", 4, np.float32)] * 2, "twice: x, x"),
        (lambda slot: PoolInferInput("x", slot, (4, 4), np.float32), "not carved"),
    ],
)
def test_what_encode_returns_must_be_inputs(server, model, returned, text):
    class Odd(Doubled):
        def encode_chunk(self, rows, slot):
            return returned(slot)

    with pytest.raises(UsageError, match=text):
        infer_sync(model, Odd(4))
    assert server.requests == []


def test_a_buffer_of_another_chunk_is_refused(server, model):
    class Hoarder(Doubled):
        kept = None

        def encode_chunk(self, rows, slot):
            self.kept = self.kept or super().encode_chunk(rows, slot)
            return self.kept

    with pytest.raises(UsageError, match="another slot"):
        infer_sync(model, Hoarder(100))
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda io: setattr(io, "item_input_bytes", lambda: 0), r"item_input_bytes\(\) of Doubled is 0"),
        (lambda io: setattr(io, "specs", ["y"]), "has 'y'; wanted OutputSpec"),
        (lambda io: setattr(io, "specs", io.specs * 2), "twice: y, y"),
        (lambda io: setattr(io, "item_input_bytes", lambda: 9999), "does not fit into a pool of 8 slots of 512 bytes"),
    ],
)
def test_an_io_that_breaks_its_contract_is_refused_before_anything_is_sent(server, model, change, text):
    io = Doubled(4)
    change(io)
    with pytest.raises(UsageError, match=text):
        infer_async(model, io)
    assert server.requests == []


def test_a_window_below_one_is_refused(model):
    with pytest.raises(UsageError, match="window=0"):
        infer_async(model, Doubled(1), window=0)


def test_explicit_tensors_take_no_options_of_a_dataset_and_the_other_way_round(server, model):
    with pytest.raises(UsageError, match="output_specs"):
        infer_sync(model, Doubled(1), ["y"])


# --- what servers get wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("drive", DRIVERS)
def test_the_servers_error_names_the_items(server, model, drive):
    server.refuse["ModelInfer"] = (grpc.StatusCode.INVALID_ARGUMENT, "NaN in x", "invalid")
    with pytest.raises(InvalidRequest, match="NaN in x") as caught:
        drive(model, Doubled(4))
    assert any("items 0 to 3" in note and "twice" in note for note in caught.value.__notes__)


def fewer_rows(request, answer):
    if "shared_memory_region" in answer.outputs[0].parameters:
        answer.outputs[0].parameters["shared_memory_byte_size"].int64_param -= 16
    else:
        answer.raw_output_contents[0] = answer.raw_output_contents[0][:-16]
    answer.outputs[0].shape[0] -= 1
    return answer.SerializeToString()


def another_dtype(request, answer):
    answer.outputs[0].datatype = "INT32"
    return answer.SerializeToString()


def another_output(request, answer):
    answer.outputs[0].name = "z"
    return answer.SerializeToString()


@pytest.mark.parametrize(
    ("rewrite", "text"),
    [
        (fewer_rows, r"output 'y' of items 4 to 7 is FP32\[3, 4\]; output_specs declares FP32\[4, 4\]"),
        (another_dtype, r"output 'y' of items 4 to 7 is INT32\[4, 4\]"),
        (another_output, "'[yz]'.*items 4 to 7|items 4 to 7 .*'[yz]'"),
    ],
)
def test_an_answer_other_than_declared_is_an_error_that_names_the_items(server, model, rewrite, text):
    answers = []

    def second(request, answer):
        answers.append(answer)
        return rewrite(request, answer) if len(answers) == 2 else answer.SerializeToString()

    server.rewrite = second
    with pytest.raises(InvalidResponse, match=text):
        infer_sync(model, Doubled(12))
    assert len(server.requests) == 2


def elsewhere(request, answer):
    answer.outputs[0].parameters["shared_memory_offset"].int64_param = 0
    return answer.SerializeToString()


def of_no_size(request, answer):
    answer.outputs[0].datatype = "BYTES"
    return answer.SerializeToString()


@pytest.mark.parametrize(
    ("rewrite", "text"),
    [(elsewhere, "of items 0 to 3 is at .*, where OutputTarget"), (of_no_size, "output 'y' of items 0 to 3: .*BYTES")],
)
def test_a_place_that_was_not_offered_and_a_datatype_without_a_size_are_not_read(server, rewrite, text):
    server.rewrite = rewrite
    with (
        KServeModel(server.url, "twice", shared_memory="on", max_batch_size=4) as model,
        pytest.raises(InvalidResponse, match=text),
    ):
        infer_sync(model, Doubled(4))


def test_a_server_without_metadata_works_too(server, model):
    server.refuse["ModelMetadata"] = (grpc.StatusCode.UNIMPLEMENTED, "no such method", "")
    io = Doubled(30)
    infer_async(model, io)
    io.check()


def test_a_busy_server_is_asked_again(server, mode):
    refused = []

    honest = server.ModelInfer

    def ModelInfer(request, context):
        if len(refused) < 3:
            refused.append(request)
            server.abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", "shed")
        return honest(request, context)

    server.ModelInfer = ModelInfer
    policy = RetryPolicy(initial_backoff=0.01)
    with KServeModel(server.url, "twice", shared_memory=mode, max_batch_size=4, retry=policy) as model:
        io = Doubled(30)
        infer_async(model, io)
    io.check()
    assert len(refused) == 3


def test_waiting_for_a_slot_counts_against_the_deadline(server):
    with KServeModel(server.url, "twice", shared_memory="off", deadline=0.1) as model:
        pool = pools.inline_pool()
        with pool.acquire(8), pytest.raises(PoolAcquireTimeout):
            infer_sync(model, Doubled(1))


def test_the_time_of_encode_does_not(server, monkeypatch):
    passed = 0.0
    monkeypatch.setitem(Budget.__init__.__kwdefaults__, "clock", lambda: time.monotonic() + passed)

    class Slow(Doubled):
        def encode_chunk(self, rows, slot):
            nonlocal passed
            passed += 100.0
            return super().encode_chunk(rows, slot)

    with KServeModel(server.url, "twice", deadline=10.0, max_batch_size=4) as model:
        io = Slow(8)
        infer_sync(model, io)
    io.check()


# --- shared memory that is lost -----------------------------------------------------------------------------------


def test_a_slot_whose_answer_may_still_come_is_never_lent_again(server):
    hang = threading.Event()

    def late(request, answer):
        hang.wait(10)
        return answer.SerializeToString()

    with KServeModel(server.url, "twice", shared_memory="on", max_batch_size=4) as model:
        infer_sync(model, Doubled(4))
        pool = pools._pools._shared.pool
        server.rewrite = late
        model.deadline = 0.2
        with pytest.raises(DeadlineExceeded):
            infer_sync(model, Doubled(4))
        assert (pool.withdrawn, pool.free) == (1, 7)
        hang.set()
        model.deadline = 10.0
        io = Doubled(30)
        infer_async(model, io)
        io.check()
        assert (pool.withdrawn, pool.free) == (1, 7)


def test_a_pool_that_lost_half_its_slots_is_replaced(server):
    with KServeModel(server.url, "twice", shared_memory="on", max_batch_size=4) as model:
        infer_sync(model, Doubled(4))
        pool = pools._pools._shared.pool

        class Losing(Doubled):
            def decode_chunk(self, rows, response):
                super().decode_chunk(rows, response)
                if rows.start < 20:
                    pool.acquire().release(reusable=False)

        io = Losing(60)
        infer_sync(model, io)
        io.check()
        assert pools._pools._shared.pool is not pool
        assert {request.inputs[0].parameters["shared_memory_region"].string_param for request in server.requests} == {
            pool.region_name,
            pools._pools._shared.pool.region_name,
        }


class Withdrawing(Doubled):
    """Loses all slots of the shared pool once, while the server refuses to register another one."""

    def __init__(self, server, refusal, n_items):
        super().__init__(n_items)
        self.server = server
        self.refusal = refusal

    def decode_chunk(self, rows, response):
        super().decode_chunk(rows, response)
        if rows.start == 8:
            pool = pools._pools._shared.pool
            while pool.free:
                pool.acquire().release(reusable=False)
            self.server.refuse["SystemSharedMemoryRegister"] = self.refusal


def test_a_new_pool_waits_for_a_server_that_is_away(server):
    class Returning(dict):
        """Refuses three times."""

        def __contains__(self, method):
            if method == "SystemSharedMemoryRegister":
                tries.append(method)
                return len(tries) > 1 and len(tries) < 5
            return False

    tries = []
    policy = RetryPolicy(initial_backoff=0.01)
    with KServeModel(server.url, "twice", shared_memory="on", max_batch_size=4, retry=policy) as model:
        server.refuse = Returning()
        io = Withdrawing(server, (grpc.StatusCode.UNAVAILABLE, "no connection", ""), 60)
        infer_sync(model, io)
    io.check()
    assert len(tries) == 5
    assert all(all(in_regions(request)) for request in server.requests)


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_new_pool_that_the_server_refuses_is_done_without_or_an_error(server, mode):
    refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many regions", "shm_limit")
    with KServeModel(server.url, "twice", shared_memory=mode, max_batch_size=4) as model:
        io = Withdrawing(server, refusal, 60)
        if mode == "on":
            with pytest.raises(RegionLimit, match="too many regions") as caught:
                infer_sync(model, io)
            assert any("items 12 to 15" in note for note in caught.value.__notes__)
            return
        infer_sync(model, io)
        io.check()
        assert model.endpoint.latched
    assert [all(in_regions(request)) for request in server.requests] == [True] * 3 + [False] * 12


@pytest.mark.parametrize("drive", DRIVERS)
def test_a_server_that_forgot_the_region_is_told_again(server, drive):
    with KServeModel(server.url, "twice", shared_memory="on", max_batch_size=4) as model:
        drive(model, Doubled(4))
        server.regions.clear()
        io = Doubled(60)
        drive(model, io)
        io.check()
    assert server.calls.count("SystemSharedMemoryRegister") == 2


@pytest.mark.parametrize("drive", DRIVERS)
def test_auto_goes_on_inline_when_the_region_cannot_be_registered_again(server, drive, caplog):
    class Breaking(Doubled):
        def decode_chunk(self, rows, response):
            super().decode_chunk(rows, response)
            server.refuse["SystemSharedMemoryRegister"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "no", "shm_limit")
            server.regions.clear()

    with (
        KServeModel(server.url, "twice", max_batch_size=4) as model,
        caplog.at_level(logging.WARNING, "rsrv.client"),
    ):
        io = Breaking(60)
        drive(model, io)
        io.check()
        assert model.endpoint.latched
        assert sorted(rows.start for rows in io.decoded) == list(range(0, 60, 4))  # none twice
    assert len([record for record in caplog.records if "event=shm_given_up" in record.getMessage()]) == 1
    assert not any(in_regions(server.requests[-1]))


def test_on_says_that_shared_memory_is_lost(server):
    with KServeModel(server.url, "twice", shared_memory="on", max_batch_size=4) as model:
        infer_sync(model, Doubled(4))
        server.regions.clear()
        server.refuse["SystemSharedMemoryRegister"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "no", "shm_limit")
        with pytest.raises(ShmUnrecoverable) as caught:
            infer_async(model, Doubled(40))
    assert any("items" in note for note in caught.value.__notes__)


def test_auto_goes_inline_on_a_machine_without_room(server, monkeypatch, caplog):
    from rsrv.core.shm.owned import OwnedRegion

    create = OwnedRegion.create.__func__

    def full(cls, prefix, n_bytes, **options):
        if prefix == "client":
            raise OSError(28, "no room")
        return create(cls, prefix, n_bytes, **options)

    monkeypatch.setattr(OwnedRegion, "create", classmethod(full))
    with KServeModel(server.url, "twice", max_batch_size=4) as model:
        io = Doubled(30)
        infer_async(model, io)
        io.check()
    assert "event=shm_full using=inline" in caplog.text
    with (
        KServeModel(server.url, "twice", shared_memory="on") as model,
        pytest.raises(OutOfSharedMemory, match="no room"),
    ):
        infer_async(model, io)


@pytest.mark.parametrize("drive", DRIVERS)
def test_a_dataset_goes_on_with_new_and_smaller_pools(server, mode, drive):
    class Shrinking(Doubled):
        def decode_chunk(self, rows, response):
            super().decode_chunk(rows, response)
            if rows.start == 32:
                client_init(pool_bytes=512)  # eight slots of 64 bytes

    with KServeModel(server.url, "twice", shared_memory=mode, max_batch_size=16) as model:
        io = Shrinking(160)
        drive(model, io, **({"window": 1} if drive is infer_async else {}))
        io.check()
        assert {len(rows) for rows in io.decoded} == {16, 8 if mode == "on" else 16}
    starts = [(rows.start, rows.stop) for rows in io.decoded]
    assert [start for start, _ in starts[1:]] == [stop for _, stop in starts[:-1]]


def test_a_server_that_is_away_fails_the_dataset_within_the_deadline():
    with (
        KServeModel("127.0.0.1:9", "twice", shared_memory="off", deadline=0.3) as model,
        pytest.raises((ServerUnreachable, DeadlineExceeded)) as caught,
    ):
        infer_async(model, Doubled(3))
    assert any("item 0" in note for note in caught.value.__notes__)


# --- interrupts ---------------------------------------------------------------------------------------------------


def test_an_interrupt_does_not_wait_for_answers_and_decodes_no_more(server, model, monkeypatch):
    from rsrv.client.dataset.driver import Crew

    hang, arrived = threading.Event(), threading.Semaphore(0)

    def late(request, answer):
        arrived.release()
        hang.wait(10)
        return answer.SerializeToString()

    def interrupted(self):
        for _ in range(2):
            assert arrived.acquire(timeout=10)
        raise KeyboardInterrupt

    server.rewrite = late
    monkeypatch.setattr(Crew, "next", interrupted)
    io = Doubled(100)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        infer_async(model, io, window=2)
    crew = [one for one in set(threading.enumerate()) - before if one.name.startswith("rsrv-dataset")]
    assert len(crew) == 2  # still waiting for their answers, which nobody hears of
    assert all(thread.daemon for thread in crew)
    hang.set()
    for thread in crew:
        thread.join(10)
    assert io.decoded == []
    shared = pools._pools._shared
    assert shared is None or shared.pool.free == 8


# --- looking again ------------------------------------------------------------------------------------------------


def in_auto(server, **options):
    return KServeModel(server.url, "twice", max_batch_size=4, **options)


def test_a_dataset_that_began_inline_uses_shared_memory_when_it_is_there_again(server):
    with in_auto(server) as model:
        model.endpoint.latch(ShmUnrecoverable("gone"))
        io = Doubled(12)

        def progress(done, n_items):
            if done == 4:
                model.endpoint.unlatch()

        infer_sync(model, io, progress=progress)
        io.check()
        assert [any(in_regions(request)) for request in server.requests] == [False, True, True]
        assert [all(in_regions(request)) for request in server.requests] == [False, True, True]


def test_a_dataset_that_returns_to_shared_memory_may_find_no_room_for_it(server, monkeypatch, caplog):
    def full(*_):
        raise OutOfSharedMemory("no room")

    with in_auto(server) as model:
        model.endpoint.latch(ShmUnrecoverable("gone"))
        io = Doubled(12)

        def progress(done, n_items):
            if done == 4:
                model.endpoint.unlatch()
                monkeypatch.setattr("rsrv.client.dataset.course.shared_pool", full)

        infer_sync(model, io, progress=progress)
        io.check()
        assert not any(map(any, map(in_regions, server.requests)))
        assert caplog.text.count("no_shm_slots") == 1


def test_an_item_that_does_not_fit_into_the_shared_pool_goes_inline(server, caplog):
    """The pool has room for the inputs, but not for the outputs, which need none inline."""
    client_init(pool_bytes=256, n_slots=1)
    with in_auto(server) as model:
        io = Doubled(2)
        io.item_input_bytes = lambda: 256
        infer_async(model, io)
        io.check()
        assert not any(map(any, map(in_regions, server.requests)))
        assert caplog.text.count("does not fit into a pool") == 1
    with KServeModel(server.url, "twice", shared_memory="on") as model, pytest.raises(UsageError, match="not fit"):
        infer_async(model, io)


def test_slots_that_are_free_but_not_adjacent_make_a_new_pool(server):
    with KServeModel(server.url, "twice", shared_memory="on", max_batch_size=64) as model:
        old = pools.shared_pool(model.endpoint, Budget(20))
        for number, slot in enumerate([old.acquire() for _ in range(8)]):
            slot.release(reusable=number not in (3, 7))
        io = Doubled(64)  # takes four adjacent slots
        infer_sync(model, io)
        io.check()
        (request,) = server.requests
        assert all(in_regions(request))
        assert request.inputs[0].parameters["shared_memory_region"].string_param != old.region_name


@pytest.mark.parametrize("drive", DRIVERS)
def test_new_settings_amid_a_dataset_disturb_nobody(server, drive):
    with KServeModel(server.url, "twice", shared_memory="on", max_batch_size=4, retry=NO_RETRY) as model:
        io = Doubled(40)

        def encode(rows, slot, honest=io.encode_chunk):
            if rows.start == 16:
                client_init(pool_bytes=2048, n_slots=4)
            return honest(rows, slot)

        io.encode_chunk = encode
        drive(model, io)
        io.check()
        assert all(map(all, map(in_regions, server.requests)))
        assert len(own_shared_memory()) == 1


@pytest.mark.parametrize("method", ["IsSameIPCNamespace", "SystemSharedMemoryRegister", "ModelConfig"])
def test_a_dataset_waits_for_a_server_that_is_busy_at_its_beginning(server, method):
    turned_away_once(server, method)
    quick = RetryPolicy(initial_backoff=0.01)
    with KServeModel(server.url, "twice", shared_memory="on", max_batch_size="auto", retry=quick) as model:
        io = Doubled(12)
        infer_async(model, io)
        io.check()
    assert server.calls.count(method) == 2


def turned_away_once(server, method):
    honest = getattr(server, method)

    def busy(request, context):
        setattr(server, method, honest)
        server.abort(context, grpc.StatusCode.UNAVAILABLE, "stopping", "stopping")

    setattr(server, method, busy)
