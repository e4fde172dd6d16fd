"""A bundle that is registered and not prepared: its manifest is read, and no other file."""

from __future__ import annotations

import os
from pathlib import Path

from rsrv.bundle.files import MANIFEST
from rsrv.bundle.manifest import Manifest, load_manifest
from rsrv.core.errors import BundleError, InvalidRequest


def require_bundle(name: str, directory: Path) -> None:
    """Raises InvalidRequest (`bad_directory`) unless `directory` may hold the bundle `name`."""
    if directory.name != name:
        raise InvalidRequest(
            f"the bundle in {directory} cannot be registered as {name!r}: a model has the name of its directory",
            hint=f"register it as {directory.name!r}",
            reason="bad_directory",
        )
    if not os.path.isfile(directory / MANIFEST):
        raise InvalidRequest(f"{directory} holds no bundle: there is no {MANIFEST}", reason="bad_directory")


def manifest_of(name: str, directory: Path) -> Manifest:
    """Read the manifest. Raises InvalidRequest (`bad_directory`)."""
    try:
        return load_manifest(directory / MANIFEST, name=name)
    except BundleError as error:
        raise InvalidRequest(
            f"model {name!r} cannot be registered: {error.message}", hint=error.hint, reason="bad_directory"
        ) from error
