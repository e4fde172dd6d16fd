"""Many clients at once: each gets exactly its own rows, and a malformed request fails alone."""

import threading

import numpy as np
import pytest
from support.bundles import write_affine
from support.server import ServerProcess

triton = pytest.importorskip("tritonclient.grpc")
from tritonclient.utils import InferenceServerException  # noqa: E402

CLIENTS = 32
REQUESTS = 4_000


def tensor(array, name="x", datatype="FP32"):
    result = triton.InferInput(name, array.shape, datatype)
    result.set_data_from_numpy(array)
    return result


def malformed(kind, x):
    """A request that is wrong in one way, and the text that says so."""
    if kind == 0:
        return [tensor(x, name="y")], "no input 'y'"
    if kind == 1:
        return [tensor(x.astype(np.int32), datatype="INT32")], "INT32"
    if kind == 2:
        return [tensor(np.zeros((len(x), 4), np.float32))], "extent 4"
    if kind == 3:
        return [tensor(np.zeros((9, 3), np.float32))], "at most 8"
    if kind == 4:
        short = tensor(x)
        short._raw_content = short._raw_content[:-4]
        return [short], "bytes"
    return [], "missing"


class Caller(threading.Thread):
    def __init__(self, number, url):
        super().__init__(name=f"caller-{number}")
        self.number = number
        self.url = url
        self.right = self.refused = 0
        self.wrong = []

    def run(self):
        rng = np.random.default_rng(self.number)
        with triton.InferenceServerClient(self.url) as client:
            for i in range(self.number, REQUESTS, CLIENTS):
                rows = int(rng.integers(1, 9))
                # Whole numbers below 2^24 are exact in f32, and no two requests have a row in common.
                x = (np.arange(rows * 3, dtype=np.float32) + i * 24).reshape(rows, 3)
                try:
                    if i % 10 == 7:
                        self.send_malformed(client, i, x)
                    else:
                        answer = client.infer("affine", [tensor(x)]).as_numpy("y")
                        if answer.dtype == np.float32 and np.array_equal(answer, x * 2 + 1):
                            self.right += 1
                        else:
                            self.wrong.append((i, answer))
                except Exception as error:
                    self.wrong.append((i, error))

    def send_malformed(self, client, i, x):
        inputs, text = malformed((i // 10) % 6, x)
        with pytest.raises(InferenceServerException, match=text) as error:
            client.infer("affine", inputs)
        assert error.value.status() == "StatusCode.INVALID_ARGUMENT"
        self.refused += 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_32_clients_get_their_own_rows_while_one_request_in_ten_fails_alone(tmp_path):
    write_affine(tmp_path / "repo" / "affine")
    with ServerProcess(tmp_path / "repo") as server:
        server.wait_ready()
        callers = [Caller(number, server.url) for number in range(CLIENTS)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        wrong = [item for caller in callers for item in caller.wrong]
        assert not wrong, wrong[:5]
        assert sum(caller.refused for caller in callers) == REQUESTS // 10
        assert sum(caller.right for caller in callers) == REQUESTS - REQUESTS // 10
        assert server.metric("rsrv_worker_requests_total", model="affine", status="OK") == REQUESTS - REQUESTS // 10
        assert server.metric("rsrv_worker_requests_total", model="affine", status="INVALID_ARGUMENT") == REQUESTS // 10
        assert server.metric("rsrv_worker_requests_served_total", model="affine") == REQUESTS - REQUESTS // 10
        assert 0 < server.metric("rsrv_worker_dispatch_total", model="affine") < REQUESTS - REQUESTS // 10
        assert server.metric("rsrv_worker_dispatch_errors_total") == 0
        assert server.metric("rsrv_worker_inflight_requests") == 0
        assert server.stop() == 0
