"""``python -m benchmarks [--short] [--out FOLDER] [--record FILE] [CASE …]``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import dataset, first_light, gateway, reload, residency, restart, scheduler, serving
from benchmarks.load import pin
from benchmarks.report import record, show, write
from benchmarks.servers import DRIVER_CORE

CASES = {
    **first_light.CASES,
    **scheduler.CASES,
    **restart.CASES,
    **serving.CASES,
    **residency.CASES,
    **reload.CASES,
    **gateway.CASES,
    **dataset.CASES,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"all by default: {', '.join(CASES)}")
    parser.add_argument("--short", action="store_true", help="seconds instead of minutes; the numbers mean little")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the JSON file")
    parser.add_argument("--record", type=Path, help="Markdown file to put the table into, such as docs/performance.md")
    arguments = parser.parse_args(argv)
    unknown = [c for c in arguments.cases if c not in CASES]
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}; there are {', '.join(CASES)}")
    affinity = os.sched_getaffinity(0)
    measurements = []
    for name in arguments.cases or CASES:
        began = time.monotonic()
        if name in {"request-cost", "large-requests"}:
            pin(DRIVER_CORE)
        measurements += list(CASES[name](short=arguments.short))
        os.sched_setaffinity(0, affinity)
        sys.stderr.write(f"{name} took {time.monotonic() - began:.0f} s\n")
    show(measurements)
    if arguments.record:
        record(measurements, arguments.record)
    path = write(measurements, arguments.out)
    sys.stderr.write(json.dumps({"written": str(path)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
