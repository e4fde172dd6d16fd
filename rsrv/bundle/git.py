"""Bounded, read-only calls of git: no prompt, no lock, nothing of a surrounding hook, never more than asked for."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_KEPT_VARIABLES = {"GIT_EXEC_PATH", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM"}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^?#]*)(.*)", re.DOTALL)
_SSH_SCHEMES = {"ssh", "git+ssh", "ssh+git"}
_OUTPUT_LIMIT = 1 << 20
_STDERR_LIMIT = 64 << 10


@dataclass(frozen=True, slots=True)
class GitAnswer:
    """What one call wrote. `error`: one line for people, None after success; `cut`: there was more output."""

    output: bytes
    error: str | None
    cut: bool = False

    @property
    def line(self) -> str | None:
        """The output as one line of text, or None when the call failed or wrote nothing."""
        text = self.output.decode("utf-8", "replace").strip()
        return text if text and self.error is None else None


class Git:
    """Calls git in `directory` until `seconds` have passed for all calls together; then every call fails."""

    def __init__(self, directory: Path, *, seconds: float) -> None:
        self._directory = directory
        self._deadline = time.monotonic() + seconds

    def inside(self, directory: Path) -> Git:
        """The same for another directory, with what is left of the time."""
        return Git(directory, seconds=self._deadline - time.monotonic())

    def __call__(self, *arguments: str, limit: int = _OUTPUT_LIMIT) -> GitAnswer:
        """Run ``git <arguments>`` and keep at most `limit` bytes of its output."""
        command = ["git", "-c", "core.fsmonitor=false", "-C", str(self._directory), *arguments]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment()
            )
        except (OSError, ValueError) as error:
            return GitAnswer(b"", f"git cannot be started: {error}")
        with process:
            try:
                output, stderr, state = self._collect(process, limit)
            except BaseException:
                process.kill()
                raise
            if state != "ended":
                process.kill()
        if state == "late":
            return GitAnswer(output, f"git {arguments[0]} took too long")
        if state == "full":
            return GitAnswer(output, None, cut=True)
        if process.returncode != 0:
            text = stderr.decode("utf-8", "replace").strip().partition("\n")[0]
            return GitAnswer(output, text or f"git {arguments[0]} ended with {process.returncode}")
        return GitAnswer(output, None)

    def _collect(self, process: subprocess.Popen[bytes], limit: int) -> tuple[bytes, bytes, str]:
        """Read both pipes until they end, the output is above `limit` (kept up to it), or time is up."""
        assert process.stdout is not None
        assert process.stderr is not None
        output, stderr = bytearray(), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, output)
            selector.register(process.stderr, selectors.EVENT_READ, stderr)
            while selector.get_map():
                remaining = self._deadline - time.monotonic()
                if remaining <= 0:
                    return bytes(output), bytes(stderr), "late"
                for key, _ in selector.select(remaining):
                    part = os.read(key.fd, 1 << 16)
                    if not part:
                        selector.unregister(key.fileobj)
                    elif key.data is output:
                        output += part
                    elif len(stderr) < _STDERR_LIMIT:
                        stderr += part
                if len(output) > limit:
                    return bytes(output[:limit]), bytes(stderr), "full"
        try:
            process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return bytes(output), bytes(stderr), "late"
        return bytes(output), bytes(stderr), "ended"


def _environment() -> dict[str, str]:
    """Ours, without what a surrounding git command or hook points at its own repository (``GIT_DIR``, …)."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name in _KEPT_VARIABLES}
    return {**kept, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


def without_credentials(remote: str) -> str:
    """A remote's address without user, password, token, query and fragment (X-28); an ssh login name stays."""
    transport, marker, address = remote.partition("::")
    if marker and "/" not in transport and "@" not in transport:  # a remote helper: ext::…, codecommit::…
        return f"{transport}::{without_credentials(address)}"
    match = _URL.fullmatch(remote)
    if match is None:
        return _without_scp_password(remote)
    scheme, authority, path, rest = match.groups()
    user, at, host = authority.rpartition("@")
    if not at and "@" in path + rest and not re.fullmatch(r"[^:]*|\[[^\]]*\](:[0-9]*)?|[^:]*:[0-9]*", authority):
        # A password with an unescaped / ? or #: what looks like host:port begins with the user's name.
        return f"{scheme}://{(path + rest).rpartition('@')[2]}"
    login = user.partition(":")[0] if scheme.lower() in _SSH_SCHEMES else ""
    return f"{scheme}://{login}{'@' if login else ''}{host}{path}"


def _without_scp_password(remote: str) -> str:
    """``user:password@host:path`` is no address that git documents, but people write it."""
    user, at, rest = remote.partition("@")
    if at and ":" in user and "/" not in user:
        return f"{user.partition(':')[0]}@{rest}"
    return remote
