"""Converting a repository: one model after the other, each in a process of its own, as far as each one goes."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rsrv.core.errors import ExportError, RsrvError, UsageError
from rsrv.export.repository.config import ConvertConfig
from rsrv.export.repository.jobs import Sizes, perform, reason_of
from rsrv.export.repository.report import ConversionReport, ConversionResult, with_hint
from rsrv.export.repository.staging import move_bundles, remove_bundle, staging_area
from rsrv.export.repository.triton import find_model_file, obstacle, read_triton_model
from rsrv.export.repository.worklist import WorkItem, plan, present, select
from rsrv.runtime.compile_process import ChildLost, ChildSettings, CompileProcess

LadderPolicy = Literal["halve", "bisect"]
"""What to keep when not all batch sizes work: size 1 alone, or each size that works."""

_CHILD = "rsrv.export.repository.jobs"


def convert_repository(
    config: ConvertConfig,
    *,
    only: Sequence[str] = (),
    force: bool = False,
    isolate: bool = True,
    ladder: LadderPolicy = "halve",
    on_start: Callable[[WorkItem], None] | None = None,
    on_result: Callable[[ConversionResult], None] | None = None,
) -> ConversionReport:
    """Convert what is not there yet; the report is written unless `only` restricts the run.

    Args:
        only: names of models or bundles.
        force: delete the bundles of `only` first.
        isolate: run each attempt in a process of its own, which may crash, hang or run out of memory.
        ladder: see `LadderPolicy`.
        on_start, on_result: called before and after each model.

    A model that fails is in the report and stops nothing. Raises UsageError for names that are unknown and for `force`
    without `only`, ExportError when something that is no bundle stands in the way of `force`.
    """
    if force and not only:
        raise UsageError("--force deletes bundles and needs --only to say which")
    whole = plan(config)
    chosen = select(whole, only)
    _require_torch(chosen, force)
    if force:
        for item in chosen:
            if item.exclusion is None:
                remove_bundle(item.target)
    results = []
    with staging_area(config.output_root) as area:
        run = _Run(config, area, isolate, ladder, {item.bundle for item in whole})
        for item in chosen:
            if on_start is not None:
                on_start(item)
            begun = time.monotonic()
            result = replace(run.convert(item), seconds=time.monotonic() - begun)
            results.append(result)
            if on_result is not None:
                on_result(result)
    report = ConversionReport(tuple(results))
    if not only:
        report.write(config.report_path, config.json_path)
    return report


@dataclass(frozen=True)
class _Answer:
    """What a job came to. `lost`: its process is gone, so that nothing is known about smaller batches."""

    sizes: tuple[int, ...] | None = None
    because: str = ""
    warnings: tuple[str, ...] = ()
    error: str = ""
    final: bool = False
    lost: bool = False


@dataclass(frozen=True)
class _Run:
    """What all conversions of a run share."""

    config: ConvertConfig
    area: Path
    isolate: bool
    ladder: LadderPolicy
    bundles: set[str]

    def convert(self, item: WorkItem) -> ConversionResult:
        """What became of `item`. Raises only for what is not about this model (a full disk, an interrupt)."""
        made = Path(tempfile.mkdtemp(dir=self.area))
        try:
            if item.exclusion is not None:
                return self._excluded(item)
            if (found := present(item.target)) is not None:
                return _was_there(item, found.manifest.batching.compiled_batch_sizes, found.manifest.provenance)
            result = self._handled(item, made) if item.handler is not None else self._generic(item, made)
        except RsrvError as error:
            result = _result(item, "failed", reason=reason_of(error))
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return replace(result, reason=result.reason.replace(str(made), str(self.config.output_root)))

    def _excluded(self, item: WorkItem) -> ConversionResult:
        assert item.exclusion is not None
        removed = item.exclusion.remove_existing and remove_bundle(item.target)
        after = "; the bundle that was there is removed" if removed else ""
        return _result(item, "skipped", reason=f"excluded: {item.exclusion.reason}{after}")

    def _handled(self, item: WorkItem, made: Path) -> ConversionResult:
        assert item.handler is not None
        answer = self._perform(
            {
                "job": "handler",
                "file": str(item.handler.file),
                "source": None if item.source is None else str(item.source),
                "model": item.model,
                "bundle": item.bundle,
                "out": str(made / item.bundle),
                "options": dict(item.handler.options),
            }
        )
        if answer.sizes is None:
            return _result(item, "failed", reason=answer.error)
        if others := sorted({path.name for path in made.iterdir()} & (self.bundles - {item.bundle})):
            raise ExportError(f"the handler also wrote {others[0]!r}, which is a model of the worklist itself")
        moved = move_bundles(made, self.config.output_root)
        also = f"also wrote {', '.join(name for name in moved if name != item.bundle)}" if len(moved) > 1 else ""
        return _result(item, "success", batch_sizes=answer.sizes, note=_note(also, *answer.warnings))

    def _generic(self, item: WorkItem, made: Path) -> ConversionResult:
        assert item.source is not None  # models without a directory have a handler
        model = read_triton_model(item.source)
        if (found := obstacle(model)) is not None:
            outcome, reason = found
            return _result(item, outcome, reason=reason)
        find_model_file(item.source, model)
        wanted = list(model.ladder)
        attempts = _Attempts(self, item, made / item.bundle, wanted)
        answer = attempts.bisect() if self.ladder == "bisect" else attempts.halve()
        if answer.sizes is None:
            return _result(item, "failed", reason=answer.error)
        move_bundles(made, self.config.output_root)
        kept = answer.sizes or (1,)
        dropped = tuple(size for size in wanted if size not in kept)
        alone = bool(wanted) and not answer.sizes
        return _result(
            item,
            "partial" if dropped else "success",
            batch_sizes=answer.sizes,
            dropped=dropped,
            reason=answer.because if dropped else "",
            note=_note("takes one row only, without a batch axis" if alone else "", *answer.warnings),
        )

    def _perform(self, message: Mapping[str, Any]) -> _Answer:
        if not self.isolate:
            return _read(perform(message))
        settings = ChildSettings(
            platform="cpu", ordinal=0, parse_only=False, memory_bytes=self.config.memory_bytes, cpu_threads=None
        )
        # Temporary files of a process that may be killed at any moment: here they go away with it, or with the area.
        scratch = tempfile.mkdtemp(prefix="tmp.", dir=self.area)
        process = CompileProcess(settings, _CHILD)
        try:
            return _read(process.request({**message, "tmp": scratch}, b"", timeout=self.config.timeout_seconds)[0])
        except ChildLost as lost:
            return _Answer(error=_fate(lost, self.config.timeout_seconds), lost=True)
        finally:
            process.close()
            shutil.rmtree(scratch, ignore_errors=True)


@dataclass(frozen=True)
class _Attempts:
    """The attempts at one model; after one that succeeds, its bundle is at `out`."""

    run: _Run
    item: WorkItem
    out: Path
    wanted: list[int]

    def halve(self) -> _Answer:
        """The whole ladder, else size 1, else one row without a batch axis (X-45).

        Some models have the batch size of their example built in: only the last of these works for them.
        """
        choices: list[Sizes] = [self.wanted, [1], None] if len(self.wanted) > 1 else [self.wanted or None]
        if self.wanted == [1]:
            choices.append(None)
        answer = self._perform(choices)
        if answer.lost and len(choices) > 1:
            # Whatever ended the process, memory or time, a batch of one may do with less.
            again = self._perform(choices[1:], because=answer.error)
            return again if again.sizes is not None else answer
        return answer

    def bisect(self) -> _Answer:
        """The whole ladder, else the sizes of it that work, else as `halve`."""
        if len(self.wanted) < 2:
            return self.halve()
        whole = self._perform([self.wanted])
        if whole.sizes is not None or whole.final:
            return whole
        last, kept, parts = whole, list[int](), _halves(self.wanted)
        while parts:
            part = parts.pop(0)
            # Beside what works already: a single size is compared with its double, which may be one that does not.
            if [*kept, *part] != self.wanted:
                last = self._perform([[*kept, *part]], because=whole.error)
                if last.sizes is not None:
                    kept += part
                    continue
            if len(part) > 1:
                parts[:0] = _halves(part)
        if last.sizes is None:  # and the bundle of an earlier success is gone
            last = self._perform([kept] if kept else [[1], None], because=whole.error)
        return last if last.sizes is not None else whole

    def _perform(self, choices: Sequence[Sizes], because: str | None = None) -> _Answer:
        # A probe before this one, or a process that was ended, may have left something.
        for left in self.out.parent.iterdir():
            shutil.rmtree(left, ignore_errors=True)
        return self.run._perform(
            {
                "job": "generic",
                "source": str(self.item.source),
                "out": str(self.out),
                "choices": list(choices),
                "ladder": self.wanted,
                "because": because,
                "golden": self.run.config.golden,
            }
        )


def _halves(sizes: list[int]) -> list[list[int]]:
    middle = (len(sizes) + 1) // 2
    return [sizes[:middle], sizes[middle:]]


def _require_torch(items: Sequence[WorkItem], force: bool) -> None:
    """Without importing it. Raises ModuleNotFoundError before anything is deleted or converted in vain."""
    needed = any(item.disposition == "generic" and (force or present(item.target) is None) for item in items)
    for name in ("torch", "torchax"):
        if needed and importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _read(answer: Mapping[str, Any]) -> _Answer:
    if "sizes" in answer:
        warnings = tuple(answer["warnings"])
        return _Answer(sizes=tuple(answer["sizes"]), because=answer["because"] or "", warnings=warnings)
    error = answer["error"]
    if isinstance(error, Mapping):  # raised outside of the job, by the process itself
        return _Answer(error=with_hint(str(error["message"]), error["hint"]), final=True)
    return _Answer(error=str(error), final=bool(answer["final"]))


def _note(*texts: str) -> str:
    return "; ".join(filter(None, texts))


def _fate(lost: ChildLost, timeout: float) -> str:
    if lost.why == "deadline":
        return f"the conversion took longer than {timeout:g} s (timeout_seconds) and was ended{lost.last_words}"[:500]
    if lost.why == "memory":
        return f"the conversion took more than memory_bytes: {lost.ending}{lost.last_words}"[:500]
    return f"the conversion ended its process: {lost.ending}{lost.last_words}"[:500]


def _was_there(item: WorkItem, sizes: Sequence[int], provenance: Mapping[str, Any]) -> ConversionResult:
    """From the bundle itself, which remembers what could not be kept when it was made."""
    dropped = provenance.get("dropped_batch_sizes")
    if not isinstance(dropped, (list, tuple)) or not dropped or not all(isinstance(size, int) for size in dropped):
        return replace(_result(item, "success", batch_sizes=tuple(sizes)), was_there=True)
    reason = str(provenance.get("dropped_because", ""))
    result = _result(item, "partial", batch_sizes=tuple(sizes), dropped=tuple(dropped), reason=reason)
    return replace(result, was_there=True)


def _result(item: WorkItem, outcome: Any, **facts: Any) -> ConversionResult:
    return ConversionResult(item.model, item.bundle, item.source, item.disposition, outcome, **facts)
