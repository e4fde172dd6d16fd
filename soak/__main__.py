"""``python -m soak [--seconds N] [--seed N]``: ends with 0 when everything that has to be true is."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from benchmarks.report import machine
from soak.run import Record, soak

SHOWN_PROBLEMS = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="of load, beside a fifth for warming up")
    parser.add_argument("--seed", type=int, default=0, help="what the clients draw their requests from")
    parser.add_argument("--steady", type=int, default=2, help="client processes of 8 threads that live to the end")
    parser.add_argument("--mortal", type=int, default=2, help="client processes of 4 threads that are killed")
    parser.add_argument("--small-budget", action="store_true", help="the device holds the largest model and no other")
    parser.add_argument("--json", type=Path, help="file for the record of the run")
    parser.add_argument("--log", type=Path, help="file for the server's log")
    arguments = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - began:5.0f} s  {text}\n")

    with TemporaryDirectory(prefix="rsrv-soak-") as folder:
        record = soak(
            Path(folder),
            seconds=arguments.seconds,
            seed=arguments.seed,
            steady=arguments.steady,
            mortal=arguments.mortal,
            say=say,
            small_budget=arguments.small_budget,
        )
    show(record, Console())
    if arguments.log:
        arguments.log.write_text("\n".join(record.log) + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), **record.to_json()}, indent=1) + "\n")
    return 0 if record.passed else 1


def show(record: Record, console: Console) -> None:
    requests = Table("kind of request", "outcomes", title=f"{record.started} requests, {record.killed} clients killed")
    for kind in sorted({outcome.rsplit(" ", 1)[0] for outcome in record.outcomes}):
        ends = Counter({o.rsplit(" ", 1)[1]: n for o, n in record.outcomes.items() if o.rsplit(" ", 1)[0] == kind})
        requests.add_row(kind, "  ".join(f"{end} {n}" for end, n in ends.most_common()))
    console.print(requests)
    served = Table("model", "answers", "rows", "dispatches", "batch fill", "dropped")
    for model in record.status.models:
        if model.counters is not None:
            counters = model.counters
            served.add_row(
                model.name,
                str(counters.requests.get("OK", 0)),
                str(counters.rows),
                str(counters.dispatches),
                f"{model.batch_fill:.0%}" if model.batch_fill is not None else "",
                "  ".join(f"{reason} {n}" for reason, n in counters.dropped.items()),
            )
    console.print(served)
    for problem in record.problems[:SHOWN_PROBLEMS]:
        console.print(f"[red]{problem}", highlight=False, markup=True)
    verdict = Table("check", "", "found")
    for check in record.checks:
        verdict.add_row(check.name, "yes" if check.passed else "[bold red]no", check.found)
    console.print(verdict)


if __name__ == "__main__":
    sys.exit(main())
