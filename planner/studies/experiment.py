"""The experiment engine: cases are run, their rows stored, and pages and figures drawn from the rows alone."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from planner.graphs.io.files import write_text
from planner.studies.jobs import run
from planner.studies.rows import KeptRows, Key, Row
from planner.studies.tables import Column, format_markdown
from planner.studies.workers import return_false

Case = TypeVar("Case")


@dataclass(frozen=True, slots=True)
class Study(Generic[Case, Row]):
    """An experiment: how a case is run, and which pages and figures are made from the rows.

    Attributes:
        row: the dataclass of its rows, as in ``planner.studies.rows``.
        run: yields the rows of a case, given its known rows.
        whole: True if the rows of a case are made together: stored all or none, and not made again if there are some.
        again: returns whether the rows of a whole case are to be made again.
        order: sort key of rows; None: in the order of addition.
        pages, figures: functions of the rows, by file name; or the columns of a page that is one table.
        failures: returns a line for each violation in the rows.
        file: the name of the CSV.
    """

    row: type[Row]
    run: Callable[[Case, Sequence[Row]], Iterable[Row]]
    whole: bool = True
    again: Callable[[Sequence[Row]], bool] | None = None
    order: Callable[[Row], Any] | None = None
    pages: Mapping[str, Callable[[Sequence[Row]], str] | Sequence[Column | str]] = field(default_factory=dict)
    figures: Mapping[str, Callable[[Sequence[Row], Path], None]] = field(default_factory=dict)
    failures: Callable[[Sequence[Row]], Iterable[str]] | None = None
    file: str = "rows.csv"

    def read_kept(self, folder: Path) -> KeptRows[Row]:
        """Return the rows in the CSV in `folder`; raise an OutputError if it has other columns, or is damaged."""
        return KeptRows(folder / self.file, self.row, self.order)

    def fill(
        self, kept: KeptRows[Row], cases: Mapping[Key, Case], *, jobs: int = 1, cluster: str | None = None
    ) -> Iterator[tuple[Row, ...]]:
        """Run the cases missing in `kept`; yield rows once they are stored.

        Args:
            cases: cases by the prefixes of their rows' keys.
            jobs: number of parallel cases: one runs in this process, several run in other processes.
            cluster: address of a Dask scheduler, whose workers run the cases; None: they run here.

        Raises:
            PlannerError: a case cannot be run, or the cluster cannot be reached or was lost.
        """
        waiting = ((case, known) for key, case in cases.items() if self._is_missing(known := kept.of(*key)))
        job = partial(_run_case, self.run, self.whole or jobs > 1 or cluster is not None)
        for made in run(job, lambda: next(waiting, None), return_false, jobs=jobs, cluster=cluster):
            for rows in (made,) if isinstance(made, tuple) else ((row,) for row in made):
                kept.add(*rows)
                yield rows

    def write_pages(self, rows: Sequence[Row], folder: Path) -> list[str]:
        """Write the pages of `rows` into `folder`, and return their texts; none if there are no rows."""
        pages = {name: page(rows) if callable(page) else format_markdown(rows, page) for name, page in self.pages.items() if rows}
        for name, text in pages.items():
            write_text(folder / name, text)
        return list(pages.values())

    def draw_figures(self, rows: Sequence[Row], folder: Path) -> None:
        """Write the figures of `rows` into `folder`; none if there are no rows."""
        for name, draw in self.figures.items():
            if rows:
                draw(rows, folder / name)

    def _is_missing(self, known: Sequence[Row]) -> bool:
        return not self.whole or not known or (self.again is not None and self.again(known))


def _run_case(
    run: Callable[[Case, Sequence[Row]], Iterable[Row]], at_once: object, task: tuple[Case, Sequence[Row]], _: Callable[[], bool]
) -> Iterable[Row]:
    """Return the rows of a case; with `at_once`, as one tuple."""
    rows = run(*task)
    return tuple(rows) if at_once else rows
