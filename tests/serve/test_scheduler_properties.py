"""Whatever arrives, expires, is cancelled, staged, recalled and retried, in whatever order: what is always true."""

import dataclasses
import random
from collections import Counter

import pytest
from sched_support import Desk, paper_model, spec

from rsrv.core.errors import RsrvError
from rsrv.serve.scheduler.policy import ModelPolicy, Policy

VARIANTS = ((3,), (5,))
SECONDS = {1: 0.010, 2: 0.012, 4: 0.015, 8: 0.016}


def two_shapes(name):
    return paper_model(
        name, keys=tuple(SECONDS), inputs=(spec("x", "n", "?"),), outputs=(spec("y", "n", "?"),), variants=VARIANTS
    )


class Driver:
    """A backlog, and around it what the dispatcher does with it, in a random order: one batch may be staged.

    Model ``w`` has a batching window, the others have none.
    """

    def __init__(self, random, policy, *, measured):
        self.random = random
        self.desk = Desk(two_shapes("a"), two_shapes("b"), two_shapes("w"), policy=policy)
        self.staged = None
        self.number = {}
        self.settled = Counter()
        if measured:
            for name in "abw":
                for variant in VARIANTS:
                    self.desk.seed(name, SECONDS, variant)

    @property
    def backlog(self):
        return self.desk.backlog

    def queues(self):
        return [*self.backlog.queues.values()]

    def step(self):
        moves = [self.accept, self.accept, self.accept, self.choose_or_run, self.choose_or_run, self.grow, self.recall]
        move = self.random.choice([*moves, self.cancel, self.wait, self.limit])
        move()
        self.check()

    def accept(self):
        within = self.random.choice([0, 0, 0.005, 0.02, 0.1, 1.0])
        name, rows, variant = self.random.choice("abw"), self.random.randint(1, 8), self.random.choice(VARIANTS)
        try:
            ticket = self.desk.accept(name, rows, variant=variant, within=within)
        except RsrvError:
            return
        self.number[ticket] = len(self.number)
        if self.staged is not None and self.backlog.precedes(ticket, self.staged):
            self.recall()

    def cancel(self):
        if self.number:
            self.random.choice([*self.number][-20:]).cancel()

    def wait(self):
        self.desk.clock.advance(self.random.choice([0.001, 0.01, 0.05, 0.5]))

    def limit(self):
        queue = self.desk.queue(self.random.choice("abw"))
        queue.cap = self.random.choice([None, 1, 3, 8])
        self.backlog.replan(queue)

    def choose_or_run(self):
        if self.staged is None:
            self.choose()
        else:
            self.run(fails=self.random.random() < 0.2)

    def choose(self):
        self.staged = self.backlog.next(self.desk.clock.ns, self.random.choice([0, 10**7]))
        if self.staged is not None:
            self.check_staged()
        else:
            assert not self.backlog.waiting or self.backlog.ripe_ns > self.desk.clock.ns, "who waits, waits for nothing"

    def grow(self):
        if self.staged is None or self.staged.final:
            return
        grown = self.backlog.grow(self.staged, self.desk.clock.ns)
        if grown is not None:
            assert grown.tickets[: len(self.staged.tickets)] == self.staged.tickets
            self.staged = grown
            self.check_staged()

    def recall(self):
        if self.staged is not None:
            self.backlog.put_back(self.staged)
            self.staged = None

    def run(self, *, fails=False):
        batch, self.staged = self.staged, None
        seconds = self.random.choice([0.005, 0.02])
        self.desk.clock.advance(seconds)
        now_ns = self.desk.clock.ns
        self.backlog.shares.charge(batch.queue.account, seconds, now_ns)
        if fails and len(batch.tickets) > 1:
            self.backlog.retry(batch.queue, batch.tickets)
        else:
            self.settled.update(batch.tickets)
            if not fails:
                variant = batch.tickets[0].variant
                self.backlog.measured(batch.queue, variant, batch.batch_key, round(seconds * 1e9), now_ns)
        self.backlog.settled(batch.queue)

    def check_staged(self):
        tickets, queue = self.staged.tickets, self.staged.queue
        assert {(ticket.queue, ticket.variant) for ticket in tickets} == {(queue, tickets[0].variant)}
        assert not any(ticket.queued for ticket in tickets)
        rows = sum(ticket.rows for ticket in tickets)
        assert rows <= self.staged.batch_key
        order = [self.number[ticket] for ticket in tickets]
        assert order == sorted(order)
        older = [t for t in queue.live() if t.variant == tickets[0].variant and self.number[t] < order[-1]]
        assert not older, "a request passed an older one of its own shape"
        assert all(ticket.overtaken <= queue.overtakes for ticket in queue.live())

    def check(self):
        """Every request is in one place, and each queue knows what it holds."""
        backlog = self.backlog
        self.settled.update(ticket for ticket, _ in self.desk.dropped())
        places = Counter(self.settled)
        places.update(self.staged.tickets if self.staged is not None else ())
        places.update(ticket for _, ticket in backlog._retries)
        for queue in self.queues():
            live = [*queue.live()]
            places.update(live)
            assert (queue.depth, queue.rows) == (len(live), sum(ticket.rows for ticket in live))
            assert queue.urgent_ns == min((t.deadline_ns for t in live if t.deadline_ns), default=0)
            assert not queue.tickets or queue.tickets[0].queued
            assert (queue in backlog._ready) + (queue in backlog._waiting) == bool(live)
        assert places == Counter([*self.number])

    def finish(self):
        """Run what is left, as a server that stops does."""
        self.backlog.hurry()
        while self.staged is not None or self.backlog.waiting:
            if self.staged is not None:
                self.run()
            else:
                self.choose()
            self.check()
        assert self.settled == Counter([*self.number])


class Versions(Driver):
    """As before, and models are replaced, renamed, retired and refused, and their programs exchanged.

    `serving` are the models by the name that they began with, `past` the ones before, for which requests still come.
    """

    def __init__(self, random, policy, *, measured):
        super().__init__(random, policy, measured=measured)
        self.serving = {name: self.desk.models[name] for name in "abw"}
        self.past = []
        self.version = {}

    def queues(self):
        return [*self.backlog.roster.by_incarnation.values()]

    def step(self):
        moves = [self.replace, self.retire, self.refuse, self.rename, self.select, self.ask_past]
        self.random.choice([super().step, super().step, super().step, *moves])()
        self.finish_closed()
        self.check()

    def accept(self):
        self.ask(self.serving[self.random.choice("abw")])

    def ask_past(self):
        if self.past:
            model = self.random.choice(self.past)
            queue = self.backlog.roster.by_incarnation.get(model.incarnation)
            assert self.ask(model) is None or not queue.closed

    def ask(self, model):
        self.desk.models["asked"] = model
        within, rows = self.random.choice([0, 0, 0.005, 0.1]), self.random.randint(1, 8)
        try:
            ticket = self.desk.accept("asked", rows, variant=self.random.choice(VARIANTS), within=within)
        except RsrvError:
            return None
        assert ticket.queue.model.incarnation == model.incarnation
        self.number[ticket] = len(self.number)
        if self.staged is not None and self.backlog.precedes(ticket, self.staged):
            self.recall()
        return ticket

    def limit(self):
        queue = self.random.choice([*self.backlog.queues.values()])
        queue.cap = self.random.choice([None, 1, 3, 8])
        self.backlog.replan(queue)

    def replace(self):
        name = self.random.choice("abw")
        old = self.serving[name]
        new = self.serving[name] = two_shapes(old.name)
        self.backlog.roster.replace(new)
        self.past.append(old)

    def retire(self):
        newest = {model.incarnation for model in self.serving.values()}
        old = [queue for queue in self.queues() if queue.model.incarnation not in newest]
        if old:
            self.backlog.close(self.random.choice(old))

    def refuse(self):
        for queue in [*self.backlog.roster.closing]:
            if self.staged is not None and self.staged.queue is queue:
                self.settled.update(self.staged.tickets)
                self.staged = None
                self.backlog.settled(queue)
            self.settled.update(self.backlog.clear(self.desk.clock.ns, queue))

    def rename(self):
        name = self.random.choice("abw")
        old = self.serving[name]
        new = dataclasses.replace(old, name=f"{name}{self.random.randint(0, 10**9)}")
        queue = self.backlog.roster.rename(old.name, new)
        self.backlog.replan(queue)
        self.backlog.rewindow(queue)
        self.serving[name] = new
        self.past.append(old)

    def select(self):
        name = self.random.choice("abw")
        old = self.serving[name]
        other = dataclasses.replace(old, programs=two_shapes(name).programs)
        self.backlog.replan(self.backlog.roster.set_programs(other, self.random.randint(1, 3)))
        self.serving[name] = other
        self.past.append(old)

    def finish_closed(self):
        flying = {self.staged.queue} if self.staged is not None else set()
        for queue in [*self.backlog.roster.closing]:
            if not (self.backlog.depth(queue) or queue in flying):
                self.backlog.roster.finished(queue)

    def check(self):
        super().check()
        shares, busy = self.backlog.shares, {queue.account for queue in self.queues() if queue.depth or queue.in_flight}
        if self.backlog.policy.fair_population == "active":
            assert busy <= {*shares._population} <= busy | {queue.account for queue, _ in self.backlog._retries}
        assert shares.weight == pytest.approx(len(shares._population))
        assert all(queue.in_flight >= 0 for queue in self.queues())


@pytest.mark.parametrize("driver", [Driver, Versions])
@pytest.mark.parametrize("population", ["active", "prepared"])
@pytest.mark.parametrize("discipline", ["fair", "fifo", "edf"])
def test_every_request_is_settled_once_and_in_the_order_of_its_shape(discipline, population, driver):
    for seed in range(60 if driver is Driver else 30):
        rng = random.Random(f"{discipline} {population} {seed}")
        policy = Policy(
            discipline=discipline,
            fair_population=population,
            variant_overtakes=rng.choice([0, 2]),
            max_queue_depth=20,
            models={"w": ModelPolicy(max_wait_ns=20_000_000)},
        )
        made = driver(rng, policy, measured=rng.random() < 0.5)
        for _ in range(60):
            made.step()
        made.finish()
        if population == "active":
            assert not made.backlog.shares._population
