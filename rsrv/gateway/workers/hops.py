"""`Hops`: which gateways a call has passed, so that those that list each other as workers send nothing in circles."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

from rsrv.core.errors import GatewayLoop

Metadata = tuple[tuple[str, str | bytes], ...]

GATEWAY_KEY = "x-rsrv-gateway"
"""Metadata by which a worker sees that a gateway calls, and which others the call has passed before."""
MAX_HOPS = 8
"""Gateways that a call may pass one after the other."""

_HOP = re.compile("rsrv/[0-9a-f]{12}")


class Hops:
    """The mark of one gateway, and what it makes of those of others. What a client may have made up counts as none.

    Attributes:
        identity: the mark; another one for each gateway that starts.
        own: what goes with a call that has passed no gateway before.
    """

    def __init__(self) -> None:
        self.identity = f"rsrv/{secrets.token_hex(6)}"
        self.own: Metadata = ((GATEWAY_KEY, self.identity),)

    def after(self, passed: str) -> Metadata:
        """What goes with a call that has come with the value `passed`: that of the key, and this gateway at its end.

        Raises GatewayLoop when the call was here before, or has come too far.
        """
        hops = _HOP.findall(passed)
        chain = ",".join([*hops, self.identity])
        if self.identity in hops:
            raise GatewayLoop(
                f"the call has been at this gateway before ({chain}): gateways list each other, or themselves, as "
                "workers",
                hint="take one of them out of endpoints, or of where else workers are listed",
            )
        if len(hops) >= MAX_HOPS:
            raise GatewayLoop(f"the call has passed {len(hops)} gateways ({chain}); at most {MAX_HOPS} are taken")
        return ((GATEWAY_KEY, chain),)

    def signed(self, metadata: Metadata) -> Metadata:
        """`metadata` of a call that begins here, or of one that goes on and has in it what `passed_by` gave."""
        passed = "".join(str(value) for key, value in metadata if key == GATEWAY_KEY)
        return (*(entry for entry in metadata if entry[0] != GATEWAY_KEY), *self.after(passed))


def passed_by(metadata: Mapping[str, str]) -> Metadata:
    """What a call that goes on takes with it from `metadata` with which it came: the gateways that it has passed."""
    passed = metadata.get(GATEWAY_KEY)
    return () if passed is None else ((GATEWAY_KEY, passed),)
