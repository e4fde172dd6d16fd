"""Digests of a bundle's files: programs before they are used, weights and hooks in the background afterwards."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rsrv.bundle.digests import DigestsMode, read_verified_program, verify_files
from rsrv.bundle.directory import Bundle, open_bundle
from rsrv.core.errors import BundleError, DigestMismatch

if TYPE_CHECKING:
    from rsrv.serve.registry import Registry

log = logging.getLogger(__name__)

Programs = Mapping[tuple[int, ...], Mapping[int, bytes]]
"""Variant to batch key to the bytes of a program."""


def read_programs(bundle: Bundle, mode: DigestsMode) -> Programs:
    """The programs of `bundle`, each compared with its digest as `mode` says. Raises DigestMismatch, BundleError."""
    if mode == "strict":
        for finding in verify_files(bundle, "all"):
            raise DigestMismatch(
                f"bundle {bundle.name!r}: {finding.message}",
                rule="B-15a",
                file=finding.file,
                hint=f"'rsrv bundle seal {bundle.path}' accepts the files as they are",
            )
    read = {path: read_verified_program(bundle, path, mode) for path in bundle.program_files()}
    return {variant: {key: read[path] for key, path in by_key.items()} for variant, by_key in bundle.programs.items()}


class DigestWatch:
    """Hashes weights and hooks after the server is ready, and reports what differs from the manifests.

    Such files may be replaced on their own, so a difference is a warning and the model is marked as modified.
    """

    def __init__(self, registry: Registry, stopping: threading.Event, *, allow_unhooked: Sequence[str] = ()) -> None:
        self._registry = registry
        self._stopping = stopping
        self._allow_unhooked = allow_unhooked

    def run(self) -> None:
        for entry in self._registry.entries():
            if self._stopping.is_set():
                return
            if entry.prepared is None or not entry.prepared.model.manifest.files:
                continue
            try:
                bundle = open_bundle(entry.path, unhooked=entry.name in self._allow_unhooked)
                findings = verify_files(bundle, "all")
            except (OSError, BundleError) as error:
                log.warning("digests not checked name=%s error=%s", entry.name, error)
                continue
            if findings:
                files = sorted(finding.file for finding in findings)
                log.warning("model modified name=%s files=%s", entry.name, ",".join(files))
                self._registry.set_modified(entry.name, files)
