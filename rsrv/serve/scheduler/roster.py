"""Which queues there are: one for each incarnation, and for each name an account. The scheduler's lock guards it.

An incarnation comes by `add` or `replace`, is `closed` when no request may come for it any more, and is gone when the
last that it accepted is settled (`finished`). Its queue is found by its number, so that requests that were prepared for
one version of a model never meet those for another; settings and statistics are found by name.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from rsrv.core.errors import UnknownModel
from rsrv.serve.scheduler.account import Account
from rsrv.serve.scheduler.queue import ModelQueue, Ticket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rsrv.serve.scheduler.model import ServableModel
    from rsrv.serve.scheduler.policy import Policy
    from rsrv.serve.scheduler.shares import Shares


class Roster:
    """The queues and the accounts.

    Attributes:
        queues: the newest incarnation of each name, until it is finished.
        by_incarnation: all that are not finished.
        closing: those of them that are closed.
        cancelled: where tickets announce that they are cancelled.
    """

    def __init__(self, policy: Policy, shares: Shares) -> None:
        self._policy = policy
        self._shares = shares
        self._prepared = policy.fair_population == "prepared"
        self._accounts: dict[str, Account] = {}
        self.queues: dict[str, ModelQueue] = {}
        self.by_incarnation: dict[int, ModelQueue] = {}
        self.closing: dict[ModelQueue, None] = {}
        self.cancelled: deque[Ticket] = deque()

    # --- incarnations come --------------------------------------------------------------------------------------------

    def add(self, model: ServableModel) -> ModelQueue:
        """The queue of a name that is not served.

        One whose incarnations are all finished, but which was not removed, goes on with its account. Raises ValueError
        when the name, or the incarnation, is taken.
        """
        account = self._accounts.get(model.name)
        if account is not None and account.queues:
            raise ValueError(f"model {model.name!r} is already scheduled; remove or replace it")
        self._require_new(model)
        if account is None:
            account = self._accounts[model.name] = Account(model.name, self._policy.model(model.name).weight)
            self._shares.open(account)
        return self._enlist(model, account)

    def replace(self, model: ServableModel) -> ModelQueue:
        """The queue of a new incarnation of a name that is served; the old one keeps its own.

        Raises UnknownModel for another name, ValueError when the incarnation is taken.
        """
        account = self._accounts.get(model.name)
        if account is None:
            raise UnknownModel(f"model {model.name!r} is not scheduled, so no new incarnation can take its place")
        self._require_new(model)
        old = self.queues.get(model.name)
        queue = self._enlist(model, account)
        if old is not None:
            queue.costs.inherit(old.costs, _shared(old.model, model))
        return queue

    def _require_new(self, model: ServableModel) -> None:
        taken = self.by_incarnation.get(model.incarnation)
        if taken is not None:
            raise ValueError(
                f"incarnation {model.incarnation} of model {model.name!r} is already scheduled, "
                f"as model {taken.model.name!r}; every load has a number of its own"
            )

    def _enlist(self, model: ServableModel, account: Account) -> ModelQueue:
        queue = ModelQueue(model, self._policy, self.cancelled, account)
        self.queues[model.name] = self.by_incarnation[model.incarnation] = queue
        account.queues.append(queue)
        if self._prepared:
            self._shares.enter(account)
        return queue

    # --- incarnations change ------------------------------------------------------------------------------------------

    def rename(self, old: str, model: ServableModel) -> ModelQueue:
        """`model` is the newest incarnation of `old` under a new name.

        Weight, cap and batching window are those that the policy has for the new name, but for what was set while it
        ran. Raises UnknownModel, ValueError when the new name is taken or `model` is not that incarnation.
        """
        queue = self.newest(old)
        _require_same(queue.model, model)
        if old == model.name:
            raise ValueError(f"model {old!r} has that name already")
        taken = self._accounts.get(model.name)
        if taken is not None and taken.queues:
            raise ValueError(f"model {old!r} cannot be renamed: {model.name!r} is already scheduled")
        if taken is not None:
            self._shares.close(taken)
        account = queue.account
        del self.queues[old]
        del self._accounts[old]
        self.queues[model.name], self._accounts[model.name] = queue, account
        account.name, queue.model = model.name, model
        if not account.weight_set:
            self._shares.reweigh(account, self._policy.model(model.name).weight)
        queue.resolve(self._policy)
        return queue

    def set_programs(self, model: ServableModel, key: int) -> ModelQueue:
        """`model` is a known incarnation with other programs, those of the set `key`.

        Raises UnknownModel, ValueError when it is not that incarnation or its programs are not of the same sizes.
        """
        queue = self.incarnation(model)
        _require_same(queue.model, model)
        if queue.model.name != model.name:
            raise ValueError(f"incarnation {model.incarnation} is model {queue.model.name!r}, not {model.name!r}")
        grid, wanted = model.batch_keys_by_variant, queue.model.batch_keys_by_variant
        if grid != wanted:
            raise ValueError(f"model {model.name!r} has programs for {dict(grid)}; wanted are those for {dict(wanted)}")
        queue.set_programs(model, key)
        return queue

    # --- incarnations go ----------------------------------------------------------------------------------------------

    def close(self, queue: ModelQueue) -> None:
        """Accept nothing more for `queue`."""
        queue.closed = True
        self.closing[queue] = None

    def remove(self, name: str) -> Sequence[ModelQueue]:
        """Close all incarnations of `name`, and forget it: what is still to be settled is counted for nobody."""
        account = self._accounts.pop(name, None)
        if account is None:
            return []
        self.queues.pop(name, None)
        self._shares.close(account)
        for queue in account.queues:
            self.close(queue)
        return [*account.queues]

    def finished(self, queue: ModelQueue) -> None:
        """Nothing of a closed incarnation is left."""
        del self.closing[queue]
        del self.by_incarnation[queue.model.incarnation]
        queue.account.queues.remove(queue)
        if not queue.account.queues:
            self._shares.leave(queue.account)
        name = queue.model.name
        if self.queues.get(name) is queue:
            del self.queues[name]

    # --- incarnations are found ---------------------------------------------------------------------------------------

    def newest(self, name: str) -> ModelQueue:
        """Raises UnknownModel."""
        queue = self.queues.get(name)
        if queue is None:
            raise UnknownModel(f"model {name!r} is not scheduled")
        return queue

    def incarnation(self, model: ServableModel) -> ModelQueue:
        """Also one that is closed. Raises UnknownModel when nothing is left of it."""
        queue = self.by_incarnation.get(model.incarnation)
        if queue is None:
            raise UnknownModel(f"model {model.name!r} (incarnation {model.incarnation}) is not scheduled")
        return queue


def _require_same(known: ServableModel, model: ServableModel) -> None:
    if model.incarnation != known.incarnation:
        raise ValueError(
            f"model {known.name!r} is scheduled as incarnation {known.incarnation}, not {model.incarnation}; "
            "a new one has to replace it"
        )
    if model.weights is not known.weights:
        raise ValueError(f"model {known.name!r} (incarnation {known.incarnation}) has other weights; batches hold them")


def _shared(old: ServableModel, new: ServableModel) -> list[tuple[tuple[int, ...], int]]:
    """The programs, by variant and batch key, that are the same executables in both."""
    return [
        (variant, key)
        for variant, programs in new.programs.items()
        for key, executable in programs.items()
        if old.programs.get(variant, {}).get(key) is executable
    ]
