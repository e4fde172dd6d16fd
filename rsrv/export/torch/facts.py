"""Versions of what an export is made with, and where the model's source lies."""

from __future__ import annotations

import inspect
import re
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import nn

from rsrv.core.errors import ExportError

TESTED = {"torch": ((2, 13), (2, 15)), "torchax": ((0, 0, 14), (0, 0, 15)), "jax": ((0, 10), (0, 11))}
"""Package → versions that the front end was tested with: from the first to below the second."""

_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib"))


def require_tested() -> None:
    """Raises ExportError when a package is missing or outside of the tested range."""
    for package, (oldest, beyond) in TESTED.items():
        found = _version(package)
        numbers = tuple(int(part) for part in re.findall(r"\d+", found or "")[: len(oldest)])
        if found is None or not oldest <= numbers < beyond:
            low, high = (".".join(map(str, bound)) for bound in (oldest, beyond))
            state = "is not installed" if found is None else f"{found} is outside of the tested range"
            raise ExportError(f"{package} {state}; wanted {low} to below {high}", hint="pip install 'rsrv[torch]'")


def version_facts() -> dict[str, Any]:
    return {f"{package}_version": _version(package) or "unknown" for package in ("torch", "torchax", "jax", "jaxlib")}


def module_directory(module: nn.Module) -> Path:
    """Where the source of the model is, for the state of its repository; the current directory for installed code."""
    for part in module.modules():
        try:
            file = inspect.getfile(type(part))
        except (OSError, TypeError):
            continue
        if not file.startswith((*_INSTALLED, "<")):
            return Path(file).absolute().parent
    return Path()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
