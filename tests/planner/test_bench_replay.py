import asyncio
import time

import numpy as np
import pytest

from planner.bench.live_run import LiveRun
from planner.bench.options import PromptKind, ReplayOptions
from planner.bench.replay import replay
from planner.errors import BenchError, ServerFailed
from planner.workload.requests import Requests
from tests.planner.openai_service import (
    DONE,
    STREAM,
    OpenAIService,
    Plan,
    event,
    good,
    planned,
    text,
    usage,
    whole,
)

OPTIONS = ReplayOptions(token_ids=(10, 90), timeout_s=10)


def requests(*arrival_s: float, prompt: int = 5, output: int = 3) -> Requests:
    count = len(arrival_s)
    return Requests(np.array(arrival_s), np.full(count, prompt), np.full(count, output))


async def run_against(*plans: Plan, count: int | None = None, **options: float) -> LiveRun:
    """A run of requests that all come at once, each answered by its plan."""
    async with OpenAIService(planned(*plans)).running() as service:
        arrivals = requests(*[0.0] * (count or len(plans)))
        return await replay(service.url, arrivals, ReplayOptions(token_ids=(10, 90), **options))


async def test_each_request_asks_for_exactly_the_workloads_lengths() -> None:
    lengths = Requests(np.zeros(3), np.array([4, 9, 1]), np.array([2, 1, 5]))
    async with OpenAIService().running() as service:
        run = await replay(service.url, lengths, OPTIONS)
    assert sorted((len(b["prompt"]), b["max_tokens"]) for b in service.replayed) == [
        (1, 5), (4, 2), (9, 1),
    ]  # fmt: skip
    assert run.timeline.requests.output_tokens.tolist() == [2, 1, 5]
    assert run.num_short == 0
    body = service.bodies[-1]
    assert body["model"] == "tiny"
    assert body["ignore_eos"] is True
    assert body["temperature"] == 0
    assert body["stream_options"] == {"include_usage": True}


async def test_no_two_prompts_are_alike_and_a_seed_repeats_them() -> None:
    async def prompts(seed: int) -> list[tuple[int, ...]]:
        async with OpenAIService().running() as service:
            options = ReplayOptions(token_ids=(10, 90), seed=seed)
            await replay(service.url, requests(0, 0, 0, prompt=20), options)
        return sorted(tuple(body["prompt"]) for body in service.bodies)

    first = await prompts(1)
    assert len(set(first)) == 4
    assert all(10 <= token_id < 90 for prompt in first for token_id in prompt)
    assert await prompts(1) == first
    assert not set(await prompts(2)) & set(first)


async def test_text_prompts_have_as_many_words() -> None:
    async with OpenAIService().running() as service:
        options = ReplayOptions(prompt=PromptKind.TEXT)
        await replay(service.url, requests(0, prompt=30), options)
    assert len(service.replayed[0]["prompt"].split(" ")) == 30


async def test_requests_are_sent_while_earlier_ones_have_no_answer() -> None:
    """An open loop: the service holds back every answer until it has all requests."""
    service = OpenAIService(num_awaited=4)
    service.answerer = planned(*([STREAM, service.has_all, *good_tail()] for _ in range(3)))
    async with service.running():
        run = await replay(service.url, requests(0, 0.01, 0.02), OPTIONS)
    assert run.is_answered.all()


def good_tail() -> Plan:
    return [text(" a"), text(" b"), text(" c", finish_reason="length") + usage(5, 3) + DONE]


async def test_requests_leave_at_their_times_counted_from_the_first() -> None:
    async with OpenAIService().running() as service:
        run = await replay(service.url, requests(100.0, 100.05, 100.12), OPTIONS)
    assert run.requests.arrival_s == pytest.approx([0, 0.05, 0.12])
    assert (run.lateness_s >= 0).all()
    assert run.sent_s[2] >= 0.12
    assert (run.timeline.first_token_s > run.sent_s).all()


async def test_the_time_to_first_token_counts_from_the_scheduled_arrival() -> None:
    """A client that is held up, here by a callback that blocks, must not flatter the service."""

    def block(num_ended: int) -> None:
        if num_ended == 1:
            time.sleep(0.4)

    async with OpenAIService().running() as service:
        options = ReplayOptions(token_ids=(10, 90), on_end=block)
        run = await replay(service.url, requests(0.0, 0.3), options)
    # The block begins once the first answer has come, at any moment before the second's time.
    lateness_s = float(run.lateness_s[1])
    assert run.timeline.ttft_s[1] >= lateness_s
    assert lateness_s == pytest.approx(run.sent_s[1] - 0.3)
    assert lateness_s > 0.02


async def test_times_between_tokens_are_those_of_the_stream() -> None:
    first, rest = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.call_later(0.2, first.set)
    loop.call_later(0.5, rest.set)
    run = await run_against([STREAM, first, text("a"), rest, *good_tail()[1:]])
    assert run.timeline.ttft_s[0] == pytest.approx(0.1, abs=0.1)
    assert run.gaps_s[0] == pytest.approx(0.3, abs=0.1)
    assert run.timeline.tpot_s[0] == pytest.approx(run.gaps_s.sum() / 2)


async def test_merged_events_count_by_the_usage() -> None:
    merged = [STREAM, text(" a"), text(" b c", finish_reason="length") + usage(5, 3) + DONE]
    run = await run_against(merged)
    assert run.timeline.requests.output_tokens.tolist() == [3]
    assert run.num_events == 2
    assert len(run.gaps_s) == 1


async def test_an_answer_of_another_length_counts_with_the_length_it_has() -> None:
    run = await run_against(
        [STREAM, text(" a", finish_reason="stop") + usage(6, 1) + DONE], good_plan()
    )
    assert sorted(run.timeline.requests.output_tokens.tolist()) == [1, 3]
    assert sorted(run.timeline.requests.input_tokens.tolist()) == [5, 6]
    assert run.num_short == 1


def good_plan() -> Plan:
    return [STREAM, *good_tail()]


@pytest.mark.parametrize(
    ("plan", "kind", "message"),
    [
        (whole("429 Too Many Requests", {"error": {"message": "full"}}), "http_429", "full"),
        (whole("500 Oops", "?"), "http_500", "?"),
        (whole("200 OK", {"choices": []}), "not_a_stream", "application/json"),
        ([STREAM, text("a")], "cut_short", "after 1 tokens"),
        ([STREAM, text("a"), event(error={"message": "died"}), DONE], "stream_error", "died"),
        ([STREAM + b"data: {\n\n"], "malformed", "cannot be read"),
        ([], "disconnected", "after 0 bytes"),
        (
            [STREAM.replace(b"Connection: close", b"Content-Length: 9000"), text("a")],
            "disconnected",
            "after ",
        ),
    ],
)
async def test_every_failure_has_a_name_and_spares_the_others(
    plan: Plan, kind: str, message: str
) -> None:
    run = await run_against(plan, good_plan())
    assert [failure.kind for failure in run.failures] == [kind]
    assert message in run.failures[0].message
    assert run.is_answered.sum() == 1
    assert not run.is_answered[run.failures[0].number]
    assert len(run.timeline) == 1


async def test_an_answer_that_takes_too_long_has_failed() -> None:
    never = asyncio.Event()
    run = await run_against([STREAM, text("a"), never], timeout_s=0.1)
    assert [failure.kind for failure in run.failures] == ["timeout"]
    never.set()


async def test_an_answer_without_end_is_given_up_before_it_fills_the_memory() -> None:
    run = await run_against([STREAM, *(text("a" * 2**20) for _ in range(70))])
    assert [failure.kind for failure in run.failures] == ["endless"]


async def test_stages_join_at_the_first_token_and_add_up_to_the_latency() -> None:
    stages = {
        "prefill_queue_s": 0.001,
        "prefill_s": 0.002,
        "transfer_s": 0.003,
        "decode_queue_s": 0.004,
        "decode_s": 0.005,
    }
    told = event(choices=[], timing=stages) + DONE
    tail = [text(" a"), text(" b") + text(" c", finish_reason="length") + usage(5, 3) + told]
    run = await run_against([STREAM, *tail], good_plan())
    with_stages = int(np.flatnonzero(~np.isnan(run.timeline.prefill_end_s))[0])
    known = {name: values[with_stages] for name, values in run.timeline.stages_s().items()}
    assert known["prefill"] == pytest.approx(0.002)
    assert known["transfer"] == pytest.approx(0.003)
    assert known["decode_queue"] == pytest.approx(0.004)
    assert sum(known.values()) == pytest.approx(run.timeline.last_token_s[with_stages])
    unknown = run.timeline.stages_s()["prefill"][1 - with_stages]
    assert np.isnan(unknown)


@pytest.mark.parametrize("refused", ["return_timing", "ignore_eos"])
async def test_a_strict_service_gets_what_it_takes_of_the_api(refused: str) -> None:
    def strict(body: dict[str, object]) -> Plan:
        if refused in body:
            return whole("400 Bad Request", {"error": {"message": "unknown field"}})
        return good(body)

    async with OpenAIService(strict).running() as service:
        run = await replay(service.url, requests(0), OPTIONS)
    assert run.is_answered.all()
    assert "return_timing" not in service.bodies[-1]
    assert ("ignore_eos" in service.bodies[-1]) == (refused == "return_timing")


async def test_headers_go_with_every_request() -> None:
    async with OpenAIService().running() as service:
        options = ReplayOptions(token_ids=(1, 9), headers={"Authorization": "Bearer x"})
        await replay(f"{service.url}/v1/", requests(0), options)
    assert all(b"Authorization: Bearer x" in head for head in service.heads)
    assert all(head.startswith(b"POST /v1/completions ") for head in service.heads)


async def refusal(service: OpenAIService, options: ReplayOptions = OPTIONS) -> str:
    async with service.running():
        with pytest.raises(ServerFailed) as caught:
            await replay(service.url, requests(0), options)
    assert caught.value.exit_code == 1
    return str(caught.value).replace(service.url, "URL")


async def test_a_service_that_refuses_token_ids_is_named_with_a_way_out() -> None:
    plan = whole("400 Bad Request", {"error": {"message": "'prompt' must be text"}})
    said = await refusal(OpenAIService(lambda _: plan))
    assert said == (
        "URL/v1 refuses a small request: HTTP 400: 'prompt' must be text (does --prompt text help?)"
    )


async def test_a_service_that_fails_or_lists_no_model_ends_the_run_before_it_starts() -> None:
    down = whole("503 Service Unavailable", {"error": {"message": "loading"}})
    assert (
        await refusal(OpenAIService(lambda _: down))
        == "URL/v1 fails a small request: HTTP 503: loading"
    )
    nothing = OpenAIService(models=whole("200 OK", {"data": []}))
    assert await refusal(nothing) == "URL/v1/models lists no model; name one with --model"
    other = OpenAIService(models=whole("404 Not Found", "nothing here"))
    assert "lists no models (HTTP 404)" in await refusal(other)


async def test_nobody_listening_is_said_in_one_sentence() -> None:
    async with OpenAIService().running() as service:
        url = service.url
    with pytest.raises(ServerFailed, match=r"^http://127.0.0.1:\d+/v1 cannot be reached: "):
        await replay(url, requests(0), OPTIONS)


@pytest.mark.parametrize(
    ("url", "arrivals", "message"),
    [
        ("localhost:8000", requests(0), "must begin with http://"),
        ("http://127.0.0.1:99999", requests(0), "must be such as http://127.0.0.1:8000"),
        ("http://[::1", requests(0), "must be such as http://127.0.0.1:8000"),
        ("http://127.0.0.1:1/v1?key=1", requests(0), "must be such as http://127.0.0.1:8000"),
        (f"http://{'a' * 5000}", requests(0), "must be such as http://127.0.0.1:8000"),
        ("http://localhost:1", requests(), "no request to send"),
    ],
)
async def test_bad_input_is_refused(url: str, arrivals: Requests, message: str) -> None:
    with pytest.raises(BenchError, match=message) as caught:
        await replay(url, arrivals, OPTIONS)
    assert caught.value.exit_code == 2


def test_bad_options_are_refused() -> None:
    with pytest.raises(BenchError, match="a range such as 1000-30000, not 9-3"):
        ReplayOptions(token_ids=(9, 3))
    with pytest.raises(BenchError, match="above zero"):
        ReplayOptions(timeout_s=0)
