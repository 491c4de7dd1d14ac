"""`distserve plan` and bad input: one sentence on stderr that names the option, exit code 2."""

from pathlib import Path

import pytest

from ipc.placement_file import FileNode, file_of, write_placement
from ipc.vocabulary import InstanceSpec, Parallelism, Role, Segment
from planner.plan.command import main

KNOWN = ["--model", "opt-13b", "--coefficients", "distserve-raw", "--jobs", "1"]


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that the command ends with."""
    assert main([*KNOWN, *argv]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    line = output.err.strip().splitlines()[-1]
    assert line.startswith("distserve plan: ")
    return line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--nodes", "0"], "a cluster needs at least one node, not 0"),
        (["--nodes", "99999999999"], "--nodes must be at most 10000, not 99999999999"),
        (["--nodes", "1.5"], "--nodes takes a number or names such as alpha,beta, not '1.5'"),
        (["--nodes", "nan"], "--nodes takes a number or names such as alpha,beta, not 'nan'"),
        (["--devices-per-node", "100000"], "--devices-per-node: must be at most 1024"),
        (["--devices-per-node", "0"], "a node needs at least one device, not 0"),
        (["--nodes", "a,,b"], "--nodes takes a number or names such as alpha,beta"),
        (["--nodes", "a,a"], "each node needs a name of its own"),
        (["--device", "z100"], "unknown device 'z100'"),
        (["--objective", "devices"], "--objective devices needs the --rate"),
        (["--rates", "1,2"], "--rates is for `distserve simulate`"),
        (["--num-requests", "100"], "--num-requests is for `distserve simulate`"),
        (["--rate", "0"], "a rate must be above zero"),
        (["--device-hour-price", "-1"], "--device-hour-price must be above zero"),
        (["--device-hour-price", "1e308"], "--device-hour-price must be at most 1e+09"),
        (["--plot", "figure.png"], "must be a folder or end with .svg"),
        (["--replan", "log.csv"], "--replan LOG.csv and --current placement.json go together"),
        (["--affinity", "middle"], "argument --affinity: invalid choice: 'middle'"),
        (["--ttft", "0"], "the TTFT target must be above zero"),
        (["--target", "90"], "the attainment target must lie between 0 and 1"),
        (["--max-total-tokens", "3"], "no request of sharegpt fits under the limit of 3 tokens"),
        (["--jobs", "0"], "argument --jobs: must be at least 1"),
        (["--jobs", "999999999999"], "argument --jobs: must be at most 256"),
        (["--out", "/nowhere/placement.json"], "--out: there is no folder /nowhere"),
        (["--out", "/"], "--out: / is a folder"),
        (["--out"], "argument --out: expected one argument"),
    ],
)
def test_a_wrong_option_is_named(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    assert words in told(capsys, *argv)


def test_without_a_device_nobody_knows_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "opt-13b"]) == 2
    assert "give --device" in capsys.readouterr().err


def test_an_unknown_model_is_answered_with_close_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "opt-13", "--device", "a100"]) == 2
    assert "did you mean opt-13b" in capsys.readouterr().err


def test_a_log_or_a_placement_that_is_not_there_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = str(tmp_path / "none.json")
    line = told(capsys, "--replan", str(tmp_path / "log.csv"), "--current", missing)
    assert "none.json cannot be read" in line


def test_a_placement_without_its_origin_cannot_be_replanned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    current, log = tmp_path / "current.json", tmp_path / "log.csv"
    spec = InstanceSpec("mixed-0", Role.MIXED, Parallelism(), (Segment("a", (0,)),))
    write_placement(current, file_of("opt-13b", [FileNode("a", 1)], [spec]))
    rows = "".join(f"{second},100,10\n" for second in range(2000))
    log.write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    line = told(capsys, "--replan", str(log), "--current", str(current))
    assert "has no origin" in line
