"""Bundles of the older format, made by hand as its writer would make them: nothing here uses rsrv's own conversion."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import yaml
from safetensors.numpy import load_file, save_file

LISTS = ("executable_inputs", "executable_outputs", "client_inputs", "client_outputs")


def write_column_major(source: Path, target: Path) -> Path:
    """The row-major bundle `source` as format 2.0: letters reversed, weights transposed, unknown keys gone."""
    shutil.copytree(source, target)
    mapping = yaml.safe_load((source / "manifest.yaml").read_text())
    for key in LISTS:
        for entry in mapping.get(key, []):
            entry["shape"] = entry["shape"][::-1]
    for key in ("axis_order", "files"):
        mapping.pop(key, None)
    mapping["format_version"] = "2.0"
    (target / "manifest.yaml").write_text(yaml.safe_dump(mapping, sort_keys=False))
    weights = load_file(source / "weights.safetensors")
    header = (source / "weights.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    order = json.loads(header[8 : 8 + length])["__metadata__"]["argument_order"]
    reversed_weights = {name: np.array(array.transpose(), order="C") for name, array in weights.items()}
    save_file(reversed_weights, target / "weights.safetensors", metadata={"argument_order": order})
    return target
