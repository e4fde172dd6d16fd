"""The gate in front of a new bundle: its words name the bundle, and one process may prove many of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.bundles import lower

from rsrv.audit import AuditProcess, bundle_gate
from rsrv.bundle.golden import Golden
from rsrv.bundle.iospec import IOSpec
from rsrv.bundle.staging import final_name
from rsrv.bundle.writer import write_bundle
from rsrv.core.errors import BundleError, ParityMismatch, SignatureMismatch

X = np.ones((1, 3), np.float32)


@pytest.fixture(scope="module")
def process() -> Iterator[AuditProcess]:
    with AuditProcess(backend="cpu") as process:
        yield process


def write(path: Path, program: bytes, weight: np.ndarray, **gate: object) -> Path:
    return write_bundle(
        path,
        name=path.name,
        executable_inputs=[IOSpec("x", np.float32, (1, 3), batch_axis=0)],
        executable_outputs=[IOSpec("y", np.float32, (1, 3), batch_axis=0)],
        modules={1: program},
        weights=[("w", weight)],
        gate=bundle_gate(**gate),
        overwrite=True,
    )


@pytest.fixture(scope="module")
def program() -> bytes:
    return lower(lambda x, w: (x * w,), [((1, 3), np.float32), ((3,), np.float32)])


def test_the_name_of_a_staged_directory_is_known() -> None:
    assert final_name(Path("/a/.my.net.v2.123.partial")) == "my.net.v2"


def test_errors_name_the_bundle_as_it_is_going_to_be_called(tmp_path: Path, program: bytes) -> None:
    with pytest.raises(SignatureMismatch) as signature:
        write(tmp_path / "net", program, np.ones(4, np.float32))
    with pytest.raises(BundleError) as damaged:
        write(tmp_path / "net", b"junk", np.ones(3, np.float32))
    with pytest.raises(ParityMismatch) as parity:
        write(tmp_path / "net", program, np.ones(3, np.float32), goldens=[Golden({"z": X}, {"y": X})])
    for caught in (signature, damaged, parity):
        assert str(caught.value).startswith("the bundle was not written: ")
        assert ".partial" not in f"{caught.value} {caught.value.hint}"
    assert list(tmp_path.iterdir()) == []


def test_one_process_proves_one_bundle_after_the_other_under_the_same_name(
    tmp_path: Path, program: bytes, process: AuditProcess
) -> None:
    for factor in (2, 3):
        weight = np.full(3, factor, np.float32)
        write(tmp_path / "net", program, weight, goldens=[Golden({"x": X}, {"y": X * factor})], process=process)
    with pytest.raises(ParityMismatch, match="does not compute what the framework computed"):
        write(tmp_path / "net", program, weight, goldens=[Golden({"x": X}, {"y": X * 2})], process=process)
