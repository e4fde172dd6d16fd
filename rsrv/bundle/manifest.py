"""The manifest of a bundle: what `manifest.yaml` says, as values. Reading the other files is not done here.

Tools call `manifest_problems` to learn everything that is wrong; loading stops at the first problem.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rsrv.bundle.blocks import (
    BatchingSpec,
    FileDigest,
    HooksSpec,
    read_batching,
    read_files,
    read_hooks,
    read_meta_calls,
)
from rsrv.bundle.entries import read_entries
from rsrv.bundle.files import HOOKS, LEGACY_HOOKS, MANIFEST, read_regular
from rsrv.bundle.outline import key_lines
from rsrv.bundle.problems import KeyPath, Problems, violation
from rsrv.bundle.rules import validate
from rsrv.bundle.variants import VariableAxis, VariantKey, read_variants, variable_axes
from rsrv.core.errors import BundleError, InvalidRequest, ManifestError
from rsrv.core.tensors import TensorSpec
from rsrv.core.yamlio import YamlError, load_yaml

# Format versions, newest first. A reader knows exactly the versions that are listed here.
#
# 3.0  2026-11-29  Axes are row-major: letters, weights and variant keys read as numpy shapes do. Adds axis_order,
#                  files, hooks, batching.dynamic, qualified keys in input_shapes, x-*; unknown keys are errors.
# 2.0  (older)     Column-major letters, weights with reversed axes, hooks in model.jl. Read, and turned row-major here;
#                  unknown keys are warnings.
FORMAT_VERSION = "3.0"
OLDER_FORMAT_VERSION = "2.0"
_SPELLINGS = {"3.0": FORMAT_VERSION, "3": FORMAT_VERSION, "2.0": OLDER_FORMAT_VERSION, "2": OLDER_FORMAT_VERSION}

MAX_MANIFEST_BYTES = 256 << 10
MAX_MANIFEST_NODES = 16_384
"""Keys and values; enough for the digests of 2,700 files, which fill as many bytes as a manifest may have."""

MODEL, META = "model", "meta"

KEYS = (
    "format_version",
    "name",
    "description",
    "kind",
    "executable_inputs",
    "executable_outputs",
    "client_inputs",
    "client_outputs",
    "batching",
    "input_shapes",
    "meta",
    "hooks",
    "provenance",
    "axis_order",
    "files",
)
"""Top-level keys, in the order in which they are written (X-13); ``x-*`` follow."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A manifest that was read. Axes are row-major.

    Attributes:
        name: the name of the bundle's directory; what the file itself says is informational (B-2).
        client_inputs, client_outputs: what clients see when hooks transform the tensors; None = the executable lists.
        input_shapes: one canonical key per shape variant, in file order; empty for a single shape.
        files: digests of the other files, or None when the manifest has none.
        extensions: the ``x-*`` keys, verbatim.
        warnings: what the file says without an effect; bundles of format 2.0 only.
    """

    format_version: str = FORMAT_VERSION
    name: str
    description: str = ""
    kind: str = MODEL
    executable_inputs: tuple[TensorSpec, ...] = ()
    executable_outputs: tuple[TensorSpec, ...] = ()
    client_inputs: tuple[TensorSpec, ...] | None = None
    client_outputs: tuple[TensorSpec, ...] | None = None
    batching: BatchingSpec = field(default_factory=BatchingSpec)
    provenance: dict[str, Any] = field(default_factory=dict)
    meta_calls: tuple[str, ...] = ()
    input_shapes: tuple[VariantKey, ...] = ()
    files: Mapping[str, FileDigest] | None = None
    hooks: HooksSpec = field(default_factory=HooksSpec)
    extensions: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[ManifestError, ...] = field(default=(), compare=False)

    @property
    def is_meta(self) -> bool:
        return self.kind == META

    @property
    def column_major(self) -> bool:
        """The bundle is of format 2.0: its weights file holds every tensor with reversed axes (B-58)."""
        return self.format_version == OLDER_FORMAT_VERSION

    @property
    def wire_inputs(self) -> tuple[TensorSpec, ...]:
        """What requests are checked against (B-49)."""
        return self.executable_inputs if self.client_inputs is None else self.client_inputs

    @property
    def wire_outputs(self) -> tuple[TensorSpec, ...]:
        return self.executable_outputs if self.client_outputs is None else self.client_outputs

    @cached_property
    def input_batch_dim(self) -> int | None:
        """0-based batch axis of the first batched executable input (B-37)."""
        return next((spec.batch_axis for spec in self.executable_inputs if spec.batch_axis is not None), None)

    def wire_batch(self) -> tuple[str, int] | None:
        """Name and 1-based batch axis of the first batched wire input (B-38); None for a meta (B-55)."""
        if self.is_meta:
            return None
        for spec in self.wire_inputs:
            if spec.batch_axis is not None:
                return spec.name, spec.batch_axis + 1
        return None

    @cached_property
    def coalescable_specs(self) -> bool:
        """Whether every executable input and output is batched, without which requests cannot be merged (B-40)."""
        specs = (*self.executable_inputs, *self.executable_outputs)
        return bool(self.executable_inputs) and all(spec.batch_axis is not None for spec in specs)

    @cached_property
    def variable_axes(self) -> tuple[VariableAxis, ...]:
        """Variable axes of the executable inputs in the order of a variant's key (B-43)."""
        return variable_axes(self.executable_inputs)

    @property
    def variants(self) -> tuple[VariantKey, ...]:
        """Keys that programs exist for: `input_shapes`, or the one empty key."""
        return self.input_shapes or ((),)

    def variant_of(self, shapes: Mapping[str, Sequence[int]]) -> VariantKey:
        """The variant that serves executable inputs of these shapes (B-39).

        Raises InvalidRequest for an input that is missing or of another rank, and for sizes without a program.
        """
        key = []
        for axis in self.variable_axes:
            shape = shapes.get(axis.input)
            if shape is None or len(shape) <= axis.axis:
                raise InvalidRequest(
                    f"input {axis.input!r} has no axis {axis.axis} to choose a shape variant by: {shape}"
                )
            key.append(int(shape[axis.axis]))
        if tuple(key) not in self.variants:
            names = ", ".join(axis.qualified for axis in self.variable_axes)
            compiled = ", ".join(str(list(variant)) for variant in self.variants)
            raise InvalidRequest(f"no program for the sizes {key} of {names}; compiled: {compiled}")
        return tuple(key)


def load_manifest(path: Path | str, *, name: str | None = None) -> Manifest:
    """Read the manifest of the bundle at `path` (its directory, or the manifest file itself).

    `name` replaces the name of the directory. Raises ManifestError for the first problem in the order of §1.14.
    """
    manifest, problems = inspect_manifest(path, name=name)
    for problem in problems:
        raise problem
    assert manifest is not None
    return manifest


def manifest_problems(path: Path | str, *, name: str | None = None) -> list[BundleError]:
    """Everything that is wrong with the manifest of the bundle at `path`, each with file, line and rule."""
    return list(inspect_manifest(path, name=name)[1])


def inspect_manifest(
    path: Path | str, *, name: str | None = None, unhooked: bool = False
) -> tuple[Manifest | None, list[ManifestError]]:
    """The manifest at `path` as far as it could be read, and all its problems; None when nothing could be read.

    `unhooked` takes a format 2.0 bundle without its hooks (B-68): what is left is what its program takes and returns.
    """
    file = Path(os.path.abspath(path))
    if file.is_dir():
        file = file / MANIFEST
    try:
        text = read_regular(file, max_bytes=MAX_MANIFEST_BYTES, error=ManifestError, rule="B-1")
        mapping = load_mapping(text)
    except ManifestError as error:
        return None, [error]
    manifest, problems = _read(
        mapping,
        name=file.parent.name if name is None else name,
        has_hooks=os.path.lexists(file.parent / HOOKS),
        has_legacy_hooks=os.path.lexists(file.parent / LEGACY_HOOKS),
        unhooked=unhooked,
    )
    lines = key_lines(text.decode()) if problems or problems.warnings() else {}
    warnings = tuple(problems.warnings(file=MANIFEST, lines=lines))
    return replace(manifest, warnings=warnings), problems.errors(file=MANIFEST, lines=lines)


def load_mapping(text: bytes) -> dict[Any, Any]:
    """The root mapping of a manifest text. Raises ManifestError (B-14) for anything else."""
    try:
        decoded = text.decode("utf-8")
        value = load_yaml(decoded, what=MANIFEST, max_bytes=MAX_MANIFEST_BYTES, max_nodes=MAX_MANIFEST_NODES)
    except UnicodeDecodeError as error:
        raise violation(ManifestError, "B-14", f"{MANIFEST}: not UTF-8 at byte {error.start}", file=MANIFEST) from None
    except YamlError as error:
        raise violation(ManifestError, "B-14", error.message, file=MANIFEST) from None
    if not isinstance(value, dict):
        kind = "nothing" if value is None else f"a {type(value).__name__}"
        raise violation(ManifestError, "B-14", f"{MANIFEST}: the root must be a mapping, this is {kind}", file=MANIFEST)
    return value


def parse_manifest(mapping: Mapping[str, Any], *, name: str, has_hooks: bool) -> Manifest:
    """The manifest that `mapping` (parsed YAML) describes. Raises ManifestError for the first problem (§1.14)."""
    manifest, problems = _read(dict(mapping), name=name, has_hooks=has_hooks)
    for problem in problems.errors():
        raise problem
    return manifest


def _read(
    mapping: dict[Any, Any], *, name: str, has_hooks: bool, has_legacy_hooks: bool = False, unhooked: bool = False
) -> tuple[Manifest, Problems]:
    older = _SPELLINGS.get(str(mapping.get("format_version"))) == OLDER_FORMAT_VERSION
    problems = Problems(lenient=older)
    version = _read_version(mapping, problems)
    known = version in _SPELLINGS
    if known:
        ordinary = {key: value for key, value in mapping.items() if not _is_extension(key)}
        problems.unknown_keys(ordinary, KEYS, at=())
    _read_name(mapping, problems)
    kind = _read_kind(mapping, problems)
    meta_calls: tuple[str, ...] = ()
    if kind == META:
        meta_calls = read_meta_calls(mapping.get("meta"), problems, strict=known)
    elif kind == MODEL and "meta" in mapping:
        problems.add("B-52", "'meta' is there, but kind is model", at=("meta",), hint="write kind: meta, or remove it")

    def entries(key: str) -> tuple[TensorSpec, ...]:
        return read_entries(mapping[key], key, problems, row_major=not older)

    def required(key: str) -> tuple[TensorSpec, ...]:
        if key in mapping:
            return entries(key)
        if kind == MODEL:
            problems.add("B-25", f"{key} is missing; kind: model needs it", at=(key,))
        return ()

    executable_inputs, executable_outputs = required("executable_inputs"), required("executable_outputs")
    client_inputs = entries("client_inputs") if "client_inputs" in mapping else None
    client_outputs = entries("client_outputs") if "client_outputs" in mapping else None
    not_run_here = older and has_legacy_hooks and not has_hooks
    if not_run_here and unhooked and kind == MODEL:
        client_inputs = client_outputs = None
    elif not_run_here:
        _refuse_legacy_hooks(name, kind, problems)
    batching = read_batching(mapping.get("batching", {}), problems, strict=known)
    hooks = read_hooks(mapping.get("hooks", {}), problems, strict=known)
    provenance = mapping.get("provenance")
    input_shapes: tuple[VariantKey, ...] = ()
    if "input_shapes" in mapping and kind == MODEL and not problems.touched("executable_inputs"):
        input_shapes = read_variants(mapping["input_shapes"], variable_axes(executable_inputs), problems)
    manifest = Manifest(
        format_version=_SPELLINGS.get(version, version),
        name=name,
        description=_read_description(mapping, problems),
        kind=kind or MODEL,
        executable_inputs=executable_inputs,
        executable_outputs=executable_outputs,
        client_inputs=client_inputs,
        client_outputs=client_outputs,
        batching=batching,
        provenance=provenance if isinstance(provenance, dict) else {},
        meta_calls=meta_calls,
        input_shapes=input_shapes,
        files=read_files(mapping["files"], problems, strict=known) if "files" in mapping else None,
        hooks=hooks,
        extensions={key: value for key, value in mapping.items() if _is_extension(key)},
    )
    if _version_supported(version, mapping.get("axis_order"), problems) and kind is not None:
        validate(
            manifest,
            has_hooks=has_hooks or not_run_here,
            declares_variants="input_shapes" in mapping,
            problems=problems,
        )
    return manifest, problems


def _is_extension(key: object) -> bool:
    return isinstance(key, str) and key.startswith("x-")


def _read_version(mapping: Mapping[Any, Any], problems: Problems) -> str:
    """``format_version`` as a string; a YAML number is written out (3.0 → "3.0")."""
    version = mapping.get("format_version")
    if version is None:
        problems.add("§1.11", "missing format_version", hint=f'write format_version: "{FORMAT_VERSION}"')
        return ""
    if isinstance(version, bool) or not isinstance(version, str | int | float):
        problems.add("§1.11", f"format_version is {version!r}, want a string", at=("format_version",))
        return ""
    return str(version)


def _version_supported(version: str, axis_order: object, problems: Problems) -> bool:
    if not version:
        return False
    at: KeyPath = ("format_version",)
    canonical = _SPELLINGS.get(version)
    if canonical is None:
        supported = f"{FORMAT_VERSION}, {OLDER_FORMAT_VERSION}"
        problems.add("§1.11", f"format_version {version!r} is not supported; supported: {supported}", at=at)
        return False
    natural = "row_major" if canonical == FORMAT_VERSION else "column_major"
    if axis_order not in (None, natural):
        problems.add(
            "§1.11",
            f"axis_order is {axis_order!r}, but format_version {version} means {natural}",
            at=("axis_order",),
        )
    return axis_order in (None, natural)


def _refuse_legacy_hooks(name: str, kind: str | None, problems: Problems) -> None:
    hint = f"write {HOOKS}, which then is used instead"
    if kind == MODEL:
        hint += (
            "; without its hooks the program alone can be served: allow_unhooked, or rsrv bundle convert --drop-hooks"
        )
    problems.add("B-68", f"{name!r} needs a Python port of its hooks: {LEGACY_HOOKS} cannot run here", hint=hint)


def _read_name(mapping: Mapping[Any, Any], problems: Problems) -> None:
    name = mapping.get("name", "")
    if not isinstance(name, str):
        problems.add("§1.3", f"name is {name!r}, want a string", at=("name",), hint="put it in quotes")


def _read_kind(mapping: Mapping[Any, Any], problems: Problems) -> str | None:
    kind = mapping.get("kind", MODEL)
    if kind in (MODEL, META):
        return str(kind)
    problems.add("B-54", f"kind is {kind!r}, want 'model' or 'meta'", at=("kind",))
    return None


def _read_description(mapping: Mapping[Any, Any], problems: Problems) -> str:
    description = mapping.get("description")
    if isinstance(description, dict | list):
        problems.add("§1.3", f"description is {description!r}, want a text", at=("description",))
        return ""
    if description is None:
        return ""
    return str(description).lower() if isinstance(description, bool) else str(description)
