"""The smallest call of each client of the API that shows a stream, its usage, and errors.

Run by an interpreter that has the clients: `python client_calls.py CLIENT URL KEY MODEL` writes
what the client saw as one JSON object. Clients are imported by who runs them alone; the tests'
own interpreter has none of them but the official one.
"""

import asyncio
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HI = [{"role": "user", "content": "Say hello."}]
TOO_LONG = [{"role": "user", "content": "word " * 20_000}]
WITH_USAGE = {"include_usage": True}
GREEDY = {"max_tokens": 8, "temperature": 0}


class Seen(dict[str, Any]):
    """What a test looks at: `text`, `num_chunks`, `num_output`, and errors by what was wrong."""


def openai_sync(url: str, key: str, model: str) -> Seen:
    openai = importlib.import_module("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
    stream = client.chat.completions.create(
        model=model, messages=HI, stream=True, stream_options=WITH_USAGE, **GREEDY
    )
    seen = _seen_of(list(stream))
    stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="sk-wrong")
    seen["wrong_key"] = _refusal(openai, lambda: stranger.models.list())
    seen["too_long"] = _refusal(
        openai, lambda: client.chat.completions.create(model=model, messages=TOO_LONG)
    )
    seen["wrong_model"] = _refusal(
        openai, lambda: client.chat.completions.create(model="gpt-9", messages=HI)
    )
    return seen


def openai_async(url: str, key: str, model: str) -> Seen:
    openai = importlib.import_module("openai")

    async def call() -> Seen:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
            stream = await client.chat.completions.create(
                model=model, messages=HI, stream=True, stream_options=WITH_USAGE, **GREEDY
            )
            seen = _seen_of([chunk async for chunk in stream])
            try:
                await client.chat.completions.create(model=model, messages=TOO_LONG)
            except openai.BadRequestError as error:
                seen["too_long"] = ["BadRequestError", error.code]
        return seen

    return asyncio.run(call())


def litellm(url: str, key: str, model: str) -> Seen:
    client, openai = importlib.import_module("litellm"), importlib.import_module("openai")
    how = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": key, "num_retries": 0}
    stream = client.completion(messages=HI, stream=True, stream_options=WITH_USAGE, **GREEDY, **how)
    seen = _seen_of(list(stream))
    seen["wrong_key"] = _refusal(
        openai, lambda: client.completion(messages=HI, **(how | {"api_key": "sk-wrong"}))
    )
    seen["too_long"] = _refusal(openai, lambda: client.completion(messages=TOO_LONG, **how))
    return seen


def langchain(url: str, key: str, model: str) -> Seen:
    chat = importlib.import_module("langchain_openai").ChatOpenAI
    openai = importlib.import_module("openai")
    how = {"model": model, "base_url": f"{url}/v1", "max_retries": 0} | GREEDY
    chunks = list(chat(api_key=key, stream_usage=True, **how).stream("Say hello."))
    usages = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    seen = Seen(
        text="".join(str(chunk.content) for chunk in chunks),
        num_chunks=len(chunks),
        num_output=usages[-1]["output_tokens"],
    )
    stranger = chat(api_key="sk-wrong", **how)
    seen["wrong_key"] = _refusal(openai, lambda: stranger.invoke("Say hello."))
    seen["too_long"] = _refusal(
        openai, lambda: chat(api_key=key, **how).invoke(TOO_LONG[0]["content"])
    )
    return seen


def llm(url: str, key: str, model: str) -> Seen:
    """The command, whose models stand in a file of its user's."""
    with tempfile.TemporaryDirectory() as directory:
        entry = f"- model_id: ours\n  model_name: {model}\n  api_base: {url}/v1\n"
        entry += "  api_key_name: ours\n"
        (Path(directory) / "extra-openai-models.yaml").write_text(entry)
        environment = os.environ | {"LLM_USER_PATH": directory}

        def run(key: str, *words: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "llm", "-m", "ours", "--key", key, *words]
            return subprocess.run(
                command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
            )

        done = run(key, "-u", "-o", "max_tokens", "8", "-o", "temperature", "0", "Say hello.")
        wrong = run("sk-wrong", "Say hello.")
    return Seen(
        text=done.stdout.strip(), usage=done.stderr, wrong_key=[wrong.returncode, wrong.stderr]
    )


def guidellm(url: str, key: str, model: str) -> Seen:
    """A benchmark of three requests, read from its report. `model` is the tokenizer's folder."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "report.json"
        command = [sys.executable, "-m", "guidellm", "run", "--disable-progress"]
        command += ["--backend", f"kind=openai_http,target={url},api_key={key}"]
        command += ["--profile", "kind=synchronous"]
        command += ["--constraint", "kind=max_requests,count=3"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={model}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"]
        command += ["--output", f"kind=json,path={file}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=directory)
        if not file.exists():
            return Seen(failed=done.stdout[-3000:] + done.stderr[-3000:])
        (benchmark,) = json.loads(file.read_text())["benchmarks"]
    requests = benchmark["requests"]
    return Seen(
        num_good=len(requests["successful"]),
        num_bad=len(requests["errored"]) + len(requests["incomplete"]),
        num_output=[each["output_metrics"]["text_tokens"] for each in requests["successful"]],
        ttft_ms=[each["time_to_first_token_ms"] for each in requests["successful"]],
    )


def _seen_of(chunks: list[Any]) -> Seen:
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    usages = [c.usage for c in chunks if getattr(c, "usage", None)]
    return Seen(
        text="".join(texts),
        num_chunks=sum(map(bool, texts)),
        num_output=usages[-1].completion_tokens if usages else None,
    )


def _refusal(library: Any, call: Any) -> list[str | None]:
    """The error's class, and its code."""
    try:
        call()
    except library.APIError as error:
        return [type(error).__name__, getattr(error, "code", None)]
    return ["nothing", None]


CLIENTS = {
    each.__name__: each for each in (openai_sync, openai_async, litellm, langchain, llm, guidellm)
}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    sys.stdout.write(json.dumps(CLIENTS[name](*arguments)) + "\n")
