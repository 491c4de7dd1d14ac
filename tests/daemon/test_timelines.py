"""Timelines of requests, through real controllers and schedulers."""

import pytest

from daemon.text import Tokenizer
from daemon.timelines import chrome_trace
from ipc.vocabulary import Role
from tests.daemon.small_tokenizers import byte_level_json
from tests.end_to_end.town import Town, spec, tokenizer_of

DISAGGREGATED = {"p0": Role.PREFILL, "d0": Role.DECODE}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("tokenizer"), byte_level_json())


def test_an_ended_request_tells_its_five_stages_and_where_they_were(tokenizer: Tokenizer) -> None:
    town = Town(tokenizer, DISAGGREGATED)
    town.ask(spec([1, 2, 3]))
    town.settle()
    (told,) = town.controller.timelines.ended_ones()
    assert (told.state, told.num_prompt, told.num_output) == ("finished", 3, 8)
    assert [(span.stage, span.instance) for span in told.spans] == [
        ("prefill_queue", "p0"),
        ("prefill", "p0"),
        ("decode_queue", "d0"),
        ("transfer", "d0"),
        ("decode_queue", "d0"),
        ("decode", "d0"),
    ]
    ends = [span.ended_s for span in told.spans]
    assert [span.started_s for span in told.spans[1:]] == ends[:-1]
    assert ends[-1] == pytest.approx(told.ended_s, abs=1e-3)


def test_an_open_request_is_told_as_far_as_it_has_come(tokenizer: Tokenizer) -> None:
    town = Town(tokenizer, DISAGGREGATED)
    client = town.ask(spec([1, 2, 3]))
    (told,) = town.controller.timelines.open()
    assert told.state == "prefill"
    assert [(span.stage, span.ended_s) for span in told.spans] == [("prefill_queue", None)]
    client.leave()
    (told,) = town.controller.timelines.ended_ones()
    assert told.state == "aborted"
    assert town.controller.timelines.num_open == 0


def test_a_retry_is_a_second_row_of_spans(tokenizer: Tokenizer) -> None:
    town = Town(tokenizer, DISAGGREGATED)
    client = town.ask(spec([1, 2, 3], max_tokens=20))
    while len(client.tokens(0)) < 4:
        town.tick()
    town.kill("d0")
    town.build("d0")
    town.settle()
    (told,) = town.controller.timelines.ended_ones()
    assert told.num_retries == 1
    assert [span.stage for span in told.spans].count("prefill") == 2


def test_a_request_is_found_by_number_and_by_label(tokenizer: Tokenizer) -> None:
    town = Town(tokenizer, DISAGGREGATED)
    client = town.ask(spec([1, 2, 3]))
    client.call.requests[0].label = "mine"
    assert town.controller.timelines.find("1") == town.controller.timelines.find("mine")
    assert town.controller.timelines.find("2") is None


def test_a_chrome_trace_has_a_row_for_each_request_and_closes_open_spans(
    tokenizer: Tokenizer,
) -> None:
    town = Town(tokenizer, DISAGGREGATED, clock=lambda: 5.0)
    town.ask(spec([1, 2, 3]))
    trace = chrome_trace(town.controller.timelines.open(), now_s=7.5)
    assert trace["traceEvents"] == [
        {"ph": "M", "name": "thread_name", "args": {"name": "request 1"}, "pid": 1, "tid": 1},
        {
            "ph": "X",
            "name": "prefill_queue",
            "ts": 5_000_000,
            "dur": 2_500_000,
            "args": {"instance": "p0"},
            "pid": 1,
            "tid": 1,
        },
    ]
