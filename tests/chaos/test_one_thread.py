"""Every fault at random moments of a mixed load, in one thread: nobody notices, nothing is left."""

import pytest

from daemon.text import Tokenizer
from tests.chaos.faults import Fault
from tests.chaos.scenario import TOPOLOGIES, one_fault, one_late_fault, storm


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("victim", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(3))
def test_nobody_notices_what_happens_to_one_instance_A1_A6_A12_A14_A22(
    tokenizer: Tokenizer, fault: Fault, victim: str, seed: int
) -> None:
    one_fault(tokenizer, fault, victim, seed)


@pytest.mark.parametrize("fault", [Fault.DEATH, Fault.DROPPED_UP, Fault.DROPPED_DOWN])
@pytest.mark.parametrize("victim", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(4))
def test_the_last_message_of_all_may_be_the_one_that_is_lost(
    tokenizer: Tokenizer, fault: Fault, victim: str, seed: int
) -> None:
    one_late_fault(tokenizer, fault, victim, seed)


@pytest.mark.parametrize("seed", range(12))
def test_nobody_notices_several_faults_on_top_of_each_other(
    tokenizer: Tokenizer, seed: int
) -> None:
    storm(tokenizer, seed)
