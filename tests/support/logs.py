"""What a logger is told."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lines_of(name: str, *, level: int | None = logging.INFO) -> Iterator[list[str]]:
    """The messages that reach the handlers of the logger `name` inside, with `level` or, if None, the level that it has."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger(name), Lines()
    before = logger.level
    logger.addHandler(handler)
    if level is not None:
        logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
