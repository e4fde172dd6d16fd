"""What differs between two bundles: what they take and return, programs and their signatures, weights, other files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from rsrv.audit.parity import compare
from rsrv.audit.programs import bindings_missing, parse_pool, programs_of
from rsrv.bundle.digests import digest_file
from rsrv.bundle.directory import Bundle, open_bundle
from rsrv.bundle.files import PATCH, WEIGHTS, bundle_files, read_program
from rsrv.bundle.manifest import Manifest
from rsrv.bundle.tensors import TensorFile, open_tensors
from rsrv.core.errors import ProgramError
from rsrv.core.tensors import TensorSpec
from rsrv.runtime.compile_pool import CompilePool
from rsrv.stablehlo.signature import ProgramReport

_PROVENANCE = "provenance"
_SHOWN_ELSEWHERE = ("name", "files", "warnings", _PROVENANCE)
_TENSORS = ("executable_inputs", "executable_outputs", "client_inputs", "client_outputs")


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same. `left` and `right` say what it is in each bundle; None = it is not there."""

    section: str
    what: str
    left: str | None
    right: str | None
    note: str | None = None

    def to_json(self) -> dict[str, str | None]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class BundleDiff:
    """All differences of two bundles. Where they came from (provenance) does not count for `same`."""

    left: str
    right: str
    differences: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        return all(difference.section == _PROVENANCE for difference in self.differences)

    def to_json(self) -> dict[str, Any]:
        return {
            "left": self.left,
            "right": self.right,
            "same": self.same,
            "differences": [difference.to_json() for difference in self.differences],
        }


def diff_bundles(left: Path | str, right: Path | str, *, pool: CompilePool | None = None) -> BundleDiff:
    """Compare two bundles; every byte of both is read. Programs that differ are parsed in a process that may die.

    Raises BundleError when one of them cannot be opened.
    """
    one, other = open_bundle(left), open_bundle(right)
    found = [
        *_manifests(one.manifest, other.manifest),
        *_programs(one, other, pool),
        *_weights(one, other),
        *_files(one, other),
        *_mappings(_PROVENANCE, one.manifest.provenance, other.manifest.provenance),
    ]
    return BundleDiff(str(one.path), str(other.path), tuple(found))


def _manifests(left: Manifest, right: Manifest) -> Iterator[Difference]:
    for what in ("compiled_batch_sizes", "dynamic"):
        one, other = getattr(left.batching, what), getattr(right.batching, what)
        if one != other:
            yield Difference("manifest", f"batching.{what}", _shown(one), _shown(other))
    for field in fields(Manifest):
        one, other = getattr(left, field.name), getattr(right, field.name)
        if field.name in _SHOWN_ELSEWHERE or one == other:
            continue
        if field.name in _TENSORS:
            yield from _tensors(field.name, one or (), other or ())
        else:
            yield Difference("manifest", field.name, _shown(one), _shown(other))


def _tensors(key: str, left: tuple[TensorSpec, ...], right: tuple[TensorSpec, ...]) -> Iterator[Difference]:
    one, other = {spec.name: spec for spec in left}, {spec.name: spec for spec in right}
    for name in _names(one, other):
        a, b = one.get(name), other.get(name)
        if a != b:
            yield Difference("manifest", f"{key} {name!r}", _spec(a), _spec(b))
    if set(one) == set(other) and list(one) != list(other):
        yield Difference("manifest", f"order of {key}", ", ".join(one), ", ".join(other))


def _spec(spec: TensorSpec | None) -> str | None:
    return None if spec is None else f"{spec.describe()} {spec.letters!r}"


def _programs(left: Bundle, right: Bundle, pool: CompilePool | None) -> Iterator[Difference]:
    one, other = ({file: bundle.path / file for file, _, _ in programs_of(bundle)} for bundle in (left, right))
    with ExitStack() as stack:
        for file in _names(one, other):
            if file not in one or file not in other:
                yield Difference("programs", file, _digest(one.get(file)), _digest(other.get(file)))
                continue
            a, b = (read_program(paths[file]) for paths in (one, other))
            if a == b:
                continue
            if pool is None and bindings_missing() is None:
                pool = stack.enter_context(parse_pool())
            yield Difference("programs", file, _digest(one[file]), _digest(other[file]), _contrast(a, b, pool))


def _contrast(left: bytes, right: bytes, pool: CompilePool | None) -> str:
    """What differs between two programs as far as can be read from outside."""
    if pool is None:
        return f"not parsed: {bindings_missing()}"
    reports: list[ProgramReport] = []
    for data in (left, right):
        try:
            reports.append(pool.inspect(data))
        except ProgramError as error:
            return error.message
    one, other = reports
    notes = []
    for kind in ("arguments", "results"):
        a, b = getattr(one.signature, kind), getattr(other.signature, kind)
        if len(a) != len(b):
            notes.append(f"{len(a)} and {len(b)} {kind}")
        notes += [f"{kind[:-1]} {i} is {x} and {y}" for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    if not notes:
        notes.append("same signature")
    if one.stablehlo_version != other.stablehlo_version:
        notes.append(f"StableHLO {one.stablehlo_version} and {other.stablehlo_version}")
    if one.custom_calls != other.custom_calls:
        notes.append(f"custom calls {_listed(one.custom_calls)} and {_listed(other.custom_calls)}")
    return "; ".join(notes)


def _weights(left: Bundle, right: Bundle) -> Iterator[Difference]:
    if left.weights_path is None or right.weights_path is None:
        if left.weights_path != right.weights_path:
            yield Difference("weights", WEIGHTS, _digest(left.weights_path), _digest(right.weights_path))
        return
    with (
        open_tensors(left.weights_path, column_major=left.manifest.column_major) as one,
        open_tensors(right.weights_path, column_major=right.manifest.column_major) as other,
    ):
        for name in _names(one.header.tensors, other.header.tensors):
            difference = _weight(name, one, other)
            if difference is not None:
                yield difference
        orders = one.header.argument_order, other.header.argument_order
        if sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]:
            position = next(i for i, (a, b) in enumerate(zip(*orders, strict=True)) if a != b)
            yield Difference(
                "weights",
                "argument_order",
                orders[0][position],
                orders[1][position],
                f"first difference at position {position}",
            )


def _weight(name: str, left: TensorFile, right: TensorFile) -> Difference | None:
    a, b = (file.read(name) if name in file.header.tensors else None for file in (left, right))
    one, other = (None if array is None else _tensor_text(array) for array in (a, b))
    if one == other:
        return None
    note = None
    if a is not None and b is not None and a.dtype == b.dtype and a.shape == b.shape:
        (row,) = compare({name: a}, {name: b}).rows
        note = f"max abs {row.max_abs:.3g}, rel {row.rel:.3g}"
    return Difference("weights", name, one, other, note)


def _tensor_text(array: np.ndarray) -> str:
    digest = hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()
    return f"{array.dtype}[{','.join(map(str, array.shape))}] sha256 {digest[:16]}"


def _files(left: Bundle, right: Bundle) -> Iterator[Difference]:
    """Everything that is neither program nor weights."""
    known = {WEIGHTS, *(file for bundle in (left, right) for file, _, _ in programs_of(bundle))}
    one, other = ({n: bundle.path / n for n in bundle_files(bundle.path) if n not in known} for bundle in (left, right))
    for name in _names(one, other):
        a, b = _digest(one.get(name)), _digest(other.get(name))
        if a != b:
            yield Difference(_PROVENANCE if name == PATCH else "files", name, a, b)


def _mappings(section: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[Difference]:
    for key in _names(left, right):
        if key not in left or key not in right or left[key] != right[key]:
            yield Difference(section, key, _shown(left.get(key)), _shown(right.get(key)))


def _names(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """The keys of both, in the order of the first, then of the second."""
    return list(dict.fromkeys([*left, *right]))


def _digest(path: Path | None) -> str | None:
    if path is None:
        return None
    found = digest_file(path)
    return f"{found.size} bytes, sha256 {found.sha256[:16]}"


def _shown(value: Any) -> str | None:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return None if value is None else str(value)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"
