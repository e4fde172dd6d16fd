"""A model with several input shapes behind a real server: each request finds its program, and merges with its like."""

import threading

import numpy as np
import pytest
from support.server import ServerProcess

from rsrv.bundle import IOSpec
from rsrv.client import KServeModel, Server
from rsrv.core.errors import InvalidRequest
from rsrv.export import export_bundle

triton = pytest.importorskip("tritonclient.grpc")

SIZES = [(4, 6), (6, 4), (6, 6)]
WEIGHT = np.array([1, 2, 4], np.float32)

CROP = """
import numpy as np

def preprocess(inputs):
    # Whatever its size, an image goes to the smallest compiled shape that holds it; u8 becomes f32.
    image = inputs["photo"]
    _, h, w, _ = image.shape
    for height, width in [(4, 6), (6, 4), (6, 6)]:
        if h <= height and w <= width:
            padded = np.zeros((len(image), height, width, 3), np.float32)
            padded[:, :h, :w] = image
            return {"image": padded}
    return {"image": image.astype(np.float32)}

def postprocess(outputs):
    return {"label": outputs["total"].argmax(-1).astype(np.int32)}
"""


def shapes(params, image):
    """f32[n,h,w,3] → the weighted image, and its sums per channel (f32[n,3])."""
    return {"weighted": image * params["w"], "total": (image * params["w"]).sum((1, 2))}


def pairs(params, q, k):
    """Two inputs whose variable axes have the same letter: f32[n,a], f32[n,a] → f32[n]."""
    return (q.sum(1) * params["w"][1] + k.sum(1),)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    common = {"collect_git": False, "batch_sizes": (1, 2, 4)}
    variants = [f"image=f32[1,{h},{w},3]" for h, w in SIZES]
    export_bundle("jax", shapes, {"w": WEIGHT}, None, dir=repo / "shapes", shape_variants=variants, **common)
    export_bundle(
        "jax",
        shapes,
        {"w": WEIGHT},
        None,
        dir=repo / "photos",
        shape_variants=variants,
        hooks=CROP,
        client_inputs=[IOSpec("photo", "u8", (1, -1, -1, 3), batch_axis=0)],
        client_outputs=[IOSpec("label", "i32", (1,), batch_axis=0)],
        **common,
    )
    export_bundle(
        "jax",
        pairs,
        {"w": WEIGHT},
        {"q": np.zeros((1, 3), "f4"), "k": np.zeros((1, 5), "f4")},
        dir=repo / "pairs",
        shape_variants=[{}, {"k": np.zeros((1, 3), "f4")}, {"q": np.zeros((1, 5), "f4")}],
        **common,
    )
    with ServerProcess(repo) as server:
        server.wait_ready()
        yield server
        assert server.stop() == 0


def image(seed, rows, size):
    return np.random.default_rng(seed).integers(0, 50, (rows, *size, 3)).astype(np.float32)


def test_each_size_is_served_by_its_own_program(server):
    with KServeModel(server.url, "shapes") as model:
        for number, size in enumerate(SIZES):
            for rows in (1, 3, 4):
                x = image(number, rows, size)
                answer = model.infer({"image": x})
                np.testing.assert_array_equal(answer["weighted"], x * WEIGHT)
                np.testing.assert_array_equal(answer["total"], (x * WEIGHT).sum((1, 2)))


def test_a_size_without_a_program_is_refused_and_the_compiled_ones_are_named(server):
    with KServeModel(server.url, "shapes") as model:
        with pytest.raises(InvalidRequest, match=r"image\.a=4, image\.c=4; compiled: image\.a=4, image\.c=6 or"):
            model.infer({"image": image(0, 1, (4, 4))})
        with pytest.raises(InvalidRequest, match="at most 4"):
            model.infer({"image": image(0, 5, (4, 6))})


def test_inputs_that_share_a_letter_choose_together(server):
    with KServeModel(server.url, "pairs") as model:
        for q, k in [(3, 5), (3, 3), (5, 5)]:
            a, b = np.full((2, q), 3, np.float32), np.full((2, k), 5, np.float32)
            np.testing.assert_array_equal(model.infer({"q": a, "k": b})["output"], [6 * q + 5 * k] * 2)
        with pytest.raises(InvalidRequest, match=r"q\.a=5, k\.a=3"):
            model.infer({"q": np.ones((1, 5), np.float32), "k": np.ones((1, 3), np.float32)})


def test_metadata_shows_the_varying_axes(server):
    with Server(server.url) as asked:
        meta = asked.model_metadata("shapes")
        assert [tensor.describe() for tensor in (*meta.inputs, *meta.outputs)] == [
            "image FP32[-1,-1,-1,3]",
            "weighted FP32[-1,-1,-1,3]",
            "total FP32[-1,3]",
        ]
        meta = asked.model_metadata("photos")
        assert [t.describe() for t in (*meta.inputs, *meta.outputs)] == ["photo UINT8[-1,-1,-1,3]", "label INT32[-1]"]


def test_hooks_bring_what_clients_send_to_a_compiled_shape(server):
    with KServeModel(server.url, "photos") as model:
        for size in [(1, 1), (3, 6), (6, 2), (5, 5)]:
            photo = np.random.default_rng(size[0]).integers(0, 255, (2, *size, 3), np.uint8)
            expected = (photo.astype(np.float32) * WEIGHT).sum((1, 2)).argmax(-1)
            answer = model.infer({"photo": photo})
            assert answer["label"].dtype == np.int32
            np.testing.assert_array_equal(answer["label"], expected)
        with pytest.raises(InvalidRequest, match="image"):
            model.infer({"photo": np.zeros((1, 7, 7, 3), np.uint8)})


class Caller(threading.Thread):
    """Sends rows of one size and keeps what was wrong, and the compiled sizes that its rows ran at."""

    def __init__(self, url, number, rounds):
        super().__init__()
        self.url, self.number, self.rounds = url, number, rounds
        self.size = SIZES[number % len(SIZES)]
        self.wrong = []
        self.batches = set()

    def run(self):
        try:
            with triton.InferenceServerClient(self.url) as client:
                for i in range(self.rounds):
                    x = image(1000 * self.number + i, 1, self.size)
                    tensor = triton.InferInput("image", x.shape, "FP32")
                    tensor.set_data_from_numpy(x)
                    answer = client.infer("shapes", [tensor], parameters={"rsrv_timing": True})
                    if not np.array_equal(answer.as_numpy("weighted"), x * WEIGHT):
                        self.wrong.append(i)
                    self.batches.add(answer.get_response().parameters["rsrv_batch"].int64_param)
        except Exception as error:
            self.wrong.append(error)


def test_concurrent_requests_merge_within_their_size_and_get_exactly_their_rows(server):
    merged = set()
    for attempt in range(20):  # which requests meet in the queue is chance, what they get is not
        callers = [Caller(server.url, 12 * attempt + number, rounds=10) for number in range(12)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert [caller.wrong for caller in callers] == [[]] * len(callers)
        merged |= {caller.size for caller in callers if caller.batches & {2, 4}}
        if merged == set(SIZES):
            break
    assert merged == set(SIZES)
    assert server.metric("rsrv_worker_dispatch_errors_total") == 0
