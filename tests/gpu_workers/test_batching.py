"""The policies of decode, over counts alone."""

from gpu_workers.batching import DecodeAdmission


def test_newcomers_leave_one_block_to_each_that_runs() -> None:
    admission = DecodeAdmission(total_blocks=100)
    assert admission.room(free_blocks=30, num_running=10) == 20
    assert admission.room(free_blocks=5, num_running=10) == 0


def test_after_a_preemption_nothing_enters_before_a_twentieth_is_free() -> None:
    admission = DecodeAdmission(total_blocks=100)
    admission.preempted()
    assert admission.room(free_blocks=4, num_running=1) == 0
    assert admission.room(free_blocks=5, num_running=1) == 4
    assert admission.room(free_blocks=4, num_running=1) == 3


def test_an_empty_instance_admits_even_after_a_preemption() -> None:
    admission = DecodeAdmission(total_blocks=100)
    admission.preempted()
    assert admission.room(free_blocks=3, num_running=0) == 3
