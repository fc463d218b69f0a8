"""What a logger is told."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lines_of(name: str) -> Iterator[list[str]]:
    """The messages at INFO and above that reach the logger `name` inside."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger(name), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
