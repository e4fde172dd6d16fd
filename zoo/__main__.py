"""``python -m zoo [--only NAME,…] [--redo] [--report] [--list]``: run the models, write ``docs/model-zoo.md``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zoo.child import Order
from zoo.models import all_models
from zoo.report import document
from zoo.results import read
from zoo.run import ROOT, Limits, run
from zoo.scaling import MODEL, scaling_jobs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m zoo", description=__doc__)
    parser.add_argument("--only", metavar="NAME,…", help="these models; a * at the end takes all that begin so")
    parser.add_argument("--redo", action="store_true", help="also what the cache has as served")
    parser.add_argument("--report", action="store_true", help="run nothing, write the document anew")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--scaling", action="store_true", help=f"only time {MODEL} for one and for three batch sizes")
    parser.add_argument("--cache", type=Path, default=ROOT / "zoo" / "cache" / "results.jsonl")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "model-zoo.md")
    parser.add_argument("--timeout", type=float, default=Limits.seconds, help="seconds for one model")
    parser.add_argument("--memory-gb", type=float, default=Limits.memory_gb, help="private memory of each process")
    arguments = parser.parse_args(argv)
    models = all_models()
    if arguments.list:
        sys.stdout.write("".join(f"{name}\t{model.source}\t{model.weights}\n" for name, model in models.items()))
        return 0
    jobs = _chosen(parser, list(models), arguments.only)
    if arguments.scaling:
        jobs = scaling_jobs()
    elif not arguments.only:
        jobs += scaling_jobs()

    def write() -> None:
        arguments.document.write_text(document(models, read(arguments.cache)), encoding="utf-8")

    results = []
    if not arguments.report:
        limits = Limits(arguments.timeout, arguments.memory_gb)
        results = run(
            jobs,
            arguments.cache,
            redo=arguments.redo,
            limits=limits,
            say=lambda text: sys.stderr.write(text + "\n"),
            after=write,
        )
    write()
    sys.stderr.write(f"written: {arguments.document}\n")
    return 0 if all(result.served for result in results) else 1


def _chosen(parser: argparse.ArgumentParser, names: list[str], only: str | None) -> list[Order]:
    chosen: list[str] = []
    for wanted in only.split(",") if only else names:
        found = [name for name in names if name == wanted or (wanted.endswith("*") and name.startswith(wanted[:-1]))]
        if not found:
            parser.error(f"the zoo has no {wanted!r}; python -m zoo --list shows what it has")
        chosen += found
    return [Order(name, name) for name in dict.fromkeys(chosen)]


if __name__ == "__main__":
    sys.exit(main())
