"""Text of others, made safe to print: names come from files and command lines, and must not drive a terminal."""


def visible(value: object) -> str:
    """`value` as text on one line, safe for a terminal: what is not printable is escaped."""
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def visible_lines(text: str) -> str:
    """The same of text that is meant to have several lines."""
    return "\n".join(map(visible, text.split("\n")))
