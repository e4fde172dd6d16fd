"""What a record of the log looks like: a line of text for people, or a line of JSON for collectors."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != ord("\t")}


class TextFormatter(logging.Formatter):
    """A line for each record, then its traceback: what a client wrote begins no line, and steers no terminal."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_CONTROLS)


class JsonFormatter(logging.Formatter):
    """One object a line: ``time`` (UTC, ISO 8601), ``level``, ``logger``, ``message``, and ``exception`` if any."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def set_up_logging(level: str, style: str = "text") -> None:
    """Log to stderr from `level` on (debug, info, warning, error), as ``text`` or ``json``; what was set up goes."""
    logging.basicConfig(level=logging.getLevelNamesMapping()[level.upper()], handlers=[handler_of(style)], force=True)


def handler_of(style: str) -> logging.Handler:
    """What writes records to stderr, as ``text`` or ``json``."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    return handler


@contextmanager
def held() -> Iterator[list[logging.LogRecord]]:
    """Keep what is logged, from info on, instead of writing it: for `let_go`, once it is known how it is written."""
    records: list[logging.LogRecord] = []

    class Holder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    root, holder = logging.getLogger(), Holder()
    level, handlers = root.level, root.handlers[:]
    root.handlers[:] = [holder]
    root.setLevel(logging.INFO)
    try:
        yield records
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def let_go(records: list[logging.LogRecord]) -> None:
    """Write what `held` kept, as far as its loggers want it now."""
    for record in records:
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
