"""Requests in bulk through instances of other shapes: each answer is the one given alone."""

from pathlib import Path

import pytest

from tests.end_to_end.bulk import asks, at_once, one_by_one, two_prefills_one_decode
from tests.end_to_end.service import Service, eventually

NUM_REQUESTS = 64


@pytest.mark.slow
def test_each_of_many_answers_is_its_solo_answer_and_nothing_is_kept_A7_B10(
    tiny_llama: Path, tiny_service: Service
) -> None:
    asked = asks(NUM_REQUESTS)
    solo = one_by_one(tiny_service, asked)
    with two_prefills_one_decode(tiny_llama) as service:
        assert len(service.ranks()) == 6
        assert one_by_one(service, asked) == solo
        assert at_once(service, asked) == solo
        eventually(lambda: service.is_all_free, 20, "all blocks free")
        counts = service.counts()
        num_pulled = 2 * sum(ask.max_tokens > 1 for ask in asked)
        assert counts["decode-0"]["num_pulls"] == num_pulled
        assert counts["decode-0"]["pull_faults"] == 0
        assert min(counts[name]["prefill_steps"] for name in ("prefill-0", "prefill-1")) > 0
