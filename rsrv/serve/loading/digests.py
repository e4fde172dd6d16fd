"""Digests of a bundle's files: programs before they are used, weights and hooks in the background afterwards."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

from rsrv.bundle.digests import DigestsMode, read_verified_program, verify_files
from rsrv.bundle.directory import Bundle, open_bundle
from rsrv.core.errors import BundleError, DigestMismatch
from rsrv.core.niceness import give_way

if TYPE_CHECKING:
    from rsrv.serve.loading.coherence import Versions
    from rsrv.serve.registry import Registry
    from rsrv.serve.scheduler.model import ServableModel

log = logging.getLogger(__name__)


Programs = Mapping[tuple[int, ...], Mapping[int, bytes]]
"""Variant to batch key to the bytes of a program."""


def read_programs(bundle: Bundle, mode: DigestsMode, look: Callable[[], None] = lambda: None) -> Programs:
    """The programs of `bundle`, each compared with its digest as `mode` says. Raises DigestMismatch, BundleError, and
    what `look` raises, which is called now and then: weights may take minutes."""
    if mode == "strict":
        for finding in verify_files(bundle, "all", look=look):
            raise DigestMismatch(
                f"bundle {bundle.name!r}: {finding.message}",
                rule="B-15a",
                file=finding.file,
                hint=f"'rsrv bundle seal {bundle.path}' accepts the files as they are",
            )
    read = {path: read_verified_program(bundle, path, mode) for path in bundle.program_files()}
    return {variant: {key: read[path] for key, path in by_key.items()} for variant, by_key in bundle.programs.items()}


class DigestWatch:
    """Hashes the weights and hooks of each model that serves, and reports what differs from its manifest.

    Such files may be replaced on their own, so a difference is a warning and the model is marked as modified. `add` may
    be called from any thread; the work is done by `run`, on one that gives way to all others.
    """

    def __init__(self, registry: Registry, stopping: threading.Event, *, allow_unhooked: Sequence[str] = ()) -> None:
        self._registry = registry
        self._stopping = stopping
        self._allow_unhooked = allow_unhooked
        self._loaded: SimpleQueue[tuple[ServableModel, Versions] | None] = SimpleQueue()

    def add(self, model: ServableModel, versions: Versions) -> None:
        """`model` has just been loaded, from these versions of its files."""
        self._loaded.put((model, versions))

    def close(self) -> None:
        """`run` returns once it has done what was added before, or has noticed that the server stops."""
        self._loaded.put(None)

    def run(self) -> None:
        give_way()
        while (loaded := self._loaded.get()) is not None and not self._stopping.is_set():
            self._check(*loaded)

    def _check(self, model: ServableModel, versions: Versions) -> None:
        entry = self._registry.get(model.name)
        if entry is None or entry.incarnation != model.incarnation or not model.manifest.files:
            return
        try:
            bundle = open_bundle(entry.path, unhooked=entry.name in self._allow_unhooked)
            findings = verify_files(bundle, "all")
            # What was edited since says nothing about what serves.
            versions.require_same(bundle)
        except (OSError, BundleError) as error:
            log.info("digests not checked name=%s error=%s", entry.name, error)
            return
        files = sorted(finding.file for finding in findings)
        if files and self._registry.set_modified(entry.name, files, of=model.incarnation) is not None:
            log.warning("model modified name=%s files=%s", entry.name, ",".join(files))
