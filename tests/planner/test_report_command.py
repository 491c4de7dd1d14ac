from pathlib import Path
from typing import Any

import orjson
import pytest

from planner.__main__ import main as planner_main
from planner.report import arguments, drawing
from planner.report.chapters import CHAPTERS
from planner.report.command import main
from planner.report.contents import Drawing, Line, Origin, Panel


def pages(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["paper", *words, "--json"]) == 0
    content: list[dict[str, Any]] = orjson.loads(capsys.readouterr().out)
    return content


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 2
    told = capsys.readouterr()
    assert not told.out
    assert told.err.count("\n") == 1
    return told.err


def test_the_planner_knows_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert planner_main(["report", "paper", "--only", "fig3"]) == 0
    assert "Figure 3: throughput over the batch" in capsys.readouterr().out


def test_pages_come_in_the_papers_order_whatever_order_they_are_asked_in(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [page["name"] for page in pages(capsys, "--only", "fig5, fig2")]
    assert names == ["fig2", "fig5"]


def test_every_page_says_where_its_values_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    for page in pages(capsys, "--only", "fig2,fig3,fig4,fig5,table2", "--seeds", "2"):
        assert page["sources"], page["name"]
        assert page["tables"], page["name"]
        for table in page["tables"]:
            assert all(len(row) == len(table["columns"]) for row in table["rows"])


def test_a_run_says_its_number_of_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    (page,) = pages(capsys, "--only", "table2", "--seeds", "2")
    assert any("2 seeds" in source for source in page["sources"])


def test_out_gets_a_drawing_and_the_figures_of_each_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "report"
    assert main(["paper", "--only", "fig2,fig3", "--out", str(out)]) == 0
    assert sorted(p.name for p in out.iterdir()) == [
        "fig2.json", "fig2.svg", "fig3.json", "fig3.svg"
    ]  # fmt: skip
    svg = (out / "fig3.svg").read_text(encoding="utf-8")
    assert "1024 tokens, published coefficients" in svg
    assert orjson.loads((out / "fig3.json").read_bytes())["name"] == "fig3"


def test_the_same_page_makes_the_same_bytes(tmp_path: Path) -> None:
    line = Line("vLLM", Origin.MEASURED, (1.0, 2.0), (90.0, 80.0))
    simulated = Line("vLLM", Origin.SIMULATED, (1.0, 2.0), (91.0, 82.0), (88.0, 70.0), (94.0, 95.0))
    panel = Panel("one", "Requests/s", "Attainment", (line, simulated), 90.0, 102.0)
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        drawing.draw(folder, Drawing("same", (panel,)))
    first, second = ((folder / "same.svg").read_bytes() for folder in folders)
    assert first == second
    assert b"vLLM, measured by the authors" in first
    assert b"vLLM, simulated" in first


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["paper", "--only", "fig8,fig77"], "--only: there is no page 'fig77': give fig1"),
        (["paper", "--seeds", "1"], "--seeds: a range needs at least 2 runs, not 1"),
        (["paper", "--target", "95"], "--target"),
        (["thesis"], "thesis"),
        ([], "what"),
    ],
)
def test_wrong_words_are_one_sentence(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refusal(capsys, *words)


def test_a_directory_that_cannot_be_made_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    path = tmp_path / "file" / "report"
    assert str(path) in refusal(capsys, "paper", "--only", "fig3", "--out", str(path))


def test_a_file_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fig3.json").mkdir()
    told = refusal(capsys, "paper", "--only", "fig3", "--out", str(tmp_path))
    assert "fig3.json cannot be written: Is a directory" in told


def test_help_names_every_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments.read_plan(["--help"], CHAPTERS)
    assert ended.value.code == 0
    text = "".join(capsys.readouterr().out.split())
    assert ",".join(CHAPTERS) in text
