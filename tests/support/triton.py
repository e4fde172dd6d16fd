"""Model repositories in Triton's layout, for the conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

Tensor = tuple[str, str, Sequence[int]]
"""Name, TYPE and dims."""


def config_pbtxt(inputs: Sequence[Tensor], outputs: Sequence[Tensor], max_batch_size: int | None = None) -> str:
    lines = [] if max_batch_size is None else [f"max_batch_size: {max_batch_size}"]
    for what, tensors in (("input", inputs), ("output", outputs)):
        lines += [f'{what} [ {{ name: "{n}" data_type: {t} dims: {list(dims)} }} ]' for n, t, dims in tensors]
    return "\n".join(lines) + "\n"


def write_triton_model(root: Path, name: str, config: str, script: Any = None, *, file: str = "model.pt") -> Path:
    """``root/name/config.pbtxt`` and, for a TorchScript module, ``1/model.pt``."""
    directory = root / name
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text(config)
    if script is not None:
        script.save(str(directory / "1" / file))
    return directory


def write_convert_config(directory: Path, **keys: Any) -> Path:
    """``convert.yaml`` with sensible keys, of which `keys` replaces some; None leaves one out."""
    merged: Mapping[str, Any] = {"source_dirs": ["source"], "output_root": "out", "report_path": "report.md", **keys}
    path = directory / "convert.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in merged.items() if value is not None}))
    return path
