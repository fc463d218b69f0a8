"""Numbers in the prose of pages are those of committed results: comments in the pages say where each is from.

After a paragraph, a list or a table, a comment names the folder of results and holds numbers of the text above it:

    <!-- numbers of results/models
    85 models: rows.model.nunique()
    0.50 to 0.85, 0.66: "took 0.50 to 0.85 of checkpointing's time, 0.66 in the median"
    -->

A line has words of the text, then an expression or a quotation. The expression is of pandas, with ``rows`` of the folder's
rows.csv: its values, rounded as written, are the numbers in the words. What is quoted is in the folder's table.md or summary.md,
and has the numbers. On the pages in ``HELD`` each number of the prose is held by such a line.
"""

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest

from tests.support.pages import PAGES, ROOT, name_of

HELD = ("docs/benchmarks.md",)
_COMMENT = re.compile(r"<!-- numbers of (\S+)\n(.*?)-->", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?![\w.-]*[a-zA-Z_/])(?:(?=[%\s),;:.|]|$))")
_NAME = re.compile(r"(?:torch|HiGHS|torch-kitsune|commit) \S+|\b(?:ICLR|H|A|RTX) ?\d+|(?<=\d)x\b")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a comment: words of the text above it, and where their numbers are from."""

    page: str
    above: str
    folder: str
    said: str
    source: str


def lines() -> list[Line]:
    found = []
    for page in PAGES:
        text, begin = page.read_text(), 0
        for comment in _COMMENT.finditer(text):
            for line in comment[2].splitlines():
                said, _, source = line.partition(": ")
                found.append(Line(name_of(page), text[begin : comment.start()], comment[1], said, source))
            begin = comment.end()
    return found


def numbers(text: str) -> list[str]:
    return [number.rstrip(",").replace(",", "") for number in _NUMBER.findall(_NAME.sub("", text))]


def written(value: float, like: str) -> str:
    """Return `value` with as many decimals as `like`."""
    return f"{value:.{len(like.partition('.')[2])}f}"


@pytest.mark.parametrize("line", lines(), ids=lambda line: f"{line.page}: {line.said}")
def test_numbers_are_those_of_the_results(line: Line) -> None:
    assert line.said in line.above, "the text above does not say so"
    said, folder = numbers(line.said), ROOT / line.folder
    assert said
    if line.source.startswith('"'):
        known = " ".join(path.read_text() for path in folder.glob("*.md"))
        quotes = line.source.strip('"').split('", "')
        assert [quote for quote in quotes if quote not in known] == []
        values = [float(number) for quote in quotes for number in numbers(quote)]
        assert [number for number in said if all(written(value, number) != number for value in values)] == []
    else:
        names = {"rows": pd.read_csv(folder / "rows.csv"), "pd": pd, "folder": folder}
        values = list(np.atleast_1d(eval(line.source, names)))
        assert [written(value, number) for value, number in zip(values, said, strict=True)] == said


@pytest.mark.parametrize("page", HELD)
def test_each_number_of_the_prose_is_held(page: str) -> None:
    for above in _COMMENT.sub("\0", (ROOT / page).read_text()).split("\0"):
        text = above
        for line in lines():
            if (line.page, line.above) == (page, above):
                text = text.replace(line.said, "")
        assert numbers(_prose(text)) == [], text


def _prose(text: str) -> str:
    """Return `text` without code, links' targets, headings, images and tables, whose cells other tests compare."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?:#|\||!\[).*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
