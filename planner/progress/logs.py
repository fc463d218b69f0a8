"""Progress in the log."""

import logging

from planner.graphs.units import format_ratio
from planner.progress.stages import Event, Progress, Stage


class LoggingView:
    """A view that logs the begin and end of stages, and the summary, at INFO.

    Args:
        logger: the logger ``planner`` if None.
        stages: log the stages; otherwise only that planning has begun, and the summary.
    """

    def __init__(self, logger: logging.Logger | None = None, *, stages: bool = True) -> None:
        self._logger = logging.getLogger("planner") if logger is None else logger
        self._stages = stages
        self._has_begun = False

    def __call__(self, progress: Progress) -> None:
        """Log the report if its event is logged."""
        match progress.event:
            case Event.BEGIN:
                if self._stages:
                    self._logger.info("%s: %s", progress.stage, progress.activity)
                elif not self._has_begun:
                    self._logger.info("planning: %s", progress.activity)
                self._has_begun = True
            case Event.END if self._stages:
                self._logger.info("%s: done in %.1f s%s", progress.stage, progress.stage_seconds, _format_found(progress))
            case Event.FAILED if self._stages:
                self._logger.info("%s: ended by an error after %.1f s", progress.stage, progress.stage_seconds)
            case Event.DONE if progress.summary:
                self._logger.info("%s", progress.summary)
        if progress.event in (Event.DONE, Event.FAILED):
            self._has_begun = False


def _format_found(progress: Progress) -> str:
    if progress.stage is not Stage.SOLVE or progress.gap is None:
        return ""
    return f", gap {format_ratio(progress.gap)}"
