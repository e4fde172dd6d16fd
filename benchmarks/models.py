"""The bundles that the benchmarks serve, exported on the spot."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np


def tiny(repo: Path) -> None:
    """``addsub``: two f32[n,16] in, sum and difference out, compiled for 1, 8 and 32 rows."""
    from rsrv.export import export_bundle

    x = np.ones((1, 16), np.float32)
    export_bundle(
        "jax-fn",
        lambda a, b: (a + b, a - b),
        (x, x),
        [],
        dir=repo / "addsub",
        input_names=["INPUT0", "INPUT1"],
        output_names=["OUTPUT0", "OUTPUT1"],
        batch_sizes=[1, 8, 32],
        collect_git=False,
    )


def identity(repo: Path) -> None:
    """``identity``: f32[n,3,224,224] (602 112 bytes a row) in and out, compiled for one row."""
    from rsrv.export import export_bundle

    x = np.ones((1, 3, 224, 224), np.float32)
    export_bundle(
        "jax-fn",
        lambda a: a,
        (x,),
        [],
        dir=repo / "identity",
        input_names=["INPUT0"],
        output_names=["OUTPUT0"],
        batch_sizes=[1],
        collect_git=False,
    )


def slow(repo: Path, *, seconds: float = 0.2) -> float:
    """``slow``: f32[n,256], compiled for 1, 8 and 32 rows; about `seconds` whatever the batch. Returns what it took."""
    import jax
    import jax.numpy as jnp

    from rsrv.export import export_bundle

    size = 512
    w = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32) / np.float32(size**0.5)

    def program(steps: int, w: jax.Array, x: jax.Array) -> jax.Array:
        mixed = jax.lax.fori_loop(0, steps, lambda _, m: jnp.tanh(m @ w), w)
        return x @ mixed[:256, :256]

    def timed(steps: int) -> float:
        run = jax.jit(lambda w, x: program(steps, w, x))
        x = jnp.ones((1, 256), jnp.float32)
        run(w, x).block_until_ready()
        started = time.perf_counter()
        run(w, x).block_until_ready()
        return time.perf_counter() - started

    steps = max(1, round(20 * seconds / timed(20)))
    export_bundle(
        "jax",
        lambda p, x: program(steps, p["w"], x),
        {"w": w},
        (np.ones((1, 256), np.float32),),
        dir=repo / "slow",
        input_names=["x"],
        output_names=["y"],
        batch_sizes=[1, 8, 32],
        collect_git=False,
    )
    return timed(steps)


def rows(
    repo: Path, name: str = "rows", *, steps: int = 400, batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
) -> Path:
    """f32[n,64,64] → f32[n,64]: `steps` small products of its own for every row, so twice the rows take twice as long.

    A core of 2020 takes 10 µs a step or less, so 4 ms for the row of 400.
    """
    import jax
    import jax.numpy as jnp

    from rsrv.export import export_bundle

    w = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32) / np.float32(8)

    def program(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        mixed = jax.lax.fori_loop(0, steps, lambda _, m: jnp.clip(m @ p["w"], -1.0, 1.0), x)
        return mixed.sum(1)

    return export_bundle(
        "jax",
        program,
        {"w": w},
        (np.ones((1, 64, 64), np.float32),),
        dir=repo / name,
        input_names=["x"],
        output_names=["y"],
        batch_sizes=list(batch_sizes),
        collect_git=False,
    )


def images(repo: Path, *, batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)) -> None:
    """``images``: f32[n,3,224,224] (602 112 bytes a row) → f32[n], the sum of every 32nd pixel of every 32nd line.

    What it computes is little, and still different for every image.
    """
    from rsrv.export import export_bundle

    export_bundle(
        "jax-fn",
        lambda a: a[:, :, ::32, ::32].sum((1, 2, 3)),
        (np.ones((1, 3, 224, 224), np.float32),),
        [],
        dir=repo / "images",
        input_names=["image"],
        output_names=["total"],
        batch_sizes=list(batch_sizes),
        collect_git=False,
    )
