import pytest

from planner.bench.events import RequestFailed, StageTimes, error_message, read_answer
from tests.planner.openai_service import DONE, event, text, usage


def failure(*pieces: bytes) -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        read_answer(enumerate(pieces))
    return caught.value


def test_an_event_counts_from_the_moment_its_last_byte_has_come() -> None:
    first, last = text("a"), text("b", finish_reason="length")
    pieces = [(1.0, first[:9]), (2.0, first[9:] + last[:5]), (3.0, last[5:]), (4.0, DONE)]
    answer = read_answer(pieces)
    assert answer.event_s == (2.0, 3.0)
    assert answer.output_tokens == 2
    assert not answer.is_counted


def test_events_may_end_their_lines_as_windows_does() -> None:
    piece = (text("a") + text("b") + DONE).replace(b"\n", b"\r\n")
    assert read_answer([(1.0, piece)]).event_s == (1.0, 1.0)


def test_comments_and_other_fields_are_no_tokens() -> None:
    answer = read_answer(
        [(1.0, b": ping\n\n"), (2.0, b"event: x\nid: 3\n" + text("a")), (3.0, DONE)]
    )
    assert answer.event_s == (2.0,)


def test_usage_tells_the_tokens_of_merged_events() -> None:
    pieces = [text("a"), text(" b c d", finish_reason="length"), usage(7, 4), DONE]
    answer = read_answer(enumerate(pieces))
    assert answer.event_s == (0, 1)
    assert (answer.input_tokens, answer.output_tokens, answer.is_counted) == (7, 4, True)


def test_token_ids_count_where_text_is_held_back() -> None:
    pieces = [text("", token_ids=[5]), text("é", token_ids=[6, 7], finish_reason="length"), DONE]
    answer = read_answer(enumerate(pieces))
    assert answer.event_s == (0, 1)
    assert answer.output_tokens == 3


def test_an_empty_end_is_no_token_unless_the_usage_has_one_more() -> None:
    end = text("", finish_reason="length")
    assert read_answer(enumerate([text("a"), end, usage(3, 1), DONE])).event_s == (0,)
    assert read_answer(enumerate([text("a"), end, usage(3, 2), DONE])).event_s == (0, 1)
    assert read_answer(enumerate([text("a"), end, DONE])).event_s == (0,)


def test_a_stream_that_tells_its_finish_needs_no_mark_of_the_end() -> None:
    assert read_answer([(1.0, text("a", finish_reason="length"))]).output_tokens == 1


def test_the_services_stage_times_are_taken_and_foreign_ones_are_not() -> None:
    stages = {
        "prefill_queue_s": 0.1,
        "prefill_s": 0.2,
        "transfer_s": 0.3,
        "decode_queue_s": 0.4,
        "decode_s": 0.5,
    }
    told = read_answer([(1.0, text("a") + event(choices=[], timing=stages) + DONE)])
    assert told.stages == StageTimes(0.1, 0.2, 0.3, 0.4, 0.5)
    foreign = read_answer([(1.0, text("a") + event(choices=[], timing={"total": 3}) + DONE)])
    assert foreign.stages is None


@pytest.mark.parametrize(
    ("pieces", "kind", "message"),
    [
        ([text("a")], "cut_short", "the stream ended after 1 tokens, without its end"),
        ([], "cut_short", "the stream ended after 0 tokens, without its end"),
        ([DONE], "no_tokens", "the answer holds no token"),
        ([text("a"), event(error={"message": "out  of\nluck"})], "stream_error", "out of luck"),
        ([event(object="error", message="no")], "stream_error", "no"),
        ([b"data: {nonsense}\n\n"], "malformed", "an event cannot be read"),
        ([b'data: {"choices": 3}\n\n'], "malformed", "an event cannot be read"),
    ],
)
def test_what_is_no_answer_fails_by_a_name_F12(
    pieces: list[bytes], kind: str, message: str
) -> None:
    failed = failure(*pieces)
    assert failed.kind == kind
    assert failed.message.startswith(message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "full house"}}', "full house"),
        (b'{"object": "error", "message": "full house"}', "full house"),
        (b'{"detail": [{"msg": "full house"}]}', "[{'msg': 'full house'}]"),
        (b"<html>\n full house</html>", "<html> full house</html>"),
        (b"", "no message"),
    ],
)
def test_an_errors_sentence_is_found_in_whatever_it_is_wrapped_in(
    body: bytes, message: str
) -> None:
    assert error_message(body) == message


@pytest.mark.parametrize("count", [-8, 10**10])
def test_a_count_of_tokens_that_cannot_be_is_no_count(count: int) -> None:
    end = text("a", finish_reason="length")
    assert failure(end, usage(count, 4), DONE).kind == "malformed"
    assert failure(end, usage(7, count), DONE).kind == "malformed"


def test_an_errors_sentence_cannot_colour_a_terminal() -> None:
    assert error_message(b"\x1b[31mno\x00\n more\x07") == "[31mno more"
