"""``rsrv bundle verify`` and ``rsrv bundle diff``: the numbers of bundles, and what differs between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from rsrv.cli import output
from rsrv.cli.local_server import signals_unwind
from rsrv.cli.reports import require_writable
from rsrv.cli.verify_run import Run, bundles_of, show_originals

if TYPE_CHECKING:
    from rsrv.export.verification import HookMode

ToleranceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tolerance",
        metavar="X | DTYPE=X | OUTPUT=X",
        help="Largest max|Δ|/max|reference| (repeatable). Default: what the bundle states, else f64 1e-12, f32 1e-5, "
        "f16 2e-3, bf16 1e-2; integers and booleans are exact.",
    ),
]
BackendOption = Annotated[
    str, typer.Option("--backend", metavar="B", help="Device to run programs on: auto, cpu or cuda.")
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout", metavar="SECONDS", help="Time for compiling and running one program, or for importing hooks."
    ),
]


def verify(
    directories: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR…", help="Directories of bundles.", show_default=False)
    ] = None,
    repo: Annotated[
        Path | None, typer.Option("--repo", metavar="DIR", help="All bundles in this directory, too.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="NAME,…", help="Leave these bundles out (repeatable).")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="golden | torch:SPEC | jax:SPEC",
            help="The goldens of the bundle (the default), or the original model: SPEC as in `rsrv export`.",
        ),
    ] = None,
    sources: Annotated[
        list[Path] | None,
        typer.Option(
            "--sources",
            metavar="DIR",
            help="Instead: a Triton model repository; the original of a bundle is NAME/1/model.pt (repeatable).",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="D", help="Where the original computes: cpu or cuda (untested; without TF32)."
        ),
    ] = "cpu",
    reference_only: Annotated[
        bool,
        typer.Option("--reference-only", help="Only show shapes, dtypes and ranges of what the original returns."),
    ] = False,
    batch: Annotated[
        str, typer.Option("--batch", metavar="all | N,N,…", help="Only the programs for these batch sizes.")
    ] = "all",
    tolerance: ToleranceOption = None,
    samples: Annotated[
        Path | None,
        typer.Option(
            "--samples",
            metavar="DIR",
            help="With an original: compare these samples (NAME.npy, or a directory with INPUT.npy for each sample) "
            "instead of random ones.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option("--max", metavar="N", min=1, help="Only the first N samples.")] = None,
    count: Annotated[
        int, typer.Option("--count", metavar="N", min=1, help="Random samples for each program (with an original).")
    ] = 1,
    input_range: Annotated[
        list[str] | None,
        typer.Option("--input-range", metavar="NAME=LOW:HIGH", help="Values of a random input (repeatable)."),
    ] = None,
    hooks: Annotated[
        str,
        typer.Option(
            "--hooks",
            metavar="MODE",
            help="Hooks of a bundle: off (the program alone), bundle (the original takes what clients send), both (the "
            "original runs between the hooks, too), auto (what fits the inputs of the original).",
        ),
    ] = "auto",
    served: Annotated[
        bool,
        typer.Option("--served", help="Ask a real `rsrv serve` of each bundle instead of running its programs here."),
    ] = False,
    backend: BackendOption = "auto",
    timeout: TimeoutOption = 600.0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Unproven outputs and programs without a sample fail, too.")
    ] = False,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Also write JUnit XML.")] = None,
    results: Annotated[
        Path | None,
        typer.Option("--results", metavar="FILE", help="Add a line per program to this TSV, and skip models in it."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Also write Markdown: a summary, and a line for each sample."),
    ] = None,
    as_json: output.JsonOption = False,
) -> None:
    """Compare the numbers of every program with goldens or with the original model, on this machine.

    Goldens and samples are packed into batches as the server packs requests. Exit code 1 when an output is off, when a
    program cannot be run, or when there is nothing to compare with. An output is unproven when its reference is the
    same number everywhere, or not finite.

    Example:
        rsrv bundle verify models/*
        rsrv bundle verify models/net --against jax:model.py:make --batch 1,8 --tolerance f32=1e-4
        rsrv bundle verify models/net --against torch:model.py:make --samples faces --report parity.md
        rsrv bundle verify --repo models --sources triton --served --results parity.tsv --report parity.md
    """
    from rsrv.audit import AuditProcess
    from rsrv.audit.parity import parse_tolerances
    from rsrv.core.errors import UsageError
    from rsrv.export.golden import parse_range
    from rsrv.export.verification import Verification

    if against is not None and sources:
        raise UsageError("--against and --sources both say what to compare with; want one of them")
    original = bool(sources) or against not in (None, "golden")
    if not original and (samples is not None or input_range or count != 1 or reference_only or hooks != "auto"):
        raise UsageError(
            "--samples, --count, --input-range, --hooks and --reference-only need an original: --against jax:SPEC or "
            "torch:SPEC, or --sources DIR"
        )
    _require_one_of("--hooks", hooks, ("auto", "off", "bundle", "both"))
    _require_one_of("--device", device, ("cpu", "cuda"))
    require_backend(backend)
    sizes = _batches(batch)
    if served and sizes is not None and (samples is not None or not original):
        raise UsageError("--batch chooses programs, and with --served the server chooses them for samples and goldens")
    for root in sources or []:
        if not root.is_dir():
            raise UsageError(f"--sources {root}: no such directory")
    verification = Verification(
        against=against or "golden",
        sources=tuple(sources or ()),
        samples=samples,
        limit=limit,
        count=count,
        ranges=dict(parse_range(text) for text in input_range or []),
        hooks=cast("HookMode", hooks),
        device=device,
    )
    bundles = bundles_of(directories or [], repo, exclude or [])
    for option, file in (("--junit", junit), ("--results", results), ("--report", report)):
        require_writable(option, file)
    run = Run(bundles, verification, sizes, parse_tolerances(tolerance or []), backend, timeout)
    with signals_unwind(), AuditProcess(backend=backend, timeout_seconds=timeout) as process:
        if reference_only:
            show_originals(run, process)
            return
        outcome = run.verify(process, served=served, results=results, report=report)
    if junit is not None:
        outcome.write_junit(junit, strict=strict)
    outcome.show(strict=strict, each_sample=samples is not None)
    if not outcome.passed(strict=strict):
        raise typer.Exit(1)


def diff(
    left: Annotated[Path, typer.Argument(metavar="A", help="Directory of a bundle.")],
    right: Annotated[Path, typer.Argument(metavar="B", help="Directory of another.")],
    as_json: output.JsonOption = False,
) -> None:
    """Show what differs between two bundles: manifests, signatures of programs, weights, other files.

    Exit code 0 when they are the same but for their provenance, 1 when they are not.

    Example:
        rsrv bundle diff models/net models.old/net
    """
    from rsrv.audit import diff_bundles
    from rsrv.core.errors import UsageError

    for directory in (left, right):
        if not directory.is_dir():
            raise UsageError(f"{directory}: no such directory")
    found = diff_bundles(left, right)
    if output.is_json():
        output.json(found.to_json())
    else:
        if found.differences:
            rows = [(d.section, d.what, d.left, d.right, d.note) for d in found.differences]
            output.table(None, ["section", "what", "A", "B", "note"], rows)
        elsewhere = sum(d.section != "provenance" for d in found.differences)
        output.note("the same" if found.same else f"{elsewhere} differences besides provenance")
    if not found.same:
        raise typer.Exit(1)


def require_backend(backend: str) -> None:
    _require_one_of("--backend", backend, ("auto", "cpu", "cuda"))


def _batches(text: str) -> list[int] | None:
    from rsrv.core.errors import UsageError

    if text == "all":
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"--batch {text} is neither all nor a list of sizes", hint="for example 1,8")
    return [int(part) for part in parts]


def _require_one_of(option: str, value: str, choices: Sequence[str]) -> None:
    from rsrv.core.errors import UsageError

    if value not in choices:
        raise UsageError(f"{option} {value} is none of {', '.join(choices[:-1])} and {choices[-1]}")
