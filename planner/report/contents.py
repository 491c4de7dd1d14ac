"""What a page of the report is made of: notes, tables, drawings; plain data, which is its JSON too.

Every line says where its values come from, so that nothing simulated passes for a measurement.
"""

from enum import StrEnum

import msgspec

Cell = float | str | None


class Origin(StrEnum):
    """Where values come from."""

    MEASURED = "measured by the authors"
    SIMULATED = "simulated"
    ROOFLINE = "simulated, roofline"
    FITTED = "published coefficients"
    ESTIMATED = "roofline"
    FORMULA = "formula"
    TIMED = "timed here"

    @property
    def is_model(self) -> bool:
        return self not in (Origin.MEASURED, Origin.TIMED)


class Column(msgspec.Struct, frozen=True):
    """`form` is how its numbers are written."""

    name: str
    form: str = ""


class Table(msgspec.Struct, frozen=True):
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


class Line(msgspec.Struct, frozen=True):
    """Values over something. `low` and `high`: where one more run would lie in 95 of 100 cases."""

    label: str
    origin: Origin
    at: tuple[float, ...]
    values: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None


class Panel(msgspec.Struct, frozen=True, tag="lines"):
    """One pair of axes; `target` is a level across it, `top` where the vertical axis ends."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    target: float | None = None
    top: float | None = None
    falls: bool = False  # the horizontal axis runs from large to small, as the paper's SLO scales


class Stack(msgspec.Struct, frozen=True, tag="bars"):
    """Bars of parts on top of each other: for each part its size in every bar."""

    title: str
    x_label: str
    bars: tuple[str, ...]
    parts: dict[str, tuple[float, ...]]


class Drawing(msgspec.Struct, frozen=True):
    """One SVG file, `name`.svg."""

    name: str
    panels: tuple[Panel | Stack, ...]


class Page(msgspec.Struct, frozen=True):
    """One figure or table of the paper. `sources` say what is measured and what is simulated,
    `notes` why a point differs where that is known."""

    name: str
    title: str
    sources: tuple[str, ...]
    tables: tuple[Table, ...] = ()
    drawings: tuple[Drawing, ...] = ()
    notes: tuple[str, ...] = ()
