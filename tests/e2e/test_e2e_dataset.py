"""A dataset through shared memory while the server is killed again and again, and while the client is: Ctrl-C."""

import glob
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from support.bundles import write_affine
from support.ports import lasting_ports
from support.server import ServerProcess

from rsrv.client import (
    InferenceIO,
    InferOutput,
    KServeModel,
    OutputSpec,
    RetryPolicy,
    client_init,
    infer_async,
    pool_view,
    scratch,
)

KILLS = int(os.environ.get("RSRV_KILLS", "5"))
FAKE = {"RSRV_ALLOW_FAKE": "1", "RSRV_WORKER_RUNTIME_BACKEND": "fake"}
FEATURES = 64
ROWS = 8
INTERRUPTED = 130


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    write_affine(repo / "affine", features=FEATURES, batch_sizes=(ROWS,))
    return repo


def left_by(pid):
    return glob.glob(f"/dev/shm/rsrv-*-{pid}-*")


class Keeper:
    """A server that a thread starts again, on the same port, whenever it was killed."""

    def __init__(self, repo):
        self._repo = repo
        self._killed = SimpleQueue()
        self._running = SimpleQueue()
        self._thread = threading.Thread(target=self._start_again)
        self._ports = ["--grpc-port", str(lasting_ports(1)[0]), "--http-port", "0"]

    def __enter__(self):
        self._start()
        self._server.wait_ready()
        self.url = self._server.url
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._killed.put(None)
        self._thread.join()
        self._server.__exit__()

    def kill(self):
        """At once; there is a new one some time later."""
        # It may answer before the thread that started it knows.
        running = self._running.get(timeout=60)
        running.signal(signal.SIGKILL)
        self._killed.put(running)

    def _start_again(self):
        while (killed := self._killed.get()) is not None:
            killed.wait()
            self._start()

    def _start(self):
        self._server = ServerProcess(self._repo, env=FAKE, ports=self._ports).__enter__()
        self._running.put(self._server)


class Rows(InferenceIO):
    """Item `i` is filled with `i`; the fake device answers with the sum over each row. Kills when it gets to `kill_at`,
    while the chunks before are under way."""

    def __init__(self, items, kill_at=(), kill=None):
        self.items = items
        self.kill_at, self.kill = set(kill_at), kill
        self.y = np.full((items, FEATURES), np.nan, np.float32)
        self.decoded = np.zeros(items, int)

    def __len__(self):
        return self.items

    def item_input_bytes(self):
        return 4 * FEATURES

    def output_specs(self):
        return [OutputSpec("y", np.float32, (FEATURES,))]

    def encode_chunk(self, rows, slot):
        if rows.start in self.kill_at:
            self.kill_at.remove(rows.start)
            self.kill()
        x = scratch(slot, "x", (len(rows), FEATURES), np.float32)
        pool_view(x)[:] = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None]
        return x

    def decode_chunk(self, rows, response):
        self.decoded[rows.start : rows.stop] += 1
        self.y[rows.start : rows.stop] = InferOutput("y", response, np.float32)


@pytest.mark.slow
@pytest.mark.timeout(60 + 30 * KILLS)
def test_a_dataset_is_complete_and_right_although_its_server_is_killed_again_and_again(repo):
    each = 100 * ROWS
    with Keeper(repo) as keeper, client_init(pool_bytes=16 << 20):
        data = Rows(each * (KILLS + 1), [each * (n + 1) for n in range(KILLS)], keeper.kill)
        patient = RetryPolicy(initial_backoff=0.2, max_backoff=0.5, budget_per_second=100)
        with KServeModel(
            keeper.url, "affine", max_batch_size=ROWS, shared_memory="on", deadline=60, retry=patient
        ) as model:
            infer_async(model, data, window=4)
        assert left_by(os.getpid()) == []
    assert not data.kill_at
    np.testing.assert_array_equal(data.y[:, 0], FEATURES * np.arange(len(data), dtype=np.float32))
    np.testing.assert_array_equal(data.y, np.broadcast_to(data.y[:, :1], data.y.shape))
    assert (data.decoded == 1).all()


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------

ABOUT = """
    import asyncio, itertools, sys
    import numpy as np
    from rsrv.client import *
    options = {"max_batch_size": 8, "shared_memory": "on", "deadline": 600}
    running = lambda *_: print("running", flush=True)
    x = np.ones((100_000, 64), np.float32)
"""
FACES = {
    "map of arrays": """
        with KServeModel(sys.argv[1], "affine", **options) as model:
            model.map(x, progress=running)
    """,
    "map of an endless iterator": """
        with KServeModel(sys.argv[1], "affine", **options) as model:
            for y in model.map(x[0] for _ in itertools.count()):
                running()
    """,
    "asyncio": """
        async def main():
            async with AsyncKServeModel(sys.argv[1], "affine", **options) as model:
                await model.map(x, progress=running)
        asyncio.run(main())
    """,
}


@pytest.fixture(scope="module")
def slow_server(repo):
    slow = {"RSRV_WORKER_RUNTIME_FAKE_SECONDS_PER_ROW": "0.01", "RSRV_WORKER_SCHEDULER_DISCIPLINE": "fifo"}
    with ServerProcess(repo, env={**FAKE, **slow}) as server:
        server.wait_ready()
        yield server


@pytest.mark.parametrize("face", FACES)
def test_ctrl_c_within_a_dataset_ends_the_process_and_leaves_nothing(slow_server, face):
    program = textwrap.dedent(ABOUT) + textwrap.dedent(FACES[face])
    process = subprocess.Popen(
        [sys.executable, "-c", program, slow_server.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout.readline() == "running\n", process.stderr.read()
        assert left_by(process.pid)
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (-signal.SIGINT, INTERRUPTED)
    assert "KeyboardInterrupt" in complaint
    assert "Fatal" not in complaint
    assert left_by(process.pid) == []
    assert slow_server.metric("rsrv_worker_shm_regions") == 0
