"""A page for people."""

from rich import box
from rich.console import Console
from rich.table import Table as Grid

from planner.report.contents import Cell, Column, Page, Table


def show(page: Page, console: Console) -> None:
    """Title, where the values come from, tables, and why points differ."""
    _say(console, f"\n{page.title}", "bold")
    for source in page.sources:
        _say(console, f"  {source}", "dim")
    for table in page.tables:
        console.print(_grid(table))
    for note in page.notes:
        _say(console, f"  {note}")


def _grid(table: Table) -> Grid:
    # Narrow, for terminals of 80 columns.
    grid = Grid(
        title=table.title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for index, column in enumerate(table.columns):
        grid.add_column(column.name, justify="right" if index else "left")
    for row in table.rows:
        cells = zip(row, table.columns, strict=True)
        grid.add_row(*(_told(cell, column) for cell, column in cells))
    return grid


def _told(cell: Cell, column: Column) -> str:
    if cell is None:
        return "-"
    return cell if isinstance(cell, str) else format(cell, column.form)


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, markup=False)
