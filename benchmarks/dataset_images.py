"""The images of the `dataset` case: 602 112 bytes each, generated, all different, with answers that are known exactly.

Image `i` is one picture of small integers plus `i`, so that all sums of it are exact in float32 in any order.
"""

from __future__ import annotations

import numpy as np

SHAPE = (3, 224, 224)
IMAGE_BYTES = 4 * 3 * 224 * 224
_PICTURE = np.random.default_rng(0).integers(0, 256, SHAPE).astype(np.float32)
_STRIDED = _PICTURE[:, ::32, ::32]


def generate(rows: range, out: np.ndarray) -> None:
    """Write the images `rows` into `out`, f32[len(rows), 3, 224, 224]: each is written once, straight to its place."""
    for place, row in zip(out, rows, strict=True):
        np.add(_PICTURE, np.float32(row), out=place)


def totals(rows: range) -> np.ndarray:
    """f32[len(rows)]: what the model ``images`` answers for them."""
    return np.float32(_STRIDED.sum()) + np.float32(_STRIDED.size) * np.arange(rows.start, rows.stop, dtype=np.float32)


def check(rows: range, found: np.ndarray | None) -> None:
    """Raise RuntimeError for an answer that is not the one for these images."""
    if found is None or not np.array_equal(found, totals(rows)):
        raise RuntimeError(f"images {rows.start} to {rows.stop - 1}: wrong totals {found}")


def chunks(items: int, rows: int) -> list[range]:
    return [range(start, min(start + rows, items)) for start in range(0, items, rows)]
