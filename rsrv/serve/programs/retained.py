"""What is kept of the program sets of one incarnation. Whoever owns it holds a lock."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rsrv.core.errors import UnknownModel, WrongState
from rsrv.serve.programs.records import Phase, ProgramSet
from rsrv.serve.scheduler.queue import ORIGINAL

if TYPE_CHECKING:
    from rsrv.runtime.device import Executable
    from rsrv.serve.programs.compare import Tally
    from rsrv.serve.programs.contract import Key
    from rsrv.serve.programs.shadow import Shadow
    from rsrv.serve.scheduler.plan import Variant

MAX_DIAGNOSTICS = 64 << 10
"""Bytes of text that are kept of a compilation."""
_CUT = "\n… (cut)"

Programs = Mapping["Variant", Mapping[int, "Executable"]]


class Build:
    """One program set: pending, then ready or failed for good.

    Attributes:
        programs: what runs; nothing before it is ready.
        digests: sha256 of the file of each program, "" when it is not known.
        numerics: what was done about the arithmetic of its programs.
        warm: it has served, or was run once.
        percent, tally: how many batches its shadow gets now, and what came of all of them.
        done: set when it is not pending any more, and its shadow is there if it was to have one.
    """

    def __init__(self, number: int, label: str, digests: Mapping[Key, str], created_unix: float) -> None:
        self.id = number
        self.label = label
        self.digests = digests
        self.created_unix = created_unix
        self.phase: Phase = "pending"
        self.diagnostics = ""
        self.programs: Programs = {}
        self.numerics = ""
        self.warm = False
        self.percent = 0.0
        self.tally: Tally | None = None
        self.done = threading.Event()

    def finish(self, programs: Programs, numerics: str, diagnostics: str = "") -> None:
        self.programs, self.numerics, self.diagnostics = programs, numerics, clipped(diagnostics)
        self.phase = "ready"

    def fail(self, diagnostics: str) -> None:
        self.phase, self.diagnostics = "failed", clipped(diagnostics)

    def snapshot(self) -> ProgramSet:
        return ProgramSet(
            id=self.id,
            phase=self.phase,
            label=self.label,
            fingerprint=fingerprint(self.digests),
            diagnostics=self.diagnostics,
            created_unix=self.created_unix,
            shadow=None if self.tally is None else self.tally.record(self.percent),
        )


class Retention:
    """The sets of one incarnation, by id.

    Attributes:
        name: what the model is called now.
        selected: the id of the set that serves.
        dropped: the incarnation does not serve any more.
        moving: held while a set is selected or removed, or a shadow begins or ends; before the owner's lock.
        shadow, shadowed: what gets copies of batches, and the id of its set; None and 0 when there is none.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        programs: Programs,
        numerics: str,
        digests: Mapping[Key, str],
        created_unix: float,
    ) -> None:
        original = Build(ORIGINAL, "original", digests, created_unix)
        original.finish(programs, numerics)
        original.warm = True
        original.done.set()
        self.name = name
        self.incarnation = incarnation
        self.sets = {ORIGINAL: original}
        self.selected = ORIGINAL
        self.dropped = False
        self.moving = threading.RLock()
        self.shadow: Shadow | None = None
        self.shadowed = 0
        self._last = ORIGINAL

    def add(self, label: str, digests: Mapping[Key, str], created_unix: float) -> Build:
        """A pending set, with an id that none had before."""
        self._last += 1
        made = self.sets[self._last] = Build(self._last, label, digests, created_unix)
        return made

    def require_live(self) -> None:
        """Raises WrongState when the incarnation was dropped."""
        if self.dropped:
            raise WrongState(f"model {self.name!r} was loaded again or removed meanwhile", reason="not_ready")

    def find(self, program: int) -> Build:
        """Raises UnknownModel, with reason `unknown_program`."""
        made = self.sets.get(program)
        if made is None:
            known = ", ".join(map(str, sorted(self.sets)))
            raise UnknownModel(
                f"model {self.name!r} has no program set {program}; it has {known}", reason="unknown_program"
            )
        return made

    def require(self, program: int) -> Build:
        """As `find`; raises WrongState for one that is not ready."""
        made = self.find(program)
        if made.phase != "ready":
            raise WrongState(f"program set {program} of model {self.name!r} is {made.phase}", reason="not_ready")
        return made

    def require_clean(self, made: Build) -> None:
        """Raises WrongState unless `made` was compared with what serves now, and differed in nothing."""
        record = None if made.tally is None else made.tally.record(made.percent)
        if record is None or record.against != self.selected or not record.batches:
            why = f"it was not compared with set {self.selected}, which serves"
        elif not record.clean:
            why = (
                f"of {record.batches} batches {record.mismatches} differed, and {record.errors} did not run: "
                f"{record.first_mismatch or record.first_error}"
            )
        else:
            return
        raise WrongState(
            f"program set {made.id} of model {self.name!r} has no clean record: {why}",
            reason="not_clean",
            hint="let it run in the shadow, or select it without asking for a clean record",
        )


def keyed(programs: Programs) -> dict[Key, Executable]:
    return {(variant, key): executable for variant, by_key in programs.items() for key, executable in by_key.items()}


def fingerprint(digests: Mapping[Key, str]) -> str:
    """sha256, in hexadecimal, over the JSON list of (variant, batch key, digest) in order; "" when a digest is not
    known."""
    if not all(digests.values()):
        return ""
    rows = [[list(variant), key, digest] for (variant, key), digest in sorted(digests.items())]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def clipped(text: str) -> str:
    """At most `MAX_DIAGNOSTICS` bytes of `text` as UTF-8."""
    data = text.encode()
    if len(data) <= MAX_DIAGNOSTICS:
        return text
    return data[: MAX_DIAGNOSTICS - len(_CUT.encode())].decode(errors="ignore") + _CUT
