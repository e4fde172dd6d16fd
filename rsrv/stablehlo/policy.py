"""What a server does to a program before it compiles it, as a value that goes to compile processes and cache keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

REWRITES_VERSION = 2
"""Part of every cache key. Raise it whenever `apply` makes something else of the same program and policy."""

Numerics = Literal["auto", "f32", "tf32"]


@dataclass(frozen=True, slots=True)
class Policy:
    """Which rewrites a program gets.

    Attributes:
        numerics: ``runtime.numerics``.
        tf32_capable: whether the device can run TF32 (`tf32_capable`).
        batch: the batch size to which a symbolic batch axis is specialised; None leaves the program's shapes alone.
    """

    numerics: Numerics = "auto"
    tf32_capable: bool = False
    batch: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {"numerics": self.numerics, "tf32_capable": self.tf32_capable, "batch": self.batch}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Policy:
        batch = value["batch"]
        return cls(value["numerics"], bool(value["tf32_capable"]), None if batch is None else int(batch))


@dataclass(frozen=True, slots=True)
class Applied:
    """A rewritten program; `summary` says in one line what was done ("" when nothing), `warnings` are for people."""

    program: bytes
    summary: str = ""
    warnings: tuple[str, ...] = ()


def tf32_capable(platform: str, compute_capability: str | None) -> bool:
    """Whether a device can run TF32: CUDA from compute capability 8.0 ("8.0", "9.0") on; what is unknown cannot."""
    major = (compute_capability or "").partition(".")[0]
    return platform == "cuda" and major.isascii() and major.isdigit() and int(major) >= 8


def apply(program: bytes, policy: Policy) -> Applied:
    """`program` as `policy` wants it. Raises ProgramError when it cannot be rewritten so.

    Like every function that parses, call it in a compile process for programs that nobody has vouched for.
    """
    if policy.batch is not None:
        from rsrv.stablehlo.specialise import specialised

        program = specialised(program, policy.batch)
    if policy.numerics == "tf32":
        return Applied(program, "tf32")
    if policy.numerics == "auto" and policy.tf32_capable:
        return Applied(program, "auto (tf32 active)")
    from rsrv.stablehlo.mlir import bytecode
    from rsrv.stablehlo.numerics import Pinned, pin, require_pinned, strip_tf32, ungoverned
    from rsrv.stablehlo.program import parse

    module = parse(program)
    if policy.numerics == "auto":
        stripped = strip_tf32(module)
        if not stripped:
            return Applied(program, "auto (f32: target lacks TF32)")
        text = f"stripped {stripped} tf32 algorithm(s): target lacks TF32"
        return Applied(bytecode(module), f"auto ({text})", (text,))
    pinned: Pinned = pin(module)
    require_pinned(module)
    opaque = ungoverned(module)
    parts = [
        f"rewrote {pinned.algorithms} tf32 algorithm(s)" if pinned.algorithms else "",
        f"pinned {pinned.dots} dot_general" if pinned.dots else "",
        f"pinned {pinned.convolutions} convolution" if pinned.convolutions else "",
        f"UNGOVERNED opaque ops: {', '.join(opaque)}" if opaque else "",
    ]
    summary = f"f32 ({', '.join(filter(None, parts)) or 'nothing to pin'})"
    warnings = (f"no setting governs the arithmetic of {', '.join(opaque)}",) if opaque else ()
    return Applied(bytecode(module) if pinned else program, summary, warnings)
