"""The process behind `audit.process`: runs hooks, compiles programs, replays goldens. It may die at any moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rsrv.audit.hooks import BundleHooks
from rsrv.audit.packing import answer, fitting, golden_problem
from rsrv.audit.parity import ParityReport, compare, unanswered
from rsrv.bundle.directory import Bundle, open_bundle
from rsrv.bundle.files import HOOKS, MANIFEST, WEIGHTS, read_program
from rsrv.bundle.golden import Golden, read_golden
from rsrv.bundle.safetensors import write_weights
from rsrv.bundle.tensors import load_tensors
from rsrv.core.errors import ProgramError, RsrvError
from rsrv.runtime.backends import open_device
from rsrv.runtime.compile_child import Handler, serve_jobs
from rsrv.runtime.device import Buffer, Device, Executable
from rsrv.runtime.frames import Frame
from rsrv.runtime.hooks import load_hooks
from rsrv.stablehlo.policy import Policy, apply, tf32_capable

Stamp = tuple[int | str, ...]


def main() -> None:
    serve_jobs(_handler)


def _handler(settings: dict[str, Any]) -> Handler:
    programs = _Programs(settings["platform"])

    def handle(message: dict[str, Any], body: bytes) -> Frame:
        if message["job"] == "hooks":
            return {"hooks": _import_hooks(message)}, b""
        if message["job"] == "call":
            return {"called": programs.call(message)}, b""
        return {"reports": programs.replay(message)}, b""

    return handle


def _import_hooks(message: dict[str, Any]) -> list[str]:
    hooks = load_hooks(Path(message["path"]), name=message["name"], incarnation=0, meta=message["meta"])
    return [role for role in ("preprocess", "postprocess", "run") if getattr(hooks, role) is not None]


class _Programs:
    """The device, opened with the first program, and what was read of the bundle that was asked for last."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._device: Device | None = None
        self._bundle: Bundle | None = None
        self._stamp: Stamp = ()
        self._weights: list[Buffer] | None = None
        self._hooks: BundleHooks | None = None
        self._goldens: tuple[Stamp, list[Golden]] = ((), [])

    def call(self, message: dict[str, Any]) -> bool:
        """Run one hook on the arrays of a file and write another; False when the bundle has no such hook."""
        self._open(message["bundle"])
        assert self._hooks is not None
        if not self._hooks.has(message["role"]):
            return False
        made = self._hooks.call(message["role"], load_tensors(message["given"]))
        write_weights(message["made"], list(made.items()))
        return True

    def replay(self, message: dict[str, Any]) -> dict[str, Any]:
        bundle = self._open(message["bundle"])
        if self._goldens[0] != (stamp := _stamp(Path(message["goldens"]))):
            self._goldens = (stamp, read_golden(message["goldens"]))
        goldens = self._goldens[1]
        reports: dict[int, ParityReport] = {}
        given = dict(enumerate(goldens))
        if message["hooks"]:
            given = self._preprocessed(bundle, goldens, reports)
        taken = fitting(bundle.manifest, tuple(message["variant"]), list(given.values()))
        chosen = {index: given[index] for index in (list(given)[position] for position in taken)}
        if chosen:
            answers = self._answers(bundle, message, chosen)
            for index, outputs in answers.items():
                reports[index] = self._compared(goldens[index], outputs, message)
        return {str(index): reports[index].to_transport() for index in sorted(reports)}

    def _preprocessed(
        self, bundle: Bundle, goldens: Sequence[Golden], reports: dict[int, ParityReport]
    ) -> dict[int, Golden]:
        """What ``preprocess`` makes of each golden; one that it refuses, or spoils, gets its report now."""
        assert self._hooks is not None
        made: dict[int, Golden] = {}
        for index, golden in enumerate(goldens):
            try:
                inputs = self._hooks.call("preprocess", golden.inputs)
            except RsrvError as error:
                reports[index] = unanswered(golden.outputs, error.message)
                continue
            made[index] = Golden(inputs, golden.outputs)
            if (problem := golden_problem(bundle.manifest, made[index])) is not None:
                reports[index] = unanswered(golden.outputs, f"what the hook preprocess returned {problem}")
                del made[index]
        return made

    def _compared(self, golden: Golden, outputs: dict[str, np.ndarray], message: dict[str, Any]) -> ParityReport:
        if message["hooks"]:
            assert self._hooks is not None
            try:
                outputs = self._hooks.call("postprocess", outputs)
            except RsrvError as error:
                return unanswered(golden.outputs, error.message)
        return compare(golden.outputs, outputs, message["tolerances"])

    def _answers(
        self, bundle: Bundle, message: dict[str, Any], chosen: Mapping[int, Golden]
    ) -> dict[int, dict[str, np.ndarray]]:
        device = self._opened_device()
        batch = message["batch_key"] if bundle.manifest.batching.dynamic else None
        policy = Policy(tf32_capable=tf32_capable(device.platform, device.facts.get("compute capability")), batch=batch)
        executable = device.compile(apply(read_program(bundle.path / message["file"]), policy).program)
        results = executable.signature.results
        if len(results) != len(bundle.manifest.executable_outputs):
            raise ProgramError(f"returns {len(results)} results, not those that the manifest declares", rule="B-9")
        if not message["batch_key"]:
            chosen = {i: golden for i, golden in chosen.items() if _takes(executable, bundle, golden)}

        def run(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
            return self._run(device, executable, self._weights_on(device, bundle), inputs)

        return answer(bundle.manifest, message["batch_key"], chosen, run)

    def _open(self, path: str) -> Bundle:
        """The bundle at `path`; anew when another one lies there now, such as the next export of the same name."""
        stamp = _stamp(Path(path), Path(path, MANIFEST), Path(path, WEIGHTS), Path(path, HOOKS))
        if self._bundle is None or self._stamp != stamp:
            if self._device is not None and self._weights is not None:
                self._device.free(self._weights)
            self._weights = None
            self._bundle = open_bundle(path)
            self._hooks = BundleHooks(self._bundle)
            self._stamp = stamp
        return self._bundle

    def _opened_device(self) -> Device:
        if self._device is None:
            # Beside the process that asks, which may hold the card; and whoever names CUDA wants no CPU's numbers.
            self._device = open_device(self._backend, preallocate=False, allow_cpu_fallback=self._backend == "auto")
        return self._device

    def _weights_on(self, device: Device, bundle: Bundle) -> list[Buffer]:
        if self._weights is None:
            assert bundle.weights_path is not None  # a bundle with programs
            weights = load_tensors(bundle.weights_path, column_major=bundle.manifest.column_major)
            self._weights = [device.put(array) for array in weights.values()]
        return self._weights

    def _run(
        self, device: Device, executable: Executable, weights: Sequence[Buffer], inputs: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        buffers: list[Buffer] = []
        try:
            buffers += [device.put(np.ascontiguousarray(array).reshape(array.shape)) for array in inputs]
            return device.launch(executable, [*buffers, *weights]).result()
        finally:
            device.free(buffers)


def _stamp(*paths: Path) -> Stamp:
    """Tells a file, or what is there instead of it now, apart from what was there under the same name."""
    found: list[int | str] = []
    for path in paths:
        try:
            status = path.stat()
        except FileNotFoundError:
            found += [str(path), 0]
        else:
            found += [str(path), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    return tuple(found)


def _takes(executable: Executable, bundle: Bundle, golden: Golden) -> bool:
    """A program without a batch size in its name takes exactly the shapes that it was compiled for."""
    shapes = [golden.inputs[spec.name].shape for spec in bundle.manifest.executable_inputs]
    return shapes == [tensor.shape for tensor in executable.signature.arguments[: len(shapes)]]
