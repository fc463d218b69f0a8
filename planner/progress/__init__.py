"""Progress of planning, and the views that show it: ``planner.compile(..., on_progress=LineView())``."""

from planner.progress.default import OnProgress, default_views, views_of
from planner.progress.line import LineView
from planner.progress.logs import LoggingView
from planner.progress.notebook import NotebookView
from planner.progress.stages import Event, Progress, Stage, Stages, View

__all__ = [
    "Event",
    "LineView",
    "LoggingView",
    "NotebookView",
    "OnProgress",
    "Progress",
    "Stage",
    "Stages",
    "View",
    "default_views",
    "views_of",
]
