from pathlib import Path

import pytest

from planner.simulate.command import main

OPT = ("--model", "opt-13b", "--coefficients", "distserve")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one sentence."""
    assert main([*words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("distserve simulate: ")
    assert told.err.count("\n") == 1
    return told.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "0"], "a rate must be above zero requests per second, not '0'"),
        (["--rate", "-1"], "a rate must be above zero requests per second, not '-1'"),
        (["--rate", "1e-300"], "a rate must lie between 1e-06 and 1e+06 requests per second"),
        (["--rates", "1,1e300"], "a rate must lie between 1e-06 and 1e+06 requests per second"),
        (["--rates", "1,,2"], "a rate must be above zero requests per second, not ''"),
        (["--rate", "1", "--rates", "2"], "not allowed with argument --rate"),
        (["--ttft", "0"], "the TTFT target must be above zero"),
        (["--ttft", "9" * 400], "a time must not exceed 1e+09 s"),
        (["--tpot", "0ms"], "the TPOT target must be above zero"),
        (["--tpot", "-5"], "a time is written as 200ms or 2s"),
        (["--target", "90"], "the attainment target must lie between 0 and 1, not 90"),
        (["--target", "most"], "'most' is no number"),
        (["--num-requests", "0"], "--num-requests: must be at least 1, not 0"),
        (["--num-requests", "50"], "a run needs at least 100 requests"),
        (["--num-requests", "999999999999"], "--num-requests: must be at most 10000000"),
        (["--num-requests", "many"], "must be a whole number, not 'many'"),
        (["--workload", "poems"], "unknown workload 'poems'"),
        (["--workload", "none.csv"], "none.csv: no such file"),
        (["--workload", "azure-code", "--max-total-tokens", "3"], "no request of azure-code"),
        (["--arrivals", "gamma:0"], "gamma needs a CV between 0.01 and 100"),
        (["--length-scale", "0"], "the length scale must be above zero"),
        (["--length-scale", "1e308"], "the length scale must be at most 1e+09"),
        (["--prefill", "999999999"], "--prefill: must be at most 4096, not 999999999"),
        (["--prefill-tokens", "999999999999"], "--prefill-tokens: must be at most 1000000"),
        (["--prefill", "1"], "nobody decodes"),
        (["--decode", "2"], "nobody prefills"),
        (["--prefill", "0", "--decode", "0"], "nobody prefills"),
        (["--decode", "-1"], "--decode: must be at least 0, not -1"),
        (["--mixed-tp", "2"], "--mixed-tp without mixed instances"),
        (["--chunk-tokens", "512"], "--chunk-tokens is for mixed instances"),
        (["--mixed-rules", "vllm"], "--mixed-rules vllm needs --mixed and --chunk-tokens"),
        (["--mixed", "1", "--mixed-rules", "theirs"], "invalid choice: 'theirs'"),
        (["--decode-tp", "3"], "40 attention heads do not divide by 3"),
        (["--prefill-pp", "41"], "there are only 40 layers for 41 stages"),
        (["--decode-tp", "8"], "profile distserve has no tp 8 for opt-13b"),
        (["--block-size", "1000000000"], "--block-size: must be at most 65536, not 1000000000"),
        (["--kv-tokens", "8"], "smaller than one block of 16 tokens"),
        (["--kv-tokens", "64", "--kv-cache-gib", "1"], "not allowed with argument"),
        (["--kv-cache-gib", "0"], "--kv-cache-gib must be above zero"),
        (["--kv-cache-gib", "1e308"], "--kv-cache-gib must be at most 1e+06"),
        (["--weight-bits", "4"], "the coefficients distserve are of 16-bit weights and KV"),
        (["--kv-bits", "0"], "--kv-bits must lie between 1 and 64"),
        (["--speculate", "four"], "--speculate takes G:ACCEPTANCE[:MODEL] such as 4:0.7"),
        (["--speculate", "4:1"], "accepts with a probability from 0 to below 1"),
        (["--speculate", "4:0.7", "--mixed", "1"], "mixed ones do not speculate"),
        (["--speculate", "4:0.7:gpt-9"], "unknown model 'gpt-9'"),
        (["--overhead", "coffee=1s"], "NAME one of arrival, handover, token"),
        (["--overhead", "token"], "a time is written as 200ms or 2s, not ''"),
        (["--overheads", "none.json"], "cannot read none.json: No such file"),
        (["--slo-scales", "1"], "--slo-scales needs a --rate"),
        (["--slo-scales", "0", "--rate", "1"], "an SLO scale must be above zero, not '0'"),
        (["--slo-scales", "1", "--rates", "1,2"], "--slo-scales looks at one rate"),
        (["--goodput", "--rate", "1"], "--goodput finds its rates itself"),
        (["--save", "a.csv", "--rates", "1,2"], "--save holds one run"),
        (["--plot", "a.png"], "must end with .svg"),
        (["--profile", "none.json"], "cannot read the profile none.json"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_two(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *OPT, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: --model"),
        (["--model", "llama-9"], "unknown model 'llama-9'"),
        (["--model", "opt-13b"], "nothing is known of opt-13b at tp 1, pp 1"),
        (["--model", "opt-13b", "--device", "abacus"], "unknown device 'abacus'"),
        (["--model", "opt-13b", "--coefficients", "best"], "invalid choice: 'best'"),
        (
            ["--model", "opt-66b", "--device", "a100"],
            "weights take 122.4 GiB of the 74.4 GiB that may be used",
        ),
        (
            ["--model", "llama-2-7b", "--device", "rtx-4090", "--speculate", "2:0.5:llama-3-8b"],
            "and its draft model do not fit",
        ),
    ],
)
def test_what_is_not_known_or_does_not_fit_is_told_with_the_reason(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *words)


def test_a_csv_with_holes_names_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "holes.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,100,20\n1,,20\n")
    told = refused(capsys, *OPT, "--workload", str(trace))
    assert "holes.csv, line 3: input_tokens is empty" in told


def test_what_needs_a_rate_is_refused_where_all_requests_arrive_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "burst.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "5,100,20\n" * 3)
    told = refused(capsys, *OPT, "--workload", str(trace), "--slo-scales", "1")
    assert "all requests arrive at once" in told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"coffee_s": 1}', "no overhead 'coffee_s'"),
        ('{"token_s": -1}', "token_s must lie between 0 and 1e+09, not -1"),
        ('{"token_s": 1e308}', "token_s must lie between 0 and 1e+09, not 1e+308"),
        ('{"decode_scale": 0}', "decode_scale must lie between 0.001 and 1000, not 0"),
        ('{"prefill_scale": 1e308}', "prefill_scale must lie between 0.001 and 1000"),
        ('{"token_s": "soon"}', "Expected `float`, got `str`"),
        ("[]", "Expected `object`, got `array`"),
        ("{token_s: 1}", "line 1 column 2"),
    ],
)
def test_a_file_of_overheads_is_checked_field_by_field(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "overheads.json"
    file.write_text(text)
    told = refused(capsys, *OPT, "--overheads", str(file))
    assert "overheads.json" in told
    assert message in told


def test_a_figure_or_a_run_that_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = tmp_path / "missing"
    few = (*OPT, "--rate", "1", "--num-requests", "100")
    assert "cannot be written" in refused(capsys, *few, "--save", str(nowhere / "a.csv"))
    assert "cannot be written" in refused(capsys, *few, "--plot", str(nowhere / "a.svg"))
