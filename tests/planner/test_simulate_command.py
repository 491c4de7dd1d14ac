import os
import re
import shlex
import signal
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest

from planner.__main__ import main as planner_main
from planner.bench.run_file import read_run
from planner.simulate.command import main
from planner.simulate.words import EPILOG
from planner.workload.trace_file import read_trace

OPT = ("--model", "opt-13b", "--coefficients", "distserve-raw")
PAPER = (*OPT, "--prefill", "1", "--prefill-tp", "2", "--decode", "1", "--ttft", "250ms")
TRACE = "arrival_s,input_tokens,output_tokens\n0,100,20\n0.5,1500,10\n0.6,200,1\n2,3000,5\n"


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    content: dict[str, Any] = orjson.loads(capsys.readouterr().out)
    return content


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 0
    return capsys.readouterr().out


def epilog_commands() -> list[list[str]]:
    """The examples of the help text, as a shell would split them."""
    text = EPILOG.replace("\\\n", "")
    found = re.findall(r"^ +distserve simulate (.*)$", text, flags=re.MULTILINE)
    return [shlex.split(words) for words in found]


def test_the_quick_start_of_the_help_text_finds_the_goodput(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quick_start = epilog_commands()[0]
    text = told(capsys, *quick_start, "--num-requests", "2000")
    assert "opt-13b on 3 devices, sharegpt, up to 2048 tokens a request" in text
    assert "1 prefill (tp 2, pp 1)" in text
    assert "step times fitted" in text
    found = re.search(r"goodput: ([\d.]+) requests per second .* ([\d.]+) per device", text)
    assert found is not None
    assert float(found[1]) == pytest.approx(3 * float(found[2]), rel=0.01)
    assert "limited by TPOT" in text


def test_every_example_of_the_help_text_is_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    few = ("--num-requests", "100", "--json")
    commands = [words for words in epilog_commands()[1:] if "--profile" not in words]
    assert [main([*words, *few]) for words in commands] == [0] * 3
    assert len(read_run(tmp_path / "run.csv")) == 100
    assert (tmp_path / "curve.svg").exists()


def test_a_goodput_search_reports_interval_devices_and_bounds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = report(capsys, *PAPER, "--num-requests", "1000")
    rate, per_device = found["goodput"]["rate"], found["goodput"]["per_device"]
    assert rate["low"] <= rate["value"] <= rate["high"]
    assert per_device["value"] == pytest.approx(rate["value"] / 3)
    # So short a run may have had luck: its estimate alone need not lie below the cap.
    assert 0.5 * found["bounds"]["rate_cap"] < rate["low"] < found["bounds"]["rate_cap"]


def test_a_goodput_of_zero_says_which_floor_is_above_the_target(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = told(capsys, *OPT, "--ttft", "20ms", "--num-requests", "500")
    assert "goodput: none at 90% attainment; limited by TTFT" in text
    assert re.search(r"TTFT: within [\d.]+ ms at best for 90% of the requests", text)


def test_one_rate_is_reported_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, *PAPER, "--rate", "2")
    for part in ("time to first token", "stage: prefill queue", "stage: decode", "TPOT <= 100 ms",
                 "meets the target of 90%", "prefill busy", "preemptions", "P99"):  # fmt: skip
        assert part in text


def test_how_busy_instances_are_follows_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--arrivals", "fixed", "--num-requests", "500")
    slow, fast = (report(capsys, *PAPER, "--rate", rate, *few)["runs"][0] for rate in ("1", "2"))
    busy = [run["use"]["prefill_busy"] for run in (slow, fast)]
    assert busy[1] == pytest.approx(2 * busy[0], rel=0.1)
    mean_s = slow["latencies"]["stages_s"]["decode"]["mean"]
    assert slow["use"]["sequences"] == pytest.approx(mean_s, rel=1e-6)


def test_a_rate_that_cannot_be_kept_up_with_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "misses the target: queues grow by" in told(capsys, *PAPER, "--rate", "20")


def test_rates_make_a_curve_and_a_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "curve.svg"
    words = ("--rates", "8,1", "--num-requests", "300", "--plot", str(figure))
    low, high = report(capsys, *PAPER, *words)["runs"]
    assert [low["rate"], high["rate"]] == pytest.approx([1, 8])
    assert low["attainment"]["value"] > high["attainment"]["value"]
    assert "Rate (requests per second)" in figure.read_text()


def test_slo_scales_at_one_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "scale.svg"
    words = ("--rate", "2", "--slo-scales", "2,0.5,1", "--plot", str(figure))
    found = report(capsys, *PAPER, *words, "--num-requests", "1000")["scales"]
    shares = [point["attainment"]["value"] for point in found["points"]]
    assert [point["scale"] for point in found["points"]] == [0.5, 1, 2]
    assert shares == sorted(shares)
    assert 0 < found["minimal_scale"]["value"] < 1
    assert "SLO scale" in figure.read_text()


def test_a_trace_is_replayed_at_its_own_times_and_what_is_too_long_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "my.csv"
    trace.write_text(TRACE)
    found = report(capsys, *OPT, "--workload", str(trace))
    assert found["runs"][0]["num_counted"] == 3
    assert any("1 of 4 requests" in note and "left out" in note for note in found["notes"])
    cut = report(capsys, *OPT, "--workload", str(trace), "--overlong", "clip")
    assert cut["runs"][0]["num_counted"] == 4


def test_a_saved_run_is_a_workload_and_gives_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "run.csv"
    words = (*PAPER, "--rate", "3", "--num-requests", "200")
    first = report(capsys, *words, "--save", str(saved))["runs"][0]
    assert len(read_trace(saved)) == 200
    again = report(capsys, *PAPER, "--workload", str(saved))["runs"][0]
    assert again["attainment"]["value"] == first["attainment"]["value"]
    ours, theirs = (run["latencies"]["ttft_s"]["p90"] for run in (first, again))
    assert ours == pytest.approx(theirs, abs=2e-6)
    assert read_run(saved).timeline.ttft_s.max() == pytest.approx(
        first["latencies"]["ttft_s"]["p99"], rel=0.5
    )


def test_the_same_seed_gives_the_same_report_and_another_one_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (*PAPER, "--rate", "3", "--num-requests", "200", "--seed")
    one, same, other = (report(capsys, *words, seed)["runs"] for seed in ("7", "7", "8"))
    assert one == same
    assert one != other


def test_json_is_the_whole_of_stdout_and_infinities_are_null(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (*OPT, "--workload", "synthetic:100,1", "--num-requests", "100", "--rate", "1")
    assert report(capsys, *words)["bounds"]["decode_cap"] is None


def test_ctrl_c_ends_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    assert main([*PAPER, "--num-requests", "64000"]) == 130
    timer.join()
    assert capsys.readouterr().err == "distserve simulate: interrupted\n"


def test_help_explains_sources_and_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for part in ("measured", "fitted", "roofline", "how to read the report", "exit codes"):
        assert part in text
    assert len(epilog_commands()) == 5


@pytest.mark.parametrize("words", [[], ["forecast"]])
def test_the_planner_without_a_command_it_knows_says_which_there_are(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert planner_main(words) == 2
    told = capsys.readouterr().err
    assert all(command in told for command in ("plan", "simulate", "bench", "report"))
