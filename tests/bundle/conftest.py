"""Manifests and bundle directories to start from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rsrv.bundle.safetensors import write_weights

MANIFEST: dict[str, Any] = {
    "format_version": "3.0",
    "executable_inputs": [{"name": "image", "dtype": "f32", "shape": "nchw", "dims": {"c": 3, "h": 8, "w": 8}}],
    "executable_outputs": [{"name": "scores", "dtype": "f32", "shape": "nk", "dims": {"k": 10}}],
    "batching": {"compiled_batch_sizes": [1, 4]},
}
META: dict[str, Any] = {
    "format_version": "3.0",
    "kind": "meta",
    "meta": {"calls": ["detector", "classifier"]},
    "client_inputs": [{"name": "image", "dtype": "u8", "shape": "hwc", "dims": {"h": -1, "w": -1, "c": 3}}],
    "client_outputs": [{"name": "boxes", "dtype": "f32", "shape": "kd", "dims": {"k": -1, "d": 4}}],
}


def changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of `base` with `changes`; a value of ... removes the key."""
    mapping = {**copy.deepcopy(base), **copy.deepcopy(changes)}
    return {key: value for key, value in mapping.items() if value is not ...}


@pytest.fixture
def manifest():
    """Factory of the mapping of a valid manifest with changes."""
    return lambda **changes: changed(MANIFEST, changes)


@pytest.fixture
def meta():
    """Factory of the mapping of a valid meta manifest with changes."""
    return lambda **changes: changed(META, changes)


@pytest.fixture
def make_bundle(tmp_path):
    """Factory of a bundle directory ``repo/<name>``: manifest text or mapping, programs by file name, other files."""

    def make(
        name: str = "net",
        *,
        manifest: dict[str, Any] | str | None = None,
        programs: tuple[str, ...] = ("model.b1.mlir", "model.b4.mlir"),
        weights: bool = True,
        files: dict[str, str] | None = None,
        repo: str = "repo",
    ) -> Path:
        directory = tmp_path / repo / name
        directory.mkdir(parents=True)
        content = MANIFEST if manifest is None else manifest
        text = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
        (directory / "manifest.yaml").write_text(text)
        for program in programs:
            (directory / program).write_bytes(b"ML\xefR" + program.encode())
        if weights:
            write_weights(directory / "weights.safetensors", [("w", np.arange(16, dtype=np.float32))])
        for file, body in (files or {}).items():
            (directory / file).parent.mkdir(exist_ok=True)
            (directory / file).write_text(body)
        return directory

    return make
