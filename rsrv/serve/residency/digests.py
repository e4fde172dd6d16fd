"""Finds out, in the background and at low cost, which declared digests of tensors are true.

Only those are looked at that another model declares, too. That matters on a card, where tensors cannot be compared any
more once they are there; where device memory is the host's, `TensorPool` compares bytes when it reads them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rsrv.bundle.safetensors import WeightEntry
from rsrv.core.errors import WeightsError
from rsrv.core.memory import aligned_empty
from rsrv.core.niceness import give_way, join_polite
from rsrv.serve.residency.content import WeightsFile, content_key

log = logging.getLogger(__name__)

_SLICE_BYTES = 1 << 20
_AGAIN_SECONDS = 0.2
"""When to look again at a file that was written a moment ago."""


@dataclass(eq=False)
class _Model:
    file: WeightsFile
    checked: set[str] = field(default_factory=set)


class Verifier:
    """Hashes tensors of weights files that several models declare to have. All methods are thread safe.

    Args:
        on_verified: told, on the thread that hashes, of a model of which tensors were verified. The pool uses them from
            the next load on, and `TensorPool.share` in what is loaded already.
    """

    def __init__(self, on_verified: Callable[[str], None] = lambda name: None) -> None:
        self._on_verified = on_verified
        self._lock = threading.Lock()
        self._models: dict[str, _Model] = {}
        self._declaring: dict[str, set[str]] = {}
        self._due: deque[str] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rsrv-verify", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End within a slice of a megabyte, if it gets the processor for that; nothing is verified any more."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            join_polite(self._thread)

    def add(self, name: str, file: WeightsFile) -> None:
        """From now on `name` is a model with these weights; another file under the same name takes its place."""
        self.remove(name)
        with self._lock:
            self._models[name] = _Model(file)
            due = {name}
            for digest in _digests(file):
                names = self._declaring.setdefault(digest, set())
                due |= names
                names.add(name)
            self._due += sorted(due.difference(self._due))
        self._wake.set()

    def remove(self, name: str) -> None:
        """Forget a model; one that is not known is fine."""
        with self._lock:
            model = self._models.pop(name, None)
            for digest in _digests(model.file) if model is not None else ():
                names = self._declaring[digest]
                names.discard(name)
                if not names:
                    del self._declaring[digest]

    def rename(self, old: str, new: str) -> None:
        """The model `old` is known as `new`; one that is not known is fine."""
        with self._lock:
            model = self._models.pop(old, None)
            if model is None:
                return
            self._models[new] = model
            for digest in _digests(model.file):
                names = self._declaring[digest]
                names.discard(old)
                names.add(new)
            # What was under way for the old name is given up.
            if new not in self._due:
                self._due.append(new)
        self._wake.set()

    def verify_next(self) -> bool:
        """Look at the next model that is due; False when it has to be done again later, or none is due."""
        with self._lock:
            if not self._due:
                return False
            name = self._due.popleft()
            model = self._models.get(name)
            entries = self._wanted(model) if model is not None else []
        if model is None or not entries:
            return True
        try:
            later, verified = self._verify(name, model, entries)
        except (OSError, WeightsError) as error:
            # Whoever loads it next says the same, and to somebody who waits for it.
            log.debug("digests not verified model=%s why=%s", name, error)
            return True
        if verified:
            log.debug("digests verified model=%s tensors=%d", name, verified)
            self._on_verified(name)
        if later:
            with self._lock:
                self._due.append(name)
        return not later

    def _wanted(self, model: _Model) -> list[WeightEntry]:
        file = model.file
        return [
            entry
            for entry in file.header.tensors.values()
            if file.is_shareable(entry)
            and entry.name not in model.checked
            and len(self._declaring[file.header.tensor_digests[entry.name]]) > 1
        ]

    def _verify(self, name: str, model: _Model, entries: list[WeightEntry]) -> tuple[bool, int]:
        """Whether some have to be looked at again, and how many digests turned out to be true."""
        file = model.file
        verified = 0
        for entry in entries:
            token = file.token
            if not file.is_current():
                return False, verified
            if not file.is_settled():
                return True, verified
            found = self._hash(file, entry)
            if found is None or self._models.get(name) is not model:
                return False, verified
            declared = file.header.tensor_digests[entry.name]
            if not file.is_current() or file.token != token:
                return False, verified
            model.checked.add(entry.name)
            if found == declared:
                verified += file.learn({entry.name: content_key(entry, found)}, token)
                continue
            log.warning(
                "a tensor does not have its declared digest; it is not shared model=%s tensor=%r declared=%s found=%s",
                name,
                entry.name,
                declared,
                found,
            )
        return False, verified

    def _hash(self, file: WeightsFile, entry: WeightEntry) -> str | None:
        """None when it was interrupted."""
        hasher = hashlib.sha256()
        block = aligned_empty(min(_SLICE_BYTES, entry.nbytes), "u1").data
        done = 0
        while done < entry.nbytes:
            if self._stopping:
                return None
            n = os.preadv(file.fileno(), [block[: entry.nbytes - done]], file.header.data_offset + entry.begin + done)
            if n == 0:
                return None  # truncated; a load will say so
            hasher.update(block[:n])
            done += n
        return hasher.hexdigest()

    def _run(self) -> None:
        give_way()
        try:
            while not self._stopping:
                self._wake.clear()
                if not self.verify_next():
                    self._wake.wait(_AGAIN_SECONDS if self._due else None)
        except Exception:
            if not self._stopping:  # else it was left behind by `close`, and its file is closed meanwhile
                raise


def _digests(file: WeightsFile) -> set[str]:
    return {file.header.tensor_digests[e.name] for e in file.header.tensors.values() if file.is_shareable(e)}
