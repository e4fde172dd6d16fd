"""`write_bundle`: a bundle directory from programs, weights and specs, checked and in one step (X-5 … X-13)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rsrv.bundle.digests import digest_file, files_block
from rsrv.bundle.files import (
    HOOKS,
    MANIFEST,
    PATCH,
    WEIGHTS,
    bundle_files,
    is_passing,
    read_regular,
    relative_name_problem,
    require_name,
)
from rsrv.bundle.hookfile import MAX_HOOK_BYTES, parse_hooks
from rsrv.bundle.iospec import IOSpec
from rsrv.bundle.manifest import FORMAT_VERSION, KEYS, MAX_MANIFEST_BYTES, MODEL, load_mapping, parse_manifest
from rsrv.bundle.problems import violation
from rsrv.bundle.programs import ANY_BATCH, is_program_name, program_name
from rsrv.bundle.provenance import patch_bytes
from rsrv.bundle.safetensors import write_weights
from rsrv.bundle.staging import staged_directory
from rsrv.bundle.text import emit_manifest
from rsrv.bundle.variants import VariantKey, variable_axes, variant_entries
from rsrv.core.errors import BundleError, ManifestError

Modules = Mapping[int, bytes]
"""Batch key → program; the one key 0 is a program without a batch size."""


def write_bundle(
    dir: Path | str,  # noqa: A002
    *,
    name: str,
    executable_inputs: Sequence[IOSpec],
    executable_outputs: Sequence[IOSpec],
    modules: Modules | Mapping[VariantKey, Modules],
    weights: Sequence[tuple[str, np.ndarray]],
    client_inputs: Sequence[IOSpec] | None = None,
    client_outputs: Sequence[IOSpec] | None = None,
    input_shapes: Sequence[Sequence[int]] | None = None,
    provenance: Mapping[str, Any] | None = None,
    gate: Callable[[Path], None] | None = None,
    hooks: str | Path | None = None,
    extra_files: Mapping[str, bytes | os.PathLike[str]] | None = None,
    overwrite: bool = False,
    description: str = "",
    dynamic_batch_sizes: Sequence[int] | None = None,
) -> Path:
    """Write a bundle and return its directory. Equal arguments give equal bytes.

    Args:
        dir: the bundle's directory; its basename must be `name`.
        modules: batch size → serialised program, or ``{0: program}`` for the only one. With `input_shapes`, one such
            mapping per variant: variant key → batch size → program.
        weights: (name, array) in the order of the program's arguments.
        client_inputs, client_outputs: what clients see when `hooks` transform the tensors.
        input_shapes: sizes of the variable axes, in (input, axis) order, one vector per variant.
        provenance: see `collect_provenance`; ``git_diff`` goes to a file of its own.
        gate: called with the staged directory when it is complete; what it raises cancels the write.
        hooks: a hook file (`Path`, or text naming an existing file) or its source text.
        extra_files: name in the bundle → content, or the path of a file to copy.
        overwrite: replace an existing bundle as a whole.
        dynamic_batch_sizes: the one program has a symbolic batch axis, to be specialised to these sizes (B-12a).

    Raises BundleError, or ManifestError, that names the rule. The target is then what it was before.
    """
    target = Path(os.path.abspath(dir))
    if target.name != name:
        raise violation(
            BundleError, "X-5", f"{target} cannot hold the bundle {name!r}: its name must be its directory's"
        )
    require_name(name)
    programs = _programs(executable_inputs, modules, input_shapes, dynamic_batch_sizes)
    facts = dict(provenance or {})
    diff = facts.pop("git_diff", None)
    if diff:
        facts["git_diff_file"] = PATCH
    files = {program: _Content.of(data, program) for program, data in programs.files.items()}
    if hooks is not None:
        files[HOOKS] = _hook_content(hooks)
    if diff:
        files[PATCH] = _Content(data=diff if isinstance(diff, bytes) else patch_bytes(diff))
    for file, data in (extra_files or {}).items():
        _require_free(file, files)
        files[file] = _Content.of(data, file)

    mapping: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "name": name,
        "description": description,
        "kind": MODEL,
        "executable_inputs": [spec.entry() for spec in executable_inputs],
        "executable_outputs": [spec.entry() for spec in executable_outputs],
        "client_inputs": None if client_inputs is None else [spec.entry() for spec in client_inputs],
        "client_outputs": None if client_outputs is None else [spec.entry() for spec in client_outputs],
        "batching": {
            "compiled_batch_sizes": programs.batch_sizes,
            "dynamic": True if dynamic_batch_sizes is not None else None,
        },
        "input_shapes": programs.variants,
        "provenance": facts or None,
        "axis_order": "row_major",
    }
    mapping = {key: value for key, value in mapping.items() if value is not None and value != ""}
    mapping["batching"] = {key: value for key, value in mapping["batching"].items() if value is not None}
    _checked_text(mapping, name, has_hooks=hooks is not None)

    with staged_directory(target, overwrite=overwrite) as staged:
        write_weights(staged / WEIGHTS, weights)
        for file, content in files.items():
            content.write(staged / file)
        digests = {file: digest_file(staged / file) for file in bundle_files(staged)}
        mapping["files"] = files_block(digests)
        (staged / MANIFEST).write_bytes(_checked_text(mapping, name, has_hooks=hooks is not None))
        if gate is not None:
            gate(staged)
    return target


@dataclass(frozen=True)
class _Programs:
    """What `modules` comes to: file name → bytes, and what the manifest says about them."""

    files: Mapping[str, bytes]
    batch_sizes: list[int]
    variants: list[dict[str, int]] | None


def _programs(
    inputs: Sequence[IOSpec],
    modules: Mapping[Any, Any],
    input_shapes: Sequence[Sequence[int]] | None,
    dynamic_batch_sizes: Sequence[int] | None,
) -> _Programs:
    axes = variable_axes([spec.spec for spec in inputs])
    if input_shapes is None:
        by_variant: list[tuple[int | None, Modules]] = [(None, modules)]
        variants = None
    else:
        keys = [tuple(vector) for vector in input_shapes]
        for key in keys:
            if len(key) != len(axes):
                names = ", ".join(axis.qualified for axis in axes) or "none"
                raise violation(BundleError, "X-8", f"input_shapes has {list(key)}, but the variable axes are: {names}")
            if key not in modules:
                raise violation(BundleError, "X-8", f"modules has no programs for the variant {list(key)}")
        surplus = [key for key in modules if key not in keys]
        if surplus:
            raise violation(
                BundleError, "X-8", f"modules has programs for {surplus[0]!r}, which input_shapes does not list"
            )
        by_variant = [(i, modules[key]) for i, key in enumerate(keys)]
        variants = variant_entries(keys, axes)
    sizes = {tuple(_batch_keys(programs, dynamic=dynamic_batch_sizes is not None)) for _, programs in by_variant}
    if len(sizes) > 1:
        raise violation(BundleError, "X-8", f"variants have programs for different batch sizes: {sorted(sizes)}")
    batch_keys = next(iter(sizes), ())
    return _Programs(
        files={program_name(i, size): programs[size] for i, programs in by_variant for size in batch_keys},
        batch_sizes=sorted(dynamic_batch_sizes or [size for size in batch_keys if size != ANY_BATCH]),
        variants=variants,
    )


def _batch_keys(modules: Modules, *, dynamic: bool) -> list[int]:
    if not isinstance(modules, Mapping) or not modules:
        raise violation(BundleError, "X-7", f"modules must map batch sizes to programs, got {modules!r}")
    for key in modules:
        if isinstance(key, bool) or not isinstance(key, int) or key < 0:
            raise violation(BundleError, "X-7", f"modules has the batch size {key!r}, want an integer above 0, or 0")
    if ANY_BATCH in modules and len(modules) > 1:
        raise violation(BundleError, "X-7", f"modules has key 0, the only program, beside others: {sorted(modules)}")
    if dynamic and ANY_BATCH not in modules:
        raise violation(BundleError, "B-12a", f"dynamic_batch_sizes wants one program, key 0, got {sorted(modules)}")
    return sorted(modules)


@dataclass(frozen=True)
class _Content:
    """A file to write: its bytes, or the file to copy them from."""

    data: bytes | None = None
    source: Path | None = None

    @classmethod
    def of(cls, value: object, name: str) -> _Content:
        if isinstance(value, bytes | bytearray | memoryview):
            return cls(data=bytes(value))
        if isinstance(value, os.PathLike):
            source = Path(value)
            if not source.is_file():
                raise violation(BundleError, "X-12", f"{name}: {source} is not a file", file=name)
            return cls(source=source)
        raise violation(
            BundleError, "X-9", f"{name}: want bytes or the path of a file, got {type(value).__name__}", file=name
        )

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.data is not None:
            path.write_bytes(self.data)
        elif self.source is not None:
            shutil.copyfile(self.source, path)


def _hook_content(hooks: str | os.PathLike[str]) -> _Content:
    """The hook file from a path or from source text; it has to compile and to register the hooks of a model (X-10)."""
    if isinstance(hooks, str) and ("\n" in hooks or not (os.path.exists(hooks) or hooks.endswith(".py"))):
        source = hooks.encode()
    else:
        source = read_regular(Path(hooks), max_bytes=MAX_HOOK_BYTES, error=BundleError, rule="X-10")
    for problem in parse_hooks(source, file=HOOKS).problems(meta=False):
        raise problem
    return _Content(data=source)


def _require_free(name: str, taken: Mapping[str, object]) -> None:
    """Refuse an extra file whose name leaves the bundle or means something else in it."""
    trouble = relative_name_problem(name)
    if trouble is None and any(is_passing(part) for part in name.split("/")):
        trouble = "is never part of a bundle"
    if trouble is None and (name in taken or name in (MANIFEST, WEIGHTS, HOOKS, PATCH) or is_program_name(name)):
        trouble = "is written by rsrv itself"
    if trouble is not None:
        raise violation(BundleError, "X-12", f"extra_files has {name!r}, which {trouble}", file=name)


def _checked_text(mapping: Mapping[str, Any], name: str, *, has_hooks: bool) -> bytes:
    """The manifest's text, read back: what a server would refuse is refused here, under the same rule."""
    text = emit_manifest(mapping, KEYS).encode()
    if len(text) > MAX_MANIFEST_BYTES:
        raise violation(ManifestError, "X-13", f"the manifest takes {len(text)} bytes, above {MAX_MANIFEST_BYTES}")
    parse_manifest(load_mapping(text), name=name, has_hooks=has_hooks)
    return text
