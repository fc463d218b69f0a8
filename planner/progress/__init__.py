"""Progress of planning, and the views that show it: ``planner.compile(..., on_progress=LineView())``."""

from planner.progress.default import OnProgress, list_default_views, list_views
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
    "list_default_views",
    "list_views",
]
