"""`convert_bundle`: a bundle written anew in the other format, checked before anything appears (X-60, §1.11)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rsrv.audit.gate import bundle_gate
from rsrv.audit.programs import bindings_missing, parse_pool
from rsrv.audit.twins import require_same_answers
from rsrv.bundle.digests import digest_file, files_block, read_verified_program
from rsrv.bundle.directory import Bundle, open_bundle
from rsrv.bundle.files import HOOKS, LEGACY_HOOKS, MANIFEST, WEIGHTS, bundle_files, read_regular, require_name
from rsrv.bundle.manifest import FORMAT_VERSION, KEYS, MAX_MANIFEST_BYTES, OLDER_FORMAT_VERSION, load_mapping
from rsrv.bundle.problems import violation
from rsrv.bundle.programs import is_program_name
from rsrv.bundle.rewrite import rewritten
from rsrv.bundle.safetensors import write_weights
from rsrv.bundle.staging import staged_directory
from rsrv.bundle.tensors import load_tensors
from rsrv.bundle.text import emit_manifest
from rsrv.core.errors import BundleError, ManifestError, ProgramError, UsageError
from rsrv.runtime.compile_pool import CompilePool

FORMATS = (FORMAT_VERSION, OLDER_FORMAT_VERSION)


@dataclass(frozen=True)
class Conversion:
    """What became of a bundle.

    Attributes:
        path: the new bundle.
        left_out: files of the old one that it does not have.
        rewritten: programs that were serialised anew; the others are the same bytes.
        compared: programs that gave the same answers in both forms; None when nobody asked.
    """

    path: Path
    format_version: str
    left_out: tuple[str, ...]
    rewritten: tuple[str, ...]
    compared: tuple[str, ...] | None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


def convert_bundle(
    directory: Path | str,
    out: Path | str,
    *,
    to: str = FORMAT_VERSION,
    drop_hooks: bool = False,
    stablehlo_version: str | None = None,
    verify: bool = False,
    overwrite: bool = False,
    pool: CompilePool | None = None,
) -> Conversion:
    """Write the bundle in `directory` as `out`, whose name is the new model's name.

    Letters and weights are turned to the axis order of the format; programs are the same in both, and are copied byte
    for byte unless they are text or `stablehlo_version` asks for another version. All files get digests.

    Args:
        to: ``3.0`` (row-major) or ``2.0`` (column-major, for the older system).
        drop_hooks: leave the hooks out, and with them what clients saw; the program's own tensors remain.
        stablehlo_version: write the programs at this version ("x.y.z", "min" or "current").
        verify: run both bundles on the same random inputs and compare.
        overwrite: replace an existing bundle as a whole.
        pool: compile pool that parses the programs; default: one of its own.

    Raises UsageError for a format that does not exist, BundleError when the bundle cannot be read, cannot be expressed
    in the format, or does not pass the checks afterwards (SignatureMismatch, ParityMismatch).
    """
    if to not in FORMATS:
        raise UsageError(f"there is no format {to!r}; formats: {', '.join(FORMATS)}")
    target = Path(os.path.abspath(out))
    require_name(target.name)
    source = open_bundle(directory, unhooked=drop_hooks)
    _require_expressible(source, to, drop_hooks)
    text = read_regular(source.path / MANIFEST, max_bytes=MAX_MANIFEST_BYTES, error=ManifestError, rule="B-1")
    mapping = rewritten(source.manifest, load_mapping(text), name=target.name, to=to, drop_hooks=drop_hooks)
    files = [name for name in bundle_files(source.path) if name != WEIGHTS and not is_program_name(name)]
    kept = [name for name in files if not (drop_hooks and name in (HOOKS, LEGACY_HOOKS))]
    programs = [path.name for path in source.program_files()]
    with parse_pool(pool) as parser, staged_directory(target, overwrite=overwrite) as staged:
        written = _programs(source, staged, stablehlo_version, parser)
        if source.weights_path is not None:
            _weights(source, staged / WEIGHTS, to)
        for name in kept:
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.path / name, staged / name)
        _manifest(staged, mapping)
        bundle_gate(parser)(staged)
        compared = require_same_answers(source, open_bundle(staged)) if verify else None
    left_out = sorted({*bundle_files(source.path)} - {*kept, *programs, WEIGHTS})
    return Conversion(target, to, tuple(left_out), tuple(written), compared)


def _require_expressible(source: Bundle, to: str, drop_hooks: bool) -> None:
    """Only a hook file in the other system's language can serve there; ours stays behind (§1.11)."""
    if source.manifest.is_meta and drop_hooks:
        raise violation(BundleError, "B-68", f"bundle {source.name!r} is a meta: without its hooks nothing is left")
    portable = (source.path / LEGACY_HOOKS).exists()
    if to == OLDER_FORMAT_VERSION and source.hooks_path is not None and not drop_hooks and not portable:
        raise violation(
            BundleError,
            "B-68",
            f"bundle {source.name!r} has hooks in {HOOKS}, which no reader of format {to} runs",
            file=HOOKS,
            hint=None
            if source.manifest.is_meta
            else "--drop-hooks leaves them out; clients then see the program's tensors",
        )


def _programs(source: Bundle, staged: Path, version: str | None, pool: CompilePool) -> Sequence[str]:
    """Copy the programs, or serialise them anew; names of the latter."""
    from rsrv.stablehlo.artifact import DEFAULT_VERSION, artifact_version, serialize

    written = []
    for path in source.program_files():
        data = read_verified_program(source, path, "programs")
        if version is not None or artifact_version(data) is None:
            if (reason := bindings_missing()) is not None:
                raise ProgramError(f"{path.name}: {reason}", file=path.name)
            try:
                pool.inspect(data)  # a program that ends the process that parses it ends that one, not this one
                data = serialize(data, version or DEFAULT_VERSION)
            except ProgramError as error:
                text = f"{path.name}: {error.message}"
                raise ProgramError(text, rule=error.rule, file=path.name, hint=error.hint) from error
            written.append(path.name)
        (staged / path.name).write_bytes(data)
    return written


def _weights(source: Bundle, path: Path, to: str) -> None:
    """The weights in the axis order of the format, laid out and digested as ours are (B-58, B-58a)."""
    assert source.weights_path is not None
    if source.manifest.is_meta:
        shutil.copyfile(source.weights_path, path)  # for the hooks alone; nobody knows their axes
        return
    arrays = load_tensors(source.weights_path, column_major=source.manifest.column_major)
    if to == OLDER_FORMAT_VERSION:
        arrays = {name: np.asarray(array.T, order="C") for name, array in arrays.items()}
    write_weights(path, list(arrays.items()))


def _manifest(staged: Path, mapping: Mapping[str, object]) -> None:
    digests = {name: digest_file(staged / name) for name in bundle_files(staged)}
    text = emit_manifest({**mapping, "files": files_block(digests)}, KEYS).encode()
    if len(text) > MAX_MANIFEST_BYTES:
        raise violation(ManifestError, "X-13", f"the manifest takes {len(text)} bytes, above {MAX_MANIFEST_BYTES}")
    (staged / MANIFEST).write_bytes(text)
