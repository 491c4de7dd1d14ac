"""`distserve plan` from end to end, in process, on clusters small enough for seconds."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pytest

from ipc.placement_file import FileRange, read_placement
from ipc.vocabulary import Segment
from planner.plan.command import main
from planner.workload.catalogue import parse_workload
from planner.workload.requests import Requests
from planner.workload.trace_file import write_trace

LOAD = "synthetic:512,16"
QUICK = ["--coefficients", "distserve-raw", "--ttft", "250ms", "--jobs", "1", "--quick"]
SMALL = ["--model", "opt-13b", "--workload", LOAD, "--max-degree", "1", *QUICK]


class Answer(NamedTuple):
    """What a run printed and wrote."""

    report: Any
    placement: Path
    figures: Path


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    folder = tmp_path_factory.mktemp("plan")
    placement, figures, printed = (folder / n for n in ("placement.json", "figures", "out.json"))
    with pytest.MonkeyPatch.context() as patch, printed.open("w") as stdout:
        patch.setattr("sys.stdout", stdout)
        argv = ["--nodes", "alpha", "--devices-per-node", "2", "--json", "--out", str(placement)]
        argv += ["--device-hour-price", "3.6", "--plot", str(figures)]
        assert main([*SMALL, *argv]) == 0
    return Answer(orjson.loads(printed.read_bytes()), placement, figures)


def test_two_devices_get_one_instance_of_each_phase(answer: Answer) -> None:
    instances = read_placement(answer.placement).placement.instances
    assert [(instance.name, *instance.segments) for instance in instances] == [
        ("prefill-0", Segment("alpha", (0,))),
        ("decode-0", Segment("alpha", (1,))),
    ]


def test_the_file_says_where_it_comes_from(answer: Answer) -> None:
    file = read_placement(answer.placement)
    assert file.servable
    assert file.origin is not None
    assert file.origin.load.workload == LOAD
    assert file.origin.load.mean_input_tokens == 512
    assert file.origin.load.gap_cv == pytest.approx(1, abs=0.1)
    found = answer.report["searches"][0]["recommended"]["rate"]
    assert file.origin.goodput == FileRange(found["value"], found["low"], found["high"])


def test_each_prefill_instance_is_told_its_own_saturation_length(answer: Answer) -> None:
    prefill, decode = read_placement(answer.placement).instances
    assert prefill.prefill_tokens is not None
    assert 256 <= prefill.prefill_tokens <= 2048  # about 512 on an A100 (paper section 3.1)
    assert decode.prefill_tokens is None


def test_the_report_holds_placement_search_and_cost(answer: Answer) -> None:
    report = answer.report
    assert report["placement"]["instances"][0]["stages"][0]["node"] == "alpha"
    found = report["searches"][0]
    assert found["asked"]["num_nodes"] == 1
    per_s = found["recommended"]["rate"]["value"]
    assert found["cost"]["per_hour"] == pytest.approx(2 * 3.6)
    assert found["cost"]["per_thousand_requests"] == pytest.approx(7.2 / 3.6 / per_s)
    assert report["recommendation"].startswith("Recommended: 1 prefill (tp 1, pp 1) + 1 decode")
    assert "were not looked at (--quick)" in report["recommendation"]


def test_a_folder_gets_every_figure(answer: Answer) -> None:
    names = {path.name for path in answer.figures.iterdir()}
    wanted = ("attainment-rate", "attainment-scale", "stages", "ttft", "tpot", "candidates")
    assert names == {f"{name}.svg" for name in wanted}
    for path in answer.figures.iterdir():
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_people_get_a_paragraph_a_table_and_the_devices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "--devices-per-node", "2"]) == 0
    output = capsys.readouterr()
    for words in ("Recommended: ", "prefill-0  node-0: 0", "best  1 prefill 1x1", "searched in"):
        assert words in output.out
    assert "prefill-0" not in output.err


def test_a_placement_across_nodes_says_that_it_cannot_be_served_yet(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Two nodes of one device each: with low affinity no pair has a node, and that is told too."""
    out = tmp_path / "placement.json"
    argv = ["--nodes", "2", "--devices-per-node", "1", "--affinity", "both", "--out", str(out)]
    assert main([*SMALL, *argv]) == 0
    told = capsys.readouterr().out
    assert "It cannot be served yet" in told
    assert "prefill-0 stage 0 (node-0) and decode-0 stage 0 (node-1)" in told
    assert "low affinity: " in told
    assert not read_placement(out).servable


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "opt-175b", "--device", "a100", "--ttft", "4s"], "opt-175b fits nowhere"),
        (["--model", "opt-13b", "--rate", "1000"], "carries 1000 requests/s"),
        (["--model", "opt-13b", "--ttft", "1ms"], "opt-13b"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    limits = ["--devices-per-node", "2", "--max-degree", "1", "--workload", LOAD]
    coefficients = [] if "--device" in argv else ["--coefficients", "distserve-raw"]
    assert main([*coefficients, "--ttft", "250ms", *argv, *limits, "--jobs", "1", "--quick"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    told = output.err.strip().splitlines()
    assert len(told) == 1
    assert told[0].startswith("distserve plan: ")
    assert words in told[0]


def log_of(path: Path, rate: float) -> Path:
    """Forty minutes of the planned load at that rate."""
    requests = parse_workload(LOAD).requests(int(2400 * rate) + 20, rate, 3)
    kept = requests.arrival_s < 2401
    write_trace(path, Requests(*(np.asarray(c)[kept] for c in columns(requests))))
    return path


def columns(requests: Requests) -> tuple[Any, Any, Any]:
    return requests.arrival_s, requests.input_tokens, requests.output_tokens


def test_a_load_as_planned_keeps_its_placement(
    answer: Answer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = read_placement(answer.placement)
    assert file.origin is not None
    log = log_of(tmp_path / "log.csv", 0.95 * file.origin.goodput.value)
    argv = ["--nodes", "2", "--devices-per-node", "2", "--replan", str(log)]
    assert main([*SMALL, *argv, "--current", str(answer.placement)]) == 0
    assert capsys.readouterr().out.startswith("keep: no shift")


def test_a_load_that_grew_beyond_it_is_planned_anew(
    answer: Answer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = read_placement(answer.placement)
    assert file.origin is not None
    log = log_of(tmp_path / "log.csv", 1.6 * file.origin.goodput.value)
    out = tmp_path / "next.json"
    argv = ["--nodes", "2", "--devices-per-node", "2", "--replan", str(log), "--json"]
    argv += ["--current", str(answer.placement), "--out", str(out)]
    assert main([*SMALL, *argv]) == 0
    report = orjson.loads(capsys.readouterr().out)
    assert report["verdict"]["action"] == "switch"
    assert report["verdict"]["proposal"]["num_devices"] == 4
    segments = [s for i in read_placement(out).placement.instances for s in i.segments]
    assert sum(len(segment.devices) for segment in segments) == 4
