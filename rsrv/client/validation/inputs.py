"""The first half of a dry run: `encode_chunk` on two patterns, and what it says and does against the model's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from rsrv.client.dataset.io import PoolInferInput
from rsrv.client.shapes import fits, slip, text
from rsrv.client.validation.findings import Findings
from rsrv.client.validation.staging import PATTERNS, Part, WatchedSlot, staging_pool
from rsrv.core.dtypes import DType

if TYPE_CHECKING:
    from rsrv.client.dataset.io import InferenceIO
    from rsrv.client.iospec import ModelIOSpec

_COUNT_ALL = "a full chunk would not fit its slot: count all inputs of an item, in bytes"
_FIRST = "look at how it reads these items and at the shapes that it asks for"
_AGAIN = "this is its second call for these items, and it has to take that: a chunk may have to be sent once more"
_NOT_A_DESCRIPTOR = "make them with scratch(slot, name, shape, dtype) or PoolInferInput(name, subslot, shape, dtype)"


@dataclass(frozen=True, slots=True)
class Staged:
    """One descriptor of `encode_chunk`: its tensor, where its bytes are, and what they were after the call."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    content: np.ndarray

    @property
    def subject(self) -> str:
        return f"input {self.name!r}"


def check_inputs(spec: ModelIOSpec, io: InferenceIO, rows: range, item_bytes: int, findings: Findings) -> None:
    """Run `encode_chunk` and tell what is wrong; its own exceptions are raised with a note."""
    runs: list[list[Staged]] = []
    strayed = False
    with staging_pool(item_bytes * len(rows)) as pool:
        for pattern in PATTERNS:
            with pool.acquire() as lent:
                slot = WatchedSlot(lent, pattern)
                returned = _encode(io, rows, slot, _AGAIN if runs else _FIRST, findings)
                if returned is None:
                    asked = f"asked for {slot.overflowed} bytes more after carving {slot.carved}"
                    findings.error("encode_chunk", f"{asked}, but {_declared(item_bytes, rows)}", _COUNT_ALL)
                    return
                # The second run would say the same again.
                heard = findings if not runs else Findings(spec.name)
                runs.append(_staged(returned, slot, heard))
                strayed = strayed or _check_strays(slot, pattern, runs[-1], findings)
            if len(runs) == 1:
                _check_tensors(spec, runs[0], rows, findings)
                _check_bytes(slot.carved, item_bytes, rows, findings)
    _check_unwritten(runs[0], runs[1], findings)


def _encode(io: InferenceIO, rows: range, slot: WatchedSlot, advice: str, findings: Findings) -> Sequence[Any] | None:
    """What it returned, as a list; None when the slot had no room for what it wanted to carve."""
    try:
        with findings.calling(f"encode_chunk({rows!r}, slot)", advice):
            returned = io.encode_chunk(rows, slot)
    except Exception:
        if slot.overflowed is None:
            raise
        return None
    return list(returned) if isinstance(returned, Sequence) else [returned]


def _staged(returned: Sequence[Any], slot: WatchedSlot, findings: Findings) -> list[Staged]:
    """The descriptors that can be used; the others are findings."""
    staged: list[Staged] = []
    if not returned:
        findings.error("encode_chunk", "returned no descriptors, so nothing would be sent", _NOT_A_DESCRIPTOR)
    for one in returned:
        if not isinstance(one, PoolInferInput):
            findings.error("encode_chunk", f"returned a {type(one).__name__}", _NOT_A_DESCRIPTOR)
            continue
        subject, part = f"input {one.name!r}", one.subslot
        if part.pool is not slot.pool or part.generation != slot.generation:
            hint = "carve every buffer from the slot that encode_chunk is given, in every call"
            findings.error(subject, "its buffer is not a part of the slot of this call", hint)
        elif slot.part_of(part.offset, one.nbytes) is None:
            hint = "outputs are carved behind the inputs: take the buffer with slot.subslot(n_bytes) or scratch"
            findings.error(subject, "its bytes are not carved from the slot, so outputs may overwrite them", hint)
        else:
            content = slot.content(part.offset, one.nbytes)
            staged.append(Staged(one.name, one.dtype, one.shape, part.offset, content))
    return staged


def _check_tensors(spec: ModelIOSpec, staged: Sequence[Staged], rows: range, findings: Findings) -> None:
    """Names, dtypes, shapes and overlaps."""
    names = [tensor.name for tensor in staged]
    wanted = ", ".join(spec.inputs) or "none"
    for i, tensor in enumerate(staged):
        if tensor.name in names[:i]:
            findings.error(tensor.subject, "is sent twice", "return one descriptor for each input")
        declared = spec.inputs.get(tensor.name)
        if declared is None:
            findings.error(tensor.subject, f"the model has no input of that name; it has: {wanted}")
            continue
        datatype = DType.from_numpy(tensor.dtype).wire
        if datatype != declared.datatype:
            findings.error(tensor.subject, f"is sent as {datatype}, the model takes {declared.datatype}")
        if not fits(declared.shape, tensor.shape):
            differ = f"has shape {text(tensor.shape)}, the model takes {text(declared.shape)}"
            findings.error(tensor.subject, differ, slip(declared.shape, tensor.shape))
            continue
        axis = spec.row_axis(declared)
        if axis is not None and tensor.shape[axis] != len(rows):
            findings.warning(
                tensor.subject,
                f"has {tensor.shape[axis]} rows (axis {axis} of {text(tensor.shape)}) for {len(rows)} item(s)",
            )
    for name in spec.inputs:
        if name not in names:
            findings.error(f"input {name!r}", "the model needs it, and encode_chunk returned no descriptor for it")
    in_order = sorted(staged, key=lambda tensor: tensor.start)
    for before, after in pairwise(in_order):
        if before.start + before.content.size > after.start and after.content.size:
            findings.error(after.subject, f"lies on the bytes of {before.subject}", "carve a buffer for each input")


def _check_bytes(carved: int, item_bytes: int, rows: range, findings: Findings) -> None:
    differ = f"encode_chunk carved {carved} bytes, but {_declared(item_bytes, rows)}"
    if carved > item_bytes * len(rows):
        findings.error("item_input_bytes", differ, _COUNT_ALL)
    elif carved < item_bytes * len(rows):
        findings.warning("item_input_bytes", differ, "requests have fewer items than would fit")


def _declared(item_bytes: int, rows: range) -> str:
    return f"item_input_bytes() is {item_bytes}, which makes {item_bytes * len(rows)} for {len(rows)} item(s)"


def _check_strays(slot: WatchedSlot, pattern: int, staged: Sequence[Staged], findings: Findings) -> bool:
    """Tell of writes outside of the carved buffers; whether there were any."""
    runs = slot.stray_writes(pattern)
    for start, n_bytes, part in runs:
        owner = _owner(part, staged)
        behind = (
            "in front of the first buffer" if part is None else f"{start - part.end} bytes behind the end of {owner}"
        )
        findings.error(
            owner if part is not None and owner.startswith("input") else "encode_chunk",
            f"wrote {n_bytes} bytes outside of its buffers, {behind}",
            "they would change another buffer, or another request",
        )
    return bool(runs)


def _owner(part: Part | None, staged: Sequence[Staged]) -> str:
    if part is not None:
        for tensor in staged:
            if part.start <= tensor.start <= part.end and tensor.start + tensor.content.size <= part.end:
                return tensor.subject
    return "a buffer that no descriptor names"


def _check_unwritten(first: Sequence[Staged], second: Sequence[Staged], findings: Findings) -> None:
    """Bytes that kept the pattern of both runs."""
    if [(t.name, t.dtype, t.shape) for t in first] != [(t.name, t.dtype, t.shape) for t in second]:
        findings.warning("encode_chunk", "returned other tensors for the same items when it was called again")
        return
    for one, other in zip(first, second, strict=True):
        kept = (one.content == PATTERNS[0]) & (other.content == PATTERNS[1])
        count = int(np.count_nonzero(kept))
        if count:
            place = [int(i) for i in np.unravel_index(int(np.argmax(kept)) // one.dtype.itemsize, one.shape)]
            findings.error(
                one.subject,
                f"{count} of its {kept.size} bytes are never written, the first at index {text(place)}",
                "they would be sent with what an earlier request left there: fill them, with 0 for example",
            )
