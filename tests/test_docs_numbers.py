"""Numbers in the prose of pages are those of results or of the code: comments in the pages say where each is from.

After a paragraph, a list or a table, a comment names a source and holds numbers of the text above it:

    <!-- numbers of results/models
    85 models: rows.model.nunique()
    0.50 to 0.85, 0.66: "took 0.50 to 0.85 of checkpointing's time, 0.66 in the median"
    -->

The source is a folder of results, a module of the repository, or another file, such as a log or a test. A line has words of the
text, then an expression or a quotation. An expression is of pandas with ``rows`` of the folder's rows.csv, of the names of the
module, or of the file's ``text``: its values, rounded as written, are the numbers in the words. What is quoted is in the file, or
in the folder's table.md or summary.md, and has the numbers. Inline code is left out: what users type and programs print is
written so. A line of which the words are ``table`` is about the last table above it, all cells but the first of each row. On all
pages but ``FREE`` each other number is held by such a line, and each table but ``TABLES``.
"""

import importlib
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.support.pages import PAGES, ROOT, name_of

FREE = {"docs/formulation.md": "mathematics: values of variables, and numbers of rows, which test_formulation.py compares"}
_COMPARED = "tests/test_docs_figures.py compares it"
TABLES = {
    "| | the plan |": _COMPARED,
    "| on an H100, measured |": _COMPARED,
    "| model | budget | windows |": _COMPARED,
    "| budget | published |": "its first row is compared by tests/test_docs_figures.py; MONeT's figures are from its paper",
}
_COMMENT = re.compile(r"<!-- numbers of (\S+)\n(.*?)-->", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?![\w.-]*[a-zA-Z_/])(?:(?=[%\s),;:.|]|$))")
_NAME = re.compile(r"(?:[Tt]orch|Python|HiGHS|torch-kitsune|commit) \S+|\b(?:ICLR|H|A|RTX|RFC) ?\d+|(?<=\d)x\b|\b20\d\d(?=[),])")
_CODE = r"`[^`]*`|\$[^$]*\$|\]\([^)]*\)"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a comment: words of the text above it, and where their numbers are from."""

    page: str
    above: str
    place: str
    said: str
    source: str


@cache
def lines() -> list[Line]:
    found = []
    for page in PAGES:
        text, begin, above = page.read_text(), 0, ""
        for comment in _COMMENT.finditer(text):
            above = text[begin : comment.start()].strip() or above  # one comment behind another is of the same text
            for line in comment[2].splitlines():
                said, _, source = line.partition(": ")
                found.append(Line(name_of(page), above, comment[1], said, source))
            begin = comment.end()
    return found


def numbers(text: str) -> list[str]:
    return [number.rstrip(",").replace(",", "") for number in _NUMBER.findall(_NAME.sub("", text))]


def written(value: float, like: str) -> str:
    """Return `value` with as many decimals as `like`."""
    return f"{value:.{len(like.partition('.')[2])}f}"


@pytest.mark.parametrize("line", lines(), ids=lambda line: f"{line.page}: {line.said}")
def test_numbers_are_those_of_the_results(line: Line) -> None:
    assert line.said in line.above or line.said == "table", "the text above does not say so"
    said = (
        [number for cell in _cells(_tables(line.above)[-1]) for number in numbers(cell)]
        if line.said == "table"
        else numbers(line.said)
    )
    assert said
    place = ROOT / line.place
    if line.source.startswith('"'):
        known = " ".join(path.read_text() for path in (place.glob("*.md") if place.is_dir() else (place,)))
        quotes = line.source.strip('"').split('", "')
        assert [quote for quote in quotes if quote not in known] == []
        values = [float(number) for quote in quotes for number in numbers(quote)]
        assert [number for number in said if all(written(value, number) != number for value in values)] == []
    else:
        if place.is_dir():
            names: dict[str, Any] = {"rows": pd.read_csv(place / "rows.csv"), "pd": pd, "folder": place}
        else:
            module = line.place.removesuffix(".py")
            names = vars(importlib.import_module(module.replace("/", "."))) if module != line.place else {}
            names = {"text": place.read_text(), "re": re, "root": ROOT} | names
        values = list(np.atleast_1d(eval(line.source, names)))
        assert [written(value, number) for value, number in zip(values, said, strict=True)] == said


@pytest.mark.parametrize("page", [name for name in map(name_of, PAGES) if name not in FREE])
def test_each_number_of_the_prose_is_held(page: str) -> None:
    for piece in _COMMENT.sub("\0", (ROOT / page).read_text()).split("\0"):
        text = above = piece.strip()
        for line in lines():
            if (line.page, line.above) == (page, above):
                text = text.replace(line.said, "")
        assert numbers(_prose(text)) == [], text


@pytest.mark.parametrize("page", [name for name in map(name_of, PAGES) if name not in FREE])
def test_each_table_is_held(page: str) -> None:
    for piece in _COMMENT.sub("\0", (ROOT / page).read_text()).split("\0"):
        held = any((line.page, line.above, line.said) == (page, piece.strip(), "table") for line in lines())
        loose = _tables(piece)[: -1 if held else None]
        assert [table for table in loose if _is_of_numbers(table) and not table.startswith(tuple(TABLES))] == []


def _tables(text: str) -> list[str]:
    return re.findall(r"(?:^\|.*(?:\n|\Z))+", text, re.MULTILINE)


def _cells(table: str) -> list[str]:
    """Return the cells of a table that are not empty, without its header and the first cell of each row."""
    return [cell.strip() for row in table.splitlines()[2:] for cell in row.split("|")[2:] if cell.strip()]


def _is_of_numbers(table: str) -> bool:
    """Return True if most cells of a table are numbers, not text in which numbers occur."""
    cells = _cells(table)
    return sum(bool(re.match(r"[*+-]*\d", cell)) for cell in cells) > len(cells) / 2


def _prose(text: str) -> str:
    """Return `text` without code, formulas, links' targets, headings, numbers of items, images and tables."""
    text = re.sub(r"^ *```(?s:.*?)^ *```|^:::.*(?:\n    .*)*", "", text, flags=re.MULTILINE)
    text = re.sub(r"^ *(?:#|\||!\[).*$|^ *\d+\. ", "", text, flags=re.MULTILINE)
    return re.sub(_CODE, "", text)
