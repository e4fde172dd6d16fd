"""Which handler answers which method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rsrv.rpc.call import Call

Kind = Literal["unary", "server_stream", "bidi"]


@dataclass(frozen=True, slots=True)
class Route:
    """A handler, and how many messages go which way. The handler must not block; see `Call`."""

    handler: Callable[[Call], None]
    kind: Kind = "unary"


Routes = dict[str, Route]
"""Full method name (``/inference.GRPCInferenceService/ModelInfer``) → its route."""
