"""How a soak sees that memory grows, and what a process holds."""

import os
import subprocess
import sys

import pytest

from rsrv.core.shm import OwnedRegion
from soak.vitals import Vitals, growth, shared_memory


def test_growth_is_the_trend_over_the_whole_time():
    flat = [(float(t), 1000 + 7 * (-1) ** t) for t in range(60)]
    assert growth(flat) == pytest.approx(0, abs=2)
    assert growth([(t, rss + 10 * t) for t, rss in flat]) == pytest.approx(590, abs=2)
    assert growth(flat[:2]) == 0.0


OPENS_ON_REQUEST = "print(flush=True); input(); file = open('/dev/zero'); print(flush=True); input()"


def test_vitals_count_descriptors_and_threads_of_a_process():
    # Not of this one, where something of another test may end just now.
    command = [sys.executable, "-S", "-c", OPENS_ON_REQUEST]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        before = Vitals.of(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline()
        after = Vitals.of(process.pid)
        process.stdin.close()
    assert after.fds == before.fds + 1
    assert after.files - before.files == {"/dev/zero": 1}
    assert after.threads == before.threads == 1
    assert after.rss > 1 << 20


def test_objects_in_shared_memory_are_known_by_the_pid_of_their_maker():
    with OwnedRegion.create("test-soak", 16) as region:
        assert shared_memory()[region.name] == os.getpid()
    assert region.name not in shared_memory()
