"""The shipped length tables: the published means, and the raw data they stand for."""

from pathlib import Path

import numpy as np
import pytest

from planner.errors import WorkloadError
from planner.workload.build_tables import RECIPES, Recipe, build_table, main, read_pairs, stand_ins
from planner.workload.gap_families import ks_distance
from planner.workload.requests import Ints
from planner.workload.tables import LengthTable, load_table

RAW_DIR = Path(__file__).resolve().parents[3] / "shared" / "data"
TABLES = {recipe.name: load_table(recipe.name) for recipe in RECIPES}


def pairs(table: LengthTable) -> tuple[Ints, Ints]:
    return np.array(table.input_tokens), np.array(table.output_tokens)


def raw_pairs(recipe: Recipe) -> tuple[Ints, Ints]:
    if not (RAW_DIR / recipe.file).exists():
        pytest.skip(f"the raw data are not here: {recipe.file}")
    return read_pairs(recipe, RAW_DIR / recipe.file)


def distance(table: Ints, raw: Ints) -> float:
    """Largest difference between the two distribution functions."""
    values = np.unique(np.concatenate([table, raw]))
    below = [np.searchsorted(np.sort(side), values, "right") / len(side) for side in (table, raw)]
    return float(np.abs(below[0] - below[1]).max())


def test_humaneval_has_the_published_means() -> None:
    """171.3 and 98.2 tokens (DistServe, figure 7), reproduced exactly."""
    inputs, outputs = pairs(TABLES["humaneval"])
    assert len(inputs) == 164
    assert (round(inputs.mean(), 1), round(outputs.mean(), 1)) == (171.3, 98.2)


def test_sharegpt_has_the_means_of_its_source_close_to_the_published_ones() -> None:
    """767.1 and 198.8 in the prepared file; DistServe's figure 7 prints 755.5 and 200.3."""
    inputs, outputs = pairs(TABLES["sharegpt"])
    assert inputs.mean() == pytest.approx(767.1, abs=0.5)
    assert outputs.mean() == pytest.approx(198.8, abs=0.5)
    assert inputs.mean() == pytest.approx(755.5, rel=0.02)
    assert outputs.mean() == pytest.approx(200.3, rel=0.02)


def test_chat_and_summaries_fit_the_positions_of_opt() -> None:
    for name in ("sharegpt", "longbench"):
        inputs, outputs = pairs(TABLES[name])
        assert (inputs + outputs).max() <= 2048


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_table_stands_for_all_rows_of_its_raw_file(recipe: Recipe) -> None:
    raw_in, raw_out = raw_pairs(recipe)
    inputs, outputs = pairs(TABLES[recipe.name])
    assert TABLES[recipe.name].num_rows == len(raw_in)
    assert inputs.mean() == pytest.approx(raw_in.mean(), rel=0.005)
    assert outputs.mean() == pytest.approx(raw_out.mean(), rel=0.02)
    assert distance(inputs, raw_in) < 0.01
    assert distance(outputs, raw_out) < 0.01
    correlation = np.corrcoef(inputs, outputs)[0, 1]
    assert correlation == pytest.approx(np.corrcoef(raw_in, raw_out)[0, 1], abs=0.01)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_pair_occurs_in_the_raw_file(recipe: Recipe) -> None:
    raw = set(zip(*(side.tolist() for side in raw_pairs(recipe)), strict=True))
    table = TABLES[recipe.name]
    assert set(zip(table.input_tokens, table.output_tokens, strict=True)) <= raw


def test_the_raw_files_give_the_shipped_tables_again() -> None:
    recipe = next(recipe for recipe in RECIPES if recipe.name == "azure-code")
    raw_pairs(recipe)
    again = build_table(recipe, RAW_DIR)
    shipped = TABLES["azure-code"]
    assert again.input_tokens == shipped.input_tokens
    assert again.output_tokens == shipped.output_tokens
    assert again.arrivals is not None
    assert shipped.arrivals is not None
    assert again.arrivals.window_rates == pytest.approx(shipped.arrivals.window_rates)


def test_every_table_names_its_source_and_licence() -> None:
    assert all(table.source and table.licence and table.tokens for table in TABLES.values())


def test_stand_ins_keep_a_strong_dependence_better_than_a_random_sample() -> None:
    random = np.random.default_rng(1)
    inputs = random.integers(1, 10_000, 20_000)
    outputs = inputs // 10 + random.integers(1, 100, 20_000)
    rows = stand_ins(inputs, outputs, 1000)
    assert len(set(rows.tolist())) == 1000
    # A random sample of 1,000 lies 0.03 away in the mean (Kolmogorov's distribution).
    uniform = np.sort(inputs[rows]) / 10_000
    assert ks_distance(uniform) < 0.015
    assert np.corrcoef(inputs[rows], outputs[rows])[0, 1] == pytest.approx(
        np.corrcoef(inputs, outputs)[0, 1], abs=0.002
    )


def test_an_unreadable_table_is_one_sentence() -> None:
    with pytest.raises(WorkloadError, match="the length table nonesuch of this installation"):
        load_table("nonesuch")


def test_building_without_the_raw_files_names_the_missing_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path}/sharegpt_distserve.csv: no such file\n"
