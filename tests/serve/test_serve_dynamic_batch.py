"""Bundles with a symbolic batch axis at load: the sizes of the bundle or of the operator, each a program of its own."""

import threading

import numpy as np
import pytest
from support.bundles import N, specs, write_affine

from rsrv.bundle.writer import write_bundle
from rsrv.core.config import EndpointsConfig, ServerConfig
from rsrv.core.config.sections import ModelSchedulingConfig, SchedulerConfig
from rsrv.runtime import CompilePool, open_device
from rsrv.serve.loading import Loader, LoadProgress, ProgramSource
from rsrv.serve.registry import ModelState, Registry
from rsrv.serve.residency.manager import Residency
from rsrv.serve.residency.tensors import TensorPool
from rsrv.serve.scheduler import Scheduler

DOUBLE = b"""module { func.func public @main(%x: tensor<?x3xf32>) -> tensor<?x3xf32> {
  %0 = stablehlo.add %x, %x : tensor<?x3xf32>
  return %0 : tensor<?x3xf32> } }"""
ONLY_FOUR = b"""module { func.func public @main(%x: tensor<?x3xf32>) -> tensor<?x3xf32> {
  %c = stablehlo.constant dense<1.0> : tensor<4x3xf32>
  %0 = stablehlo.add %x, %c : (tensor<?x3xf32>, tensor<4x3xf32>) -> tensor<?x3xf32>
  return %0 : tensor<?x3xf32> } }"""
STATIC = DOUBLE.replace(b"?", b"4")


def write_dynamic(path, program=DOUBLE, sizes=(1, 4)):
    tensor = {"x": ((N, 3), np.float32)}
    return write_bundle(
        path,
        name=path.name,
        executable_inputs=specs(tensor),
        executable_outputs=specs({"y": tensor["x"]}),
        modules={0: program},
        weights=[],
        dynamic_batch_sizes=sizes,
    )


@pytest.fixture(scope="module")
def parts():
    with CompilePool() as pool:
        device = open_device("cpu")
        yield pool, device
        device.close()


@pytest.fixture
def load(parts, tmp_path):
    pool, device = parts
    made = []

    def call(**batch_sizes):
        registry, scheduler, progress = Registry(), Scheduler(device), LoadProgress()
        models = {name: ModelSchedulingConfig(batch_sizes=sizes) for name, sizes in batch_sizes.items()}
        config = ServerConfig(
            model_dirs=[str(tmp_path)],
            endpoints=EndpointsConfig(grpc_port=0),
            scheduler=SchedulerConfig(models=models),
        )
        source = ProgramSource(device=device, pool=pool, progress=progress)
        residency = Residency(device, scheduler, None, TensorPool(device))
        loader = Loader(config=config, registry=registry, scheduler=scheduler, residency=residency, source=source,
                        progress=progress, stopping=threading.Event(), on_phase=lambda phase: None)  # fmt: skip
        made.append((scheduler, residency, loader))
        loader.load_all()
        return {entry.name: entry for entry in registry.entries()}

    yield call
    for scheduler, residency, loader in made:
        scheduler.stop()
        loader.close()
        residency.free()


def test_one_program_is_served_at_the_sizes_that_the_bundle_lists(load, tmp_path):
    write_dynamic(tmp_path / "net")
    entry = load()["net"]
    assert entry.state is ModelState.READY, entry.reason
    model = entry.prepared.model
    assert model.batch_keys(()) == (1, 4)
    assert model.coalescable
    assert {key: program.signature.arguments[0].shape for key, program in model.programs[()].items()} == {
        1: (1, 3),
        4: (4, 3),
    }


def test_an_operator_chooses_other_sizes(load, tmp_path):
    write_dynamic(tmp_path / "net")
    assert load(net=[16, 2])["net"].prepared.model.batch_keys(()) == (2, 16)


def test_a_size_that_the_program_does_not_take_fails_its_model_alone(load, tmp_path):
    write_dynamic(tmp_path / "good")
    write_dynamic(tmp_path / "picky", ONLY_FOUR, sizes=(4,))
    write_dynamic(tmp_path / "static", STATIC, sizes=(4,))
    entries = load(picky=[4, 5])
    assert entries["good"].state is ModelState.READY
    assert entries["picky"].failure.phase == "signature"
    assert (
        "cannot be specialised to batch size 5: 'stablehlo.add' op requires the same shape" in entries["picky"].reason
    )
    assert "program has no symbolic axis" in entries["static"].reason
    assert load()["picky"].state is ModelState.READY


def test_sizes_are_chosen_for_symbolic_programs_only(load, tmp_path):
    write_affine(tmp_path / "affine", batch_sizes=(1, 4))
    entry = load(affine=[1])["affine"]
    assert entry.failure.phase == "manifest"
    assert entry.failure.message == (
        "scheduler.models.affine.batch_sizes is [1], but the programs of 'affine' are for fixed batch sizes"
    )


def test_models_with_the_same_program_share_each_size(load, tmp_path):
    write_dynamic(tmp_path / "a")
    write_dynamic(tmp_path / "b", sizes=(4, 8))
    entries = load()
    one, other = (entries[name].prepared.model.programs[()] for name in ("a", "b"))
    assert one[4] is other[4]
    assert set(one) == {1, 4}
    assert set(other) == {4, 8}
