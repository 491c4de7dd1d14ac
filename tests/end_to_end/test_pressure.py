"""More work than there is room for: pools, batches and queues that are full, with real schedulers.

Whatever is short, everybody who was let in is answered, the oldest first, and nothing is left
behind; who is not let in is told at once.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from daemon.deadlines import TimeLimits
from daemon.door import Target
from daemon.errors import NotReady, QueueFull, QueueTimeout, RequestTimeout, SloMissed
from daemon.text import Tokenizer
from ipc.kv_layout import blocks_for
from ipc.vocabulary import Role
from tests.daemon.small_tokenizers import byte_level_json
from tests.end_to_end.service import Service, eventually, serving
from tests.end_to_end.test_control_plane import (
    DISAGGREGATED,
    TOPOLOGIES,
    TWO_AND_TWO,
    assert_answered,
)
from tests.end_to_end.town import Client, Town, spec, tokenizer_of
from tests.gpu_workers.rig import BLOCK_SIZE

ONE_INSTANCE_DECODES = ("1P+1D", "mixed")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("tokenizer"), byte_level_json())


@contextmanager
def town_of(tokenizer: Tokenizer, topology: str, **how: int) -> Iterator[Town]:
    """At its end everything has been given back."""
    town = Town(tokenizer, TOPOLOGIES[topology], **how)
    yield town
    town.settle()
    town.check_all_free()
    town.close()


def num_preempted(town: Town) -> int:
    return sum(house.rig.scheduler.decodes.num_preempted for house in town.houses.values())


def num_trips(client: Client) -> int:
    return sum(len(request.trips) for request in client.call.requests)


def random_load(town: Town, num_requests: int) -> None:
    chance = town.random
    for i in range(num_requests):
        prompt = [chance.randrange(200) for _ in range(chance.randrange(1, 24))]
        town.ask(spec(prompt, max_tokens=chance.randrange(1, 40), num_choices=1 + i % 2))
        for _ in range(chance.randrange(10)):
            town.tick()


# ---- decode pools ---------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ONE_INSTANCE_DECODES)
@pytest.mark.parametrize("seed", range(4))
def test_a_full_decode_pool_preempts_the_youngest_and_the_oldest_finishes_first(
    tokenizer: Tokenizer, topology: str, seed: int
) -> None:
    with town_of(tokenizer, topology, seed=seed, num_blocks=16) as town:
        clients = [town.ask(spec(list(range(i, i + 10)), max_tokens=40)) for i in range(12)]
        finished: list[Client] = []
        while len(finished) < len(clients):
            town.tick()
            finished += [c for c in clients if c.is_over and c not in finished]
        assert num_preempted(town) > 0
        assert finished[0] is clients[0]
        assert num_trips(clients[0]) == 1, "the oldest was never preempted"
    for client in clients:
        assert_answered(client)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("num_blocks", "seed"), [(16, 0), (16, 1), (24, 2)])
def test_preemptions_are_few_beside_the_tokens_that_come_out(
    tokenizer: Tokenizer, topology: str, num_blocks: int, seed: int
) -> None:
    """No circle of pull, preempt and prefill: over many seeds 0.02 to 0.05 for each token."""
    with town_of(tokenizer, topology, seed=seed, num_blocks=num_blocks) as town:
        random_load(town, 20)
        town.settle()
        num_tokens = sum(len(delta.token_ids) for c in town.clients for delta in c.deltas)
        assert num_preempted(town) < num_tokens / 10
        assert max(num_trips(client) for client in town.clients) <= 20
    for client in town.clients:
        assert_answered(client)


@pytest.mark.parametrize("seed", range(4))
def test_every_sequence_has_the_pages_that_its_tokens_need_and_no_more_A23(
    tokenizer: Tokenizer, seed: int
) -> None:
    """Prompts and outputs around every edge of a page, several sequences on each at a time."""
    with town_of(tokenizer, "1P+1D", seed=seed, num_blocks=32) as town:
        for i in range(40):
            length = BLOCK_SIZE * (1 + i % 4) + i % 3 - 1
            town.ask(spec([i] * length, max_tokens=1 + i % 9, num_choices=1 + i % 2))
        while not all(client.is_over for client in town.clients):
            town.tick()
            for running in town.houses["d0"].rig.scheduler.decodes._running.values():
                assert len(running.blocks) == blocks_for(running.num_computed, BLOCK_SIZE)
    for client in town.clients:
        assert_answered(client)


@pytest.mark.parametrize("num_prompt", range(1, 2 * BLOCK_SIZE + 2))
def test_what_fits_the_pool_to_the_last_token_runs_through_and_one_more_is_refused_A23(
    tokenizer: Tokenizer, num_prompt: int
) -> None:
    with town_of(tokenizer, "1P+1D", num_blocks=4) as town:
        room = 4 * BLOCK_SIZE - num_prompt
        with pytest.raises(Exception, match="maximum context length is 16 tokens"):
            town.ask(spec([1] * num_prompt, max_tokens=room + 1))
        client = town.ask(spec([1] * num_prompt, max_tokens=room))
        town.settle()
        assert num_preempted(town) == 0
    assert_answered(client)


# ---- batches and bridges --------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["1P+1D", "2P+2D", "mixed"])
def test_one_place_in_decode_serves_fifty_long_prompts_A25(
    tokenizer: Tokenizer, topology: str
) -> None:
    """Prefill's pool fills with prompts that wait to be pulled, and empties again."""
    with town_of(tokenizer, topology, num_blocks=32, max_batch=1) as town:
        clients = [town.ask(spec([i] * 40, max_tokens=4)) for i in range(50)]
        held = 0
        while not all(client.is_over for client in clients):
            town.tick()
            held = max(held, *(h.rig.scheduler.pool.num_held for h in town.houses.values()))
    assert held == (0 if topology == "mixed" else 30), (
        "three prompts of ten blocks are all it holds"
    )
    for client in clients:
        assert_answered(client)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_three_hundred_long_prompts_that_all_leave_five_times_leave_a_house_that_answers_A10_A14(
    tokenizer: Tokenizer, topology: str
) -> None:
    with town_of(tokenizer, topology, num_blocks=32) as town:
        for _ in range(5):
            clients = [town.ask(spec([i % 200] * 40, max_tokens=20)) for i in range(300)]
            for _ in range(town.random.randrange(300)):
                town.tick()
            for client in clients:
                client.leave()
            town.clients.clear()
        probe = town.ask(spec([1, 2, 3]))
        town.settle()
    assert_answered(probe)


def test_a_burst_beyond_the_bound_is_refused_at_once_and_all_others_are_answered_A18_D13(
    tokenizer: Tokenizer,
) -> None:
    with town_of(tokenizer, "2P+2D", num_blocks=32, max_queued=50) as town:
        waits_s = []
        for i in range(1000):
            try:
                town.ask(spec([i % 200] * 30, max_tokens=6))
            except QueueFull as error:
                waits_s.append(error.retry_after_s)
        assert len(waits_s) == 950
        assert all(0 < wait_s <= 120 for wait_s in waits_s)
    for client in town.clients:
        assert_answered(client)


# ---- time -----------------------------------------------------------------------------------


class HandClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("phase", ["waiting", "prefill", "handoff", "decode"])
@pytest.mark.parametrize("seed", range(4))
def test_requests_whose_time_is_up_anywhere_end_once_and_give_everything_back_A13_A16(
    tokenizer: Tokenizer, phase: str, seed: int
) -> None:
    clock = HandClock()
    limits = TimeLimits(queue_s=1e6, request_s=50.0, outage_s=1e6)
    town = Town(tokenizer, TWO_AND_TWO, seed=seed, num_blocks=32, clock=clock, time_limits=limits)
    if phase == "waiting":
        town.kill("p0")
        late = [town.ask(spec([i] * 20, max_tokens=30)) for i in range(20)]
        town.kill("p1")
    else:
        late = [town.ask(spec([i] * 20, max_tokens=30)) for i in range(20)]
    while town.controller.count_phases()[phase] == 0:
        town.tick()
    clock.now_s = 50.0
    town.controller.timekeeper.look()
    for name in set(TWO_AND_TWO) - set(town.houses):
        town.build(name)
    after = [town.ask(spec([i] * 20, max_tokens=5)) for i in range(5)]
    town.settle()
    town.check_all_free()
    failed = [client for client in late if client.error is not None]
    assert failed
    assert all(isinstance(client.error, RequestTimeout) for client in failed)
    for client in (*(c for c in late if c.error is None), *after):
        assert_answered(client)


def test_a_queue_that_does_not_move_in_time_is_refused_and_the_head_is_served_D14(
    tokenizer: Tokenizer,
) -> None:
    clock = HandClock()
    limits = TimeLimits(queue_s=10.0)
    town = Town(tokenizer, DISAGGREGATED, clock=clock, time_limits=limits, max_tokens=3)
    clients = [town.ask(spec([i, 2, 3])) for i in range(6)]
    town.houses["p0"].act()
    town.deliver(town.houses["p0"])  # that the first one has begun, and not that it is done
    clock.now_s = 10.0
    town.controller.timekeeper.look()
    late = town.ask(spec([9, 9, 9]))
    town.settle()
    town.check_all_free()
    assert_answered(clients[0])
    assert_answered(late)
    assert all(isinstance(client.error, QueueTimeout) for client in clients[1:])


def test_without_prefill_what_waits_gets_503_in_time_and_a_newcomer_at_once_B13(
    tokenizer: Tokenizer,
) -> None:
    clock = HandClock()
    town = Town(tokenizer, DISAGGREGATED, clock=clock, time_limits=TimeLimits(outage_s=5.0))
    clients = [town.ask(spec([i] * 20)) for i in range(6)]
    town.kill("p0")
    with pytest.raises(NotReady):
        town.ask(spec([1]))
    clock.now_s = 5.0
    town.controller.timekeeper.look()
    town.settle()
    assert all(isinstance(client.error, NotReady) for client in clients)
    town.build("p0")
    again = town.ask(spec([1, 2, 3]))
    town.settle()
    assert_answered(again)
    town.check_all_free()


def test_by_target_as_many_are_let_in_as_will_be_in_time_and_more_when_told(
    tokenizer: Tokenizer,
) -> None:
    """A step takes half a second on the rig's clock, and begins a second after the last one."""
    roles = {"p0": Role.PREFILL, "d0": Role.DECODE}
    town = Town(tokenizer, roles, target=Target(ttft_s=3.0), max_tokens=20, num_blocks=256)
    for i in range(10):
        town.ask(spec([i] * 20, max_tokens=1))
    town.settle()
    clients, waits_s = [], []
    for i in range(10):
        try:
            clients.append(town.ask(spec([i] * 20, max_tokens=4)))
        except SloMissed as error:
            waits_s.append(error.retry_after_s)
    assert 1 < len(clients) < 10
    assert waits_s == sorted(waits_s)
    assert 0 < waits_s[0] <= 3.0
    town.settle()
    for client in clients:
        assert_answered(client)
    assert_answered(settled(town, town.ask(spec([1] * 20))))


def test_a_real_service_holds_its_limits_and_tells_how_late_its_loop_is_A16(
    tiny_llama: Path,
) -> None:
    """A microsecond is over before any worker can answer."""
    flags = ("--dtype", "float32", "--kv-cache-gib", "0.02", "--request-timeout-s", "0.000001")
    with serving(tiny_llama, *flags) as service:
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
        for stream in (False, True):
            refused = httpx.post(f"{service.url}/v1/completions", json=body | {"stream": stream})
            assert refused.status_code == 504
            assert refused.json()["error"]["code"] == "deadline_exceeded"
        eventually(lambda: service.is_all_free, 20, "blocks free after the time was up")
        eventually(lambda: num_lags(service) > 0, 5, "the lag of its loop")


def num_lags(service: Service) -> float:
    text = httpx.get(f"{service.url}/metrics").text
    found = re.search(r"^distserve_event_loop_lag_seconds_count (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def settled(town: Town, client: Client) -> Client:
    town.settle()
    return client
