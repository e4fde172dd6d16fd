"""Options that every front end shares, checked once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rsrv.bundle.files import GOLDEN, is_passing, name_problem
from rsrv.core.errors import ExportError
from rsrv.core.shapes import is_integer

if TYPE_CHECKING:
    from rsrv.bundle.iospec import IOSpec
    from rsrv.runtime.compile_pool import CompilePool

Precision = Literal["default", "high", "highest"]
Int64 = Literal["keep", "narrow"]
Lowering = Literal["torchax", "torch-xla"]
Axes = Sequence[int | None] | Mapping[str, int | None]

_PRECISIONS = (None, "default", "high", "highest")
_PLATFORMS = (None, "cpu", "cuda")
MAX_BATCH_SIZE = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """See `rsrv.export.export_bundle` for the meaning of each field."""

    dir: Path
    name: str
    batch_sizes: tuple[int, ...] | None = (1,)
    dynamic_batch: bool = False
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    input_batch_axes: Axes | None = None
    output_batch_axes: Axes | None = None
    axis_letters: Mapping[str, str] = field(default_factory=dict)
    kwargs: Mapping[str, Any] | None = None
    wrap: Callable[[Any], Any] | None = None
    int64: Int64 = "keep"
    lowering: Lowering = "torchax"
    torch_xla_python: str | Path | None = None
    shape_variants: Sequence[Any] | None = None
    client_inputs: Sequence[IOSpec] | None = None
    client_outputs: Sequence[IOSpec] | None = None
    hooks: str | Path | None = None
    extra_files: Mapping[str, Any] = field(default_factory=dict)
    matmul_precision: Precision | None = None
    platform: str | None = None
    stablehlo_version: str | None = None
    drop_unused_inputs: bool = False
    x64: bool | None = None
    golden: int = 0
    input_ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    tolerances: Mapping[str, float] | float | None = None
    row_check: bool = True
    provenance: Mapping[str, Any] = field(default_factory=dict)
    collect_git: bool = True
    diff: bool = True
    overwrite: bool = False
    description: str = ""
    pool: CompilePool | None = None

    def __post_init__(self) -> None:
        if self.dir.name != self.name:
            raise ExportError(
                f"the bundle {self.dir} cannot be named {self.name!r}: a bundle's name is its directory's name"
            )
        if (problem := name_problem(self.name)) is not None:
            raise ExportError(f"a bundle cannot be called {self.name!r}: the name {problem}")
        if is_passing(self.name):
            raise ExportError(
                f"a bundle cannot be called {self.name!r}: servers skip such names",
                hint="names of bundles neither begin with a dot nor end with .partial, .tmp or ~",
            )
        if self.matmul_precision not in _PRECISIONS:
            raise ExportError(f"matmul_precision is {self.matmul_precision!r}, want default, high or highest")
        if self.platform not in _PLATFORMS:
            raise ExportError(f"platform is {self.platform!r}, want cpu or cuda")
        for option in ("input_names", "output_names"):
            _require_names(option, getattr(self, option))
        for option in ("input_batch_axes", "output_batch_axes"):
            _require_axes(option, getattr(self, option))
        _require_letters(self.axis_letters)
        if isinstance(self.golden, bool) or not isinstance(self.golden, int) or self.golden < 0:
            raise ExportError(f"golden is {self.golden!r}, want a number of samples, 0 or more")
        if self.golden and GOLDEN in self.extra_files:
            raise ExportError(f"extra_files has {GOLDEN!r}, which golden={self.golden} writes")
        if self.dynamic_batch and self.batch_sizes is None:
            raise ExportError(
                "dynamic_batch wants the batch sizes that a server is to compile, and batch_sizes is None",
                hint="give batch_sizes, such as [1, 8, 32]",
            )
        if self.int64 not in ("keep", "narrow"):
            raise ExportError(f"int64 is {self.int64!r}, want 'keep' or 'narrow'")
        if self.lowering not in ("torchax", "torch-xla"):
            raise ExportError(f"lowering is {self.lowering!r}, want 'torchax' or 'torch-xla'")
        if (self.lowering == "torch-xla") != (self.torch_xla_python is not None):
            raise ExportError(
                "lowering 'torch-xla' and torch_xla_python (--torch-xla-python) belong together",
                hint="torch_xla_python is the Python of an environment with torch-xla, see docs/export-torch.md",
            )
        if self.dynamic_batch and self.lowering == "torch-xla":
            raise ExportError(
                "torch-xla makes no program with a symbolic batch axis", hint="leave lowering or dynamic_batch out"
            )
        if self.dir.exists() and not self.overwrite:
            raise ExportError(f"{self.dir} exists", hint="overwrite=True (or --overwrite) replaces it as a whole")

    @property
    def programs(self) -> tuple[int, ...]:
        """The batch keys to write: the batch sizes, or 0 alone for the one program without a batch axis."""
        return (0,) if self.batch_sizes is None else self.batch_sizes

    @property
    def compared(self) -> tuple[int, ...]:
        """The batch keys to trace a model at: those of the programs, and the double of a single batch size, since batch
        axes are found by comparing. Where one program serves all sizes, two are enough."""
        sizes = self.programs
        if self.batch_sizes is None:
            return sizes
        if len(sizes) == 1:
            return (*sizes, 2 * sizes[0])
        return (sizes[0], sizes[-1]) if self.dynamic_batch else sizes


def checked_batch_sizes(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    """`sizes` ascending. Raises ExportError unless they are unique positive integers; None stays None."""
    if sizes is None:
        return None
    if not isinstance(sizes, Iterable):
        raise ExportError(f"batch_sizes is {sizes!r}, want a list of integers such as [1, 8]")
    values = [_positive(size) for size in sizes]
    if not values:
        raise ExportError("batch_sizes is empty", hint="batch_sizes=None exports one program without a batch axis")
    if len(set(values)) != len(values):
        raise ExportError(f"batch_sizes {values} repeats a size")
    return tuple(sorted(values))


def _positive(size: object) -> int:
    try:
        value = 0 if isinstance(size, bool) else operator.index(size)  # type: ignore[arg-type]
    except TypeError:
        value = 0
    if not 1 <= value <= MAX_BATCH_SIZE:
        raise ExportError(f"batch size {size!r} is not an integer from 1 to {MAX_BATCH_SIZE}")
    return value


def _require_names(option: str, names: object) -> None:
    if names is None:
        return
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ExportError(f"{option} is {names!r}, want a list of names, in order")


def _require_axes(option: str, axes: object) -> None:
    if axes is None:
        return
    listed = list(axes.values()) if isinstance(axes, Mapping) else axes
    if not isinstance(listed, (list, tuple)) or not all(axis is None or is_integer(axis) for axis in listed):
        raise ExportError(f"{option} is {axes!r}, want a list of axes, or a mapping name → axis")


def _require_letters(letters: object) -> None:
    if not isinstance(letters, Mapping) or not all(isinstance(part, str) for pair in letters.items() for part in pair):
        raise ExportError(f"axis_letters is {letters!r}, want a mapping tensor name → letters, such as {{'x': 'hwc'}}")
