"""Finding bundles in repositories and opening one: names, links and files. Nothing is parsed here but the manifest."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rsrv.bundle.files import HOOKS, MANIFEST, WEIGHTS, is_passing, link_problem, require_name, walk
from rsrv.bundle.manifest import Manifest, inspect_manifest
from rsrv.bundle.problems import violation
from rsrv.bundle.programs import is_program_name, list_programs
from rsrv.bundle.variants import VariantKey
from rsrv.core.errors import BundleError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundBundle:
    """A directory that holds a manifest; `duplicate_of` is the earlier directory of the same name (B-4)."""

    name: str
    path: Path
    duplicate_of: Path | None = None


class Discovery(list[FoundBundle]):
    """The bundles found, first root first, by name within a root; `not_found` has the wanted names that are nowhere."""

    def __init__(self, found: Iterable[FoundBundle], not_found: Sequence[str]) -> None:
        super().__init__(found)
        self.not_found = tuple(not_found)


@dataclass(frozen=True)
class Bundle:
    """An opened bundle.

    Attributes:
        path: its directory; its basename is `name`.
        programs: variant → batch key → file; key 0 is a program that takes one request at a time. With
            ``batching.dynamic`` all sizes share one file.
        weights_path: None only for a meta without weights.
        hooks_path: None without hooks.
        warnings: what is in a bundle of format 2.0 without an effect.
    """

    name: str
    path: Path
    manifest: Manifest
    programs: Mapping[VariantKey, Mapping[int, Path]] = field(default_factory=dict)
    weights_path: Path | None = None
    hooks_path: Path | None = None
    warnings: tuple[BundleError, ...] = ()

    def program_files(self) -> tuple[Path, ...]:
        """Every program file once, in the order of variants and batch sizes."""
        return tuple(dict.fromkeys(path for programs in self.programs.values() for path in programs.values()))


def discover(
    roots: Sequence[Path | str], include: Sequence[str] = (), *, skip_missing_roots: bool = False
) -> Discovery:
    """The bundles directly under `roots`; with `include`, only those names (B-1 … B-6).

    A name that was found before comes back with `duplicate_of` set. Raises BundleError (B-5) for a root that is not a
    directory, unless `skip_missing_roots`.
    """
    wanted = set(include)
    first: dict[str, Path] = {}
    found: list[FoundBundle] = []
    for root in _distinct(roots):
        try:
            names = sorted(name for name in os.listdir(root) if not is_passing(name))
        except OSError as error:
            if skip_missing_roots:
                log.info("model directory skipped path=%s error=%s", root, error.strerror)
                continue
            raise violation(BundleError, "B-5", f"model directory {root}: {error.strerror}") from error
        for name in names:
            path = root / name
            if (wanted and name not in wanted) or not os.path.lexists(path / MANIFEST):
                continue
            found.append(FoundBundle(name, path, first.get(name)))
            first.setdefault(name, path)
    not_found = [name for name in dict.fromkeys(include) if name not in first]
    if not_found:
        log.warning("models_include names no bundle names=%s", ",".join(not_found))
    return Discovery(found, not_found)


def enclosing_bundle(path: Path | str) -> Path | None:
    """The directory of the bundle that the file `path` lies in, at any depth; None when it lies in none.

    The file need not exist any more. Directories are found as in `discover`: by their manifest, unless their name is
    that of something half written or hidden.
    """
    for directory in Path(path).parents:
        if os.path.lexists(directory / MANIFEST) and not is_passing(directory.absolute().name):
            return directory
    return None


def _distinct(roots: Sequence[Path | str]) -> list[Path]:
    """`roots` without repetitions of one directory, which would make every bundle its own duplicate."""
    distinct: dict[str, Path] = {}
    for root in roots:
        distinct.setdefault(os.path.realpath(root), Path(os.path.abspath(root)))
    return list(distinct.values())


def open_bundle(path: Path | str, *, unhooked: bool = False) -> Bundle:
    """Open the bundle in the directory `path`; its basename is the model's name.

    `unhooked` takes a format 2.0 bundle whose hooks cannot run here without them; it has no effect on any other.
    Raises BundleError, or ManifestError, for the first problem: name, links out of the repository (the parent
    directory), manifest, programs, weights.
    """
    bundle, problems = inspect_bundle(path, unhooked=unhooked)
    for problem in problems:
        raise problem
    assert bundle is not None
    return bundle


def bundle_problems(path: Path | str) -> list[BundleError]:
    """Everything that is wrong with the bundle at `path` as far as names, manifest and the set of files go."""
    return inspect_bundle(path)[1]


def inspect_bundle(path: Path | str, *, unhooked: bool = False) -> tuple[Bundle | None, list[BundleError]]:
    """The bundle at `path` and its problems; None when there is not even a manifest that could be read.

    A bundle that comes with problems has the files that are there.
    """
    directory = Path(os.path.abspath(path))
    name, repository = directory.name, directory.parent
    try:
        require_name(name)
        if not directory.is_dir():
            raise violation(BundleError, "B-1", f"bundle {name!r}: {directory} is not a directory")
        _require_link_inside(directory, repository, name, "the bundle's directory")
        entries = walk(directory)
        if MANIFEST in entries:
            _require_link_inside(directory / MANIFEST, repository, name, MANIFEST)
    except BundleError as error:
        return None, [error]
    except OSError as error:
        return None, [violation(BundleError, "B-1", f"bundle {name!r}: {directory}: {error.strerror}")]
    manifest, found = inspect_manifest(directory, unhooked=unhooked)
    if manifest is None:
        return None, list(found)
    problems: list[BundleError] = [*found]
    for file in entries:
        trouble = link_problem(directory / file, repository)
        if trouble is None and _is_reserved(file) and not (directory / file).is_file():
            trouble = "is not a regular file"
        if trouble is not None:
            problems.append(violation(BundleError, "B-1", f"bundle {name!r}: {file} {trouble}", file=file))
    listing = list_programs(manifest, entries)
    # The manifest's own mistakes make others out of files that are right.
    problems += listing.problems if not found else ()
    if WEIGHTS not in entries and not manifest.is_meta:
        hint = "a model without weights needs the file too, with no tensors in it"
        problems.append(violation(BundleError, "B-58", f"bundle {name!r}: no {WEIGHTS}", file=WEIGHTS, hint=hint))
    bundle = Bundle(
        name=name,
        path=directory,
        manifest=manifest,
        programs={
            variant: {size: directory / file for size, file in programs.items()}
            for variant, programs in listing.names.items()
        },
        weights_path=directory / WEIGHTS if WEIGHTS in entries else None,
        hooks_path=directory / HOOKS if HOOKS in entries else None,
        warnings=(*manifest.warnings, *listing.warnings),
    )
    return bundle, problems


def _is_reserved(name: str) -> bool:
    return name in (WEIGHTS, HOOKS) or is_program_name(name)


def _require_link_inside(path: Path, repository: Path, name: str, what: str) -> None:
    trouble = link_problem(path, repository)
    if trouble is not None:
        hint = "copy it into the repository, or open the bundle by its real path"
        raise violation(BundleError, "B-1", f"bundle {name!r}: {what} {trouble}", file=path.name, hint=hint)
