"""A leader's prefill by skip-join: chunks in steps, blocks of half computed prompts, pipelines."""

import pytest

from gpu_workers.step_plan import StepPlan
from ipc.messages import Abort, Begun, Chunked, Gone, Prefilled, Release
from ipc.vocabulary import Parallelism, PrefillPolicy, Role
from tests.gpu_workers.group_rig import GroupRig
from tests.gpu_workers.rig import Rig, prefill, results
from tests.gpu_workers.scripted_engine import scripted_token
from tests.gpu_workers.test_group import SHAPES, shape_name, whole_answer
from tests.gpu_workers.test_scheduler import prefilled, tokens_of

SKIP_JOIN = PrefillPolicy.SKIP_JOIN


def skip_join_rig(role: Role = Role.PREFILL, **limits: int) -> Rig:
    return Rig(role, prefill_policy=SKIP_JOIN, **{"max_tokens": 16} | limits)


def rows(plans: list[StepPlan]) -> list[list[tuple[int, int]]]:
    return [[(row.sequence, row.num_new) for row in plan.rows] for plan in plans if plan.rows]


def test_a_short_prompt_goes_between_the_chunks_of_a_long_one() -> None:
    rig = skip_join_rig()
    rig.tell(prefill(1, 40))
    rig.step()
    rig.tell(prefill(2, 5))
    first, second = prefilled(rig.run())
    assert (first.request_id, second.request_id) == (2, 1)
    assert rows(rig.executor.plans) == [[(1, 16)], [(2, 5)], [(1, 16)], [(1, 8)]]
    assert second.token_ids == (scripted_token(prefill(1, 40).prompt, 0, 0),)
    assert second.started_s < first.started_s < first.ended_s < second.ended_s


def test_each_chunk_but_the_last_is_told_with_its_tokens_and_times() -> None:
    rig = skip_join_rig()
    rig.tell(prefill(1, 40))
    rig.step()
    rig.tell(prefill(2, 5))
    events = rig.run()
    assert [event for event in events if isinstance(event, Begun)] == [Begun((1,)), Begun((2,))]
    assert [event for event in events if isinstance(event, Chunked)] == [
        Chunked(1, 16, 1.0, 1.5),
        Chunked(1, 16, 3.0, 3.5),
    ]


def test_a_long_prompt_s_blocks_are_kept_between_its_chunks() -> None:
    rig = skip_join_rig()
    rig.tell(prefill(1, 40))
    rig.step()
    assert rig.scheduler.pool.num_in_use == 10
    rig.tell(prefill(2, 5))
    rig.step()
    assert rig.scheduler.pool.num_in_use == 10
    assert rig.scheduler.pool.num_held == 2


def test_a_prompt_aborted_between_its_chunks_frees_its_blocks_at_once_A3() -> None:
    rig = skip_join_rig()
    rig.tell(prefill(1, 40))
    rig.step()
    rig.tell(Abort(1, (1000,)))
    rig.tell(Abort(1, (1000,)))
    assert rig.is_all_free
    assert results(rig.run()) == [Gone(1, (1000,))]
    assert rig.num_sequences == 0


def test_a_prompt_aborted_during_a_chunk_frees_its_blocks_when_it_ends_A6() -> None:
    rig = skip_join_rig()
    rig.tell(prefill(1, 40))
    plan = rig.scheduler.plan()
    assert plan is not None
    launched = rig.executor.launch(plan)
    rig.scheduler.launched(plan, 1.0)
    rig.tell(Abort(1, (1000,)))
    assert rig.scheduler.pool.num_in_use == 10
    rig.scheduler.collect(launched, started_s=1.0, ended_s=2.0)
    assert results(rig.run()) == [Gone(1, (1000,))]
    assert rig.is_all_free


def test_half_computed_prompts_finish_in_a_pool_that_is_full_of_them_A25() -> None:
    """Two long ones hold all but one block when a short one comes: it waits until one is pulled."""
    rig = skip_join_rig(num_blocks=36)
    rig.tell(prefill(1, 100))
    rig.step()
    rig.tell(prefill(2, 40))
    rig.step()
    assert rig.scheduler.pool.num_free == 1
    rig.tell(prefill(3, 12))
    assert [event.request_id for event in prefilled(rig.run())] == [2, 1]
    assert rig.scheduler.prefills.num_waiting == 1
    rig.tell(Release(1))
    assert [event.request_id for event in prefilled(rig.run())] == [3]


def test_a_mixed_instance_decodes_when_no_prompt_can_run() -> None:
    rig = skip_join_rig(Role.MIXED)
    commands = [prefill(1, 40, num_choices=2), prefill(2, 5), prefill(3, 20)]
    for command in commands:
        rig.tell(command)
    events = rig.run()
    for command in commands:
        (first,) = [e for e in prefilled(events) if e.request_id == command.request_id]
        for i, seq_id in enumerate(command.seq_ids):
            got = [first.token_ids[i], *tokens_of(events, seq_id)]
            assert got == [scripted_token(command.prompt, i, n) for n in range(8)]
    assert rows(rig.executor.plans)[:3] == [[(2, 5)], [(3, 16)], [(3, 4)]]
    assert rig.is_all_free


def test_another_prompt_fills_the_pipeline_behind_a_chunk() -> None:
    rig = GroupRig(Role.PREFILL, Parallelism(1, 2), prefill_policy=SKIP_JOIN, max_tokens=16)
    rig.tell(prefill(1, 40))
    rig.tell(prefill(2, 36))
    assert rig.launch()
    assert rig.launch()
    assert rows(rig.executors[0].plans) == [[(1, 16)], [(2, 16)]]
    events = rig.run()
    assert sorted(e.request_id for e in events if isinstance(e, Prefilled)) == [1, 2]
    assert rig.most_in_flight == 2


@pytest.mark.parametrize("shape", [Parallelism(), *SHAPES], ids=shape_name)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.MIXED])
@pytest.mark.parametrize("seed", range(3))
def test_aborts_at_any_moment_leave_nothing_behind_in_any_shape_A3(
    shape: Parallelism, role: Role, seed: int
) -> None:
    """And a prompt is never in two steps: the rig looks at each launch."""
    rig = GroupRig(role, shape, seed=seed, prefill_policy=SKIP_JOIN, max_tokens=8)
    commands = [prefill(i, 4 + 9 * (i % 4), max_tokens=6) for i in range(1, 9)]
    for command in commands:
        rig.tell(command)
        for _ in range(rig.random.randrange(6)):
            rig.step()
    for command in commands[:3]:
        for _ in range(rig.random.randrange(9)):
            rig.step()
        rig.tell(Abort(command.request_id, command.seq_ids))
    events = rig.run()
    for command in commands:
        rig.tell(Release(command.request_id))
    for command in commands[3:] if role is Role.MIXED else ():
        expected = [scripted_token(command.prompt, 0, n) for n in range(6)]
        assert whole_answer(events, command.seq_ids[0]) == expected
    assert {e.request_id for e in prefilled(events)} >= set(range(4, 9)) - {1, 2, 3}
    assert rig.is_all_free
    assert rig.num_sequences == 0
