"""A page that is to be whole and to need nothing else."""

from html.parser import HTMLParser


class Whole(HTMLParser):
    """Fails where a tag is not closed, and collects what the page refers to, its rows of tables and its bars."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.rows: list[list[str]] = []
        self.bars: list[tuple[str, float, float, str]] = []  # class, x, width, what is said of it

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [name for name, _ in attrs if name in ("src", "href", "srcset", "data") or name.startswith("on")]
        if tag not in ("meta", "wbr", "br"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "rect":
            said = {name: value or "" for name, value in attrs}
            self.bars.append((said["class"], float(said["x"]), float(said["width"]), ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] in (["td"], ["th"]):
            self.rows[-1][-1] += data
        elif self.open[-2:] == ["rect", "title"]:
            self.bars[-1] = (*self.bars[-1][:3], self.bars[-1][3] + data)


def parsed(text: str) -> Whole:
    """`text`, of which every tag is closed."""
    page = Whole()
    page.feed(text)
    page.close()
    assert page.open == []
    return page


def assert_needs_nothing_else(text: str) -> None:
    page = parsed(text)
    assert page.references == []
    assert not page.tags & {"script", "link", "img", "iframe", "object"}
    assert "url(" not in text and "@import" not in text and "http" not in text
    assert "\x1b" not in text
