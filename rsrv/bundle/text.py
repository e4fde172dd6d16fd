"""Writes the text of a manifest so that equal content gives equal bytes (X-13).

Strings are always quoted: a shape such as ``no``, a digest of digits only and a branch called ``on`` then mean the same
to every YAML reader.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rsrv.bundle.problems import violation
from rsrv.core.errors import ManifestError

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_RESERVED_KEYS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
_PLAIN_WORDS = {"dtype", "kind", "axis_order", "mode"}
_ONE_ITEM_A_LINE = {"executable_inputs", "executable_outputs", "client_inputs", "client_outputs", "input_shapes"}
_ONE_KEY_A_LINE = {"batching", "meta", "hooks", "provenance", "files"}
_ESCAPED = re.compile('["\\\\\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff0-\uffff]')


def emit_manifest(mapping: Mapping[str, Any], order: Sequence[str]) -> str:
    """The text of a manifest: known keys in `order`, then the others by name; every tensor on a line of its own."""
    known = [key for key in order if key in mapping]
    return "".join(emit_block(key, mapping[key]) for key in (*known, *sorted(set(mapping) - set(known))))


def emit_block(key: str, value: Any) -> str:
    """The lines of one top-level key."""
    if key == "files" and isinstance(value, Mapping):
        value = {name: value[name] for name in sorted(value)}
    if key in _ONE_ITEM_A_LINE and isinstance(value, list | tuple) and value:
        return f"{_key(key)}:\n" + "".join(f"  - {_flow(item, key)}\n" for item in value)
    if key in _ONE_KEY_A_LINE and isinstance(value, Mapping) and value:
        return f"{_key(key)}:\n" + "".join(f"  {_key(name)}: {_flow(item, name)}\n" for name, item in value.items())
    return f"{_key(key)}: {_flow(value, key)}\n"


def _flow(value: Any, key: str) -> str:
    """One value on one line. Raises ManifestError for a type that YAML has no plain form for."""
    if value is None:
        return "null"
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, str):
        return value if key in _PLAIN_WORDS and re.fullmatch("[a-z][a-z0-9_]+", value) else quoted(value)
    if isinstance(value, int | np.integer):
        return str(int(value))
    if isinstance(value, float | np.floating):
        return _float(float(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)}: {_flow(item, str(name))}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(item, "") for item in value) + "]"
    raise violation(ManifestError, "X-13", f"a manifest cannot hold {value!r} ({type(value).__name__}) under {key!r}")


def _float(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    mantissa, e, exponent = repr(value).partition("e")
    return mantissa + ".0" * (e != "" and "." not in mantissa) + e + exponent


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise violation(ManifestError, "X-13", f"a manifest cannot hold the key {key!r}; keys are strings")
    return key if _PLAIN_KEY.fullmatch(key) and key.lower() not in _RESERVED_KEYS else quoted(key)


def quoted(text: str) -> str:
    """`text` as a double-quoted YAML scalar on one line."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise violation(ManifestError, "X-13", f"a manifest cannot hold {text!r}: it is not valid Unicode") from None
    return '"' + _ESCAPED.sub(_escape, text) + '"'


def _escape(match: re.Match[str]) -> str:
    character = match.group()
    if character in '"\\':
        return "\\" + character
    if character in "\n\t":
        return {"\n": "\\n", "\t": "\\t"}[character]
    return f"\\x{ord(character):02x}" if ord(character) < 0x100 else f"\\u{ord(character):04x}"
