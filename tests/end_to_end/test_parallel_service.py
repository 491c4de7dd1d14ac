"""Instances of several processes in a whole service: the same answers, one life, one ending."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ipc.placement_file import FileNode, file_of, write_placement
from ipc.vocabulary import InstanceSpec, Parallelism, Role, Segment
from tests.end_to_end.service import Service, eventually, serving

PROMPTS = ("hello", "abcdefg" * 20, [7] * 33)


def texts(service: Service) -> list[object]:
    return [service.complete(prompt, return_token_ids=True)["choices"] for prompt in PROMPTS]


def stream(service: Service, first: threading.Event) -> list[str]:
    """A long stream's lines; `first` is set when it decodes."""
    body = {"prompt": "a", "max_tokens": 480, "stream": True, "ignore_eos": True}
    lines = []
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as response:
        for line in filter(None, response.iter_lines()):
            lines.append(line)
            if len(lines) == 3:
                first.set()
    return lines


def test_shapes_change_no_answer_B11(tiny_service: Service, parallel_service: Service) -> None:
    assert len(parallel_service.ranks()) == 4
    assert texts(parallel_service) == texts(tiny_service)
    eventually(lambda: parallel_service.is_all_free, 20, "all blocks free")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["decode-0/1.0", "decode-0/0.0"])
def test_killing_any_rank_restarts_its_instance_and_costs_no_answer(
    parallel_service: Service, victim: str
) -> None:
    service = parallel_service
    before, alone = service.ranks(), service.complete("hello")["choices"]
    with ThreadPoolExecutor() as pool:
        first = threading.Event()
        streaming = pool.submit(stream, service, first)
        assert first.wait(20)
        before[victim].kill()
        lines = streaming.result()
    assert '"finish_reason":"length"' in lines[-2]
    assert lines[-1] == "data: [DONE]"
    service.until_told(f"decode-0 ended: {victim} killed by SIGKILL")
    eventually(lambda: not any(before[f"decode-0/{s}.0"].is_running() for s in (0, 1)), 20, "dead")
    eventually(lambda: httpx.get(f"{service.url}/health").status_code == 200, 60, "ready again")
    after = service.ranks()
    assert {name for name in after if after[name].pid != before[name].pid} == {
        "decode-0/0.0",
        "decode-0/1.0",
    }
    assert service.complete("hello")["choices"] == alone
    eventually(lambda: service.is_all_free, 20, "all blocks free")


def test_a_placement_file_is_served_and_leaves_nothing(
    tiny_llama: Path, tiny_service: Service, tmp_path: Path
) -> None:
    spec = InstanceSpec("both", Role.MIXED, Parallelism(2, 1), (Segment("n0", (3, 1)),))
    file = file_of("tiny-llama", [FileNode("n0", 4)], [spec])
    write_placement(tmp_path / "placement.json", file)
    flags = ("--dtype", "float32", "--kv-cache-gib", "0.02")
    with serving(tiny_llama, *flags, "--placement", str(tmp_path / "placement.json")) as service:
        assert set(service.ranks()) == {"both/0.0", "both/0.1"}
        assert texts(service) == texts(tiny_service)
        assert service.stop() == 0
        assert os.listdir(service.run_dir) == ["lock"]
