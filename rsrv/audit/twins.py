"""Do two bundles of the same programs, such as a bundle and its conversion, give the same answers?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from rsrv.audit.parity import compare
from rsrv.audit.programs import Program, program_label, runnable_programs
from rsrv.bundle.digests import read_verified_program
from rsrv.bundle.directory import Bundle
from rsrv.bundle.tensors import load_tensors
from rsrv.core.errors import ParityMismatch
from rsrv.runtime.backends import open_device
from rsrv.runtime.compile_pool import CompilePool
from rsrv.runtime.device import Device, Executable, execute
from rsrv.stablehlo.policy import Policy, apply
from rsrv.stablehlo.signature import TensorType, numpy_dtype

SEED = 1234
_INTEGERS = (0, 64)
"""Integers are drawn from here: below the size of nearly every embedding (X-54)."""


def require_same_answers(one: Bundle, other: Bundle) -> tuple[str, ...]:
    """Run every program of both on the same random inputs, each with its own bundle's weights; names of the programs.

    Compiled in a process that may die, run in this one on the CPU. Raises ParityMismatch when an output differs by more
    than the tolerance of its dtype, ProgramError when a program cannot be compiled.
    """
    names = []
    with _cpu() as device, CompilePool(platform="cpu") as pool:
        weights = [_weights(bundle) for bundle in (one, other)]
        for program in runnable_programs(one):
            pair = [_load(bundle, program, pool, device) for bundle in (one, other)]
            taken = pair[0].signature.arguments[: len(one.manifest.executable_inputs)]
            inputs = [_sample(index, tensor) for index, tensor in enumerate(taken)]
            first, second = (
                {f"result {i}": array for i, array in enumerate(execute(device, executable, [*inputs, *arrays]))}
                for executable, arrays in zip(pair, weights, strict=True)
            )
            report = compare(first, second)
            if not report.ok:
                text = f"{program_label(program)} gives other answers in {other.path}: {report}"
                raise ParityMismatch(text, rule="X-60", file=program[0])
            names.append(program_label(program))
    return tuple(names)


@contextmanager
def _cpu() -> Iterator[Device]:
    device = open_device("cpu")
    try:
        yield device
    finally:
        device.close()


def _load(bundle: Bundle, program: Program, pool: CompilePool, device: Device) -> Executable:
    data = read_verified_program(bundle, bundle.path / program[0], "programs")
    policy = Policy(batch=program[2] if bundle.manifest.batching.dynamic else None)
    compiled = pool.compile(data, policy=policy)
    if compiled.blob is None:
        return device.compile(apply(data, policy).program)
    return device.load(compiled.blob, compiled.report.signature)


def _weights(bundle: Bundle) -> Sequence[np.ndarray]:
    assert bundle.weights_path is not None  # a bundle with programs
    return list(load_tensors(bundle.weights_path, column_major=bundle.manifest.column_major).values())


def _sample(index: int, tensor: TensorType) -> np.ndarray:
    source = np.random.default_rng([SEED, index])
    dtype = numpy_dtype(tensor.dtype)
    if dtype.kind == "b":
        return source.integers(0, 2, tensor.shape).astype(dtype)
    if dtype.kind in "iu":
        return source.integers(*_INTEGERS, tensor.shape).astype(dtype)
    return source.uniform(-1, 1, tensor.shape).astype(dtype)
