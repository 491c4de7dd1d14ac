"""The one word for the state of an instance's workers."""

from pathlib import Path
from typing import Any

import pytest

from daemon.incarnation import Incarnation
from daemon.live_metrics import WORKER_STATES, worker_state
from daemon.ward import Ward
from ipc.vocabulary import Role
from tests.daemon.metric_samples import spec_of


def ward(**changes: object) -> Ward:
    one = Ward(spec_of("decode-0", Role.DECODE))
    for name, value in changes.items():
        setattr(one, name, value)
    return one


async def life(*, is_up: bool = False, doom: str | None = None) -> Incarnation:
    link: Any = None
    one = Incarnation(spec_of("decode-0", Role.DECODE), 1, link)
    one.is_up = is_up
    if doom is not None:
        one.doom(doom)
    return one


async def test_each_situation_has_its_word() -> None:
    words = {
        "loading": ward(life=await life()),
        "ready": ward(life=await life(is_up=True)),
        "ending": ward(life=await life(is_up=True, doom="wedged")),
        "leaving": ward(life=await life(is_up=True), is_leaving=True),
        "restarting": ward(restarts=1),
        "waiting": ward(waits_for="node n1 has not joined"),
        "quarantined": ward(quarantined="3 deaths on n0:1"),
    }
    assert {word: worker_state(one) for word, one in words.items()} == {w: w for w in words}
    assert set(words) == set(WORKER_STATES)


@pytest.mark.parametrize("sign", WORKER_STATES)
def test_the_page_has_a_sign_for_each_word(sign: str) -> None:
    page = (Path(__file__).parents[2] / "daemon/status_page.html").read_text()
    signs = page.partition("const SIGNS = {")[2].partition("};")[0]
    assert f"{sign}: [" in signs
