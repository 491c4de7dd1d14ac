"""The controller and its leaders together, over every order of messages that a seed can make."""

import pytest

from daemon.errors import Draining, NotReady, PromptTooLong, QueueFull, WorkerFailed
from daemon.request import ENDED
from daemon.text import Tokenizer
from ipc.vocabulary import FinishReason, Role
from tests.daemon.small_tokenizers import byte_level_json
from tests.end_to_end.town import Client, Town, spec, tokenizer_of
from tests.gpu_workers.rig import Rig

DISAGGREGATED = {"p0": Role.PREFILL, "d0": Role.DECODE}
TWO_AND_TWO = DISAGGREGATED | {"p1": Role.PREFILL, "d1": Role.DECODE}
TOPOLOGIES = {
    "1P+1D": DISAGGREGATED,
    "2P+2D": TWO_AND_TWO,
    "mixed": {"m0": Role.MIXED},
    "1P+1M": {"p0": Role.PREFILL, "m0": Role.MIXED},
    "1M+1D": {"m0": Role.MIXED, "d0": Role.DECODE},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("tokenizer"), byte_level_json())


def assert_answered(client: Client) -> None:
    for choice in range(sum(s.num_choices for s in client.specs)):
        assert client.tokens(choice) == client.expected(choice)
        assert [d.finished for d in client.deltas if d.choice == choice and d.finished] == [
            FinishReason.LENGTH
        ]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(3))
def test_everybody_gets_the_same_answer_in_every_topology_B6_F18(
    tokenizer: Tokenizer, topology: str, seed: int
) -> None:
    town = Town(tokenizer, TOPOLOGIES[topology], seed=seed)
    for i in range(30):
        prompt = [town.random.randrange(200) for _ in range(town.random.randrange(1, 40))]
        town.ask(spec(prompt, max_tokens=1 + i % 12, num_choices=1 + i % 3))
        town.tick()
    town.settle()
    for client in town.clients:
        assert_answered(client)
    town.check_all_free()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_left_behind_by_clients_that_leave_at_any_moment_A3_A6(
    tokenizer: Tokenizer, topology: str, seed: int
) -> None:
    town = Town(tokenizer, TOPOLOGIES[topology], seed=seed, num_blocks=40)
    for i in range(60):
        prompt = [town.random.randrange(200) for _ in range(town.random.randrange(1, 40))]
        town.ask(spec(prompt, max_tokens=10, num_choices=1 + i % 2))
        for _ in range(town.random.randrange(8)):
            town.tick()
        if town.random.random() < 0.5:
            town.random.choice(town.clients).leave()
    town.settle()
    for client in town.clients:
        if not client.has_left:
            assert_answered(client)
    town.check_all_free()


@pytest.mark.parametrize("topology", ["1P+1D", "mixed", "2P+2D"])
def test_a_pool_under_pressure_preempts_and_still_answers_everybody_A23_F24(
    tokenizer: Tokenizer, topology: str
) -> None:
    town = Town(tokenizer, TOPOLOGIES[topology], seed=1, num_blocks=16)
    for i in range(20):
        town.ask(spec(list(range(i, i + 10)), max_tokens=40))
    town.settle()
    for client in town.clients:
        assert_answered(client)
    preempted = sum(h.rig.scheduler.decodes.num_preempted for h in town.houses.values())
    assert preempted > 0
    town.check_all_free()


def test_decode_never_computes_a_prompt_and_prefill_never_decodes_A19_A20(
    tokenizer: Tokenizer,
) -> None:
    town = Town(tokenizer, TWO_AND_TWO)
    for i in range(20):
        town.ask(spec(list(range(i, i + 10))))
    town.settle()
    counters = {name: house.rig.scheduler.counters for name, house in town.houses.items()}
    assert counters["d0"].prefill_tokens == counters["d1"].prefill_tokens == 0
    assert counters["p0"].decode_steps == counters["p1"].decode_steps == 0
    assert counters["d0"].num_pulls + counters["d1"].num_pulls == 20
    assert min(counters["d0"].num_pulls, counters["d1"].num_pulls) > 5
    assert min(counters["p0"].prefill_tokens, counters["p1"].prefill_tokens) > 50


def test_a_request_of_one_token_never_goes_to_decode_B26(tokenizer: Tokenizer) -> None:
    town = Town(tokenizer, DISAGGREGATED)
    client = town.ask(spec([1, 2, 3], max_tokens=1))
    town.settle()
    assert_answered(client)
    assert town.houses["d0"].rig.scheduler.counters.num_pulls == 0
    town.check_all_free()


def test_prompts_of_one_call_are_counted_through(tokenizer: Tokenizer) -> None:
    town = Town(tokenizer, DISAGGREGATED)
    client = town.ask(spec([1, 2], num_choices=2), spec([3, 4], num_choices=2))
    town.settle()
    assert_answered(client)
    assert {delta.choice for delta in client.deltas} == {0, 1, 2, 3}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("topology", "victim"), [("1P+1D", "p0"), ("1P+1D", "d0"), ("mixed", "m0"), ("2P+2D", "d1")]
)
def test_a_death_is_unseen_by_every_client_and_leaks_nothing_B1_B2_B3(
    tokenizer: Tokenizer, topology: str, victim: str, seed: int
) -> None:
    town = Town(tokenizer, TOPOLOGIES[topology], seed=seed, num_blocks=40)
    for i in range(12):
        town.ask(spec(list(range(i, i + 12)), max_tokens=12, num_choices=1 + i % 3))
    for _ in range(10 + 12 * seed):
        town.tick()
    town.kill(victim)
    for _ in range(seed if town.houses else 0):
        town.tick()
    town.build(victim)
    town.settle()
    for client in town.clients:
        assert_answered(client)
    after = town.ask(spec([7, 8, 9]))
    town.settle()
    assert_answered(after)
    town.check_all_free()


def test_deaths_one_after_the_other_cost_no_client_its_answer(tokenizer: Tokenizer) -> None:
    town = Town(tokenizer, TWO_AND_TWO, seed=3, num_blocks=40)
    for i in range(12):
        town.ask(spec(list(range(i, i + 12)), max_tokens=12, num_choices=1 + i % 2))
    for victim in ("p0", "d1", "d0"):
        for _ in range(25):
            town.tick()
        town.kill(victim)
        town.build(victim)
    town.settle()
    for client in town.clients:
        assert_answered(client)
    town.check_all_free()


def test_a_decode_instance_that_lives_takes_over_before_the_dead_one_is_back(
    tokenizer: Tokenizer,
) -> None:
    town = Town(tokenizer, TWO_AND_TWO)
    client = town.ask(spec([1, 2, 3], max_tokens=30))
    while len(client.tokens(0)) < 5:
        town.tick()
    (trip,) = [t for t in client.call.requests[0].trips if t.phase not in ENDED]
    assert trip.instance is not None
    town.kill(trip.instance)
    town.settle()
    assert_answered(client)


def test_a_request_that_ends_every_worker_is_given_up_with_a_clear_error(
    tokenizer: Tokenizer,
) -> None:
    town = Town(tokenizer, {"m0": Role.MIXED})
    client = town.ask(spec([1, 2, 3], max_tokens=30))
    for _ in range(4):
        assert not client.is_over
        town.tick()
        town.kill("m0")
        town.build("m0")
    town.settle()
    assert isinstance(client.error, WorkerFailed)
    assert str(client.error) == ("given up after 4 tries: the worker m0 failed: killed by SIGKILL")
    town.check_all_free()


def test_a_request_whose_instance_is_gone_waits_for_the_next_one(tokenizer: Tokenizer) -> None:
    town = Town(tokenizer, TWO_AND_TWO)
    client = town.ask(spec([1, 2, 3], max_tokens=10))
    for name in ("d0", "d1"):
        town.kill(name)
    for _ in range(50):
        town.tick()
    assert not client.is_over
    town.build("d1")
    town.settle()
    assert_answered(client)


def test_a_prefilled_prompt_outlives_the_death_of_its_decode_instance(
    tokenizer: Tokenizer,
) -> None:
    town = Town(tokenizer, DISAGGREGATED)
    client = town.ask(spec([1, 2, 3, 4, 5]))
    while not client.deltas:
        town.tick()
    town.kill("d0")
    assert client.error is None
    town.build("d0")
    town.settle()
    assert_answered(client)
    assert town.houses["p0"].rig.scheduler.counters.prefill_tokens == 5
    town.check_all_free()


def test_a_dead_instance_is_not_sent_work_and_its_like_takes_it(tokenizer: Tokenizer) -> None:
    town = Town(tokenizer, TWO_AND_TWO)
    town.kill("p0")
    town.kill("d1")
    clients = [town.ask(spec([i, 2, 3])) for i in range(5)]
    town.settle()
    for client in clients:
        assert_answered(client)


def test_without_an_instance_of_a_role_nothing_is_taken(tokenizer: Tokenizer) -> None:
    town = Town(tokenizer, DISAGGREGATED)
    town.kill("d0")
    with pytest.raises(NotReady):
        town.ask(spec([1]))


def test_a_draining_node_takes_nothing_new_and_finishes_what_it_has_B25(
    tokenizer: Tokenizer,
) -> None:
    town = Town(tokenizer, DISAGGREGATED)
    client = town.ask(spec([1, 2, 3]))
    town.controller.is_draining = True
    with pytest.raises(Draining):
        town.ask(spec([1]))
    town.settle()
    assert_answered(client)


def test_a_prompt_that_cannot_fit_is_refused_with_the_limit_E5(tokenizer: Tokenizer) -> None:
    town = Town(tokenizer, DISAGGREGATED, num_blocks=8)
    with pytest.raises(PromptTooLong, match="maximum context length is 32 tokens") as refused:
        town.ask(spec(list(range(30)), max_tokens=3))
    assert "30 in the prompt, 3 for the completion" in str(refused.value)


def test_a_full_house_refuses_D13(tokenizer: Tokenizer) -> None:
    town = Town(tokenizer, DISAGGREGATED, max_queued=3)
    for _ in range(3):
        town.ask(spec([1, 2]))
    with pytest.raises(QueueFull, match="3 requests are waiting"):
        town.ask(spec([1, 2]))
    town.settle()


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_five_stages_add_up_to_the_request_s_life(tokenizer: Tokenizer, topology: str) -> None:
    now = iter(range(1000))
    town = Town(tokenizer, TOPOLOGIES[topology], clock=lambda: float(next(now)))
    client = town.ask(spec([1, 2, 3]))
    town.settle()
    (request,) = client.call.requests
    (stages,) = client.call.stage_times
    clock = request.clock
    assert clock.ended_s is not None
    total = sum(getattr(stages, name) for name in stages.__struct_fields__)
    assert total == pytest.approx(clock.ended_s - clock.arrived_s)


def test_an_instance_with_a_smaller_pool_that_comes_later_gets_only_what_it_can_hold(
    tokenizer: Tokenizer,
) -> None:
    """A long sequence on it would be preempted and prefilled again for ever."""

    def make(role: Role, name: str, epoch: int) -> Rig:
        return Rig(role, name=name, epoch=epoch, num_blocks=6 if name == "m0" else 64)

    town = Town(tokenizer, DISAGGREGATED, make_rig=make)
    long = [town.ask(spec(list(range(i, i + 20)), max_tokens=30)) for i in range(6)]
    for _ in range(30):
        town.tick()
    town.add("m0", Role.MIXED)
    short = [town.ask(spec([i, 2, 3])) for i in range(6)]
    town.settle()
    for client in (*long, *short):
        assert_answered(client)
    assert town.houses["m0"].rig.scheduler.counters.prefill_tokens > 0
    town.check_all_free()
