"""`distserve bench --simulate` and `--validate`: words, exit codes, files; a scripted service."""

import re
import shlex
from pathlib import Path
from typing import Any

import orjson
import pytest

from planner.bench.arguments import read_plan
from planner.bench.command import main
from planner.bench.words import EPILOG
from planner.simulate.command import main as simulate
from planner.simulator.service import MixedRules
from tests.planner.openai_service import (
    DONE,
    STREAM,
    Answerer,
    Plan,
    event,
    good,
    planned,
    served,
    text,
    usage,
    whole,
)
from tests.planner.profile_tables import profile_table, written

OPT = "--model opt-13b --coefficients distserve-raw"
LOAD = ["--workload", "synthetic:8,3", "--token-ids", "10-90"]
FEW = ["--num-requests", "20", "--calibrate-requests", "60", "--calibrate-rate", "300"]
TIMING = {
    "prefill_queue_s": 0.0,
    "prefill_s": 2e-4,
    "transfer_s": 1e-5,
    "decode_queue_s": 1e-5,
    "decode_s": 1e-4,
}


def staged(body: dict[str, Any]) -> Plan:
    """A good answer at 2 ms a token, that tells its stages."""
    last = text(" z", finish_reason="length")
    told = event(choices=[], timing=TIMING)
    end = last + told + usage(len(body["prompt"]), 3) + DONE
    return [STREAM, text(" a"), 0.002, text(" b"), 0.002, end]


def bench(answerer: Answerer, folder: Path, *words: str) -> int:
    with served(answerer) as service:
        return main([service.url, *LOAD, "--save", str(folder), *words])


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    content: dict[str, Any] = orjson.loads(capsys.readouterr().out)
    return content


def test_the_same_requests_are_simulated_and_set_beside_the_live_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "both.svg"
    words = ["--rates", "100,200", "--simulate", OPT, "--plot", str(figure), "--json"]
    assert bench(good, tmp_path, "--num-requests", "20", *words) == 0
    content = report(capsys)
    assert content["simulate"] == OPT
    for run in content["runs"]:
        found, live = run["comparison"], run["summary"]["attainment"]
        assert found["live"] == live
        assert found["difference"]["value"] == pytest.approx(
            found["simulated"]["value"] - live["value"]
        )
        assert found["latencies"]["TTFT P50"]["simulated_s"] > 0.005
    assert content["simulated_goodput"] is not None
    assert {"measured", "simulated"} <= set(re.findall(r"\w+", figure.read_text()))


def test_one_run_is_compared_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "scale.svg"
    words = ["--rate", "100", "--simulate", OPT, "--plot", str(figure)]
    assert bench(good, tmp_path, "--num-requests", "20", *words) == 0
    told = capsys.readouterr().out
    assert "simulated beside live; latencies in ms" in told
    assert re.search(r"at 100/s: simulated less live [+-][\d.]+ points \(95 %: -", told)
    assert "SLO scale" in figure.read_text()
    assert ">simulated<" in figure.read_text()


def test_longer_requests_than_the_deployment_takes_are_not_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--workload", "sharegpt", "--rate", "100", "--num-requests", "20", "--json"]
    small = f"{OPT} --kv-tokens 64"
    with served() as service:
        given = [service.url, *words, "--save", str(tmp_path), "--simulate", small]
        assert main(given) == 0
    assert all(len(b["prompt"]) + b["max_tokens"] <= 64 for b in service.replayed)
    assert (
        "are longer than 64 tokens (the smallest KV pool) and were left out"
        in (report(capsys)["notes"][0])
    )


def test_a_validation_calibrates_tests_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--validate", "--rates", "200,300", "--repeat", "2", "--simulate", OPT, *FEW]
    tests = ["--test-workload", "synthetic:8,3", "--test-workload", "synthetic:20,3"]
    assert bench(staged, tmp_path, *words, *tests, "--json") == 0
    content = report(capsys)
    assert content["calibration"]["num_requests"] == 60
    assert content["calibration"]["prefill_scale"] < 1.0
    assert [(t["workload"], t["rate"]) for t in content["trials"]] == [
        (f"synthetic:{n},3", rate) for n in (8, 20) for rate in (200, 300)
    ]
    for trial in content["trials"]:
        assert len(trial["runs"]) == 2
        assert trial["comparison"]["replay_spread"] == 0.0
        assert trial["verdict"]["agrees"] is not bool(trial["verdict"]["misses"])
    assert len(list(tmp_path.glob("*.csv"))) == 9
    figures = orjson.loads((tmp_path / "calibration.json").read_bytes())
    assert figures["prefill_scale"] == content["calibration"]["prefill_scale"]
    few = ["--rate", "1", "--num-requests", "100", "--json"]
    assert simulate([*shlex.split(OPT), "--overheads", content["calibration_file"], *few]) == 0


def test_a_validation_that_does_not_agree_is_a_report_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "both.svg"
    words = ["--validate", "--rate", "200", "--simulate", OPT, *FEW, "--plot", str(figure)]
    # Calibrated on 2 ms a token; the answers of the test come at once.
    calibrating = [staged({"prompt": [1] * 8})] * 60
    assert bench(planned(*calibrating), tmp_path, *words) == 0
    told = capsys.readouterr().out
    assert "calibrated on 60 requests: prefill steps take 0." in told
    assert re.search(r"at 200/s: does not agree: .*TPOT P50", told)
    assert "0 of 1 test traces agree" in told
    assert "synthetic:8,3, simulated" in figure.read_text()


def test_a_service_that_fails_is_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = whole("429 Too Many Requests", {"error": {"message": "full"}})
    words = ["--validate", "--rate", "200", "--simulate", OPT, *FEW]
    assert bench(planned(*[full] * 60), tmp_path, *words) == 1
    assert "none of the 60 requests at 300 per second was answered" in capsys.readouterr().err


def test_a_service_that_tells_no_stages_cannot_be_validated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--validate", "--rate", "200", "--simulate", OPT, *FEW]
    assert bench(good, tmp_path, *words) == 2
    assert "does not tell them" in capsys.readouterr().err


VALIDATE = ["--validate", "--rate", "1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--simulate", "--model llama-9 --device a100"], "--simulate: unknown model 'llama-9'"),
        (["--simulate", "--model=opt-13b"], "--simulate: nothing is known of opt-13b"),
        (["--simulate", "opt-13b"], "--simulate: the following arguments are required: --model"),
        (["--simulate", f"{OPT} --rate 1"], "unrecognized arguments: --rate 1"),
        (["--simulate", f"{OPT} '"], "cannot be split into words: No closing quotation"),
        (["--simulate"], "--simulate: expected one argument"),
        (
            ["--simulate", f"{OPT} --kv-tokens 16", "--workload", "longbench"],
            "no request of longbench",
        ),
        (VALIDATE, "--validate needs --simulate"),
        (["--validate", "--simulate", OPT], "--validate needs --rates"),
        ([*VALIDATE, "--simulate", OPT, "--sweep"], "--validate tests at --rates"),
        (
            [*VALIDATE, "--simulate", OPT, "--calibrate-requests", "20"],
            "calibration needs 50 requests at least, not 20",
        ),
        ([*VALIDATE, "--simulate", OPT, "--test-workload", "poems"], "unknown workload 'poems'"),
        ([*VALIDATE, "--simulate", OPT, "--repeat", "0"], "--repeat: must be at least 1"),
        (["--calibrate-rate", "1"], "--calibrate-rate is for --validate"),
        (["--test-workload", "sharegpt"], "--test-workload is for --validate"),
        (["--knee"], "--knee is for --validate"),
    ],
)
def test_wrong_input_is_one_sentence_before_anything_is_sent(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["http://127.0.0.1:9", "--save", str(tmp_path), *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("distserve bench: ")
    assert message in told
    assert told.count("\n") == 1


def test_the_options_of_a_deployment_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["http://127.0.0.1:9", "--simulate", "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "--mixed-rules" in told
    assert "--workload" not in told


def test_every_example_of_the_help_text_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_KEY", "secret")
    (tmp_path / "my.csv").write_text("arrival_s,input_tokens,output_tokens\n0,4,2\n1,6,1\n")
    written(tmp_path, profile_table())
    commands = re.findall(r"^ +distserve bench (.*)$", EPILOG.replace("\\\n", ""), re.MULTILINE)
    words = [c.replace("models/smollm2", "smollm2-135m") for c in commands]
    plans = [read_plan(shlex.split(each)) for each in words]
    assert len(plans) == 7
    assert plans[5].deployed is not None
    validation = plans[6].validation
    assert validation is not None
    assert [trace.workload.name for trace in validation.tests] == ["sharegpt", "longbench"]
    assert [trace.num_requests for trace in validation.tests] == [500, 500]
    assert (validation.rate, validation.num_replays, validation.wants_knee) == (1.0, 2, True)
    assert validation.calibration.num_requests == 200


def test_a_deployment_may_follow_vllms_rules() -> None:
    mixed = f"{OPT} --mixed 1 --chunk-tokens 2048 --mixed-rules vllm"
    plan = read_plan(["http://127.0.0.1:9", "--rate", "1", "--simulate", mixed])
    assert plan.deployed is not None
    assert plan.deployed.built.service.instances[0].rules is MixedRules.VLLM
