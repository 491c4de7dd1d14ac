"""One client's stream: everything in its order, and one ending."""

import pytest

from daemon.errors import Draining, ServeError, WorkerFailed
from daemon.generation import Delta, TokenStream
from ipc.vocabulary import FinishReason

DIED = WorkerFailed("The worker died.")
SOME = Delta(0, "a", (1,))
END = Delta(1, "b", (2,), None, FinishReason.LENGTH)


async def read(stream: TokenStream) -> tuple[list[Delta], list[ServeError]]:
    """All deltas and errors, until the stream says that it is over."""
    deltas: list[Delta] = []
    errors: list[ServeError] = []
    while True:
        try:
            deltas += await anext(stream)
        except StopAsyncIteration:
            return deltas, errors
        except ServeError as error:
            errors.append(error)


@pytest.mark.parametrize("ends_before", [True, False])
async def test_the_first_error_is_the_one_ending_also_where_others_of_the_call_still_end(
    ends_before: bool,
) -> None:
    stream = TokenStream(num_choices=3)
    stream.put(SOME)
    if ends_before:
        stream.put(END)
    stream.fail(DIED)
    if not ends_before:
        stream.put(END)
    stream.fail(Draining())
    assert stream.is_finished
    assert await read(stream) == ([SOME, END], [DIED])


async def test_a_stream_whose_choices_have_all_ended_cannot_fail_any_more() -> None:
    stream = TokenStream(num_choices=1)
    stream.put(END)
    stream.fail(DIED)
    assert await read(stream) == ([END], [])
