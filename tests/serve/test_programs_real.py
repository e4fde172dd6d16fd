"""Program sets with the real compiler on the CPU: what is shared, what is compared, and a roll back to the last bit."""

import time

import numpy as np
import pytest
from sched_support import send
from support.bundles import N, write_affine, write_model

from rsrv.bundle.directory import open_bundle
from rsrv.core.errors import InvalidRequest
from rsrv.runtime import CompilePool, open_device
from rsrv.runtime.hooks import Hooks
from rsrv.serve.admin.events import EventLog
from rsrv.serve.loading import ProgramSource, prepare_checks
from rsrv.serve.loading.batching import program_jobs
from rsrv.serve.loading.digests import read_programs
from rsrv.serve.programs import ProgramSets
from rsrv.serve.registry import Registry
from rsrv.serve.residency.manager import Residency
from rsrv.serve.residency.tensors import TensorPool, open_weights
from rsrv.serve.scheduler import Scheduler, ServableModel
from rsrv.stablehlo.policy import Policy

WEIGHTS = {"scale": np.full(3, 2, np.float32), "shift": np.full(3, 1, np.float32)}


@pytest.fixture(scope="module")
def parts():
    with CompilePool() as pool:
        device = open_device("cpu")
        yield pool, device
        device.close()


@pytest.fixture
def server(parts, tmp_path):
    """``affine`` is loaded and serves; the names of its parts are those of a server."""
    pool, device = parts
    bundle = open_bundle(write_affine(tmp_path / "affine", batch_sizes=(1, 4)))
    source = ProgramSource(device=device, pool=pool)
    executables = {}
    for job in program_jobs(bundle.manifest, read_programs(bundle, "programs"), Policy()):
        executables.setdefault(job.variant, {})[job.batch_key] = source.load(job, source.find(job)).executable
    scheduler, registry = Scheduler(device), Registry()
    residency = Residency(device, scheduler, None, TensorPool(device))
    weights = residency.open("affine", open_weights(bundle.weights_path), floor=None, scratch_bytes=0)
    model = ServableModel("affine", 1, bundle.manifest, executables, weights)
    registry.announce({"affine": bundle.path})
    scheduler.add(model)
    scheduler.start()
    registry.set_ready("affine", prepare_checks(model, Hooks(), None))
    sets = ProgramSets(source, Policy(), scheduler=scheduler, registry=registry, capacity=4, events=EventLog())

    def ask(x):
        served = registry.get("affine").prepared.model
        return send(scheduler, served, np.asarray(x, np.float32)).outputs()["y"]

    sets.ask = ask
    yield sets
    sets.close()
    scheduler.stop()
    residency.free()


def written(directory, fn, sizes=(1, 4), features=3):
    tensor = ((N, features), np.float32)
    return write_model(directory, fn, {"x": tensor}, {"y": tensor}, weights=WEIGHTS, batch_sizes=sizes)


def test_another_formula_is_tried_selected_and_rolled_back_to_the_last_bit(server, tmp_path):
    x = np.float32([[0.1, 0.2, 0.3], [4, 5, 6]])
    before = server.ask(x)
    other = written(tmp_path / "other", lambda x, scale, shift: ((x + shift / scale) * scale,))
    staged = server.stage("affine", directory=other, shadow=100.0)
    assert (staged.phase, staged.shadow.percent) == ("ready", 100.0)
    server.ask(x)
    for _ in range(6000):
        if (record := server.list("affine").programs[1].shadow).batches:
            break
        time.sleep(0.01)
    assert record.clean, record
    assert record.largest["y"] < 1e-6
    server.select("affine", 2, 1, require_clean=True)
    np.testing.assert_allclose(server.ask(x), x * 2 + 1, rtol=1e-6)
    server.select("affine", 1, 2)
    assert server.ask(x).tobytes() == before.tobytes()


def test_the_same_files_are_not_compiled_again_and_have_the_same_fingerprint(server, tmp_path):
    original = server.list("affine").programs[0]
    staged = server.stage("affine", directory=tmp_path / "affine")
    assert staged.fingerprint == original.fingerprint != ""
    assert staged.diagnostics == "batch 1: shared\nbatch 4: shared"


def test_programs_for_other_weights_are_refused_with_what_they_take(server, tmp_path):
    tensor = ((N, 3), np.float32)
    other = write_model(
        tmp_path / "other",
        lambda x, scale: (x * scale,),
        {"x": tensor},
        {"y": tensor},
        weights={"scale": WEIGHTS["scale"]},
        batch_sizes=(1, 4),
    )
    with pytest.raises(InvalidRequest, match="batch 1: takes 2 arguments, wanted 3; batch 4: takes 2 arguments"):
        server.stage("affine", directory=other)


def test_a_grid_that_is_another_is_refused_before_anything_is_compiled(server, tmp_path):
    other = written(tmp_path / "other", lambda x, scale, shift: (x * scale + shift,), sizes=(1, 8))
    with pytest.raises(InvalidRequest, match="batch 8: the model has no such program; batch 4: missing"):
        server.stage("affine", directory=other)


def test_text_that_is_no_program_is_refused_and_the_server_lives(server, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for size in (1, 4):
        (bare / f"model.b{size}.mlir").write_text("func.func @main( this is no program")
    with pytest.raises(InvalidRequest, match=r"model\.b1\.mlir: program cannot be read"):
        server.stage("affine", directory=bare)
    np.testing.assert_array_equal(server.ask([[1, 2, 3]]), [[3, 5, 7]])
