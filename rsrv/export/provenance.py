"""What every front end records about an export, beside the facts of its own framework."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import rsrv
from rsrv.bundle.provenance import collect_provenance
from rsrv.export.options import ExportOptions


def export_provenance(
    options: ExportOptions, facts: Mapping[str, Any], *, repo_dir: Path | str = "."
) -> dict[str, Any]:
    """`facts` of the front end, what `collect_provenance` finds around `repo_dir`, and on top what the caller says
    (X-26)."""
    extra = {**facts, **options.provenance}
    if options.collect_git:
        return collect_provenance(repo_dir, extra, diff=options.diff)
    own = {
        "exported_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "python_version": platform.python_version(),
        "rsrv_version": rsrv.__version__,
    }
    return {**own, **extra}
