"""What the terminal says of a table."""

import io

import msgspec
from rich.console import Console

from gpu_workers.profiling.report import show
from ipc.profile_table import DecodePoint, MixedPoint, PrefillPoint, ProfileTable, TransferPoint
from ipc.vocabulary import DType

TABLE = ProfileTable(
    model="tiny",
    device="a processor",
    kernels="torch",
    dtype=DType.BF16,
    block_size=32,
    num_threads=1,
    saturation_tokens=28,
    kv_bytes_per_token=1000,
    prefill=(PrefillPoint(2, 50, 200.0),),
    decode=(DecodePoint(1, 64, 11.1), DecodePoint(1, 128, 22.2), DecodePoint(8, 64, 33.3)),
    mixed=(MixedPoint(32, 256, 0, 0, 44.4), MixedPoint(32, 0, 8, 128, 55.5)),
    transfer=(TransferPoint(2000, 0.5),),
    spread=0.027,
    waited=0.06,
)


def shown(table: ProfileTable) -> str:
    console = Console(file=io.StringIO(), width=120)
    show(table, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line(text: str, *cells: str) -> bool:
    """Whether some line of a printed table has exactly these cells."""
    rows = [[cell.strip() for cell in row.strip("│").split("│")] for row in text.splitlines()]
    return list(cells) in rows


def test_points_stand_where_their_line_and_column_say() -> None:
    text = shown(TABLE)
    assert line(text, "2", "50", "200.0", "500")
    assert line(text, "64", "11.1", "33.3")
    assert line(text, "128", "22.2", "")
    assert line(text, "32", "256", "44.4", "")
    assert line(text, "32", "0", "", "55.5")
    assert line(text, "2000", "0.500", "4.0")


def test_it_says_how_noisy_the_machine_was() -> None:
    assert "differ by 2.7%" in shown(TABLE)
    assert "had the core for 6% of the time" in shown(TABLE)
    assert "no time to repeat" in shown(msgspec.structs.replace(TABLE, spread=0.0))
