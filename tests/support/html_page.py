"""A page that is to be whole and to need nothing else."""

import re
from html.parser import HTMLParser

_SCRIPT = re.compile(r"(<script\b[^>]*>).*?(</script>)", re.DOTALL)


class Whole(HTMLParser):
    """Fails where a tag is not closed, and collects what the page refers to, and its rows of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [name for name, _ in attrs if name in ("src", "href", "srcset", "data") or name.startswith("on")]
        if tag not in ("meta", "wbr", "br", "input"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] in (["td"], ["th"]):
            self.rows[-1][-1] += data


def without_scripts(text: str) -> str:
    """`text` with empty scripts: they hold the chart library, and the data as JSON."""
    return _SCRIPT.sub(r"\1\2", text)


def parsed(text: str) -> Whole:
    """`text`, of which every tag is closed."""
    page = Whole()
    page.feed(text)
    page.close()
    assert page.open == []
    return page


def assert_needs_nothing_else(text: str) -> None:
    """No part of the page is elsewhere; that its scripts load nothing is for a browser to say."""
    page, written = parsed(text), without_scripts(text)
    assert page.references == []
    assert not page.tags & {"link", "img", "iframe", "object"}
    assert "url(" not in written and "@import" not in written and "http" not in written
    assert "\x1b" not in written
