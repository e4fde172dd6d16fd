"""The letter grammar of tensor shapes in manifests: one ASCII letter per axis, ``n`` or ``b`` for the batch axis.

Letters are read in row-major order and mean nothing across tensors. Reading a whole manifest is the bundle room's work.
"""

from __future__ import annotations

from collections.abc import Iterator

from rsrv.core.errors import ManifestError
from rsrv.core.tensors import BATCH, VARIABLE, Dim, DimKind

BATCH_LETTERS = "nb"
AUTO_LETTERS = "acdefghijklmopqrstuvwxyz"
"""Letters for axes that nobody named, in the order in which they are handed out."""

MAX_EXTENT = 2**63 - 1
MAX_RANK = 64
"""Most axes that numpy can represent."""


def is_letter(key: object) -> bool:
    """True for a string of exactly one ASCII letter."""
    return isinstance(key, str) and len(key) == 1 and key.isascii() and key.isalpha()


def is_integer(value: object) -> bool:
    """True for an int that is not a bool (B-15)."""
    return isinstance(value, int) and not isinstance(value, bool)


def letter_problems(tensor: str, letters: str, dims: object, *, row_major: bool = True) -> Iterator[ManifestError]:
    """Every violation of the grammar by one tensor entry, in the order B-16 … B-24.

    `row_major` is False for the older column-major manifests, where upper-case ``N`` and ``B`` are ordinary letters.
    """
    where = f"tensor {tensor!r}"
    if len(letters) > MAX_RANK:
        yield ManifestError(
            f"{where}: shape has {len(letters)} letters; at most {MAX_RANK} axes are possible", rule="B-17"
        )
        return
    if not isinstance(dims, dict):
        yield ManifestError(f"{where}: dims must be a mapping letter → size, got {dims!r}", rule="B-16")
    strange = _unique(c for c in letters if not is_letter(c))
    if strange:
        yield ManifestError(
            f"{where}: shape {letters!r} contains {_listed(strange)}; an axis is named by one ASCII letter", rule="B-17"
        )
    for letter in _unique(c for c in letters if letters.count(c) > 1 and is_letter(c)):
        yield ManifestError(f"{where}: letter {letter!r} occurs twice in shape {letters!r}", rule="B-18")
    if all(marker in letters for marker in BATCH_LETTERS):
        yield ManifestError(f"{where}: shape {letters!r} has two batch markers, 'n' and 'b'; use one", rule="B-19")
    if row_major:
        for letter in (c for c in "NB" if c in letters):
            yield ManifestError(
                f"{where}: upper-case {letter!r} in shape {letters!r} reads like the batch axis",
                rule="B-28",
                hint=f"write {letter.lower()!r} for the batch axis, or choose another letter",
            )
    if isinstance(dims, dict):
        yield from _dims_problems(where, letters, dims)


def _dims_problems(where: str, letters: str, dims: dict[object, object]) -> Iterator[ManifestError]:
    for key in dims:
        if not is_letter(key):
            yield ManifestError(f"{where}: dims key {key!r} is not one ASCII letter", rule="B-20")
    for marker in BATCH_LETTERS:
        if marker in dims:
            yield ManifestError(
                f"{where}: dims gives a size to the batch letter {marker!r}; the batch size belongs to batching",
                rule="B-21",
            )
    for key, size in dims.items():
        if not is_extent(size) and not (is_integer(size) and size == -1):
            yield ManifestError(
                f"{where}: dims[{key!r}] is {size!r}; a size is an integer above 0, or -1 for a variable axis",
                rule="B-22",
            )
    sized = {key for key in dims if isinstance(key, str) and is_letter(key) and key not in BATCH_LETTERS}
    surplus = sorted(sized - set(letters))
    if surplus:
        yield ManifestError(f"{where}: dims names {_listed(surplus)}, not in shape {letters!r}", rule="B-23")
    missing = _unique(c for c in letters if is_letter(c) and c not in BATCH_LETTERS and c not in sized)
    if missing:
        yield ManifestError(f"{where}: no size in dims for {_listed(missing)} of shape {letters!r}", rule="B-24")


def is_extent(value: object) -> bool:
    """True for an integer above 0 that fits 63 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_EXTENT


def parse_letters(
    letters: str, dims: dict[str, int], *, tensor: str, row_major: bool = True
) -> tuple[tuple[Dim, ...], int | None]:
    """The axes that `letters` and `dims` declare, and the 0-based batch axis. Raises ManifestError (B-16 … B-28)."""
    for problem in letter_problems(tensor, letters, dims, row_major=row_major):
        raise problem
    axes = tuple(
        BATCH if letter in BATCH_LETTERS else VARIABLE if dims[letter] == -1 else Dim(DimKind.FIXED, dims[letter])
        for letter in letters
    )
    return axes, axes.index(BATCH) if BATCH in axes else None


def auto_letters(rank_without_batch: int) -> str:
    """Letters for that many non-batch axes (B-29). Raises ManifestError above 24."""
    if not 0 <= rank_without_batch <= len(AUTO_LETTERS):
        raise ManifestError(
            f"{rank_without_batch} non-batch axes cannot be named; there are {len(AUTO_LETTERS)} letters for them",
            rule="B-29",
        )
    return AUTO_LETTERS[:rank_without_batch]


def _unique(letters: Iterator[str]) -> list[str]:
    return list(dict.fromkeys(letters))


def _listed(letters: list[str]) -> str:
    return ("letter " if len(letters) == 1 else "letters ") + ", ".join(map(repr, letters))
