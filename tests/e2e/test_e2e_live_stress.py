"""Several threads operate a server at random while others ask its models: each answer is one version's, nothing hangs.

Bounded and seeded: what a thread does depends on the seed alone, when it does it does not. `RSRV_STRESS_SECONDS` makes
each run longer, `RSRV_STRESS_SEED` makes it another one.
"""

import os
import random
import threading
import time

import psutil
import pytest
from support.live_stress import Stress

from rsrv.core.config import EndpointsConfig, RuntimeConfig, ServerConfig
from rsrv.core.config.sections import AdminConfig, FakeDeviceConfig, ReloadConfig
from rsrv.serve import serve

SECONDS = float(os.environ.get("RSRV_STRESS_SECONDS", "3"))
SEED = int(os.environ.get("RSRV_STRESS_SEED", "1"))
STOPS_WITHIN = 15.0

BUDGET_BYTES = 2200
"""Room for a few of the models: their weights have 16 bytes each, and one execution needs its scratch."""
RUNTIMES = {
    "cpu": RuntimeConfig(backend="cpu", cpu_threads=1),
    "budget": RuntimeConfig(backend="cpu", cpu_threads=1, device_memory_bytes=BUDGET_BYTES),
    "card": RuntimeConfig(
        backend="fake", device_memory_bytes=BUDGET_BYTES, fake=FakeDeviceConfig(memory_bytes=1 << 20)
    ),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def begin(tmp_path, cache, monkeypatch):
    """Starts a server and what stresses it; stops it in the end."""
    monkeypatch.setenv("RSRV_ALLOW_FAKE", "1")
    monkeypatch.setenv("NPROC", "1")  # as the device sets it for `cpu_threads`; restored afterwards
    (tmp_path / "repo").mkdir()
    threads = {*threading.enumerate()}
    children = {*psutil.Process().children()}
    servers = []

    def begin(kind, *, policy="drain", **options):
        server = serve(
            ServerConfig(
                model_dirs=[str(tmp_path / "repo")],
                model_control_mode="dynamic",
                model_poll_seconds=3600.0,
                runtime=RUNTIMES[kind],
                cache_dir=str(cache),
                endpoints=EndpointsConfig(grpc_port=0, http_port=None, max_concurrent_requests=16),
                admin=AdminConfig(allow_external_dirs=True, program_capacity=3),
                reload=ReloadConfig(policy=policy),
            ),
            blocking=False,
        )
        servers.append(server)
        stress = Stress(server, tmp_path / "bundles", seed=SEED, fake=kind == "card", **options)
        stress.servers_threads = threads
        stress.servers_children = children
        return stress

    yield begin
    for server in servers:
        server.stop(1.0)


def stopped(stress):
    """Stop the server: nothing of it is left, and it did not take long."""
    began = time.monotonic()
    stress.server.stop(1.0)
    if (took := time.monotonic() - began) > STOPS_WITHIN:
        stress.fault(f"the stop took {took:.1f} s")
    until = began + STOPS_WITHIN
    while (left := [each for each in threading.enumerate() if each not in stress.servers_threads]) and (
        time.monotonic() < until
    ):
        time.sleep(0.05)
    if left:
        stress.fault(f"threads are left: {left}")
    if more := {*psutil.Process().children()} - stress.servers_children:
        stress.fault(f"processes are left: {more}")
    stress.close()
    assert not stress.faults, "\n".join(stress.faults[:5])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("cpu", {}),
        ("budget", {"aborts": True}),
        ("card", {"aborts": True, "loose": True}),
        ("budget", {"aborts": True, "policy": "evict_first"}),
    ],
    ids=["cpu", "budget", "card", "evict_first"],
)
def test_models_that_are_operated_at_random_answer_right_and_leave_nothing(begin, kind, options):
    stress = begin(kind, **options)
    stress.run(SECONDS)
    stress.settle()
    assert stress.counts["infer ok"]
    assert stress.counts["reload ok"]
    stopped(stress)


@pytest.mark.parametrize("kind", ["budget", "card"])
def test_a_server_stops_in_the_middle_of_everything(begin, kind):
    stress = begin(kind, aborts=True, loose=True)
    running = threading.Thread(target=stress.run, args=(SECONDS,))
    running.start()
    time.sleep(SECONDS * random.Random(SEED).uniform(0.3, 0.9))
    stopped_by = threading.Thread(target=stress.server.stop, args=(1.0,), daemon=True)
    stopped_by.start()
    stopped_by.join(STOPS_WITHIN)
    if stopped_by.is_alive():
        stress.fault("the server does not stop")
    stress.stop.set()
    running.join()
    stopped(stress)
