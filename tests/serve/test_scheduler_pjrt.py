"""The scheduler on the real CPU device: real programs, merged, padded and cut, give what each request alone gives."""

import threading

import numpy as np
import pytest
from sched_support import INCARNATIONS, LONG, Reply, Weights, spec
from support.bundles import lower

from rsrv.bundle.manifest import Manifest
from rsrv.bundle.safetensors import write_weights
from rsrv.core.dtypes import DType
from rsrv.core.memory import aligned_empty
from rsrv.runtime.pjrt import PjrtDevice
from rsrv.serve.residency.tensors import TensorPool, open_weights
from rsrv.serve.scheduler import Scheduler, ServableModel, batch


@pytest.fixture(scope="module")
def cpu():
    device = PjrtDevice("cpu")
    yield device
    device.close()


@pytest.fixture(autouse=True, params=[0, batch.SMALL_BYTES], ids=["in_blocks", "small"])
def small_bytes(request, monkeypatch):
    monkeypatch.setattr(batch, "SMALL_BYTES", request.param)


@pytest.fixture
def scheduler(cpu):
    scheduler = Scheduler(cpu)
    yield scheduler
    scheduler.stop()
    assert scheduler._dispatcher.pool.lent == 0


def compiled(cpu, fn, inputs, outputs, *, keys=(1, 4), weights=None, name="m"):
    """A model of `fn(*inputs, *weights) -> tuple`; every program is lowered, written and compiled for real."""
    weights = weights or Weights()
    arguments = [(buffer.shape, buffer.dtype) for buffer in weights.buffers]

    def program(key):
        return cpu.compile(lower(fn, [(s.concrete_shape(key), s.dtype.numpy) for s in inputs] + arguments))

    manifest = Manifest(name=name, executable_inputs=tuple(inputs), executable_outputs=tuple(outputs))
    return ServableModel(name, next(INCARNATIONS), manifest, {(): {key: program(key) for key in keys}}, weights)


def submit(scheduler, model, inputs, rows):
    reply = Reply()
    scheduler.submit(model, inputs, rows, (), 0, reply)
    return reply


def test_requests_with_different_batch_axes_get_their_own_rows(scheduler, cpu, tmp_path):
    write_weights(tmp_path / "w.safetensors", [("w", np.arange(6, dtype=np.float32).reshape(3, 2))])
    placed = TensorPool(cpu).load(open_weights(tmp_path / "w.safetensors"))
    weights = Weights(placed.buffers)
    m = compiled(
        cpu,
        lambda x, s, w: (x @ w + s.T, s * 2),
        [spec("x", "n", 3), spec("s", 2, "n")],
        [spec("y", "n", 2), spec("t", 2, "n")],
        keys=(1, 4, 8),
        weights=weights,
    )
    scheduler.add(m)
    rng = np.random.default_rng(0)
    requests = []
    for rows in (1, 2, 1, 3, 1, 8, 4, 5):
        x = rng.integers(-50, 50, (rows, 3)).astype(np.float32)
        s = rng.integers(-50, 50, (2, rows)).astype(np.float32)
        requests.append((x, s, submit(scheduler, m, {"x": x, "s": s}, rows)))
    scheduler.start()
    w = np.arange(6, dtype=np.float32).reshape(3, 2)
    for x, s, reply in requests:
        outputs = reply.outputs()
        assert np.array_equal(outputs["y"], x @ w + s.T)
        assert np.array_equal(outputs["t"], s * 2)
    stats = scheduler.stats()["m"]
    assert stats.requests_served == 8
    assert stats.batch_keys == {8: 4}
    scheduler.stop()
    placed.free()


@pytest.mark.parametrize("dtype", [DType.F64, DType.I64, DType.BF16, DType.U8, DType.BOOL], ids=lambda d: d.value)
def test_an_identity_program_returns_the_bits_that_went_in(scheduler, cpu, dtype):
    m = compiled(cpu, lambda x: (x,), [spec("x", "n", 3, dtype=dtype)], [spec("y", "n", 3, dtype=dtype)], keys=(1, 4))
    scheduler.add(m)
    rng = np.random.default_rng(3)
    bits = [rng.integers(0, 2 if dtype is DType.BOOL else 200, (1, 3 * dtype.itemsize), np.uint8) for _ in range(3)]
    replies = [submit(scheduler, m, {"x": raw.view(dtype.numpy)}, 1) for raw in bits]
    scheduler.start()
    for raw, reply in zip(bits, replies, strict=True):
        result = reply.outputs()["y"]
        assert result.dtype == dtype.numpy
        assert np.array_equal(np.ascontiguousarray(result).view(np.uint8), raw)


def test_the_results_of_an_identity_program_do_not_live_in_the_staging_blocks(scheduler, cpu):
    m = compiled(
        cpu, lambda x: (x, x[:, ::-1]), [spec("x", "n", 16)], [spec("y", "n", 16), spec("z", "n", 16)], keys=(4,)
    )
    scheduler.add(m)
    scheduler.start()
    replies = [submit(scheduler, m, {"x": np.full((3, 16), value, np.float32)}, 3) for value in range(20)]
    for value, reply in enumerate(replies):
        outputs = reply.outputs()
        for block, _ in tuple(scheduler._dispatcher.pool._idle.values()):
            assert not np.shares_memory(outputs["y"], block)
            assert not np.shares_memory(outputs["z"], block)
        assert (outputs["y"] == value).all()
    for value, reply in enumerate(replies):
        assert (reply.outputs()["y"] == value).all(), "a later batch overwrote the results of an earlier one"


def test_the_results_of_an_identity_program_do_not_live_in_a_request_that_passed_through(scheduler, cpu):
    m = compiled(cpu, lambda x: (x,), [spec("x", "n", 16)], [spec("y", "n", 16)], keys=(1,))
    scheduler.add(m)
    scheduler.start()
    x = aligned_empty((1, 16), np.float32)
    x[:] = 7
    y = submit(scheduler, m, {"x": x}, 1).outputs()["y"]
    x[:] = 0
    assert (y == 7).all()


def test_padding_does_not_touch_the_rows_that_were_asked_for(scheduler, cpu):
    def normalised(x):
        import jax.numpy as jnp

        return (x / jnp.sqrt((x * x).sum(1, keepdims=True)),)

    m = compiled(cpu, normalised, [spec("x", "n", 2)], [spec("y", "n", 2)], keys=(8,))
    scheduler.add(m)
    scheduler.start()
    y = submit(scheduler, m, {"x": np.float32([[3, 4], [6, 8]])}, 2).outputs()["y"]
    assert np.allclose(y, [[0.6, 0.8], [0.6, 0.8]], rtol=1e-6)


def test_many_clients_get_exactly_their_own_rows(scheduler, cpu):
    m = compiled(cpu, lambda x: (x * 2 + 1,), [spec("x", "n", 5)], [spec("y", "n", 5)], keys=(1, 4, 8))
    scheduler.add(m)
    scheduler.start()
    wrong = []

    def client(seed):
        for i in range(100):
            rows = 1 + (i + seed) % 3
            x = np.arange(rows * 5, dtype=np.float32).reshape(rows, 5) + 1000 * seed + i
            y = submit(scheduler, m, {"x": x}, rows).outputs()["y"]
            if not np.array_equal(y, x * 2 + 1):
                wrong.append((seed, i))

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    assert wrong == []
    assert scheduler.drain(LONG)
    assert scheduler.stats()["m"].requests_served == 800
