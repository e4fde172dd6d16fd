"""How an exception becomes the status of a call: code, text, and the trailers that carry the reason."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from urllib.parse import quote

from rsrv.core.errors import REASON_METADATA_KEY, Code, RsrvError

MAX_TEXT_BYTES = 4096
"""Clients refuse metadata of more than 8 KiB, and a status text is sent percent-encoded as metadata."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Status:
    code: Code
    text: str
    reason: str
    more: tuple[tuple[str, str], ...] = ()
    """What the trailers tell besides the reason."""

    @property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        return ((REASON_METADATA_KEY, self.reason), *self.more)


def status_of(error: BaseException) -> Status:
    """The status that a client sees. What is not a `RsrvError` is INTERNAL and its text stays here."""
    if not isinstance(error, RsrvError):
        return Status(Code.INTERNAL, "internal error", RsrvError.reason)
    text = f"{error.message} ({error.hint})" if error.hint else error.message
    code = error.code if error.code is not Code.OK else Code.INTERNAL
    more = tuple((key, _printable(value)) for key, value in error.trailers.items() if key != REASON_METADATA_KEY)
    return Status(code, _shortened(text), _printable(error.reason), more)


def error_trailers(error: BaseException) -> dict[str, str]:
    """The trailing metadata of a call that failed with `error`."""
    return dict(status_of(error).trailers)


def log_unexpected(error: BaseException, where: str) -> None:
    """Log what is not a `RsrvError` with its traceback: the client is not told."""
    if not isinstance(error, RsrvError):
        log.error("unexpected error in=%s type=%s", where, type(error).__name__, exc_info=error)


def _shortened(text: str) -> str:
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) * 9 > MAX_TEXT_BYTES:  # a character takes up to 9 bytes (three of UTF-8, each percent-encoded)
        size = 0
        for position, character in enumerate(text):
            size += len(quote(character, safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}~"))
            if size > MAX_TEXT_BYTES:
                return text[:position] + " …"
    return text


def _printable(value: str) -> str:
    """A value as metadata may hold it: printable ASCII, and never empty."""
    return "".join(c if " " <= c <= "~" else "?" for c in value).strip() or RsrvError.reason
