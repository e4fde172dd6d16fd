"""The process behind `audit.process`: imports hooks, compiles programs and runs goldens. It may die at any moment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rsrv.audit.packing import answer, fitting
from rsrv.audit.parity import compare
from rsrv.bundle.directory import Bundle, open_bundle
from rsrv.bundle.golden import Golden, read_golden
from rsrv.bundle.tensors import load_tensors
from rsrv.core.errors import ProgramError
from rsrv.runtime.backends import open_device
from rsrv.runtime.compile_child import Handler, serve_jobs
from rsrv.runtime.device import Buffer, Device, Executable
from rsrv.runtime.frames import Frame
from rsrv.runtime.hooks import load_hooks


def main() -> None:
    serve_jobs(_handler)


def _handler(settings: dict[str, Any]) -> Handler:
    programs = _Programs(settings["platform"])

    def handle(message: dict[str, Any], body: bytes) -> Frame:
        if message["job"] == "hooks":
            return {"hooks": _import_hooks(message)}, b""
        return {"reports": programs.replay(message)}, b""

    return handle


def _import_hooks(message: dict[str, Any]) -> list[str]:
    hooks = load_hooks(Path(message["path"]), name=message["name"], incarnation=0, meta=message["meta"])
    return [role for role in ("preprocess", "postprocess", "run") if getattr(hooks, role) is not None]


class _Programs:
    """The device, opened with the first program, and the weights and goldens of the bundle that was asked for last."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._device: Device | None = None
        self._bundle: Bundle | None = None
        self._weights: list[Buffer] = []
        self._goldens: tuple[str, list[Golden]] = ("", [])

    def replay(self, message: dict[str, Any]) -> dict[str, Any]:
        bundle, device = self._open(message["bundle"])
        if self._goldens[0] != message["goldens"]:
            self._goldens = (message["goldens"], read_golden(message["goldens"]))
        goldens = self._goldens[1]
        chosen = {index: goldens[index] for index in fitting(bundle.manifest, tuple(message["variant"]), goldens)}
        if not chosen:
            return {}
        executable = device.compile((bundle.path / message["file"]).read_bytes())
        results = executable.signature.results
        if len(results) != len(bundle.manifest.executable_outputs):
            raise ProgramError(f"returns {len(results)} results, not those that the manifest declares", rule="B-9")
        if not message["batch_key"]:
            chosen = {i: golden for i, golden in chosen.items() if _takes(executable, bundle, golden)}

        def run(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
            return self._run(device, executable, inputs)

        answers = answer(bundle.manifest, message["batch_key"], chosen, run)
        return {
            str(index): compare(goldens[index].outputs, outputs, message["tolerances"]).to_transport()
            for index, outputs in answers.items()
        }

    def _open(self, path: str) -> tuple[Bundle, Device]:
        if self._device is None:
            # Beside the process that asks, which may hold the card; and whoever names CUDA wants no CPU's numbers.
            self._device = open_device(self._backend, preallocate=False, allow_cpu_fallback=self._backend == "auto")
        if self._bundle is None or str(self._bundle.path) != path:
            self._device.free(self._weights)
            self._weights = []
            self._bundle = open_bundle(path)
            assert self._bundle.weights_path is not None  # a bundle with programs
            weights = load_tensors(self._bundle.weights_path, column_major=self._bundle.manifest.column_major)
            self._weights = [self._device.put(array) for array in weights.values()]
        return self._bundle, self._device

    def _run(self, device: Device, executable: Executable, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        buffers: list[Buffer] = []
        try:
            buffers += [device.put(np.ascontiguousarray(array).reshape(array.shape)) for array in inputs]
            return device.launch(executable, [*buffers, *self._weights]).result()
        finally:
            device.free(buffers)


def _takes(executable: Executable, bundle: Bundle, golden: Golden) -> bool:
    """A program without a batch size in its name takes exactly the shapes that it was compiled for."""
    shapes = [golden.inputs[spec.name].shape for spec in bundle.manifest.executable_inputs]
    return shapes == [tensor.shape for tensor in executable.signature.arguments[: len(shapes)]]
