"""What a person wants to know about a bundle, without parsing any program: the data of `rsrv bundle inspect`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rsrv.bundle.directory import Bundle, open_bundle
from rsrv.bundle.files import HOOKS, MANIFEST, bundle_files
from rsrv.bundle.hookfile import HookRegistrations, inspect_hooks
from rsrv.bundle.safetensors import ALIGNMENT, WeightsHeader, read_header
from rsrv.bundle.variants import VariantKey
from rsrv.core.tensors import TensorSpec

_BYTECODE_MAGIC = b"ML\xefR"


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """One declared tensor; `shape` is the wire shape, row-major, -1 for batch and variable axes."""

    name: str
    dtype: str
    datatype: str | None
    shape: tuple[int, ...]
    letters: str
    batch_axis: int | None
    text: str


@dataclass(frozen=True, slots=True)
class ProgramDescription:
    """One program file: which variant and batch sizes it serves (key 0: requests one by one)."""

    file: str
    variant: VariantKey
    batch_keys: tuple[int, ...]
    bytes: int
    format: str


@dataclass(frozen=True, slots=True)
class WeightsDescription:
    """Footprint of the weights: `aligned_bytes` can be used where they lie, the others are copied."""

    tensors: int
    parameters: int
    bytes: int
    aligned_bytes: int
    bytes_by_dtype: Mapping[str, int]
    has_digests: bool


@dataclass(frozen=True)
class BundleDescription:
    """See the fields; client tensors are what the wire shows, equal to the executable ones without hooks."""

    name: str
    path: str
    description: str
    format_version: str
    kind: str
    client_inputs: tuple[TensorDescription, ...]
    client_outputs: tuple[TensorDescription, ...]
    executable_inputs: tuple[TensorDescription, ...]
    executable_outputs: tuple[TensorDescription, ...]
    batch_sizes: tuple[int, ...]
    dynamic_batch: bool
    coalesces: bool
    input_shapes: tuple[VariantKey, ...]
    programs: tuple[ProgramDescription, ...]
    weights: WeightsDescription | None
    hooks: tuple[str, ...]
    meta_calls: tuple[str, ...]
    files: int
    bytes: int
    sealed: bool
    provenance: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As values that `json.dumps` takes."""
        return asdict(self)


def describe_bundle(path: Path | str) -> BundleDescription:
    """Describe the bundle in the directory `path`. Raises BundleError when it cannot be opened."""
    bundle = open_bundle(path)
    manifest = bundle.manifest
    names = [*bundle_files(bundle.path), MANIFEST]
    weights = None if bundle.weights_path is None or manifest.is_meta else _weights(read_header(bundle.weights_path))
    return BundleDescription(
        name=bundle.name,
        path=str(bundle.path),
        description=manifest.description,
        format_version=manifest.format_version,
        kind=manifest.kind,
        client_inputs=_tensors(manifest.wire_inputs),
        client_outputs=_tensors(manifest.wire_outputs),
        executable_inputs=_tensors(manifest.executable_inputs),
        executable_outputs=_tensors(manifest.executable_outputs),
        batch_sizes=manifest.batching.compiled_batch_sizes,
        dynamic_batch=manifest.batching.dynamic,
        coalesces=manifest.coalescable_specs and not any(0 in programs for programs in bundle.programs.values()),
        input_shapes=manifest.input_shapes,
        programs=tuple(_programs(bundle)),
        weights=weights,
        hooks=_hooks(None if bundle.hooks_path is None else inspect_hooks(bundle.hooks_path)),
        meta_calls=manifest.meta_calls,
        files=len(names),
        bytes=sum((bundle.path / name).stat().st_size for name in names),
        sealed=manifest.files is not None,
        provenance=manifest.provenance,
    )


def _tensors(specs: Iterable[TensorSpec]) -> tuple[TensorDescription, ...]:
    return tuple(
        TensorDescription(
            name=spec.name,
            dtype=spec.dtype.value,
            datatype=spec.dtype.wire,
            shape=spec.wire_shape,
            letters=spec.letters,
            batch_axis=spec.batch_axis,
            text=spec.describe(),
        )
        for spec in specs
    )


def _programs(bundle: Bundle) -> Iterable[ProgramDescription]:
    for variant, programs in bundle.programs.items():
        for path in dict.fromkeys(programs.values()):
            with open(path, "rb") as file:
                magic = file.read(len(_BYTECODE_MAGIC))
            yield ProgramDescription(
                file=path.name,
                variant=variant,
                batch_keys=tuple(key for key, program in programs.items() if program == path),
                bytes=path.stat().st_size,
                format="bytecode" if magic == _BYTECODE_MAGIC else "text",
            )


def _weights(header: WeightsHeader) -> WeightsDescription:
    by_dtype: Counter[str] = Counter()
    for entry in header.tensors.values():
        by_dtype[entry.dtype.value] += entry.nbytes
    return WeightsDescription(
        tensors=len(header.tensors),
        parameters=sum(math.prod(entry.shape) for entry in header.tensors.values()),
        bytes=header.data_bytes,
        aligned_bytes=sum(
            entry.nbytes for entry in header.tensors.values() if (header.data_offset + entry.begin) % ALIGNMENT == 0
        ),
        bytes_by_dtype=dict(sorted(by_dtype.items())),
        has_digests=bool(header.tensor_digests),
    )


def _hooks(registrations: HookRegistrations | None) -> tuple[str, ...]:
    if registrations is None:
        return ()
    names = (*registrations.functions, *(function for function, _ in registrations.calls))
    return names or (HOOKS,)
