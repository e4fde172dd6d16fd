"""Bundles of ResNet size for the restart benchmark: 53 convolutions in 16 bottleneck blocks, 25 MB of weights each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import jax

STAGES = ((3, 32, 1), (4, 64, 2), (6, 128, 2), (3, 256, 2))
"""Blocks, inner channels and stride of each stage: ResNet-50 at half width."""
SHORT_STAGES = ((1, 8, 1), (1, 16, 2))
"""What the short form of a benchmark compiles."""

Stages = tuple[tuple[int, int, int], ...]

Params = dict[str, "np.ndarray | jax.Array"]


def resnet(
    repo: Path,
    name: str,
    *,
    seed: int,
    size: int = 64,
    batch_sizes: tuple[int, ...] = (1,),
    stages: Stages = STAGES,
) -> Path:
    """Write the bundle `name`: f32[n,3,size,size] → f32[n,1000]. Programs of different seeds differ."""
    from rsrv.export import export_bundle

    params = _params(np.random.default_rng(seed), stages)
    x = np.zeros((1, 3, size, size), np.float32)
    return export_bundle(
        "jax",
        lambda p, x: _forward(p, x, 1.0 + seed / 1024, stages),
        params,
        (x,),
        dir=repo / name,
        input_names=["image"],
        output_names=["scores"],
        batch_sizes=list(batch_sizes),
        collect_git=False,
    )


def _params(rng: np.random.Generator, stages: Stages) -> dict[str, np.ndarray]:
    params: dict[str, np.ndarray] = {}

    def conv(name: str, size: int, before: int, after: int) -> None:
        fan_in = size * size * before
        params[f"{name}.w"] = (rng.standard_normal((after, before, size, size)) / fan_in**0.5).astype(np.float32)
        params[f"{name}.scale"] = np.ones(after, np.float32)
        params[f"{name}.shift"] = np.zeros(after, np.float32)

    conv("stem", 7, 3, 32)
    channels = 32
    for stage, (blocks, inner, _) in enumerate(stages):
        for block in range(blocks):
            at = f"stage{stage}.block{block}"
            conv(f"{at}.a", 1, channels, inner)
            conv(f"{at}.b", 3, inner, inner)
            conv(f"{at}.c", 1, inner, 4 * inner)
            if block == 0:
                conv(f"{at}.skip", 1, channels, 4 * inner)
            channels = 4 * inner
    params["head"] = (rng.standard_normal((channels, 1000)) / channels**0.5).astype(np.float32)
    return params


def _forward(p: Any, x: Any, factor: float, stages: Stages) -> Any:
    import jax
    import jax.numpy as jnp

    def conv(name: str, x: jax.Array, stride: int = 1) -> jax.Array:
        y = jax.lax.conv_general_dilated(x, p[f"{name}.w"], (stride, stride), "SAME")
        return y * p[f"{name}.scale"][:, None, None] + p[f"{name}.shift"][:, None, None]

    x = jax.nn.relu(conv("stem", x * factor, 2))
    for stage, (blocks, _, stride) in enumerate(stages):
        for block in range(blocks):
            at, step = f"stage{stage}.block{block}", stride if block == 0 else 1
            y = jax.nn.relu(conv(f"{at}.a", x))
            y = jax.nn.relu(conv(f"{at}.b", y, step))
            y = conv(f"{at}.c", y)
            x = jax.nn.relu(y + (conv(f"{at}.skip", x, step) if block == 0 else x))
    return jnp.mean(x, (2, 3)) @ p["head"]
