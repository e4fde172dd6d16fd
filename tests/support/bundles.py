"""Small bundles for tests: one lowered JAX function per batch size, written by `write_bundle`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from rsrv.bundle.iospec import IOSpec
from rsrv.bundle.writer import write_bundle
from rsrv.stablehlo.artifact import serialize

N = -1
"""Stands for the batch axis in the shapes below."""

Shape = tuple[int, ...]


def lower(fn: Callable, arguments: Sequence[tuple[Shape, np.dtype]]) -> bytes:
    """The portable artifact of `fn`, whose arguments are the program's, none of them dropped."""
    import jax

    specs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arguments]
    with jax.enable_x64(True):
        module = jax.jit(fn, keep_unused=True).lower(*specs).compiler_ir("stablehlo")
    return serialize(module)


def write_model(
    directory: Path,
    fn: Callable,
    inputs: Mapping[str, tuple[Shape, type | np.dtype]],
    outputs: Mapping[str, tuple[Shape, type | np.dtype]],
    *,
    weights: Mapping[str, np.ndarray] = {},
    batch_sizes: Sequence[int] | None = (1, 4, 8),
    hooks: str | None = None,
    client_inputs: Mapping[str, tuple[Shape, type | np.dtype]] | None = None,
    client_outputs: Mapping[str, tuple[Shape, type | np.dtype]] | None = None,
) -> Path:
    """Write a bundle for ``fn(*inputs, *weights) -> tuple of outputs``; `N` in a shape is its batch axis.

    ``batch_sizes=None`` writes a single program without a batch key.
    """
    directory = Path(directory)

    def concrete(shape: Shape, batch: int) -> Shape:
        return tuple(batch if size == N else size for size in shape)

    def program(batch: int) -> bytes:
        arguments = [(concrete(shape, batch), np.dtype(dtype)) for shape, dtype in inputs.values()]
        arguments += [(array.shape, array.dtype) for array in weights.values()]
        return lower(fn, arguments)

    return write_bundle(
        directory,
        name=directory.name,
        executable_inputs=specs(inputs),
        executable_outputs=specs(outputs),
        modules={0: program(1)} if batch_sizes is None else {size: program(size) for size in batch_sizes},
        weights=list(weights.items()),
        client_inputs=None if client_inputs is None else specs(client_inputs),
        client_outputs=None if client_outputs is None else specs(client_outputs),
        hooks=hooks,
    )


def specs(tensors: Mapping[str, tuple[Shape, type | np.dtype]]) -> list[IOSpec]:
    result = []
    for name, (shape, dtype) in tensors.items():
        axis = shape.index(N) if N in shape else None
        result.append(IOSpec(name, np.dtype(dtype), tuple(1 if s == N else s for s in shape), batch_axis=axis))
    return result


def write_affine(directory: Path, *, scale: float = 2.0, shift: float = 1.0, features: int = 3, **kw) -> Path:
    """``y = x * scale + shift`` for ``x: f32[n, features]``, exact for small integers; the two factors are weights."""
    weights = {"scale": np.full(features, scale, np.float32), "shift": np.full(features, shift, np.float32)}
    tensor = ((N, features), np.float32)
    return write_model(
        directory, lambda x, scale, shift: (x * scale + shift,), {"x": tensor}, {"y": tensor}, weights=weights, **kw
    )


def write_identity(directory: Path, shape: Shape = (N, 3, 224, 224), dtype: type = np.float32, **kw) -> Path:
    """``y = x``, for measuring the path of the bytes."""
    return write_model(
        directory, lambda x: (x + np.zeros((), dtype),), {"x": (shape, dtype)}, {"y": (shape, dtype)}, **kw
    )
