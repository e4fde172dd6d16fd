"""Where an export came from: time, versions and the state of the git repository around it (§2.4).

To restore the sources of a bundle: check out ``git_commit``, then ``git apply --binary working_tree.patch``.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import rsrv
from rsrv.bundle.git import Git, without_credentials

log = logging.getLogger(__name__)

MAX_DIFF_BYTES = 20 << 20
GIT_SECONDS = 30.0

# The default form, whatever the user's configuration says about diffs: ``git apply`` has to take it back.
_DIFF = (
    "diff",
    "HEAD",
    "--binary",
    "--full-index",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--no-relative",
    "--no-renames",
    "--submodule=short",
    "--ignore-submodules=dirty",
    "--unified=3",
)


def collect_provenance(
    repo_dir: Path | str = ".", extra: Mapping[str, Any] | None = None, *, diff: bool = True
) -> dict[str, Any]:
    """The provenance of an export made now from the repository around `repo_dir`; `extra` is merged last.

    Never raises: what git does not tell in time is left out, with one warning when it tells nothing. ``git_diff``
    (omitted with ``diff=False``, and above 20 MiB) holds the patch against HEAD byte by byte: bytes that are not UTF-8
    are surrogate escapes. Untracked files are not in it. Credentials are removed from ``repo_remote``.
    """
    facts: dict[str, Any] = {
        "exported_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "python_version": platform.python_version(),
        "rsrv_version": rsrv.__version__,
    }
    try:
        facts |= _repository_facts(Path(repo_dir), with_diff=diff)
    except Exception:
        log.warning("no git facts in provenance repo_dir=%s", repo_dir, exc_info=True)
    return {**facts, **(extra or {})}


def _repository_facts(directory: Path, *, with_diff: bool) -> dict[str, Any]:
    git = Git(directory, seconds=GIT_SECONDS)
    top = git("rev-parse", "--show-toplevel")
    if top.line is None:
        log.warning("the provenance has no commit: git in directory %s says: %s", directory.absolute(), top.error)
        return {}
    git = git.inside(Path(top.output.removesuffix(b"\n").decode("utf-8", "surrogateescape")))
    commit = git("rev-parse", "--verify", "--quiet", "HEAD^{commit}").line
    branch = git("symbolic-ref", "--quiet", "--short", "HEAD").line
    remote = git("config", "--get", "remote.origin.url").line
    status = git("status", "--porcelain", "--untracked-files=normal")
    facts: dict[str, Any] = {
        "git_commit": commit,
        "git_tree_sha1": git("rev-parse", "--verify", "--quiet", "HEAD^{tree}").line,
        "git_branch": branch or ("HEAD" if commit else None),
        "git_dirty": bool(status.output) if status.error is None else None,
        "repo_remote": None if remote is None else without_credentials(remote),
    }
    if with_diff and commit and facts["git_dirty"]:
        facts["git_diff"] = _diff(git)
    return {key: value for key, value in facts.items() if value is not None}


def _diff(git: Git) -> str | None:
    answer = git(*_DIFF, limit=MAX_DIFF_BYTES)
    if answer.cut:
        log.warning("git diff left out of provenance reason=above %d bytes", MAX_DIFF_BYTES)
        return None
    if answer.error is not None:
        log.warning("git diff left out of provenance reason=%s", answer.error)
        return None
    return answer.output.decode("utf-8", "surrogateescape") or None


def patch_bytes(diff: str) -> bytes:
    """The patch file for a ``git_diff``, exactly as git wrote it: not even a trailing newline may change."""
    return diff.encode("utf-8", "surrogateescape")
