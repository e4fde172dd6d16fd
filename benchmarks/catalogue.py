"""Many bundles within seconds, whose answers depend on every byte of their weights and are known exactly.

A model of this kind adds the column sums of all its weights to its input, ``y[n,c] = x[n,c] + Σ w[r,c]``. The weights
are small integers, so that the sums are exact in float32 in any order, and a model that runs with one byte of another
one's weights, or of none, answers wrongly. Models with equal shapes have equal programs, which are compiled once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.load import Stream
from rsrv.core.wire import decode_response, encode_request, join

MIB = 1 << 20
COLUMNS = 256
BATCH_SIZES = (1, 4)
_ROW_BYTES = 4 * COLUMNS
_LARGEST = 4
"""Weights are below that. A million rows of them still add up to less than 2^24, beyond which float32 has gaps."""


@dataclass(frozen=True)
class Entry:
    """A bundle: bytes of its weights, and a request whose answer is checked."""

    path: Path
    nbytes: int
    stream: Stream

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def weights(self) -> Path:
        return self.path / "weights.safetensors"


def write_catalogue(
    repo: Path,
    sizes: Sequence[int],
    *,
    tensor_bytes: int = MIB,
    seed: int = 0,
    batch_sizes: Sequence[int] = BATCH_SIZES,
) -> list[Entry]:
    """One bundle of each of `sizes` (bytes, multiples of `tensor_bytes`), all with weights of their own."""
    entries = []
    for index, size in enumerate(sizes):
        rng = np.random.default_rng((seed, index))
        tensors = [random_tensor(rng, tensor_bytes) for _ in range(size // tensor_bytes)]
        entries.append(write_entry(repo / f"model{index:03}", tensors, batch_sizes))
    return entries


def random_tensor(rng: np.random.Generator, nbytes: int) -> np.ndarray:
    """f32[rows, COLUMNS] of small integers, `nbytes` large."""
    return rng.integers(0, _LARGEST, (nbytes // _ROW_BYTES, COLUMNS), np.uint8).astype(np.float32)


def write_entry(directory: Path, tensors: Sequence[np.ndarray], batch_sizes: Sequence[int] = BATCH_SIZES) -> Entry:
    """The bundle with these weights, each f32[rows, COLUMNS]."""
    from rsrv.bundle import IOSpec, write_bundle

    rows = tuple(len(tensor) for tensor in tensors)
    write_bundle(
        directory,
        name=directory.name,
        executable_inputs=[IOSpec("x", "f32", (1, COLUMNS), batch_axis=0)],
        executable_outputs=[IOSpec("y", "f32", (1, COLUMNS), batch_axis=0)],
        modules={batch: _program(batch, rows) for batch in batch_sizes},
        weights=[(f"w{index}", tensor) for index, tensor in enumerate(tensors)],
    )
    sums = np.sum([tensor.sum(0, dtype=np.float64) for tensor in tensors], axis=0)
    return Entry(directory, sum(tensor.nbytes for tensor in tensors), _stream(directory.name, sums))


def _stream(name: str, sums: np.ndarray) -> Stream:
    x = np.arange(COLUMNS, dtype=np.float32)[None]
    expected = (x + sums).astype(np.float32)

    def right(answer: bytes) -> bool:
        y = decode_response(answer).arrays().get("y")
        return y is not None and np.array_equal(y, expected)

    return Stream(name, join(encode_request(name, [("x", x)])), check=right)


@cache
def _program(batch: int, rows: tuple[int, ...]) -> bytes:
    from rsrv.stablehlo import serialize

    row, many = f"tensor<{COLUMNS}xf32>", f"tensor<{batch}x{COLUMNS}xf32>"
    kinds = [f"tensor<{n}x{COLUMNS}xf32>" for n in rows]
    lines = ["%zero = stablehlo.constant dense<0.0> : tensor<f32>", f"%t0 = stablehlo.constant dense<0.0> : {row}"]
    for i, kind in enumerate(kinds):
        reduce = f"stablehlo.reduce(%w{i} init: %zero) applies stablehlo.add across dimensions = [0]"
        lines.append(f"%s{i} = {reduce} : ({kind}, tensor<f32>) -> {row}")
        lines.append(f"%t{i + 1} = stablehlo.add %t{i}, %s{i} : {row}")
    lines.append(f"%b = stablehlo.broadcast_in_dim %t{len(rows)}, dims = [1] : ({row}) -> {many}")
    lines.append(f"%y = stablehlo.add %x, %b : {many}")
    arguments = ", ".join([f"%x: {many}", *(f"%w{i}: {kind}" for i, kind in enumerate(kinds))])
    body = "\n  ".join([*lines, f"return %y : {many}"])
    return serialize(f"func.func public @main({arguments}) -> {many} {{\n  {body}\n}}")
