"""A program after its compilation, as a value that travels from a compile process to the server and into the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rsrv.stablehlo.signature import ProgramReport


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program that compiled.

    Attributes:
        report: of the program as it was compiled, after all rewrites.
        blob: for `Device.load`; None when the executable cannot be serialised, and the caller compiles it again with
            `Device.compile`.
        compile_seconds: wall time of the compilation alone.
        scratch_bytes: what one run takes besides its arguments, as the compiler reports it; 0 on a fake device.
        summary: what the rewrites of its policy did, in one line; "" when nothing.
        warnings: what the rewrites want people to know.
    """

    report: ProgramReport
    blob: bytes | None
    compile_seconds: float = 0.0
    scratch_bytes: int = 0
    summary: str = ""
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """All but the blob."""
        return {
            "report": self.report.to_json(),
            "serialized": self.blob is not None,
            "seconds": self.compile_seconds,
            "scratch_bytes": self.scratch_bytes,
            "summary": self.summary,
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], blob: bytes) -> Compiled:
        return cls(
            report=ProgramReport.from_json(value["report"]),
            blob=blob if value["serialized"] else None,
            compile_seconds=float(value["seconds"]),
            scratch_bytes=int(value["scratch_bytes"]),
            summary=str(value["summary"]),
            warnings=tuple(str(warning) for warning in value["warnings"]),
        )
