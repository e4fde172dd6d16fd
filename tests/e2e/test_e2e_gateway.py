"""Three real workers behind a gateway, seen by tritonclient: killed, paused, drained, added, and never noticed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from threading import local

import numpy as np
import pytest
from support.bundles import N, write_model
from support.gateway_process import ROUND_SECONDS, GatewayProcess, Load, Workers

triton = pytest.importorskip("tritonclient.grpc")
shm = pytest.importorskip("tritonclient.utils.shared_memory")
from tritonclient.utils import InferenceServerException, np_to_triton_dtype  # noqa: E402

SHAPE = (1, 16)
NBYTES = 64


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A repository with two models, three workers and a gateway. Tests leave three workers that are ready."""
    repo = tmp_path_factory.mktemp("repo")
    for name, factor in (("double", 2.0), ("triple", 3.0)):
        write_model(
            repo / name,
            lambda x, w: (x * w,),
            {"x": ((N, 16), np.float32)},
            {"y": ((N, 16), np.float32)},
            weights={"w": np.full(16, factor, np.float32)},
            batch_sizes=(1, 8),
        )
    env = {"RSRV_WORKER_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "RSRV_WORKER_RUNTIME_CPU_THREADS": "1"}
    with ExitStack() as stack:
        site = Site(stack, Workers(stack, repo, env))
        yield site
        assert site.gateway.stop() == 0, site.gateway.log


class Site:
    def __init__(self, stack: ExitStack, workers: Workers) -> None:
        self.workers = workers
        self.live = workers.start_many(3)
        self.gateway = stack.enter_context(GatewayProcess([worker.url for worker in self.live]))
        self.gateway.wait_ready()
        self.until_routed(3)
        self.url = self.gateway.url

    def until_routed(self, count: int) -> None:
        """Until so many workers are ready at the gateway."""
        self.gateway.until(lambda: self.gateway.metric("rsrv_gateway_worker_ready") == count)

    def served(self, worker) -> float:
        return worker.metric("rsrv_worker_requests_served_total")

    def ctl(self, *words: str) -> dict:
        command = [sys.executable, "-m", "rsrv", "ctl", "--url", self.url, "gateway", *words, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def tensor(name, array):
    result = triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    result.set_data_from_numpy(array)
    return result


_thread = local()


def request(url):
    """A request of this thread's own client, whose answer is looked at."""

    def ask(number: int) -> None:
        if getattr(_thread, "url", None) != url:
            _thread.url, _thread.client = url, triton.InferenceServerClient(url)
            _thread.rng = np.random.default_rng(number)
        x = _thread.rng.standard_normal(SHAPE).astype(np.float32)
        name, factor = (("double", 2), ("triple", 3))[int(_thread.rng.integers(2))]
        answer = _thread.client.infer(name, [tensor("x", x)], client_timeout=30)
        np.testing.assert_array_equal(answer.as_numpy("y"), x * np.float32(factor), strict=True)

    return ask


class Region:
    """An input and an output in shared memory, registered through the gateway."""

    def __init__(self, client, name: str) -> None:
        self._client, self._name = client, name
        self.handle = shm.create_shared_memory_region(name, f"/test-{name}", 2 * NBYTES)
        client.register_system_shared_memory(name, f"/test-{name}", 2 * NBYTES)

    def ask(self, x) -> np.ndarray:
        shm.set_shared_memory_region(self.handle, [x])
        given = triton.InferInput("x", SHAPE, "FP32")
        given.set_shared_memory(self._name, NBYTES)
        wanted = triton.InferRequestedOutput("y")
        wanted.set_shared_memory(self._name, NBYTES, offset=NBYTES)
        self._client.infer("double", [given], outputs=[wanted], client_timeout=30)
        return shm.get_contents_as_numpy(self.handle, np.float32, SHAPE, offset=NBYTES).copy()

    def close(self) -> None:
        shm.destroy_shared_memory_region(self.handle)


@pytest.fixture
def client(site):
    with triton.InferenceServerClient(site.url) as client:
        yield client


@pytest.fixture
def region(client):
    region = Region(client, f"gateway-{os.getpid()}")
    yield region
    client.unregister_system_shared_memory(region._name)
    region.close()


# --- the same as a worker ------------------------------------------------------------------------------------------


def test_a_client_cannot_tell_the_gateway_from_a_worker(site, client):
    with triton.InferenceServerClient(site.live[0].url) as worker:
        for ask in (
            lambda c: c.is_server_live(),
            lambda c: c.is_server_ready(),
            lambda c: c.is_model_ready("double"),
            lambda c: c.is_model_ready("nobody"),
            lambda c: c.get_model_metadata("triple", as_json=True),
            lambda c: c.get_model_config("triple", as_json=True),
            lambda c: c.get_model_repository_index(as_json=True),
            lambda c: c.get_server_metadata().name,
        ):
            assert ask(client) == ask(worker)
    for name in ("nobody", ""):
        with pytest.raises(InferenceServerException) as refused:
            client.infer(name, [tensor("x", np.ones(SHAPE, np.float32))])
        assert refused.value.status() in ("StatusCode.NOT_FOUND", "StatusCode.INVALID_ARGUMENT")


def test_inline_and_shared_memory_answers_are_bit_exact_whichever_worker_gives_them(site, client, region):
    rng = np.random.default_rng(7)
    before = [site.served(worker) for worker in site.live]

    def all_have_served():
        for _ in range(12):
            x = rng.standard_normal(SHAPE).astype(np.float32)
            np.testing.assert_array_equal(region.ask(x), x * np.float32(2), strict=True)
            answer = client.infer("triple", [tensor("x", x)])
            np.testing.assert_array_equal(answer.as_numpy("y"), x * np.float32(3), strict=True)
        return all(site.served(worker) > was for worker, was in zip(site.live, before, strict=True))

    site.gateway.until(all_have_served)  # a worker is ready a moment before it is routed to


def test_a_bad_request_fails_alone_with_the_workers_words(client):
    with pytest.raises(InferenceServerException) as refused:
        client.infer("double", [tensor("x", np.ones((1, 3), np.float32))])
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert "worker 127.0.0.1:" in refused.value.message()
    assert "'x'" in refused.value.message()


def test_one_scrape_has_the_series_of_the_gateway_and_of_every_worker_that_names_its_port(site):
    status, text = site.gateway.http("/metrics")
    assert status == 200
    assert text.count("# TYPE rsrv_gateway_requests_total counter") == 1
    site.gateway.until(lambda: site.gateway.metric("rsrv_gateway_routing_table_size") == 2)


# --- workers that go and come ---------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_costs_no_client_an_error_and_comes_back(site, region):
    victim = site.live[2]
    x = np.ones(SHAPE, np.float32)
    with Load(request(site.url)) as load:
        load.more(100)
        victim.signal(signal.SIGKILL)
        load.more(200)
        victim.wait()
        site.until_routed(2)
        site.live[2] = again = site.workers.start(port=victim.grpc_port)
        site.until_routed(3)
        site.gateway.until(lambda: site.served(again) > 0 or load.errors)
        for _ in range(6):  # all workers know the region, the one that started anew as well
            np.testing.assert_array_equal(region.ask(x), x * np.float32(2))
    assert load.errors == []


def test_a_worker_that_is_paused_costs_no_client_an_error_and_comes_back(site):
    victim = site.live[1]
    with Load(request(site.url)) as load:
        load.more(50)
        victim.signal(signal.SIGSTOP)
        try:
            site.until_routed(2)
            load.more(100)
        finally:
            victim.signal(signal.SIGCONT)
        site.until_routed(3)
        was = site.served(victim)
        site.gateway.until(lambda: site.served(victim) > was or load.errors)
    assert load.errors == []


def test_a_worker_that_stops_gracefully_costs_no_client_an_error(site):
    victim = site.live[0]
    with Load(request(site.url)) as load:
        load.more(50)
        assert victim.stop() == 0
        load.more(100)
        site.until_routed(2)
        site.live[0] = site.workers.start(port=victim.grpc_port)
        site.until_routed(3)
    assert load.errors == []


def test_a_worker_that_is_drained_gets_nothing_until_that_is_taken_back(site):
    drained = site.live[1]
    with Load(request(site.url)) as load:
        load.more(50)
        site.ctl("workers", "drain", drained.url)
        load.next_round()  # what it has ends
        was = site.served(drained)
        load.more(200)
        assert site.served(drained) == was
        site.ctl("workers", "undrain", drained.url)
        site.gateway.until(lambda: site.served(drained) > was or load.errors)
    assert load.errors == []


def test_a_worker_that_joins_gets_requests_within_a_round_and_one_that_is_removed_none(site):
    fourth = site.workers.start()
    with Load(request(site.url)) as load:
        load.more(20)
        began = time.monotonic()
        site.ctl("workers", "add", fourth.url)
        site.gateway.until(lambda: site.served(fourth) > 0 or load.errors)
        joined = time.monotonic() - began
        listed = site.ctl("workers", "list")
        site.ctl("workers", "remove", fourth.url)
        load.next_round()
        was = site.served(fourth)
        load.more(100)
        assert site.served(fourth) == was
    assert load.errors == []
    assert fourth.url in json.dumps(listed)
    assert joined < ROUND_SECONDS * 30, "it joined, if late: this machine is slow, but the round had to end"
    assert fourth.stop() == 0


# --- the gateway itself ---------------------------------------------------------------------------------------------


def test_a_gateway_that_is_stopped_ends_what_it_has_and_says_why_it_takes_no_more(site):
    with ExitStack() as stack:
        gateway = stack.enter_context(GatewayProcess([worker.url for worker in site.live]))
        gateway.wait_ready()
        with Load(request(gateway.url), clients=4) as load:
            load.more(40)
            assert gateway.stop() == 0, gateway.log
        assert {type(error) for error in load.errors} <= {InferenceServerException}
        for error in load.errors:
            assert error.status() == "StatusCode.UNAVAILABLE", error


def test_a_second_gateway_on_a_taken_port_exits_78_and_leaves_the_first_alone(site, client):
    command = [sys.executable, "-m", "rsrv", "gateway", "--worker", site.live[0].url]
    command += ["--grpc-port", str(site.gateway.grpc_port), "--http-port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 78, done.stderr
    assert str(site.gateway.grpc_port) in done.stderr
    assert client.is_server_ready()
