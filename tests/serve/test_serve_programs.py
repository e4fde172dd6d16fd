"""Where executables come from: shared, cached, compiled; and what is done when one of these lets us down."""

import gc
import logging
import threading

import numpy as np
import pytest

from rsrv.core.errors import DeviceError, ProgramError, ServerStopping
from rsrv.runtime import CompileOptions, FakeDevice, execute, open_cache
from rsrv.runtime.compiled import Compiled
from rsrv.serve.loading import LoadProgress, ProgramSource
from rsrv.serve.loading.programs import ProgramJob
from rsrv.stablehlo import ProgramReport, ProgramSignature, TensorType
from rsrv.stablehlo.policy import Policy

F32 = TensorType("f32", (4,))
REPORT = ProgramReport(ProgramSignature((F32,), (F32,)))


class Pool:
    """Counts what it is asked for."""

    def __init__(self, blob=b"code"):
        self.blob, self.inspected, self.compiled = blob, [], []
        self.entered, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def inspect(self, program, *, batch=None):
        self.inspected.append(program)
        return REPORT

    def compile(self, program, options=CompileOptions(), policy=Policy()):  # noqa: B008
        self.compiled.append((program, options, policy))
        self.entered.set()
        assert self.gate.wait(60)
        if program == b"bad":
            raise ProgramError("no such luck")
        return Compiled(REPORT, self.blob, 0.25, 16, "done nothing")


class Device(FakeDevice):
    """Refuses the blobs that a test names, and knows what it compiled itself."""

    refused = ()

    def __init__(self):
        super().__init__()
        self.compiled = []

    def load(self, blob, signature, **known):
        if blob in self.refused:
            raise DeviceError("the executable is of another make")
        return super().load(blob, signature)

    def compile(self, program, options=CompileOptions()):  # noqa: B008
        self.compiled.append(program)
        return super().load(program, REPORT.signature)


@pytest.fixture
def cache(tmp_path):
    cache = open_cache(tmp_path, {"device": "fake"})
    yield cache
    cache.close()


def source(pool, device=None, cache=None, **more):
    progress = LoadProgress()
    made = ProgramSource(device=device or Device(), pool=pool, cache=cache, progress=progress, **more)
    made.counts = lambda: progress.counts
    return made


def load(source, job):
    return source.load(job, source.find(job))


def job(program=b"program", model="m", policy=Policy()):  # noqa: B008
    return ProgramJob.of(model, (), 4, program, policy)


def test_a_program_is_parsed_compiled_and_kept_and_then_neither_parsed_nor_compiled(cache):
    pool = Pool()
    first = source(pool, cache=cache)
    assert not first.is_cached(job())
    loaded = load(first, job())
    assert (loaded.origin, loaded.compiled.summary, loaded.compiled.blob) == ("compiled", "done nothing", None)
    assert execute(FakeDevice(), loaded.executable, [np.ones(4, np.float32)])[0].shape == (4,)
    assert (first.counts().compiled, first.counts().compile_seconds) == (1, loaded.seconds)
    assert 0 < loaded.seconds < 60  # all of it, not what the compiler says
    again = source(Pool(), cache=cache)
    assert again.is_cached(job())
    found = load(again, job())
    assert (found.origin, found.seconds) == ("cache", 0.0)
    assert again._pool.inspected == again._pool.compiled == []
    assert str(again.counts()) == "compiled 1/1, 1 from cache"


def test_models_with_the_same_program_share_one_executable_as_long_as_one_of_them_lives():
    pool = Pool()
    programs = source(pool)
    first, second = load(programs, job(model="a")), load(programs, job(model="b"))
    assert (first.origin, second.origin) == ("compiled", "shared")
    assert first.executable is second.executable
    assert len(pool.compiled) == 1
    assert load(programs, job(policy=Policy(batch=8))).origin == "compiled"
    del first, second
    gc.collect()
    assert load(programs, job(model="c")).origin == "compiled"


def test_two_models_that_need_one_program_at_the_same_time_compile_it_once():
    pool = Pool()
    programs = source(pool)
    found = [programs.find(job(model=name)) for name in "ab"]
    pool.gate.clear()
    origins = []
    threads = [
        threading.Thread(target=lambda f=f, name=name: origins.append(programs.load(job(model=name), f)))
        for f, name in zip(found, "ab", strict=True)
    ]
    for thread in threads:
        thread.start()
    assert pool.entered.wait(60)
    pool.gate.set()
    for thread in threads:
        thread.join()
    assert sorted(loaded.origin for loaded in origins) == ["compiled", "shared"]
    assert len(pool.compiled) == 1


def test_a_cached_executable_that_the_device_refuses_is_one_warning_and_compiled_anew(cache, caplog):
    load(source(Pool(b"old"), cache=cache), job())
    device = Device()
    device.refused = (b"old",)
    again = source(Pool(b"new"), device, cache)
    assert load(again, job()).origin == "compiled"
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "the executable is of another make" in record.getMessage()
    assert load(source(Pool(), device, cache), job()).origin == "cache"


def test_what_cannot_be_serialised_is_compiled_here_after_it_survived_there_once(cache):
    program = b"func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> { return %a : tensor<4xf32> }"
    device, pool = Device(), Pool(None)
    assert load(source(pool, device, cache), job(program)).origin == "compiled"
    assert (len(pool.compiled), len(device.compiled)) == (1, 1)
    again = source(Pool(None), device, cache)
    assert load(again, job(program)).origin == "compiled"
    assert (again._pool.compiled, len(device.compiled)) == ([], 2)


def test_options_and_policy_reach_the_compiler_and_the_key(cache):
    options, policy = CompileOptions((("xla_a", 1),)), Policy("f32", True, 8)
    pool = Pool()
    load(source(pool, cache=cache, options=options), job(policy=policy))
    assert pool.compiled == [(b"program", options, policy)]
    assert not source(pool, cache=cache).is_cached(job(policy=policy))
    assert source(pool, cache=cache, options=options).is_cached(job(policy=policy))


def test_a_program_that_fails_fails_each_time_and_is_not_kept(cache):
    programs = source(Pool(), cache=cache)
    for _ in range(2):
        with pytest.raises(ProgramError, match="no such luck"):
            load(programs, job(b"bad"))
    assert cache.empty
    assert programs.counts().done == 0


def test_nothing_is_compiled_for_a_server_that_stops(cache):
    def stopping():
        raise ServerStopping("the server is stopping")

    pool = Pool()
    programs = source(pool, cache=cache, require_running=stopping)
    with pytest.raises(ServerStopping):
        programs.find(job())
    assert pool.inspected == []


def test_labels_say_what_an_entry_is():
    assert str(ProgramJob.of("net", (224, 224), 8, b"")) == "net 224x224 batch 8"
    assert str(ProgramJob.of("net", (), 0, b"")) == "net"
