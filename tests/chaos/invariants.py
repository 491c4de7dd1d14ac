"""What must hold when all is over, whatever went wrong on the way."""

from typing import Any

from tests.chaos.chaos_town import ChaosTown
from tests.chaos.load import Answer, answers_of


def check(town: ChaosTown, undisturbed: list[list[Answer]]) -> None:
    check_answers(town, undisturbed)
    check_books(town)
    check_the_auditor(town)


def check_answers(town: ChaosTown, undisturbed: list[list[Answer]]) -> None:
    """Everybody who stayed has what they would have had; who left, the beginning of it."""
    for client, whole in zip(town.clients, undisturbed, strict=True):
        answers = list(answers_of(client))
        if client.has_left:
            assert all(a.begins(w) for a, w in zip(answers, whole, strict=True))
            continue
        assert client.error is None
        assert all(len(answer.endings) == 1 for answer in answers), "one ending per choice"
        for answer, expected in zip(answers, whole, strict=True):
            assert answer == expected


def check_books(town: ChaosTown) -> None:
    """Nothing is held, used, queued or expected anywhere, and the daemon's picture says so."""
    town.check_all_free()
    trips: Any = town.controller._trips
    assert not trips._held
    assert not trips._by_sequence
    assert not any(town.controller.count_phases().values())
    for instance in town.controller.instances:
        stats = instance.stats
        assert stats.blocks_free == stats.blocks_total == instance.layout.num_blocks
        assert stats.blocks_held == stats.blocks_in_use == stats.audit_failures == 0


def check_the_auditor(town: ChaosTown) -> None:
    """A block that is lost now is missed at once."""
    for house in town.houses.values():
        pool: Any = house.rig.scheduler.pool
        lost = pool._free.pop()
        faults = house.rig.scheduler.audit()
        pool._free.append(lost)
        assert faults == ["1 blocks are neither free nor referenced"]
