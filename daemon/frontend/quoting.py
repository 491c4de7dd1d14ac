"""A client's own words in our sentences: short, on one line, and nothing but printable."""

_UNPRINTABLE = "\ufffd"


def quoted(text: str, most: int = 100) -> str:
    """The text's beginning, fit for an error message or a log line."""
    return "".join(char if char.isprintable() else _UNPRINTABLE for char in text[:most])
