from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"

EXPORT = """
import sys
from pathlib import Path
from rsrv.audit import parse_pool
from rsrv.export import call_factory, export_bundle

examples, out = Path(sys.argv[1]), Path(sys.argv[2])
with parse_pool() as pool:
    for name in ("jax_mlp", "nnx_mlp", "equinox_transformer"):
        made = call_factory(f"{examples / name}.py:make")
        fn, params, names = made.fn, made.params, made.output_names
        if name == "equinox_transformer":  # everything is captured
            fn, params = lambda _, *inputs: made.fn(made.params, *inputs), {}
        export_bundle(
            "jax", fn, params, made.inputs,
            dir=out / name, batch_sizes=[1, 3], output_names=names, collect_git=False, pool=pool,
        )
"""


def test_two_processes_write_the_same_bytes_but_for_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is this one, with another hash seed."""
    arguments = [[str(EXAMPLES), str(tmp_path / number)] for number in ("1", "2")]
    (tmp_path / "1").mkdir()
    environment = {**os.environ, "PYTHONHASHSEED": "1", "JAX_PLATFORMS": "cpu"}
    # Another directory and another call depth: neither may leave a trace in a program.
    call = f"def nested():\n{re.sub('(?m)^', '    ', EXPORT)}\nnested()\n"
    command = [sys.executable, "-c", call, *arguments[0]]
    done = subprocess.run(command, env=environment, cwd=tmp_path / "1", stderr=subprocess.PIPE, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "argv", ["-c", *arguments[1]])
    exec(EXPORT, {})
    first, second = (
        {str(path.relative_to(root)): path for path in sorted(root.rglob("*")) if path.is_file()}
        for root in (tmp_path / "1", tmp_path / "2")
    )
    assert list(first) == list(second)
    assert len(first) == 3 * 4
    for name in first:
        one, other = first[name].read_bytes(), second[name].read_bytes()
        if name.endswith("manifest.yaml"):
            one, other = (re.sub(rb'exported_at: "[^"]+"', b"", text) for text in (one, other))
        assert one == other, name
