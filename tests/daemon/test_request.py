"""One request's life: allowed steps, its text and ending, its five stages."""

import pytest

from daemon.generation import GenerationSpec, TokenStream
from daemon.request import ENDED, NEXT, Choice, Phase, Request, StageClock, Trip
from daemon.text import ChoiceText, Tokenizer
from ipc.messages import TokenRow
from ipc.vocabulary import FinishReason, SamplingParams
from tests.gpu_workers.checkpoints import EOS, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    (directory / "config.json").write_text("{}")
    return Tokenizer.from_directory(directory)


def row(text: bytes, finished: FinishReason | None = None, *more: int) -> TokenRow:
    return TokenRow(1, (*text, *more), finished)


def test_every_phase_has_its_table_and_an_end_has_no_next() -> None:
    assert set(NEXT) == set(Phase)
    assert all(not NEXT[phase] for phase in ENDED)


def test_a_step_that_is_not_allowed_is_our_own_bug() -> None:
    spec = GenerationSpec(prompt=(1,), sampling=SamplingParams(max_tokens=1, seed=0))
    request = Request(spec, 1, TokenStream(1), 0.0)
    trip = Trip(1, request, {2: Choice(0, None)}, now_s=0.0)  # type: ignore[arg-type]
    trip.enter(Phase.PREFILL)
    trip.enter(Phase.FINISHED)
    with pytest.raises(AssertionError, match="trip 1"):
        trip.enter(Phase.DECODE)


def test_the_token_that_ends_a_choice_is_counted_but_not_shown(tokenizer: Tokenizer) -> None:
    choice = Choice(0, ChoiceText(tokenizer, ()))
    delta = choice.take(row(b"ab", FinishReason.STOP, EOS))
    assert (delta.text, delta.token_ids, delta.finished) == ("ab", (97, 98, EOS), FinishReason.STOP)
    assert choice.output == [97, 98, EOS]


def test_a_visible_end_token_is_not_shown_either(tokenizer: Tokenizer) -> None:
    choice = Choice(0, ChoiceText(tokenizer, ()))
    assert choice.take(row(b"ab", FinishReason.STOP)).text == "a"


def test_a_stop_string_ends_a_choice_that_its_leader_would_go_on_with(tokenizer: Tokenizer) -> None:
    choice = Choice(0, ChoiceText(tokenizer, ("cd",)))
    assert choice.take(row(b"abc")).text == "ab"
    delta = choice.take(row(b"de"))
    assert (delta.text, delta.finished) == ("", FinishReason.STOP)


def test_what_is_held_back_comes_with_the_last_delta(tokenizer: Tokenizer) -> None:
    choice = Choice(0, ChoiceText(tokenizer, ("cd",)))
    assert choice.take(row(b"abc", FinishReason.LENGTH)).text == "abc"


def test_the_five_stages_of_a_request_that_was_handed_over() -> None:
    clock = StageClock(10.0)
    clock.prefilled(11.0, 13.0)
    clock.pulled(13.5, 14.0)
    clock.decoding(14.25)
    clock.ended_s = 20.0
    stages = clock.stages
    assert stages is not None
    assert (stages.prefill_queue_s, stages.prefill_s, stages.transfer_s) == (1.0, 2.0, 0.5)
    assert (stages.decode_queue_s, stages.decode_s) == (0.75, 5.75)


def test_a_request_that_ends_on_its_first_token_has_no_decode() -> None:
    clock = StageClock(10.0)
    clock.prefilled(11.0, 13.0)
    clock.ended_s = 13.5
    stages = clock.stages
    assert stages is not None
    assert (stages.prefill_s, stages.transfer_s, stages.decode_s) == (2.5, 0.0, 0.0)


def test_a_second_trip_does_not_move_the_marks_of_the_first() -> None:
    clock = StageClock(10.0)
    for offset in (0.0, 5.0):
        clock.prefilled(11.0 + offset, 12.0 + offset)
        clock.pulled(12.0 + offset, 13.0 + offset)
        clock.decoding(13.0 + offset)
    clock.ended_s = 30.0
    assert clock.stages is not None
    assert clock.stages.decode_s == 17.0


def test_a_request_that_never_ran_has_no_stages() -> None:
    clock = StageClock(10.0)
    clock.ended_s = 11.0
    assert clock.stages is None
