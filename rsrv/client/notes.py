"""Notes on errors that belong to one request. Where many requests fail alike, they are told of the first alone."""

from __future__ import annotations


class Detail(str):
    """How the failure of one request came about."""


class ItemsNote(str):
    """Which items of a dataset the request had that failed: `rows`."""

    rows: range

    def __new__(cls, text: str, rows: range) -> ItemsNote:
        note = super().__new__(cls, text)
        note.rows = rows
        return note
