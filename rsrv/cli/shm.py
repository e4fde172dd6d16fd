"""``rsrv shm``: remove what servers and clients that are gone left in shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rsrv.cli import output

app = typer.Typer(no_args_is_help=True, help="Look after shared memory.")


@app.callback()
def options() -> None:
    """Look after shared memory."""


@app.command()
def gc(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="Where the regions are.")
    ] = Path("/dev/shm"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and leave it.")] = False,
    as_json: output.JsonOption = False,
) -> None:
    """Remove weights that no server holds and regions of clients whose process is gone.

    Safe beside running servers: they lock the weights that they share. A client in a container of its own looks gone
    from outside of it, so run this where all clients of this shared memory can be seen. Exit code 1 when something
    could not be removed.

    Example:
        rsrv shm gc --dry-run
        rsrv shm gc
    """
    from rsrv.serve.residency.janitor import sweep_clients, sweep_unheld

    findings = [("weights", found) for found in sweep_unheld(directory, dry_run=dry_run)]
    findings += [("client", found) for found in sweep_clients(directory, dry_run=dry_run)]
    removed = [found for _, found in findings if found.outcome == "removed"]
    n_bytes = sum(found.nbytes for found in removed)
    if output.is_json():
        output.json(
            {
                "removed": len(removed),
                "bytes": n_bytes,
                "dry_run": dry_run,
                "objects": [
                    {
                        "name": found.name,
                        "kind": kind,
                        "owner": found.owner,
                        "bytes": found.nbytes,
                        "outcome": found.outcome,
                        "problem": found.problem or None,
                    }
                    for kind, found in findings
                ],
            }
        )
    else:
        done = "would be removed" if dry_run else "removed"
        output.table(
            f"{directory}: {len(removed)} of {len(findings)} objects {done}, {output.size(n_bytes)}",
            ("object", "of", "size", "outcome"),
            [
                (
                    found.name,
                    f"model {found.owner or '?'}" if kind == "weights" else f"client {found.owner}",
                    output.size(found.nbytes),
                    f"failed: {found.problem}" if found.problem else done if found in removed else "in use",
                )
                for kind, found in findings
            ],
        )
    if any(found.outcome == "failed" for _, found in findings):
        raise typer.Exit(1)
