"""`golden.safetensors`: requests with the answers that the framework itself gave, to repeat the proof anywhere.

A golden is one call of the model: its program inputs and the outputs that the exporting framework computed for them.
In the file they are tensors ``input/<i>/<name>`` and ``output/<i>/<name>``, goldens counted from 0, names as in
``executable_inputs`` and ``executable_outputs``; dtypes and shapes (row-major, with the batch axis) as the program has
them. The layout is that of the weights, so the stock safetensors library reads the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rsrv.bundle.files import GOLDEN
from rsrv.bundle.problems import violation
from rsrv.bundle.safetensors import write_weights
from rsrv.bundle.tensors import load_tensors
from rsrv.core.errors import BundleError


@dataclass(frozen=True, eq=False)
class Golden:
    """One call of the model: name → array, inputs and outputs in the order in which they were written."""

    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]


def write_golden(
    path: Path | str, samples: Sequence[Mapping[str, np.ndarray]], references: Sequence[Mapping[str, np.ndarray]]
) -> None:
    """Write sample `i` of `samples` with its answer, `references[i]`. Equal arguments give equal bytes.

    Raises BundleError when there are not as many answers as samples, or one of them is empty, WeightsError for a dtype
    that no bundle holds.
    """
    if len(samples) != len(references):
        raise violation(BundleError, "X-58", f"{len(samples)} samples, but {len(references)} references", file=GOLDEN)
    items: list[tuple[str, np.ndarray]] = []
    for index, (inputs, outputs) in enumerate(zip(samples, references, strict=True)):
        if not inputs or not outputs:
            raise violation(
                BundleError, "X-58", f"golden {index} has no {'outputs' if inputs else 'inputs'}", file=GOLDEN
            )
        items += [(f"input/{index}/{name}", array) for name, array in inputs.items()]
        items += [(f"output/{index}/{name}", array) for name, array in outputs.items()]
    write_weights(path, items)


def read_golden(path: Path | str) -> list[Golden]:
    """The goldens in the file `path`, in order. Raises BundleError (X-58), or WeightsError for a damaged file."""
    goldens: dict[int, Golden] = {}
    for key, array in load_tensors(path).items():
        kind, _, rest = key.partition("/")
        number, slash, name = rest.partition("/")
        if kind not in ("input", "output") or not slash or not number.isdecimal() or str(int(number)) != number:
            raise _broken(path, f"tensor {key!r} is not called input/<i>/<name> or output/<i>/<name>")
        golden = goldens.setdefault(int(number), Golden({}, {}))
        tensors = golden.inputs if kind == "input" else golden.outputs
        assert isinstance(tensors, dict)
        tensors[name] = array
    for index in range(len(goldens)):
        if index not in goldens:
            raise _broken(path, f"has {len(goldens)} goldens, but none with the number {index}")
        for what, tensors in (("inputs", goldens[index].inputs), ("outputs", goldens[index].outputs)):
            if not tensors:
                raise _broken(path, f"golden {index} has no {what}")
    return [goldens[index] for index in range(len(goldens))]


def _broken(path: Path | str, problem: str) -> BundleError:
    return violation(BundleError, "X-58", f"{path}: {problem}", file=GOLDEN, hint="export the bundle again")
