"""A server on the device: more models than its budget holds, and tensors through shared memory."""

import json
from collections import OrderedDict

import numpy as np
import pytest
from support.card import ARENA_BYTES, BACKEND, server_environment
from support.server import ServerProcess

from rsrv.bundle import IOSpec, write_bundle
from rsrv.client import KServeModel
from rsrv.stablehlo import serialize

MODELS = 8
FIT = 4
ELEMENTS = 1 << 20
WEIGHTS_BYTES = 4 * ELEMENTS
BUDGET_BYTES = FIT * WEIGHTS_BYTES + WEIGHTS_BYTES // 2
BATCH = 4
CALLS = 60


def write(directory, index):
    """``y = x * w[0]`` for rows of one element; the other weights only take room."""
    x, w = f"tensor<{BATCH}x1xf32>", f"tensor<{ELEMENTS}xf32>"
    program = f"""func.func public @main(%x: {x}, %w: {w}) -> {x} {{
      %0 = stablehlo.slice %w [0:1] : ({w}) -> tensor<1xf32>
      %1 = stablehlo.broadcast_in_dim %0, dims = [1] : (tensor<1xf32>) -> {x}
      %2 = stablehlo.multiply %x, %1 : {x}
      return %2 : {x} }}"""
    spec = {"dtype": "f32", "shape": (1, 1), "batch_axis": 0}
    write_bundle(
        directory / name(index),
        name=name(index),
        executable_inputs=[IOSpec("x", **spec)],
        executable_outputs=[IOSpec("y", **spec)],
        modules={BATCH: serialize(program)},
        weights=[("w", np.full(ELEMENTS, index + 2, np.float32))],
    )


def name(index):
    return f"model{index}"


class Fleet:
    """A running server and a client for each of its models."""

    def __init__(self, server, backend):
        self.server, self.backend = server, backend
        self.clients = [KServeModel(server.url, name(i), shared_memory="off", deadline=60) for i in range(MODELS)]

    def call(self, index, x=3.0):
        (answer,) = self.clients[index].infer({"x": np.full((1, 1), x, np.float32)})["y"].ravel()
        # A fake device answers with the sum over the row, whatever the weights are.
        assert answer == (x if self.backend == "fake" else x * (index + 2))

    def metric(self, metric):
        return self.server.metric(f"rsrv_worker_{metric}")

    def close(self):
        for client in self.clients:
            client.close()


@pytest.fixture(scope="module", params=["cuda"] if BACKEND == "cuda" else ["cpu", "fake"])
def fleet(request, tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    for index in range(MODELS):
        write(models, index)
    settings = server_environment(request.param)
    settings["RSRV_WORKER_RUNTIME_WEIGHT_CACHE_FRACTION"] = repr(BUDGET_BYTES / ARENA_BYTES)
    with ServerProcess(models, env=settings) as server:
        server.wait_settled()  # the scratch probe ends after it is ready
        fleet = Fleet(server, request.param)
        yield fleet
        fleet.close()
        assert server.stop() == 0


def test_the_server_runs_on_the_device_that_was_asked_for(fleet):
    (device,) = json.loads(fleet.server.http("/v1/status")[1])["devices"]
    assert device["platform"] == fleet.backend


def test_weights_come_and_go_as_an_lru_cache_of_that_size_would_have_it(fleet):
    for index in range(MODELS):
        fleet.call(index)
    budget = fleet.metric("weight_cache_max_bytes")
    fit = int(budget // WEIGHTS_BYTES)
    # About: an allocator may have got a little less or more than its share.
    assert FIT - 1 <= fit <= FIT + 1
    cache = OrderedDict.fromkeys(range(MODELS - fit, MODELS))
    loads, evictions = fleet.metric("weight_loads_total"), fleet.metric("weight_evicts_total")
    in_use = fleet.metric("device_memory_in_use_bytes")
    misses = 0
    for index in map(int, np.random.default_rng(1).integers(0, MODELS, CALLS)):
        if index not in cache:
            misses += 1
            cache.popitem(last=False)
        cache[index] = None
        cache.move_to_end(index)
        fleet.call(index)
        assert fleet.metric("weight_cache_resident_bytes") == fit * WEIGHTS_BYTES <= budget
    assert fleet.metric("weight_loads_total") - loads == misses
    assert fleet.metric("weight_evicts_total") - evictions == misses
    assert fleet.metric("device_memory_in_use_bytes") <= in_use, "what was evicted is free"


@pytest.mark.parametrize("rows", [1, BATCH])
def test_tensors_through_shared_memory_are_the_same(fleet, rows):
    x = np.arange(1, rows + 1, dtype=np.float32).reshape(rows, 1)
    inline = fleet.clients[0].infer({"x": x})["y"]
    with KServeModel(fleet.server.url, name(0), shared_memory="on", deadline=60) as shared:
        np.testing.assert_array_equal(shared.infer({"x": x})["y"], inline)
        assert shared.transport == "shared memory"
