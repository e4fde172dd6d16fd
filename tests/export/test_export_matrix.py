"""One model of each framework: exported, run from its bundle alone, compared with jax.jit of the same function."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
import pytest

from rsrv.audit import check_bundle
from rsrv.bundle import Bundle, open_bundle, ordered, read_header
from rsrv.core.dtypes import DType
from rsrv.export import Factory, call_factory, export_bundle
from rsrv.runtime import CompilePool, PjrtDevice, execute

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
SIZES = (1, 4, 8)


@dataclass
class Exported:
    made: Factory
    bundle: Bundle
    device: PjrtDevice
    answers: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def rows(self, count: int) -> dict[str, np.ndarray]:
        """Input rows that are all different; the first ones do not depend on `count`."""
        draw = np.random.default_rng(1)
        data = {}
        for spec in self.bundle.manifest.executable_inputs:
            shape = spec.concrete_shape(max(SIZES))
            if spec.dtype is not DType.I32:
                values = draw.normal(0, 1, shape)
            elif spec.name == "mask":
                values = np.arange(shape[1]) <= draw.integers(1, shape[1], (shape[0], 1))
            else:
                values = draw.integers(0, 100, shape)
            data[spec.name] = values.astype(spec.dtype.numpy)[:count]
        return data

    def weights(self) -> list[np.ndarray]:
        """Read with numpy alone, as a foreign reader of the file would."""
        path = self.bundle.weights_path
        assert path is not None
        header, data = read_header(path), path.read_bytes()
        return [
            np.frombuffer(data[header.data_offset + e.begin : header.data_offset + e.end], e.dtype.numpy).reshape(
                e.shape
            )
            for e in ordered(header)
        ]

    def run(self, batch: int) -> list[np.ndarray]:
        if batch not in self.answers:
            program = self.device.compile(self.bundle.programs[()][batch].read_bytes())
            self.answers[batch] = execute(self.device, program, [*self.rows(batch).values(), *self.weights()])
        return self.answers[batch]

    def jitted(self, batch: int) -> list[np.ndarray]:
        result = jax.jit(self.made.fn)(self.made.params, *self.rows(batch).values())
        return [np.asarray(leaf) for leaf in jax.tree.leaves(result)]


@pytest.fixture(scope="module", params=["jax_mlp", "flax_cnn", "nnx_mlp", "equinox_transformer"])
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: PjrtDevice, pool: CompilePool
) -> Exported:
    made = call_factory(f"{EXAMPLES / request.param}.py:make")
    path = export_bundle(
        "jax",
        made.fn,
        made.params,
        made.inputs,
        dir=tmp_path_factory.mktemp("matrix") / request.param,
        batch_sizes=SIZES,
        output_names=made.output_names,
        collect_git=False,
        pool=pool,
    )
    return Exported(made, open_bundle(path), device)


@pytest.mark.parametrize("batch", SIZES)
def test_answers_are_those_of_jit_bit_by_bit(exported: Exported, batch: int) -> None:
    found, expected = exported.run(batch), exported.jitted(batch)
    assert len(found) == len(expected) == len(exported.bundle.manifest.executable_outputs)
    for mine, reference in zip(found, expected, strict=True):
        assert mine.dtype == reference.dtype
        assert mine.shape == reference.shape
        assert mine.tobytes() == reference.tobytes()


def test_answers_differ_from_row_to_row(exported: Exported) -> None:
    for output in exported.run(max(SIZES)):
        assert np.ptp(output, axis=0).max() > 0.01 * np.abs(output).max()


def test_a_row_gets_the_same_answer_at_every_size(exported: Exported) -> None:
    reference = exported.run(max(SIZES))
    for size in SIZES[:-1]:
        for mine, whole in zip(exported.run(size), reference, strict=True):
            assert np.abs(mine - whole[:size]).max() / np.abs(whole).max() <= 1e-4


def test_the_bundle_has_no_finding(exported: Exported, pool: CompilePool) -> None:
    report = check_bundle(exported.bundle.path, pool=pool)
    assert report.passed(strict=True), report.to_json()
    assert report.checks == ["manifest", "files", "weights", *(f"model.b{size}.mlir" for size in SIZES)]


def test_the_models_are_served_in_batches(exported: Exported) -> None:
    assert exported.bundle.manifest.coalescable_specs
    assert exported.bundle.manifest.batching.compiled_batch_sizes == SIZES
