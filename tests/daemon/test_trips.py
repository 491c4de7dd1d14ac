"""What is done again after a death, and what goes together then."""

from daemon.controller import LeaderEvent
from daemon.generation import GenerationSpec
from daemon.text import Tokenizer
from ipc.messages import Decode, Prefill, Prefilled, Pulled, TokenRow, Tokens
from ipc.vocabulary import KVHandle, Role, SamplingParams
from tests.daemon.mute import EPOCH, MuteHouse

PROMPT = (65,) * 10
SAMPLING = SamplingParams(max_tokens=100, seed=1, temperature=0.0)


def prefilled(command: Prefill, *token_ids: int) -> LeaderEvent:
    handle = KVHandle("p0", EPOCH, command.request_id, (0,), len(PROMPT))
    nobody = tuple(None for _ in token_ids)
    return Prefilled(command.request_id, token_ids, nobody, handle, 0.0, 0.0)


def tokens(command: Decode, *token_ids: int) -> LeaderEvent:
    """The same token for every choice, step by step."""
    seq_ids = [start.seq_id for start in command.sequences]
    return Tokens(0.0, tuple(TokenRow(s, (t,), None) for t in token_ids for s in seq_ids))


def prefilled_again(house: MuteHouse) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(choices, output) of each prefill but the first."""
    return [(command.choices, command.output) for command in house.prefills()[1:]]


def house_of(tokenizer: Tokenizer, num_choices: int, *first_tokens: int) -> MuteHouse:
    """One request, whose prompt has been prefilled and handed to d0; d1 is there, too."""
    house = MuteHouse(tokenizer)
    spec = GenerationSpec(prompt=PROMPT, sampling=SAMPLING, num_choices=num_choices)
    house.controller.submit([spec])
    house.hears("p0", prefilled(house.prefills()[0], *first_tokens))
    house.up("d1", Role.DECODE)
    return house


def test_choices_that_lose_their_prompt_with_one_first_token_go_on_together(
    tokenizer: Tokenizer,
) -> None:
    house = house_of(tokenizer, 3, 7, 7, 8)
    (command,) = house.decodes()
    house.hears("d0", Pulled(command.request_id, 1, 0.0, 0.0))
    house.down("d0")
    assert prefilled_again(house) == [((0, 1), (7,)), ((2,), (8,))]


def test_choices_that_have_grown_go_on_apart_also_where_they_are_equal(
    tokenizer: Tokenizer,
) -> None:
    """Together they could need more blocks than the pool that they once fitted into has."""
    house = house_of(tokenizer, 2, 7, 7)
    (command,) = house.decodes()
    house.hears("d0", Pulled(command.request_id, 1, 0.0, 0.0))
    house.hears("d0", tokens(command, 8, 9))
    house.down("d0")
    assert prefilled_again(house) == [((0,), (7, 8, 9)), ((1,), (7, 8, 9))]
