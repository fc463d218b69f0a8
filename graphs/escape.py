"""Text from files and command lines, made safe to print: it must not control a terminal."""


def escape_text(value: object) -> str:
    """Return `value` as text on one line, with unprintable characters escaped."""
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def escape_lines(text: str) -> str:
    """Return text of several lines, with unprintable characters escaped."""
    return "\n".join(map(escape_text, text.split("\n")))
