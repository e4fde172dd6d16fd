"""A server that stops while weights are being read: from a slow disk, and from one that does not answer any more."""

import contextlib
import logging
import os
import threading

import numpy as np
import pytest
from residency_support import NBYTES, Site
from sched_support import LONG

from rsrv.bundle.safetensors import write_weights
from rsrv.core.errors import ServerStopping, WeightsError
from rsrv.runtime.fake import FakeDevice
from rsrv.serve.residency import reading, transfer
from rsrv.serve.residency.copies import Copies
from rsrv.serve.residency.floors import Floor
from rsrv.serve.residency.handle import ModelWeights
from rsrv.serve.residency.tensors import TensorPool, open_weights
from rsrv.serve.residency.transfer import Job, Transfer


class Disk:
    """Reads wait until `answers`; those that began before are told by `asked`."""

    def __init__(self, monkeypatch):
        self.asked, self.answers, self.reads = threading.Event(), threading.Event(), 0
        self.hangs = False
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self.preadv)

    def preadv(self, fd, buffers, offset):
        if self.hangs:
            self.reads += 1
            self.asked.set()
            assert self.answers.wait(LONG)
        return self._preadv(fd, buffers, offset)


@pytest.fixture
def disk(monkeypatch):
    disk = Disk(monkeypatch)
    yield disk
    disk.answers.set()


@pytest.mark.parametrize("unified", [True, False])
def test_a_slow_load_ends_with_its_part_when_the_server_stops(tmp_path, monkeypatch, disk, unified):
    monkeypatch.setattr(reading, "_PART_BYTES", 64)
    here = Site(tmp_path, 2 * NBYTES, unified=unified)
    with contextlib.closing(here):
        here.add("a", floor=Floor.UNPINNED)
        disk.hangs = True
        waits = here.ask("a")
        assert disk.asked.wait(LONG)
        here.residency.close()
        disk.answers.set()
        here.scheduler.stop()
        here.residency.stop()
        assert isinstance(waits.error(), ServerStopping)
        assert disk.reads <= 2
        assert not here.residency._moves.hangs


@pytest.mark.parametrize("unified", [True, False])
def test_a_read_that_hangs_keeps_no_server_from_stopping_and_nothing_is_freed_under_it(
    tmp_path, monkeypatch, caplog, disk, unified
):
    monkeypatch.setattr(transfer, "_PATIENCE_SECONDS", 0.05)
    here = Site(tmp_path, 4 * NBYTES, unified=unified)
    here.add("b", "a", floor=Floor.UNPINNED)
    here.serve("b")
    disk.hangs = True
    waits = here.ask("a")
    assert disk.asked.wait(LONG)
    here.residency.close()
    here.scheduler.stop()
    with caplog.at_level(logging.WARNING):
        here.residency.stop()
        here.residency.free()
    assert isinstance(waits.error(), ServerStopping)
    assert [record.message.split(" ")[:2] for record in caplog.records] == [["weights", "are"]] * 2
    assert here.device.weight_bytes == NBYTES
    assert here.models["b"].weights.file.is_current()
    with pytest.raises(ServerStopping):
        here.residency.compact()
    disk.answers.set()
    here.residency._moves._transfer._thread.join(LONG)
    assert not here.residency._moves.hangs
    here.close()


def test_the_end_of_a_job_that_was_given_up_is_told_to_nobody(monkeypatch):
    monkeypatch.setattr(transfer, "_PATIENCE_SECONDS", 0.05)
    posted, entered, gate = [], threading.Event(), threading.Event()
    moves = Transfer(posted.append)
    moves.stop()
    assert not moves.left
    moves.start()

    def hang():
        entered.set()
        assert gate.wait(LONG)

    moves.put(Job(hang, lambda outcome: None))
    assert entered.wait(LONG)
    moves.stop()
    assert moves.left
    assert moves.is_alive
    gate.set()
    moves._thread.join(LONG)
    assert posted == []


# --- what a failed load says of the next one --------------------------------------------------------------------------


@pytest.fixture
def load(tmp_path):
    """Loads the weights and gives the error that the next load would be spared."""
    path = tmp_path / "w.safetensors"
    write_weights(path, [("w", np.arange(64, dtype=np.float32))])
    device = FakeDevice()
    copies = Copies(device, TensorPool(device), None)
    weights = ModelWeights("m", open_weights(path), Floor.UNPINNED, 256)

    def load():
        with contextlib.suppress(WeightsError):
            copies.bring(weights)
            copies.drop([weights])
        return copies.known_failure(weights)

    load.path, load.weights = path, weights
    return load


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    with path.open("r+b") as file:
        file.write(data)


def test_a_load_of_other_bytes_is_not_tried_again_until_the_file_changes_once_more(load):
    assert load() is None
    flip(load.path)
    assert "not the same" in load().message
    flip(load.path)
    assert load() is None


def test_a_file_that_changes_while_it_is_read_is_read_again(load, monkeypatch):
    flip(load.path)
    preadv, pending = os.preadv, [lambda: os.utime(load.path, ns=(1, 1))]

    def read(fd, buffers, offset):
        n = preadv(fd, buffers, offset)
        if pending:
            pending.pop()()
        return n

    monkeypatch.setattr(os, "preadv", read)
    assert load() is None
    assert load() is not None


def test_a_disk_that_fails_once_is_asked_again(load, monkeypatch):
    def fail(fd, buffers, offset):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert load() is None
        assert load.weights.placed is None
    assert load() is None
    load.weights.file.close()
    assert load() is not None
