"""From prefill to decode: what is handed over, what is not, and what is free afterwards."""

from collections.abc import Iterator

import orjson
import pytest
from msgspec.structs import replace

from daemon.errors import QueueFull, WorkerFailed
from daemon.frontend.answers import StreamedAnswer, WholeAnswer
from daemon.frontend.calls import Call, Dialect
from daemon.frontend.served_model import ServedModel
from daemon.generation import GenerationSpec
from daemon.text import Tokenizer
from ipc.messages import MixedPolicy, SetRole
from ipc.vocabulary import FinishReason, Parallelism, Role
from tests.daemon.small_tokenizers import byte_level_json
from tests.end_to_end.test_control_plane import (
    DISAGGREGATED,
    TOPOLOGIES,
    TWO_AND_TWO,
    assert_answered,
)
from tests.end_to_end.town import Client, Town, spec, tokenizer_of
from tests.gpu_workers.group_rig import GroupRig
from tests.gpu_workers.scripted_engine import scripted_token

PROMPT = [1, 2, 3, 4, 5, 6]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("tokenizer"), byte_level_json())


@pytest.fixture
def town(tokenizer: Tokenizer) -> Iterator[Town]:
    """One prefill and one decode instance; at its end everything has been given back."""
    town = Town(tokenizer, DISAGGREGATED)
    yield town
    town.settle()
    town.check_all_free()


def num_pulls(town: Town) -> int:
    return town.houses["d0"].rig.scheduler.counters.num_pulls


def counted(town: Town, name: str, **labels: str) -> float:
    """A counter, or the number of a histogram's samples."""
    registry = town.controller._metrics.registry
    found = [registry.get_sample_value(f"{name}_{what}", labels) for what in ("total", "count")]
    return next((value for value in found if value is not None), 0.0)


def ending(client: Client) -> list[FinishReason]:
    return [delta.finished for delta in client.deltas if delta.finished is not None]


# ---- what ends on its first token -----------------------------------------------------------


def test_a_request_of_one_token_ends_with_prefill_B26(town: Town) -> None:
    client = town.ask(spec(PROMPT, max_tokens=1))
    town.settle()
    assert (ending(client), len(client.tokens(0))) == ([FinishReason.LENGTH], 1)
    assert num_pulls(town) == 0


def test_an_end_token_at_once_hands_nothing_over_B27(town: Town) -> None:
    plain = spec(PROMPT)
    end = replace(plain.sampling, end_token_ids=(scripted_token(plain.prompt, 0, 0),))
    client = town.ask(replace(plain, sampling=end))
    town.settle()
    assert ending(client) == [FinishReason.STOP]
    assert "".join(delta.text for delta in client.deltas) == ""
    assert num_pulls(town) == 0


def test_a_stop_string_in_the_first_token_hands_nothing_over_B27(
    town: Town, tokenizer: Tokenizer
) -> None:
    """The prefill instance cannot see it: it has held the blocks until it was told."""
    (token_id,) = tokenizer.encode("x", special=False)
    plain = spec([token_id])
    assert scripted_token(plain.prompt, 0, 0) == token_id
    client = town.ask(replace(plain, stop=("x",)))
    town.settle()
    assert (ending(client), len(client.tokens(0))) == ([FinishReason.STOP], 1)
    assert num_pulls(town) == 0


# ---- several choices ------------------------------------------------------------------------


def test_choices_are_prefilled_once_pulled_once_and_decoded_apart_B14(town: Town) -> None:
    client = town.ask(spec(PROMPT, num_choices=3))
    town.settle()
    assert_answered(client)
    assert len({tuple(client.tokens(choice)) for choice in range(3)}) == 3
    assert town.houses["p0"].rig.scheduler.counters.prefill_tokens == len(PROMPT)
    assert num_pulls(town) == 1


# ---- refusals, departures, changes of role --------------------------------------------------


def test_what_decode_refuses_is_given_back_by_prefill_and_the_client_is_told_A2_D11(
    town: Town,
) -> None:
    known = town.houses["d0"].rig.exchange.known
    peers = set(known)
    known.clear()
    client = town.ask(spec(PROMPT))
    town.settle()
    assert isinstance(client.error, WorkerFailed)
    assert counted(town, "distserve_requests_ended", ending="failed") == 1
    town.check_all_free()
    known |= peers
    after = town.ask(spec(PROMPT))
    town.settle()
    assert_answered(after)


@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_client_may_leave_at_any_step_of_the_handover_and_twice_A3_A12(
    tokenizer: Tokenizer, num_choices: int
) -> None:
    """The same town a hundred times, the same request left one step later each time."""
    phases = set()
    for num_ticks in range(100):
        town = Town(tokenizer, DISAGGREGATED, seed=5)
        stays = town.ask(spec([7, 8, 9]))
        leaves = town.ask(spec(PROMPT, num_choices=num_choices))
        for _ in range(num_ticks):
            town.tick()
        phases |= {trip.phase.name for trip in leaves.call.requests[0].trips}
        leaves.leave()
        leaves.leave()
        town.settle()
        assert_answered(stays)
        town.check_all_free()
    assert {"PREFILL", "HANDOFF", "DECODE", "FINISHED"} <= phases


@pytest.mark.parametrize("seed", range(4))
def test_roles_may_change_while_requests_are_under_way_B28(tokenizer: Tokenizer, seed: int) -> None:
    town = Town(tokenizer, TWO_AND_TWO, seed=seed, num_blocks=48)
    orders = [SetRole(Role.MIXED, MixedPolicy(8)), SetRole(Role.PREFILL), SetRole(Role.MIXED)]
    for i in range(40):
        prompt = [town.random.randrange(200) for _ in range(town.random.randrange(1, 40))]
        town.ask(spec(prompt, max_tokens=1 + i % 12, num_choices=1 + i % 2))
        for _ in range(town.random.randrange(10)):
            town.tick()
        town.houses["p0"].post(orders[i % 3])
    town.settle()
    counters = town.houses["p0"].rig.scheduler.counters
    assert counters.decode_steps > 0
    assert counters.prefill_tokens > 0
    for client in town.clients:
        assert_answered(client)
    town.check_all_free()


# ---- shapes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [((1, 2), (1, 1)), ((1, 2), (2, 1)), ((2, 2), (1, 2)), ((1, 4), (4, 1))],
)
def test_a_pipeline_may_prefill_for_any_shape_B10_B12_B20(
    tokenizer: Tokenizer, prefill: tuple[int, int], decode: tuple[int, int], seed: int
) -> None:
    shapes = {"p0": Parallelism(*prefill), "d0": Parallelism(*decode)}
    town = Town(
        tokenizer,
        DISAGGREGATED,
        seed=seed,
        make_rig=lambda role, name, epoch: GroupRig(
            role, shapes[name], seed=seed, name=name, epoch=epoch, num_blocks=32
        ),
    )
    for i in range(16):
        town.ask(spec(list(range(i, i + 1 + 2 * i)), max_tokens=2 + i % 9, num_choices=1 + i % 2))
        town.tick()
    town.settle()
    for client in town.clients:
        assert_answered(client)
    assert num_pulls(town) >= 16
    town.check_all_free()


# ---- what is counted ------------------------------------------------------------------------


def call_of(specs: list[GenerationSpec], **how: bool) -> Call:
    return Call(dialect=Dialect.COMPLETION, specs=tuple(specs), echoes=("e", "f"), **how)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("num_blocks", [200, 16])
def test_usage_is_the_same_whole_streamed_echoed_and_preempted_F13_F24(
    tokenizer: Tokenizer, topology: str, num_blocks: int
) -> None:
    town = Town(tokenizer, TOPOLOGIES[topology], seed=1, num_blocks=num_blocks)
    model = ServedModel(id="m", tokenizer=tokenizer, chat_template=None, max_context=64, created=0)
    specs = [spec(PROMPT, max_tokens=30, num_choices=2), spec([9], max_tokens=7, num_choices=2)]
    clients = [town.ask(*specs) for _ in range(4)]
    town.settle()
    preempted = sum(h.rig.scheduler.decodes.num_preempted for h in town.houses.values())
    assert (preempted > 0) == (num_blocks == 16)
    for client in clients:
        whole = WholeAnswer(call_of(specs), model)
        streamed = StreamedAnswer(call_of(specs, stream=True, include_usage=True), model)
        running = StreamedAnswer(call_of(specs, stream=True, continuous_usage=True), model)
        whole.take(client.deltas)
        streamed.take(client.deltas)
        last = running.take(client.deltas).removesuffix(b"\n\n").rpartition(b"data: ")[2]
        told = [
            orjson.loads(whole.body(()))["usage"],
            orjson.loads(streamed.ending(()).split(b"\n\n")[0].removeprefix(b"data: "))["usage"],
            orjson.loads(last)["usage"],
        ]
        expected = {"prompt_tokens": 7, "completion_tokens": 74, "total_tokens": 81}
        assert [{name: usage[name] for name in expected} for usage in told] == [expected] * 3


def test_counts_add_up_over_deaths_departures_and_refusals_D8_D10_D11(
    tokenizer: Tokenizer,
) -> None:
    town = Town(tokenizer, DISAGGREGATED, max_queued=12)
    for i in range(12):
        town.ask(spec([i, 2, 3], max_tokens=30))
    with pytest.raises(QueueFull):
        town.ask(spec(PROMPT))
    while not all(client.deltas for client in town.clients):
        town.tick()
    for client in town.clients[:3]:
        client.leave()
    town.kill("d0")
    town.build("d0")
    town.settle()
    for client in town.clients[3:]:
        assert_answered(client)
    ended = {
        how: counted(town, "distserve_requests_ended", ending=how)
        for how in ("finished", "aborted", "failed")
    }
    assert ended == {"finished": 9, "aborted": 3, "failed": 0}
    model = {"model_name": "test", "engine": "0"}
    assert counted(town, "vllm:time_to_first_token_seconds", **model) == 9
    assert counted(town, "vllm:request_success", finished_reason="length", **model) == 9
    assert counted(town, "distserve_requests_refused", reason="queue_full") == 1
    assert 0 < counted(town, "distserve_retries") <= 9  # the others were not pulled yet
    num_tokens = sum(len(delta.token_ids) for c in town.clients for delta in c.deltas)
    assert counted(town, "vllm:generation_tokens", **model) == num_tokens
