"""A worker's memory does not grow with the lengths that prompts happen to have."""

from pathlib import Path

from tests.end_to_end.service import Service, serving


def anonymous_mib(service: Service, instance: str) -> int:
    pid = service.workers()[instance].pid
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) // 1024


def test_prompts_of_all_lengths_leave_a_worker_no_larger(tiny_llama: Path) -> None:
    """A matrix product is prepared once per shape; the library's cache of these was unbounded in
    practice and took a megabyte for each length of a prompt."""
    flags = ("--dtype", "float32", "--kv-cache-gib", "0.02")
    with serving(tiny_llama, *flags) as service, service.client() as client:
        grown = []
        for lengths in (range(1, 161, 2), range(161, 281, 2)):
            before = anonymous_mib(service, "prefill-0")
            for length in lengths:
                body = {"prompt": [5] * length, "max_tokens": 1}
                client.post("/v1/completions", json=body).raise_for_status()
            grown.append(anonymous_mib(service, "prefill-0") - before)
    assert grown[1] < 25, grown
