"""The weights file under audit: header, layout, and the digest of every tensor."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from rsrv.audit.findings import Finding
from rsrv.bundle.files import WEIGHTS, open_regular
from rsrv.bundle.safetensors import ALIGNMENT, WeightEntry, WeightsHeader, read_header
from rsrv.core.errors import BundleError, WeightsError

_PART = 1 << 20


def weights_findings(
    path: Path, *, digests: bool, column_major: bool = False
) -> tuple[WeightsHeader | None, list[Finding]]:
    """The header of the weights at `path` (None when it cannot be read) and what is wrong with the file.

    `column_major` for a bundle of format 2.0. With `digests` all bytes are read and compared with ``tensor_digests``.
    """
    try:
        header = read_header(path, column_major=column_major)
    except BundleError as error:
        return None, [Finding("error", "weights", error.message, rule=error.rule, file=WEIGHTS, hint=error.hint)]
    findings = [] if column_major else [*_layout(header)]
    if digests and header.tensor_digests:
        findings += _digests(path, header)
    return header, findings


def _layout(header: WeightsHeader) -> Iterator[Finding]:
    """B-58a: a tensor that does not start on a 64-byte boundary is copied at every load."""
    aligned = [entry for entry in header.tensors.values() if entry.nbytes and entry.nbytes % ALIGNMENT == 0]
    copied = [entry for entry in aligned if (header.data_offset + entry.begin) % ALIGNMENT]
    if copied:
        yield Finding(
            "warning",
            "weights",
            f"{len(copied)} tensors ({sum(entry.nbytes for entry in copied)} bytes), the first of them "
            f"{copied[0].name!r}, do not start on a {ALIGNMENT}-byte boundary and are copied at every load",
            rule="B-58a",
            file=WEIGHTS,
            hint="write the file with rsrv.bundle.write_weights",
        )


def _digests(path: Path, header: WeightsHeader) -> Iterator[Finding]:
    fd = open_regular(path, error=WeightsError, rule="B-58")
    try:
        for name, declared in header.tensor_digests.items():
            actual = _digest(fd, header.data_offset, header.tensors[name])
            if actual != declared:
                yield Finding(
                    "error",
                    "weights",
                    f"tensor {name!r} has sha256 {actual}, tensor_digests says {declared}",
                    rule="B-58a",
                    file=WEIGHTS,
                    hint="write the file with rsrv.bundle.write_weights",
                )
    finally:
        os.close(fd)


def _digest(fd: int, data_offset: int, entry: WeightEntry) -> str:
    hasher = hashlib.sha256()
    position, end = data_offset + entry.begin, data_offset + entry.end
    while position < end:
        part = os.pread(fd, min(_PART, end - position), position)
        if not part:
            return f"nothing (the file ended at byte {position})"
        hasher.update(part)
        position += len(part)
    return hasher.hexdigest()
