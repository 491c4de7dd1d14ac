"""Numbers as people write them, on the command line and in files."""

import math


def finite(text: str) -> float | None:
    """The number that the text is; None where it is none, or not a finite one."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
