"""When a gateway that reaches no worker any more should end, so that its supervisor starts it anew: a pure rule."""

from __future__ import annotations

from collections.abc import Collection

from rsrv.gateway.discovery.scan import Presence

REBUILT_ROUNDS = 2
"""Silent rounds before which no process ends: after the first one every channel is built anew, and has to be tried."""


class WedgeRule:
    """Counts the rounds in which every worker hung (spec gateway-node 1.9.3).

    Only a client stack that once worked can be wedged: before the first real answer of a server, ready or not, silence
    is a fleet that starts. A refused connection is no silence, and no answer either.
    """

    def __init__(self, exit_rounds: int) -> None:
        self.exit_rounds = exit_rounds
        self.rounds = 0
        self.ever_responsive = False

    def round(self, answers: Collection[Presence], inflight: int) -> bool:
        """Count a round; `inflight` = ModelInfer calls at workers. True when the process should end.

        `exit_rounds` 0 switches the rule off. An empty fleet is not wedged.
        """
        self.ever_responsive = self.ever_responsive or any(answer in ("ready", "unready") for answer in answers)
        self.rounds = self.rounds + 1 if answers and all(answer == "silent" for answer in answers) else 0
        return (
            self.exit_rounds > 0
            and self.ever_responsive
            and self.rounds >= max(self.exit_rounds, REBUILT_ROUNDS)
            and inflight == 0
        )
