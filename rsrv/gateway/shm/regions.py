"""Which shared memory clients have registered, and what each worker does not know of it yet. No I/O and no lock."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rsrv.gateway.methods import REGISTER, UNREGISTER
from rsrv.protos import inference as pb

MAX_MISSED = 1024
"""Names that one worker is to forget; when there are more, it is to forget all and to hear of the valid ones again."""


@dataclass(frozen=True, slots=True)
class Step:
    """One change of one region, as a worker is told it: `name` "" = all regions, which only Unregister knows."""

    registers: bool
    name: str
    body: bytes

    @property
    def path(self) -> str:
        return REGISTER if self.registers else UNREGISTER


def forget(name: str) -> Step:
    """The step that unregisters `name`, or all regions for ""."""
    return Step(False, name, pb.SystemSharedMemoryUnregisterRequest(name=name).SerializeToString())


class Regions:
    """The valid registrations in order, and the steps that workers have missed. Whoever owns it holds a lock."""

    def __init__(self) -> None:
        self._steps: dict[str, Step] = {}
        self._missed: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def steps(self) -> Mapping[str, Step]:
        """Name → what registers it."""
        return self._steps

    def get(self, name: str) -> Step | None:
        return self._steps.get(name)

    def apply(self, step: Step) -> None:
        """All workers that answer have taken the step."""
        if step.registers:
            self._steps.pop(step.name, None)  # so that it stands last
            self._steps[step.name] = step
        elif step.name:
            self._steps.pop(step.name, None)
        else:
            self._steps.clear()

    def discard(self, steps: Collection[Step]) -> int:
        """Drop those that are still the valid ones; returns how many."""
        gone = [step.name for step in steps if self._steps.get(step.name) is step]
        for name in gone:
            del self._steps[name]
        return len(gone)

    def misses(self, url: str, step: Step) -> None:
        """A worker did not get the step. It hears of valid registrations anyhow when it catches up.

        Before that it is to forget the name, also when it was registered: it may have an older region of that name,
        which stays when it cannot take the new one.
        """
        self._forgets(url, [step.name])

    def breaks_off(self, url: str, steps: Iterable[Step]) -> None:
        """What a worker was not told any more of what catches it up."""
        self._forgets(url, [step.name for step in steps if not step.registers])

    def _forgets(self, url: str, names: Iterable[str]) -> None:
        missed = self._missed.setdefault(url, set())
        missed.update(names)
        if len(missed) > MAX_MISSED:
            self._missed[url] = {""}

    @property
    def behind(self) -> int:
        """How many workers are known to have missed something."""
        return len(self._missed)

    def is_behind(self, url: str) -> bool:
        """Whether the worker is known to have missed something."""
        return url in self._missed

    def catch_up(self, url: str) -> list[Step]:
        """All that the worker is to be told, in order: what to forget, then every valid registration."""
        missed = self._missed.pop(url, set())
        return [*(forget(name) for name in sorted(missed)), *self._steps.values()]

    def keep(self, urls: Collection[str]) -> None:
        """Only these workers can still catch up."""
        for url in self._missed.keys() - set(urls):
            del self._missed[url]
