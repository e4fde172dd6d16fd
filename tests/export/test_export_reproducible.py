from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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


def test_two_processes_write_the_same_bytes_but_for_the_time(tmp_path: Path) -> None:
    processes = []
    for seed in ("1", "2"):
        (tmp_path / seed).mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        # Another directory and another call depth: neither may leave a trace in a program.
        call = EXPORT if seed == "1" else f"def nested():\n{re.sub('(?m)^', '    ', EXPORT)}\nnested()\n"
        command = [sys.executable, "-c", call, str(EXAMPLES), str(tmp_path / seed)]
        processes.append(
            subprocess.Popen(command, env=environment, cwd=tmp_path / seed, stderr=subprocess.PIPE, text=True)
        )
    for process in processes:
        _, stderr = process.communicate(timeout=150)
        assert process.returncode == 0, stderr
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
