"""Which program files a manifest calls for, and which of them a bundle has: file names only, nothing is opened."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rsrv.bundle.manifest import Manifest
from rsrv.bundle.problems import violation
from rsrv.bundle.variants import VariantKey
from rsrv.core.errors import BundleError

ANY_BATCH = 0
"""Batch key of the one program that serves requests one by one (B-12)."""

MAX_PROGRAMS = 4096
"""Variants times batch sizes; digests of more files would not fit into a manifest."""

_PROGRAM = re.compile(r"model(?:\.v[0-9]+)?(?:\.b[0-9]+)?\.mlir")

ProgramNames = Mapping[VariantKey, Mapping[int, str]]
"""Variant → batch key → file name."""


@dataclass(frozen=True)
class ProgramListing:
    """The programs of a bundle, and what is wrong with the set; `names` leaves out what is missing.

    `warnings` has what is skipped: in a bundle of format 2.0 a program that nothing declares (B-33).
    """

    names: ProgramNames
    problems: tuple[BundleError, ...]
    warnings: tuple[BundleError, ...] = ()


def is_program_name(name: str) -> bool:
    """True for every name that the layout reserves for programs."""
    return _PROGRAM.fullmatch(name) is not None


def program_name(variant_index: int | None, batch_key: int) -> str:
    """``model.v{i}.b{N}.mlir``; without a variant index, or with batch key 0, that part is left out."""
    variant = "" if variant_index is None else f".v{variant_index}"
    batch = "" if batch_key == ANY_BATCH else f".b{batch_key}"
    return f"model{variant}{batch}.mlir"


def list_programs(manifest: Manifest, files: Iterable[str]) -> ProgramListing:
    """Assign the program files among `files` to variants and batch sizes (B-12a, B-32 … B-34, B-46, B-52)."""
    present = sorted(name for name in files if is_program_name(name))
    if manifest.is_meta:
        return ProgramListing({}, tuple(_problem(manifest, "B-52", name, "a meta has no programs") for name in present))
    wanted = len(manifest.variants) * max(1, len(manifest.batching.compiled_batch_sizes))
    if wanted > MAX_PROGRAMS:
        text = f"input_shapes and compiled_batch_sizes ask for {wanted} programs, at most {MAX_PROGRAMS} are possible"
        return ProgramListing({}, (_problem(manifest, "B-46", None, text),))
    problems: list[BundleError] = []
    names: dict[VariantKey, dict[int, str]] = {}
    for i, variant in enumerate(manifest.variants):
        found = _of_variant(manifest, i if manifest.input_shapes else None, present, problems)
        if found:
            names[variant] = found
    used = {name for programs in names.values() for name in programs.values()}
    undeclared = [
        _problem(manifest, "B-33", name, "the manifest declares no such program", "remove the file, or export anew")
        for name in present
        if name not in used
    ]
    problems += [] if manifest.column_major else undeclared
    if len({tuple(programs) for programs in names.values()}) > 1:
        sizes = "; ".join(f"{list(variant)}: {list(programs)}" for variant, programs in names.items())
        problems.append(_problem(manifest, "B-46", None, f"variants have programs for different batch sizes: {sizes}"))
    return ProgramListing(names, tuple(problems), tuple(undeclared) if manifest.column_major else ())


def _of_variant(
    manifest: Manifest, index: int | None, present: list[str], problems: list[BundleError]
) -> dict[int, str]:
    declared = manifest.batching.compiled_batch_sizes
    single = program_name(index, ANY_BATCH)
    by_size = {size: program_name(index, size) for size in declared}
    if manifest.batching.dynamic:
        if single not in present:
            problems.append(_problem(manifest, "B-12a", single, "missing; with batching.dynamic it serves every size"))
            return {}
        return dict.fromkeys(declared, single)
    if any(_is_sized(name, index) for name in present):
        for name in by_size.values():
            if name not in present:
                problems.append(_problem(manifest, "B-32", name, "missing, although its batch size is declared"))
        return {size: name for size, name in by_size.items() if name in present}
    if single not in present:
        wanted = " and ".join(by_size.values()) or single
        problems.append(_problem(manifest, "B-32", next(iter(by_size.values()), single), f"missing; want {wanted}"))
        return {}
    if len(declared) > 1:
        problems.append(
            _problem(
                manifest,
                "B-34",
                single,
                f"the only program, but compiled_batch_sizes is {list(declared)}; one program has one size or none",
            )
        )
    return {ANY_BATCH: single}


def _is_sized(name: str, index: int | None) -> bool:
    """Whether `name` is a program of that variant for one batch size."""
    prefix = program_name(index, ANY_BATCH).removesuffix("mlir")
    return re.fullmatch(re.escape(prefix) + r"b[0-9]+\.mlir", name) is not None


def _problem(manifest: Manifest, rule: str, name: str | None, text: str, hint: str | None = None) -> BundleError:
    place = f"bundle {manifest.name!r}: " + ("" if name is None else f"{name}: ")
    return violation(BundleError, rule, place + text, file=name, hint=hint)
