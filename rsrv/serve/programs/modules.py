"""The program files of a directory as parts of a program set: which file is for which shape and batch size. Files are
read and compared with their digests; nothing is parsed here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rsrv.bundle.digests import DigestsMode, read_verified_program
from rsrv.bundle.directory import Bundle, open_bundle
from rsrv.bundle.files import MANIFEST, link_problem, read_program
from rsrv.bundle.programs import is_program_name, list_programs
from rsrv.core.errors import BundleError, InvalidRequest
from rsrv.serve.loading.digests import read_programs

if TYPE_CHECKING:
    from rsrv.bundle.manifest import Manifest
    from rsrv.serve.programs.contract import Key
    from rsrv.serve.scheduler.model import ServableModel
    from rsrv.serve.scheduler.plan import Variant

Files = Mapping["Variant", Mapping[int, Path]]


class Module(NamedTuple):
    """One program of a set before it is parsed; `batch` is the size that its symbolic axis gets, None = it has none."""

    key: Key
    file: str
    program: bytes
    batch: int | None


def read_modules(
    directory: Path,
    model: ServableModel,
    sources: Sequence[str] = (),
    *,
    digests: DigestsMode = "programs",
) -> list[Module]:
    """The programs of `directory`, which is a bundle, or holds nothing but program files named as those of `model`.

    Args:
        sources: names of the files to take; empty = all.
        digests: how files are compared with the digests in the directory's manifest, if it has one.

    Raises InvalidRequest for a directory or a file that is not there or cannot be used.
    """
    directory = Path(os.path.abspath(directory))
    if not directory.is_dir():
        raise InvalidRequest(f"base_directory {str(directory)!r} is not a directory")
    try:
        if os.path.lexists(directory / MANIFEST):
            # Its hooks are not used, so it does not matter whether they can run here.
            bundle = open_bundle(directory, unhooked=True)
            return _of_bundle(bundle, model, sources, digests)
        return _of_files(directory, model, sources)
    except BundleError as error:
        raise InvalidRequest(f"base_directory {str(directory)!r}: {error.message}", hint=error.hint) from error
    except OSError as error:
        raise InvalidRequest(f"base_directory {str(directory)!r}: {error.strerror}") from error


def _of_bundle(bundle: Bundle, model: ServableModel, sources: Sequence[str], digests: DigestsMode) -> list[Module]:
    chosen = _chosen(bundle.programs, sources, bundle.path)
    if not sources:
        read = read_programs(bundle, digests)
        data = {path: read[variant][key] for variant, by_key in chosen.items() for key, path in by_key.items()}
    else:
        data = {path: read_verified_program(bundle, path, digests) for path in _paths(chosen)}
    return _modules(chosen, data, model, bundle.manifest)


def _of_files(directory: Path, model: ServableModel, sources: Sequence[str]) -> list[Module]:
    names = [name for name in sorted(os.listdir(directory)) if is_program_name(name)]
    if not names:
        raise InvalidRequest(
            f"base_directory {str(directory)!r} has neither a {MANIFEST} nor a program",
            hint="programs are called as in the bundle of the model: model.b8.mlir",
        )
    for name in names:
        trouble = link_problem(directory / name, directory.parent)
        if trouble is not None:
            raise InvalidRequest(f"base_directory {str(directory)!r}: {name} {trouble}")
    listing = list_programs(model.manifest, [name for name in names if not sources or name in sources])
    for problem in listing.problems if not sources else ():
        raise problem
    files = {variant: {key: directory / name for key, name in by.items()} for variant, by in listing.names.items()}
    chosen = _chosen(files, sources, directory)
    return _modules(chosen, {path: read_program(path) for path in _paths(chosen)}, model, model.manifest)


def _chosen(files: Files, sources: Sequence[str], directory: Path) -> Files:
    """The part of `files` that `sources` names. Raises InvalidRequest for a name that is not among them."""
    if not sources:
        return files
    known = {path.name for path in _paths(files)}
    if unknown := [name for name in sources if name not in known]:
        raise InvalidRequest(
            f"sources: {unknown[0]!r} is no program of {str(directory)!r} for this model; "
            f"it has {', '.join(sorted(known)) or '(none)'}"
        )
    part = {v: {key: path for key, path in by.items() if path.name in sources} for v, by in files.items()}
    return {variant: by for variant, by in part.items() if by}


def _paths(files: Files) -> list[Path]:
    return list(dict.fromkeys(path for by_key in files.values() for path in by_key.values()))


def _modules(files: Files, data: Mapping[Path, bytes], model: ServableModel, manifest: Manifest) -> list[Module]:
    modules = []
    for variant, by_key in files.items():
        if not manifest.batching.dynamic:
            modules += [Module((variant, key), path.name, data[path], None) for key, path in by_key.items()]
            continue
        # One file that is made into all sizes, which are those that the model is served with.
        path = next(iter(by_key.values()))
        keys = model.batch_keys(variant) or tuple(by_key)
        modules += [Module((variant, key), path.name, data[path], key or None) for key in keys]
    return modules
