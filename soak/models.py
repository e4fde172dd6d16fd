"""The models of a soak, each with its bundle, its random inputs, and its answers in NumPy, which the clients compute.

`write` needs JAX; everything else is for client processes, which do not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Rng = np.random.Generator

SHAPES = ((4, 6), (6, 4), (6, 6))
"""Height and width of the images that ``shapes`` is compiled for."""

REJECT, RAISE, NOTHING, RAISE_AFTER, EXIT, HANG = (10_001.0 + 2 * mark for mark in range(6))
"""What a request says in its first element to have its hook do that; other elements are far below."""

HANG_SECONDS = 2.0
"""After which a hook process that hangs is ended."""

_HOOKS = f"""
import os, time

def preprocess(inputs):
    mark = inputs["x"][0, 0]
    if mark == {REJECT}:
        raise rsrv.HookRejected("marked to be rejected")
    if mark == {RAISE}:
        raise ArithmeticError("marked to fail")
    if mark == {NOTHING}:
        return None
    if mark == {EXIT}:
        os._exit(7)
    if mark == {HANG}:
        time.sleep(3600)
    return {{"x": inputs["x"] * 2}}

def postprocess(outputs):
    if outputs["y"][0, 0] == 2 * {RAISE_AFTER} + 1:
        raise LookupError("marked to fail afterwards")
    return {{"y": outputs["y"] * 10}}
"""


@dataclass(frozen=True)
class Model:
    """One bundle and what is known about it.

    Attributes:
        sizes: the compiled batch sizes, None = a program without a batch axis.
        inputs: random inputs of so many rows.
        answer: the outputs for such inputs.
        program: what is exported: ``f(weights, *inputs)`` over JAX arrays.
        weights: by name.
        marks: what its hooks do on demand, as values of the first element.
        spoils: whether a NaN in one row has to stay in that row (floats in, floats out, row by row).
    """

    name: str
    sizes: tuple[int, ...] | None
    inputs: Callable[[Rng, int], Arrays]
    answer: Callable[[Arrays], Arrays]
    program: Callable[..., Any]
    weights: Arrays
    marks: tuple[float, ...] = ()
    spoils: bool = False
    hook_mode: str = "thread"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def largest(self) -> int:
        return self.sizes[-1] if self.sizes else 1

    def write(self, repo: Path) -> None:
        """Export the bundle; one second, more or less."""
        from rsrv.export import export_bundle

        options = dict(self.options)
        export_bundle(
            "jax",
            self.program,
            self.weights,
            None if "shape_variants" in options else self.inputs(np.random.default_rng(0), 1),
            dir=repo / self.name,
            batch_sizes=None if self.sizes is None else list(self.sizes),
            hooks=_HOOKS if self.marks else None,
            collect_git=False,
            **options,
        )
        if self.hook_mode == "process":
            manifest = repo / self.name / "manifest.yaml"
            block = f"hooks: {{mode: process, processes: 2, timeout_seconds: {HANG_SECONDS:g}}}"
            manifest.write_text(f"{manifest.read_text()}\n{block}\n")


@cache
def models() -> Mapping[str, Model]:
    """All of them, by name."""
    return {model.name: model for model in (*_perceptrons(), _slow(), _pairs(), _shapes(), _single(), *_hooked())}


def _floats(name: str, width: int) -> Callable[[Rng, int], Arrays]:
    return lambda rng, rows: {name: rng.standard_normal((rows, width), np.float32)}


def _integers(name: str, width: int) -> Callable[[Rng, int], Arrays]:
    """Small enough that sums and products are exact in float32, in any order."""
    return lambda rng, rows: {name: rng.integers(0, 100, (rows, width)).astype(np.float32)}


def _matrix(rng: Rng, rows: int, columns: int) -> np.ndarray:
    return (rng.standard_normal((rows, columns)) / rows**0.5).astype(np.float32)


def _perceptrons() -> Sequence[Model]:
    """f32[n,width] → f32[n,last]: tiny, wide, and one program that is specialised when it is loaded."""

    def program(p: Any, x: Any) -> dict[str, Any]:
        import jax.numpy as jnp

        return {"y": jnp.tanh(x @ p["a"]) @ p["b"]}

    def made(name: str, seed: int, width: int, hidden: int, last: int, sizes: tuple[int, ...], **options: Any) -> Model:
        rng = np.random.default_rng(seed)
        weights = {"a": _matrix(rng, width, hidden), "b": _matrix(rng, hidden, last)}

        def answer(inputs: Arrays) -> Arrays:
            return {"y": np.tanh(inputs["x"] @ weights["a"]) @ weights["b"]}

        return Model(
            name,
            sizes,
            _floats("x", width),
            answer,
            program,
            weights,
            spoils=True,
            options=tuple(options.items()),
        )

    return (
        made("tiny", 1, 16, 32, 4, (1, 4, 16)),
        made("wide", 2, 256, 1024, 256, (1, 8, 32)),
        made("flexible", 3, 48, 96, 12, (1, 2, 8), dynamic_batch=True),
    )


def _slow() -> Model:
    """f32[n,64] → f32[n,64], some milliseconds whatever the batch: queues form, deadlines pass in them."""
    size, steps = 256, 8
    w = np.random.default_rng(4).standard_normal((size, size)).astype(np.float32) / np.float32(size)
    mixed = w
    for _ in range(steps):
        mixed = np.tanh(mixed @ w) + w
    corner = mixed[:64, :64]

    def program(p: Any, x: Any) -> dict[str, Any]:
        import jax
        import jax.numpy as jnp

        mixed = jax.lax.fori_loop(0, steps, lambda _, m: jnp.tanh(m @ p["w"]) + p["w"], p["w"])
        return {"y": x @ mixed[:64, :64]}

    return Model("slow", (1, 4), _floats("x", 64), lambda i: {"y": i["x"] @ corner}, program, {"w": w}, spoils=True)


def _pairs() -> Model:
    """f32[n,8] and i32[n,8] → their sums f32[n], and the integers negated: exact, and of several dtypes."""

    def inputs(rng: Rng, rows: int) -> Arrays:
        numbers = rng.integers(-1000, 1000, (rows, 8), np.int32)
        return {"real": rng.integers(0, 100, (rows, 8)).astype(np.float32), "whole": numbers}

    def answer(i: Arrays) -> Arrays:
        return {"total": (i["real"] * np.float32(3)).sum(1), "negated": -i["whole"]}

    def program(p: Any, real: Any, whole: Any) -> dict[str, Any]:
        return {"total": (real * p["three"]).sum(1), "negated": -whole}

    return Model("pairs", (1, 2, 4, 8), inputs, answer, program, {"three": np.full(8, 3, np.float32)})


def _shapes() -> Model:
    """f32[n,h,w,3] of the sizes in `SHAPES` → the weighted image, and its sums f32[n,3]."""
    w = np.array([1, 2, 4], np.float32)

    def inputs(rng: Rng, rows: int) -> Arrays:
        size = SHAPES[rng.integers(len(SHAPES))]
        return {"image": rng.integers(0, 50, (rows, *size, 3)).astype(np.float32)}

    def answer(i: Arrays) -> Arrays:
        return {"weighted": i["image"] * w, "total": (i["image"] * w).sum((1, 2))}

    def program(p: Any, image: Any) -> dict[str, Any]:
        return {"weighted": image * p["w"], "total": (image * p["w"]).sum((1, 2))}

    variants = [f"image=f32[1,{h},{width},3]" for h, width in SHAPES]
    return Model("shapes", (1, 2, 4), inputs, answer, program, {"w": w}, options=(("shape_variants", variants),))


def _single() -> Model:
    """f32[32] → f32[32], running sums; no batch axis, so never merged."""

    def program(p: Any, x: Any) -> dict[str, Any]:
        import jax.numpy as jnp

        return {"y": jnp.cumsum(x * p["two"])}

    def inputs(rng: Rng, rows: int) -> Arrays:
        return {"x": rng.integers(0, 100, 32).astype(np.float32)}

    two = np.full(32, 2, np.float32)
    return Model("single", None, inputs, lambda i: {"y": np.cumsum(i["x"] * 2)}, program, {"two": two})


def _hooked() -> Sequence[Model]:
    """f32[n,8] → f32[n,8]: (2 x + 1) · 10, the factors in hooks that fail on demand, on threads and in processes."""

    def program(p: Any, x: Any) -> dict[str, Any]:
        return {"y": x + p["one"]}

    def made(name: str, marks: tuple[float, ...], mode: str) -> Model:
        return Model(
            name,
            (1, 4),
            _integers("x", 8),
            lambda i: {"y": (2 * i["x"] + 1) * 10},
            program,
            {"one": np.ones(8, np.float32)},
            marks=marks,
            hook_mode=mode,
        )

    common = (REJECT, RAISE, NOTHING, RAISE_AFTER)
    return made("hooked", common, "thread"), made("apart", (*common, EXIT, HANG), "process")
