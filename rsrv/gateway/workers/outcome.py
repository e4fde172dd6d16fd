"""What became of one call to one worker, and what that means for the client and for the other replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rsrv.core.errors import REASON_METADATA_KEY, Code, RsrvError


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call to a worker ended.

    Attributes:
        code: OK, the worker's own status, or what the transport made of a worker that is not there.
        body: the answer's bytes; empty unless OK.
        text: status message of the worker or of the transport.
        trailers: trailing metadata of the worker as far as it is handed on (`channels.trailers_of`).
        sent: false when the worker never got the request: its deadline passed while it waited for a slot or a gate.
        seconds: from sending to the end; 0 when not sent.
        unsure: the worker may still be at it, although the call is over.
    """

    code: Code
    body: bytes = b""
    text: str = ""
    trailers: Mapping[str, str] = field(default_factory=dict)
    sent: bool = True
    seconds: float = 0.0
    unsure: bool = False

    @property
    def ok(self) -> bool:
        return self.code is Code.OK

    @property
    def reason(self) -> str:
        """What the worker gave as ``rsrv-reason``; "" when the transport speaks, or a server that is not ours."""
        return self.trailers.get(REASON_METADATA_KEY, "")

    @property
    def moves_on(self) -> bool:
        """Whether another replica may answer what this one did not (the failover table, spec gateway-node 1.5.3)."""
        return self.code in (Code.NOT_FOUND, Code.UNAVAILABLE)

    @property
    def lost(self) -> bool:
        """Whether nobody answered: the connection broke, or never came to be."""
        return self.code is Code.UNAVAILABLE and not self.reason


class WorkerFailed(RsrvError):
    """A worker's own answer, handed on: code, reason and text are the worker's."""

    def __init__(self, worker: str, outcome: Outcome) -> None:
        super().__init__(
            f"worker {worker}: {outcome.text or outcome.code.name}",
            code=outcome.code,
            reason=outcome.reason or _REASONS.get(outcome.code, "worker"),
        )
        self._trailers = outcome.trailers

    @property
    def trailers(self) -> Mapping[str, str]:  # type: ignore[override]
        return self._trailers


_REASONS = {
    Code.UNAVAILABLE: "unreachable",
    Code.DEADLINE_EXCEEDED: "deadline",
    Code.CANCELLED: "cancelled",
    Code.NOT_FOUND: "unknown_model",
}
"""Reasons of what the transport says, for which no worker gave one."""

_STATUS_NAMES = {code: "OK" if code is Code.OK else code.name.title().replace("_", "") for code in Code}


def status_name(code: Code) -> str:
    """How statuses are written in metrics: ``OK``, ``NotFound``, … (spec gateway-node 1.5.3)."""
    return _STATUS_NAMES[code]
