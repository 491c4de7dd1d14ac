"""The length tables that ship with the planner: (input, output) pairs from public data sets.

Each file under `data/` is a summary of one data set: up to a few thousand pairs that stand for
all of its rows, its source and licence, and, for a trace, the fitted arrivals. The pairs are
joint, so the correlation of input and output is the data set's.
"""

import msgspec
import orjson

from planner.errors import WorkloadError
from planner.json_files import shipped_json
from planner.workload.arrival_fit import ArrivalFit


class LengthTable(msgspec.Struct, frozen=True, kw_only=True):
    """A data set's joint lengths.

    Args:
        tokens: whose tokens are counted, and what is counted in.
        num_rows: rows of the data set that the pairs stand for.
        arrivals: fitted to the data set's times; None where it has none.
    """

    name: str
    source: str
    licence: str
    tokens: str
    num_rows: int
    input_tokens: list[int]
    output_tokens: list[int]
    arrivals: ArrivalFit | None = None


def load_table(name: str) -> LengthTable:
    """The table of that name, as shipped."""
    try:
        return shipped_json("planner.workload", f"{name}.json", LengthTable)
    except (OSError, orjson.JSONDecodeError, msgspec.ValidationError) as error:
        raise WorkloadError(f"the length table {name} of this installation is broken") from error
