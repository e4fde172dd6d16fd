"""Which shapes the inputs of a program have, and what a client has to send so that it runs."""

from __future__ import annotations

from types import TracebackType

from rsrv.audit.programs import PARSE_SECONDS, Program
from rsrv.bundle.digests import read_verified_program
from rsrv.bundle.directory import Bundle
from rsrv.core.errors import BundleError
from rsrv.core.tensors import TensorSpec
from rsrv.runtime.compile_pool import CompilePool

SizedInput = tuple[TensorSpec, tuple[int, ...]]
"""An input, and the shape that one program takes."""


class ProgramShapes:
    """Shapes as the manifest of `bundle` says, or its programs where only they know. Use it as a context manager."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._pool: CompilePool | None = None

    def __enter__(self) -> ProgramShapes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.close()

    def of(self, program: Program) -> list[SizedInput]:
        """The executable inputs. Raises BundleError when the program has to be asked and cannot be read."""
        _, variant, batch = program
        specs = self._bundle.manifest.executable_inputs
        if not batch and any(spec.batch_axis is not None for spec in specs):
            return self._asked(program)
        sizes = iter(variant)
        return [(spec, spec.concrete_shape(batch, [next(sizes) for _ in spec.variable_axes])) for spec in specs]

    def of_clients(self, program: Program) -> list[SizedInput]:
        """The client inputs, with as many rows as the program. Raises BundleError when only callers know their sizes.

        An axis of any size has that of the program's input of the same name and rank.
        """
        served = {spec.name: (spec, shape) for spec, shape in self.of(program)}
        batch = next((shape[spec.batch_axis] for spec, shape in served.values() if spec.batch_axis is not None), 1)
        sized: list[SizedInput] = []
        for spec in self._bundle.manifest.wire_inputs:
            _, shape = served.get(spec.name, (spec, ()))
            if spec.variable_axes and len(shape) != spec.rank:
                raise BundleError(
                    f"client input {spec.name!r} is {spec.describe()}, whose sizes only callers know",
                    rule="X-54",
                    hint="bring samples: --samples DIR",
                )
            sized.append((spec, spec.concrete_shape(batch, [shape[axis] for axis in spec.variable_axes])))
        return sized

    def _asked(self, program: Program) -> list[SizedInput]:
        if self._pool is None:
            self._pool = CompilePool(parse_only=True, timeout_seconds=PARSE_SECONDS)
        data = read_verified_program(self._bundle, self._bundle.path / program[0], "programs")
        arguments = self._pool.inspect(data).signature.arguments
        specs = self._bundle.manifest.executable_inputs
        return [(spec, argument.shape) for spec, argument in zip(specs, arguments, strict=False)]
