"""Who may administrate: the bearer token, and what browsers send along that tells a page of somebody else apart."""

from __future__ import annotations

import hmac
from pathlib import Path
from urllib.parse import urlsplit

from rsrv.core.errors import ConfigError, ForeignOrigin, Unauthenticated
from rsrv.rpc.listen import is_loopback


class BearerToken:
    """The secret that callers must show."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    @classmethod
    def read(cls, path: str) -> BearerToken:
        """The one in the file ``endpoints.admin_token_file``, without the white space around it. Raises ConfigError."""
        where = f"endpoints.admin_token_file: {path}"
        try:
            token = Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"{where}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{where} is no text; wanted one line of it") from None
        if not token or any(not "!" <= letter <= "~" for letter in token):
            raise ConfigError(
                f"{where} holds no token; wanted one line of printable ASCII without spaces",
                hint="openssl rand -hex 32 makes one",
            )
        return cls(token)

    def require(self, authorization: str | None) -> None:
        """Look at the header, or metadata, ``authorization``; a wrong token takes as long as another.

        Raises Unauthenticated.
        """
        hint = "send 'Authorization: Bearer TOKEN', with what endpoints.admin_token_file of the server holds"
        if not authorization:
            raise Unauthenticated("administration of this server needs a token, and the call has none", hint=hint)
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated("the authorization of the call is of another kind; wanted a bearer token", hint=hint)
        if not hmac.compare_digest(given.strip().encode(errors="surrogateescape"), self._token):
            raise Unauthenticated("the token of the call is not that of this server", hint=hint)


def read_token(path: str | None) -> BearerToken | None:
    """`BearerToken.read`; None without a file."""
    return None if path is None else BearerToken.read(path)


def require_own_host(header: str | None, configured: str) -> None:
    """On a loopback address, look at the header ``Host``. Raises ForeignOrigin.

    A page can point its own name to 127.0.0.1 (DNS rebinding) and then talk to us as if we were its server; its name is
    what ``Host`` has then. On other addresses any name may be ours.
    """
    if not is_loopback(configured):
        return
    name = _host_of(header or "")
    if name and (name == configured.strip("[]").rstrip(".").lower() or is_loopback(name)):
        return
    raise ForeignOrigin(
        f"the header Host is {header!r}; wanted localhost, a loopback address or {configured!r}, at any port",
        hint="call the server by its loopback address; this protects it from web pages (DNS rebinding)",
    )


def require_same_origin(origin: str | None, host: str | None) -> None:
    """Look at the header ``Origin``, which browsers send: it must be the server itself. Raises ForeignOrigin."""
    if origin is None:
        return
    try:
        netloc = urlsplit(origin).netloc
    except ValueError:
        netloc = ""
    if not netloc or netloc.lower() != (host or "").lower():
        raise ForeignOrigin(f"the call comes from a page of {origin!r}, which may not administrate this server")


def _host_of(header: str) -> str:
    """The host of a ``Host`` header in lower case, without port, brackets and final dot; "" when it has none."""
    text = header.strip().lower()
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        return name if bracket and (not rest or (rest[0] == ":" and rest[1:].isdigit())) else ""
    name, colon, port = text.partition(":")
    return "" if colon and not port.isdigit() else name.rstrip(".")
