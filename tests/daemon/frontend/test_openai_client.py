"""The official client, over a real server: what it sends is understood, and so is what it gets."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from daemon.errors import NotReady, QueueFull
from daemon.generation import Delta
from tests.daemon.frontend.fake_submitter import failing
from tests.daemon.frontend.http_calls import FAILURE, REPLY
from tests.daemon.frontend.http_service import Service

USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def client(service: Service) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_a_completion(client: AsyncOpenAI) -> None:
    completion = await client.completions.create(model="tiny", prompt="hello", max_tokens=50)
    assert (completion.choices[0].text, completion.choices[0].finish_reason) == (REPLY, "stop")


async def test_a_streamed_completion(client: AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="tiny", prompt="hello", max_tokens=50, stream=True
    )
    assert "".join([chunk.choices[0].text async for chunk in stream]) == REPLY


async def test_a_chat(client: AsyncOpenAI) -> None:
    completion = await client.chat.completions.create(model="tiny", messages=USER)
    assert completion.choices[0].message.role == "assistant"
    assert completion.choices[0].message.content == REPLY


async def test_a_streamed_chat(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="tiny", messages=USER, stream=True)
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == REPLY


async def test_a_chat_through_the_clients_own_stream_helper(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="tiny", messages=USER) as stream:
        completion = await stream.get_final_completion()
    assert completion.choices[0].message.content == REPLY
    assert completion.choices[0].finish_reason == "stop"


async def test_usage_of_a_stream_equals_that_of_a_whole_answer(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="tiny", messages=USER)
    stream = await client.chat.completions.create(
        model="tiny", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    *_, last = [chunk async for chunk in stream]
    assert (last.choices, last.usage) == ([], whole.usage)


async def test_several_choices(client: AsyncOpenAI) -> None:
    completion = await client.chat.completions.create(model="tiny", messages=USER, n=3)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]


async def test_several_prompts_of_token_ids(client: AsyncOpenAI) -> None:
    completion = await client.completions.create(model="tiny", prompt=[[5, 6], [7]])
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 3


async def test_log_probabilities_of_a_completion(client: AsyncOpenAI) -> None:
    completion = await client.completions.create(
        model="tiny", prompt="hello", logprobs=2, echo=True
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert completion.usage is not None
    assert len(logprobs.token_logprobs) == completion.usage.total_tokens


async def test_log_probabilities_of_a_chat(client: AsyncOpenAI) -> None:
    completion = await client.chat.completions.create(
        model="tiny", messages=USER, logprobs=True, top_logprobs=3
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert completion.usage is not None
    assert len(logprobs.content) == completion.usage.completion_tokens
    assert len(logprobs.content[0].top_logprobs) == 3


async def test_log_probabilities_of_a_streamed_chat(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny", messages=USER, logprobs=True, stream=True
    )
    first = await anext(aiter(stream))
    assert first.choices[0].logprobs is not None
    assert first.choices[0].logprobs.content
    await stream.close()


async def test_our_own_fields_go_through_the_extra_body(
    service: Service, client: AsyncOpenAI
) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "return_timing": True}
    completion = await client.completions.create(model="tiny", prompt="hello", extra_body=extra)
    sampling = service.submitter.last.specs[0].sampling
    assert (sampling.top_k, sampling.min_p, sampling.end_token_ids) == (5, 0.1, ())
    assert completion.model_extra is not None
    assert completion.model_extra["timing"]["prefill_s"] == 0.2


async def test_the_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_a_bad_request(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.completions.create(model="tiny", prompt="hello", temperature=5)
    assert refusal.value.param == "temperature"
    assert refusal.value.request_id


async def test_another_model(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        await client.completions.create(model="nope", prompt="hello")
    assert refusal.value.code == "model_not_found"


async def test_a_full_house(service: Service, client: AsyncOpenAI) -> None:
    service.submitter.refusal = QueueFull("The queue is full.")
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(model="tiny", prompt="hello")


async def test_a_service_that_is_not_ready(service: Service, client: AsyncOpenAI) -> None:
    service.submitter.refusal = NotReady("Starting.")
    with pytest.raises(openai.InternalServerError) as refusal:
        await client.completions.create(model="tiny", prompt="hello")
    assert refusal.value.status_code == 503


async def test_a_failure_before_the_first_byte(service: Service, client: AsyncOpenAI) -> None:
    service.submitter.script = failing(FAILURE)
    with pytest.raises(openai.InternalServerError) as failure:
        await client.completions.create(model="tiny", prompt="hello", stream=True)
    assert failure.value.code == "worker_failed"


async def test_a_failure_amid_a_stream(service: Service, client: AsyncOpenAI) -> None:
    service.submitter.script = failing(FAILURE, [Delta(0, "a", (1,))])
    stream = await client.chat.completions.create(model="tiny", messages=USER, stream=True)
    assert (await anext(aiter(stream))).choices[0].delta.content == "a"
    with pytest.raises(openai.APIError, match="The worker died"):
        await anext(aiter(stream))


async def test_a_stream_that_is_closed_aborts_its_request(
    service: Service, client: AsyncOpenAI
) -> None:
    never = asyncio.Event()
    service.submitter.script = lambda _: [[Delta(0, "a", (1,))], never]
    stream = await client.completions.create(model="tiny", prompt="hello", stream=True)
    await anext(aiter(stream))
    await stream.close()
    await service.submitter.last.left.wait()
    assert service.submitter.last.is_aborted


async def test_the_blocking_client_in_a_thread(service: Service) -> None:
    def ask() -> str:
        with openai.OpenAI(base_url=service.url + "/v1", api_key="none") as client:
            stream = client.completions.create(
                model="tiny", prompt="hello", max_tokens=50, stream=True
            )
            return "".join(chunk.choices[0].text for chunk in stream)

    assert await asyncio.to_thread(ask) == REPLY
