"""Who used how much of the device lately, and who is owed some: the arithmetic of the fair discipline.

Used time decays by half every half-life. It is stored *inflated*: a second used at time t counts ``2 ** (t / H)``, so
that nothing has to decay, and as only ratios matter nothing has to be deflated either. Sums over the population are
kept, not computed.
"""

from __future__ import annotations

from typing import Protocol

_LONGEST = 200.0
"""Half-lives after which the epoch moves; 2 ** 1024 would overflow."""
_CANCELLED = 1e-6
"""A difference this small beside what was subtracted is rounding error; the sum is then made anew."""


class Member(Protocol):
    """A model's account (`account.Account`): its share of the device, and the inflated seconds that it used."""

    weight: float
    used: float


class Shares:
    """The accounts of all models, and the population over which shares are taken.

    Args:
        halflife_seconds: H.
        credit_idle: whoever enters the population keeps the credit that it has for having been idle.
        now_ns: where time starts.
    """

    def __init__(self, halflife_seconds: float, *, credit_idle: bool, now_ns: int = 0) -> None:
        self._per_ns = 1e-9 / halflife_seconds
        self._credit_idle = credit_idle
        self._epoch_ns = now_ns
        self._accounts: dict[Member, None] = {}
        self._population: dict[Member, None] = {}
        self.weight = 0.0
        self.used = 0.0

    def open(self, member: Member) -> None:
        """Keep an account for `member`."""
        self._accounts[member] = None

    def close(self, member: Member) -> None:
        self.leave(member)
        self._accounts.pop(member, None)

    def enter(self, member: Member) -> None:
        """Count `member` among the population.

        Without credit for idling it enters with at least its share of what the population used:
        ``used <- max(used, share / (1 - share) * sum of the others)``.
        """
        if member in self._population:
            return
        if not self._credit_idle and self.weight > 0:
            member.used = max(member.used, member.weight / self.weight * self.used)
        self._population[member] = None
        self.weight += member.weight
        self.used += member.used

    def leave(self, member: Member) -> None:
        if member not in self._population:
            return
        del self._population[member]
        self.weight -= member.weight
        self.used -= member.used
        if self.used < _CANCELLED * member.used or self.weight < _CANCELLED * member.weight:
            self._sum()

    def charge(self, member: Member, seconds: float, now_ns: int) -> None:
        """`member` used the device for `seconds`, until `now_ns`."""
        halflives = (now_ns - self._epoch_ns) * self._per_ns
        if halflives > _LONGEST:
            self._move_epoch(now_ns, halflives)
            halflives = 0.0
        inflated = seconds * 2.0**halflives
        member.used += inflated
        if member in self._population:
            self.used += inflated

    def reweigh(self, member: Member, weight: float) -> None:
        if member in self._population:
            self.weight += weight - member.weight
        member.weight = weight

    def recent_seconds(self, member: Member, now_ns: int) -> float:
        """Device time that `member` used, decayed to `now_ns`."""
        return float(member.used * 2.0 ** -min((now_ns - self._epoch_ns) * self._per_ns, 1000.0))

    def _move_epoch(self, now_ns: int, halflives: float) -> None:
        deflate = 2.0**-halflives
        for member in self._accounts:
            member.used *= deflate
        self._epoch_ns = now_ns
        self._sum()

    def _sum(self) -> None:
        self.weight = sum([member.weight for member in self._population])
        self.used = sum([member.used for member in self._population])


def priority(share: float, recent: float, price: float, cap: float, *, always_divide: bool = False) -> float:
    """How much a model is owed the device: the largest goes next.

    `share` and `recent` are fractions of the population's weight and used time, `price` what the model's next batch is
    expected to cost (seconds, after the discount), `cap` the bound of the difference. Of models that are owed something
    the cheaper goes first, of models that are not, too; with `always_divide`, the older rule, the more expensive of the
    latter.
    """
    deficit = min(max(share - recent, -cap), cap)
    return deficit / price if deficit >= 0 or always_divide else deficit * price
