"""Does a program take and return what manifest and weights declare? Pure: works on reports of parsed programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from rsrv.bundle.column_major import turned_key, weights_with_reversed_axes, with_reversed_axes
from rsrv.bundle.manifest import Manifest
from rsrv.bundle.safetensors import WeightsHeader
from rsrv.core.errors import SignatureMismatch
from rsrv.stablehlo.signature import ProgramReport, TensorType

_MAX_LISTED = 8


@dataclass(frozen=True)
class _Slot:
    """What one argument or result has to be: ``input 'x'`` with its type; -1 = an extent that is not prescribed."""

    what: str
    dtype: str
    shape: tuple[int, ...]

    def accepts(self, found: TensorType) -> bool:
        return (
            self.dtype == found.dtype
            and len(self.shape) == len(found.shape)
            and all(mine in (-1, theirs) for mine, theirs in zip(self.shape, found.shape, strict=True))
        )

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join('?' if size == -1 else str(size) for size in self.shape)}]"


def check_signature(
    manifest: Manifest,
    variant: tuple[int, ...],
    batch_key: int,
    report: ProgramReport,
    weights: WeightsHeader | None,
) -> list[str]:
    """Everything about the entry of one program that differs from its declaration (B-8…B-11, B-34); [] when it fits.

    Args:
        variant: sizes of the variable input axes, () for a bundle with a single shape.
        batch_key: compiled batch size, 0 for a program that is not bound to one.
        weights: header of the weights, None when it could not be read; then only inputs and results are compared.
    """
    problems = _differences(manifest, variant, batch_key, report, weights)
    if problems and manifest.column_major:
        problems += _row_major_after_all(manifest, variant, batch_key, report, weights)
    return problems


def _differences(
    manifest: Manifest,
    variant: tuple[int, ...],
    batch_key: int,
    report: ProgramReport,
    weights: WeightsHeader | None,
) -> list[str]:
    dynamic = manifest.batching.dynamic and batch_key == 0
    found, results = report.signature.arguments, report.signature.results
    problems: list[str] = []
    batch: int | None = batch_key or None
    if dynamic:
        problems += _symbolic(manifest, found)
    elif batch is None:
        batch, trouble = _single_batch(manifest, found)
        problems += trouble
    inputs = _inputs(manifest, variant, batch)
    if weights is None:
        if len(found) < len(inputs):
            problems.append(f"takes {len(found)} arguments, fewer than the {len(inputs)} executable_inputs (B-8)")
        else:
            problems += _compare("argument", inputs, found[: len(inputs)])
    else:
        problems += _arguments(inputs, weights, found)
    problems += _results(manifest, batch, results)
    if not dynamic and (tensor := report.signature.dynamic()) is not None:
        problems.append(f"{tensor}: shapes have to be static (B-10)")
    return problems


def require_signature(
    manifest: Manifest,
    variant: tuple[int, ...],
    batch_key: int,
    report: ProgramReport,
    weights: WeightsHeader | None,
    *,
    file: str | None = None,
) -> None:
    """Raises SignatureMismatch with all problems of `check_signature`; `file` names the program."""
    problems = check_signature(manifest, variant, batch_key, report, weights)
    if problems:
        name = f"{manifest.name}: " if manifest.name else ""
        program = file or f"program for batch size {batch_key}"
        raise SignatureMismatch(f"{name}{program} {'; '.join(problems)}", rule="B-11", file=file)


def _inputs(manifest: Manifest, variant: tuple[int, ...], batch: int | None) -> list[_Slot]:
    sizes = iter(variant)
    slots = []
    for spec in manifest.executable_inputs:
        variable = [next(sizes, -1) for _ in spec.variable_axes]
        shape = spec.concrete_shape(-1 if batch is None else batch, variable)
        slots.append(_Slot(f"input {spec.name!r}", spec.dtype.stablehlo, shape))
    return slots


def _weights(header: WeightsHeader) -> list[_Slot]:
    entries = [header.tensors[name] for name in header.argument_order]
    return [_Slot(f"weight {entry.name!r}", entry.dtype.stablehlo, tuple(entry.shape)) for entry in entries]


def _results(manifest: Manifest, batch: int | None, found: Sequence[TensorType]) -> list[str]:
    slots = [
        _Slot(
            f"output {spec.name!r}",
            spec.dtype.stablehlo,
            spec.concrete_shape(-1 if batch is None else batch, [-1] * len(spec.variable_axes)),
        )
        for spec in manifest.executable_outputs
    ]
    if len(found) != len(slots):
        return [f"returns {len(found)} results, but {len(slots)} executable_outputs are declared (B-9)"]
    return _compare("result", slots, found)


def _arguments(inputs: Sequence[_Slot], header: WeightsHeader, found: Sequence[TensorType]) -> list[str]:
    weights = _weights(header)
    slots = [*inputs, *weights]
    if len(found) != len(slots):
        return [_arity_problem(len(inputs), len(weights), slots, found)]
    problems = _compare("argument", slots, found)
    if problems and (cause := _order_problem(weights, found[len(inputs) :], header.column_major)) is not None:
        problems.append(cause)
    return problems


def _compare(kind: str, slots: Sequence[_Slot], found: Sequence[TensorType]) -> list[str]:
    problems = [
        f"{kind} {index} is {tensor}, but {slot.what} is declared as {slot}"
        for index, (slot, tensor) in enumerate(zip(slots, found, strict=True))
        if not slot.accepts(tensor)
    ]
    if len(problems) > _MAX_LISTED:
        problems[_MAX_LISTED:] = [f"and {len(problems) - _MAX_LISTED} more {kind}s differ"]
    return problems


def _arity_problem(n_inputs: int, n_weights: int, slots: Sequence[_Slot], found: Sequence[TensorType]) -> str:
    """Both numbers, surplus or shortfall, and what the types say about the cause."""
    difference = len(found) - len(slots)
    problem = (
        f"takes {len(found)} arguments, but {n_inputs} inputs + {n_weights} weights = {len(slots)} are declared: "
        f"{abs(difference)} {'surplus' if difference > 0 else 'short'} (B-8)"
    )
    matcher = SequenceMatcher(None, [str(slot) for slot in slots], [str(t) for t in found], autojunk=False)
    edits = [edit for edit in matcher.get_opcodes() if edit[0] != "equal"]
    surplus = [index for _, _, _, first, last in edits for index in range(first, last)]
    missing = [slots[index] for _, first, last, _, _ in edits for index in range(first, last)]
    seeds = [index for index in surplus if found[index].dtype in ("ui64", "ui32") and found[index].shape == (2,)]
    if difference > 0 and seeds:
        return f"{problem}; argument {seeds[0]} is {found[seeds[0]]}, most likely a random key that was captured"
    if difference > 0 and len(surplus) == difference:
        listed = ", ".join(f"{index} ({found[index]})" for index in surplus[:_MAX_LISTED])
        return f"{problem}; undeclared: argument {listed}, most likely a captured value"
    if difference < 0 and len(missing) == -difference:
        listed = ", ".join(slot.what for slot in missing[:_MAX_LISTED])
        return f"{problem}; nothing takes {listed}, most likely left out by the exporter because it is unused"
    return problem


def _order_problem(weights: Sequence[_Slot], found: Sequence[TensorType], column_major: bool) -> str | None:
    """The likely cause when the weights of a program do not fit one by one."""
    declared = [(slot.dtype, slot.shape) for slot in weights]
    taken = [(tensor.dtype, tensor.shape) for tensor in found]
    if declared == taken:
        return None
    if Counter(declared) == Counter(taken):
        return "the same weights in another order would fit: argument_order does not match this program"
    if not column_major and [(dtype, shape[::-1]) for dtype, shape in declared] == taken:
        return "all weights would fit with reversed axes: they look column-major"
    return None


def _row_major_after_all(
    manifest: Manifest,
    variant: tuple[int, ...],
    batch_key: int,
    report: ProgramReport,
    weights: WeightsHeader | None,
) -> list[str]:
    """Whether the program would fit when manifest, weights or both of a format 2.0 bundle were row-major (B-67).

    The format version decides all the same: what fits by its shapes alone may still be the wrong way round.
    """
    turned, key = with_reversed_axes(manifest), turned_key(manifest, variant)
    plain = None if weights is None else weights_with_reversed_axes(weights)
    for what, declared, sizes, header in (
        ("the manifest", turned, key, weights),
        ("the weights file", manifest, variant, plain),
        ("all of it", turned, key, plain),
    ):
        if not _differences(declared, sizes, batch_key, report, header):
            return [f"{what} looks row-major although format_version is {manifest.format_version} (B-67)"]
    return []


def _single_batch(manifest: Manifest, found: Sequence[TensorType]) -> tuple[int | None, list[str]]:
    """The batch extent of the one program without a batch size in its name (B-34)."""
    declared = manifest.batching.compiled_batch_sizes
    extent = None
    for spec, tensor in zip(manifest.executable_inputs, found, strict=False):
        if spec.batch_axis is not None and spec.rank == len(tensor.shape):
            extent = tensor.shape[spec.batch_axis]
            break
    if extent == -1:
        return None, []  # reported as a dynamic shape
    if declared and tuple(declared) != (extent,):
        there = "has no batch axis" if extent is None else f"is compiled for batch size {extent}"
        sizes = ", ".join(map(str, declared))
        return extent, [f"{there}, but compiled_batch_sizes is [{sizes}]; want [] or the one size there is (B-34)"]
    return extent, []


def _symbolic(manifest: Manifest, found: Sequence[TensorType]) -> list[str]:
    """With ``batching.dynamic`` the batch axis of every batched input has to be symbolic (B-12a)."""
    return [
        f"argument {index} is {tensor}, but the batch axis of input {spec.name!r} has to be symbolic (B-12a)"
        for index, (spec, tensor) in enumerate(zip(manifest.executable_inputs, found, strict=False))
        if spec.batch_axis is not None and spec.rank == len(tensor.shape) and tensor.shape[spec.batch_axis] != -1
    ]
