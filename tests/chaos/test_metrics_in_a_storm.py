"""What /metrics says while everything goes wrong, and that it adds up when all is over."""

import random

import pytest
from prometheus_client.samples import Sample

from daemon.text import Tokenizer
from ipc.vocabulary import Role
from tests.chaos.chaos_town import ChaosTown
from tests.chaos.faults import Fault
from tests.daemon.metric_samples import all_samples
from tests.daemon.small_tokenizers import byte_level_json
from tests.end_to_end.town import Client, spec, tokenizer_of

ROLES = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
NUM_REQUESTS = 60


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("tokenizer"), byte_level_json())


def scraped(town: ChaosTown) -> list[Sample]:
    controller = town.controller
    text = controller._metrics.render(controller.count_phases())[1].decode()
    return list(all_samples(text))


def total(samples: list[Sample], name: str, **labels: str) -> float:
    found = (s for s in samples if s.name == name and labels.items() <= s.labels.items())
    return sum(sample.value for sample in found)


def series(samples: list[Sample]) -> set[tuple[str, str]]:
    return {(s.name, str(sorted(s.labels.items()))) for s in samples}


def storm(town: ChaosTown, seed: int) -> None:
    """Requests come, some clients leave, instances die; all samples are looked at on the way."""
    dice = random.Random(seed)
    for at in (100, 400, 700):
        town.strike(Fault.DEATH, dice.choice(list(ROLES)), at)
    leaving: list[Client] = []
    for number in range(NUM_REQUESTS):
        client = town.ask(spec([number % 50 + 1, 2, 3], max_tokens=dice.randrange(1, 12)))
        if dice.random() < 0.2:
            leaving.append(client)
        for _ in range(dice.randrange(30)):
            town.tick()
        if leaving and dice.random() < 0.5:
            leaving.pop().leave()
        if number % 10 == 0:
            check_while_it_lasts(town)
    for client in leaving:
        client.leave()


def check_while_it_lasts(town: ChaosTown) -> None:
    samples = scraped(town)
    # Sums of times are none here: each instance of this town has a clock of its own.
    counts = [s for s in samples if not s.name.endswith("_seconds_sum")]
    negative = [s for s in counts if not s.value >= 0]
    assert not negative
    arrived = total(samples, "distserve_requests_arrived_total")
    ended = total(samples, "distserve_requests_ended_total")
    assert arrived == ended + town.controller.num_open


@pytest.mark.parametrize("seed", range(3))
def test_no_gauge_is_ever_negative_and_all_counts_add_up_D8_D10(
    tokenizer: Tokenizer, seed: int
) -> None:
    town = ChaosTown(tokenizer, ROLES, seed=seed)
    storm(town, seed)
    town.settle()
    assert town.num_deaths > 0
    check_while_it_lasts(town)
    samples = scraped(town)
    finished = total(samples, "distserve_requests_ended_total", ending="finished")
    assert finished + total(samples, "distserve_requests_ended_total", ending="aborted") == 60
    # However often its work was done again, an answered request is counted once everywhere.
    for once in (
        "vllm:time_to_first_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_prompt_tokens_count",
    ):
        assert total(samples, once) == finished
    assert total(samples, "distserve_retries_total") > 0
    assert total(samples, "distserve_slo_requests_total", slo="both") == finished
    assert total(samples, "vllm:request_success_total") == NUM_REQUESTS
    told = sum(len(delta.token_ids) for client in town.clients for delta in client.deltas)
    assert total(samples, "vllm:generation_tokens_total") == told
    for state in ("held", "in_use"):
        assert total(samples, "distserve_kv_blocks", state=state) == 0


def test_no_request_adds_a_series_whatever_it_holds_D7(tokenizer: Tokenizer) -> None:
    town = ChaosTown(tokenizer, ROLES, seed=7)
    for round_number in range(2):
        for number in range(20):
            client = town.ask(spec([number + 1, round_number + 1], max_tokens=3 + number % 3))
            client.call.requests[0].label = f"named-{round_number}-{number}"
        town.settle()
        if round_number == 0:
            before = series(scraped(town))
    after = series(scraped(town))
    assert after == before
    assert not [name for name in after if "named" in name[1]]
