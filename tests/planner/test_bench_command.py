from pathlib import Path
from typing import Any

import orjson
import pytest

from planner.bench.command import main
from planner.bench.run_file import read_run
from tests.planner.openai_service import good, served, whole

FAST = ["--ttft", "30s", "--tpot", "30s", "--num-requests", "5", "--token-ids", "10-90"]
SMALL = ["--workload", "synthetic:8,3"]


def bench(url: str, folder: Path, *words: str) -> int:
    return main([url, *FAST, *SMALL, "--save", str(folder), *words])


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    content: dict[str, Any] = orjson.loads(capsys.readouterr().out)
    return content


def test_a_run_is_reported_and_its_trace_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served() as service:
        assert bench(service.url, tmp_path, "--rate", "200") == 0
    told = capsys.readouterr().out
    assert "5 requests at 200 per second, 5 answered" in told
    assert "time to first token" in told
    assert "100.0%" in told
    (trace,) = tmp_path.glob("*-rate-200.csv")
    assert read_run(trace).timeline.requests.output_tokens.tolist() == [3] * 5


def test_json_is_the_whole_of_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served() as service:
        assert bench(service.url, tmp_path, "--rates", "400,200", "--json") == 0
    content = report(capsys)
    assert [run["rate"] for run in content["runs"]] == pytest.approx([200, 400])
    assert content["runs"][0]["summary"]["attainment"]["value"] == 1.0
    assert content["goodput"]["rate"] == pytest.approx(400)
    assert content["goodput"]["is_bounded"] is False
    assert all(Path(run["trace"]).exists() for run in content["runs"])


def test_rates_make_a_table_and_a_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "curve.svg"
    with served() as service:
        words = ("--rates", "200,400", "--plot", str(figure))
        assert bench(service.url, tmp_path, *words) == 0
    told = capsys.readouterr().out
    assert "goodput: at least 400 requests per second at 90% attainment" in " ".join(told.split())
    assert "Rate (requests per second)" in figure.read_text()
    for heading in ("both met", "TTFT P90", "tokens/s", "failed"):  # whole, on 80 columns
        assert heading in told
    assert "\N{HORIZONTAL ELLIPSIS}" not in told


def test_a_sweep_doubles_as_long_as_all_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served() as service:
        words = ("--sweep", "--rate", "200", "--max-runs", "3", "--json")
        assert bench(service.url, tmp_path, *words) == 0
    assert [run["rate"] for run in report(capsys)["runs"]] == pytest.approx([200, 400, 800])


def test_a_trace_can_be_replayed_at_its_own_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = tmp_path / "my.csv"
    workload.write_text("arrival_s,input_tokens,output_tokens\n7,4,2\n7.05,6,1\n")
    with served() as service:
        given = [service.url, "--workload", str(workload), "--save", str(tmp_path), "--json"]
        assert main(given) == 0
    (run,) = report(capsys)["runs"]
    assert run["summary"]["num_requests"] == 2
    assert sorted(len(body["prompt"]) for body in service.replayed) == [4, 6]


def test_one_run_is_plotted_over_the_slo_scale(tmp_path: Path) -> None:
    figure = tmp_path / "scale.svg"
    with served() as service:
        assert bench(service.url, tmp_path, "--rate", "200", "--plot", str(figure)) == 0
    assert "SLO scale" in figure.read_text()


def test_a_service_that_answers_nothing_is_a_failure_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[object] = []

    def only_the_first(body: dict[str, Any]) -> Any:
        seen.append(body)
        full = whole("429 Too Many Requests", {"error": {"message": "full"}})
        return good(body) if len(seen) == 1 else full

    with served(only_the_first) as service:
        assert bench(service.url, tmp_path, "--rate", "200") == 1
    assert "5 failed: http_429, such as: HTTP 429: full" in capsys.readouterr().out


def test_nobody_listening_exits_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served() as service:
        url = service.url
    assert bench(url, tmp_path, "--rate", "1") == 1
    assert f"distserve bench: {url}/v1 cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "0"], "a rate must be above zero requests per second, not '0'"),
        (["--rates", "1,x"], "a rate must be above zero requests per second, not 'x'"),
        (["--rates", "1", "--sweep"], "--sweep finds its rates itself"),
        (["--rate", "1", "--rates", "2"], "not allowed with argument --rate"),
        (["--sweep", "--max-runs", "0"], "--max-runs: must be at least 1"),
        (["--num-requests", "0"], "--num-requests: must be at least 1, not 0"),
        (["--ttft", "0"], "the TTFT target must be above zero"),
        (["--ttft", "soon"], "a time is written as 200ms or 2s, not 'soon'"),
        (["--target", "90"], "the attainment target must lie between 0 and 1"),
        (["--workload", "poems"], "unknown workload 'poems'"),
        (["--workload", "none.csv"], "none.csv: no such file"),
        (["--arrivals", "never"], "unknown arrivals 'never'"),
        (["--token-ids", "7"], "--token-ids must be a range such as 1000-30000, not 7"),
        (["--api-key-env", "NO_SUCH_KEY"], "the environment holds no NO_SUCH_KEY"),
        (["--plot", "a.png"], "must end with .svg"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_two(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["http://127.0.0.1:9", "--save", str(tmp_path), *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("distserve bench: ")
    assert message in told
    assert told.count("\n") == 1


def test_help_teaches_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert told.count("    distserve bench http") == 7
    assert "1 the service failed; 2 wrong input" in told


def test_a_key_of_two_lines_is_refused_and_not_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "secret\nX-Other: 1")
    assert main(["http://127.0.0.1:9", "--save", str(tmp_path), "--api-key-env", "A_KEY"]) == 2
    told = capsys.readouterr().err
    assert "what A_KEY holds is no key" in told
    assert "secret" not in told
