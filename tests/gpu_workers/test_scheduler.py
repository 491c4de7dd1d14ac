"""What a leader decides, step by step, with an engine that checks every plan."""

from collections.abc import Sequence

import pytest

from ipc.messages import (
    Abort,
    Decode,
    Gone,
    MixedPolicy,
    PeerDown,
    Preempted,
    Prefilled,
    Pulled,
    Refused,
    Release,
    SequenceStart,
    SetRole,
    Tokens,
)
from ipc.vocabulary import FinishReason, KVHandle, Role, SamplingParams
from tests.gpu_workers.rig import BLOCK_SIZE, Rig, prefill, results
from tests.gpu_workers.scripted_engine import scripted_token


def prefilled(events: Sequence[object]) -> list[Prefilled]:
    return [event for event in events if isinstance(event, Prefilled)]


def tokens_of(events: Sequence[object], seq_id: int) -> list[int]:
    rows = [row for event in events if isinstance(event, Tokens) for row in event.rows]
    return [token for row in rows if row.seq_id == seq_id for token in row.token_ids]


def decode(rig: Rig, request_id: int, num_tokens: int, **how: int) -> Decode:
    """A handle of a peer that the rig knows, and the choices that go on from it."""
    rig.know("there", 5)
    num_choices = how.get("num_choices", 1)
    prompt = tuple(range(request_id, request_id + num_tokens))
    blocks = tuple(range(-(-num_tokens // BLOCK_SIZE)))
    return Decode(
        request_id=request_id,
        arrival=how.get("arrival", request_id),
        handle=KVHandle("there", 5, request_id, blocks, num_tokens),
        sequences=tuple(
            SequenceStart(1000 * request_id + i, i, (scripted_token(prompt, i, 0),))
            for i in range(num_choices)
        ),
        prompt=prompt,
        sampling=SamplingParams(max_tokens=how.get("max_tokens", 8), seed=0),
    )


class TestPrefill:
    def test_a_prompt_is_answered_by_a_first_token_and_a_handle(self) -> None:
        rig = Rig(Role.PREFILL)
        command = prefill(1, 10)
        rig.tell(command)
        (event,) = prefilled(rig.run())
        assert event.token_ids == (scripted_token(command.prompt, 0, 0),)
        assert event.handle is not None
        assert event.handle.num_tokens == 10
        assert rig.scheduler.pool.num_held == len(event.handle.block_ids) == 3

    def test_held_blocks_are_freed_by_release_and_only_once(self) -> None:
        rig = Rig(Role.PREFILL)
        rig.tell(prefill(1, 10))
        rig.run()
        rig.tell(Release(1))
        rig.tell(Release(1))
        assert rig.is_all_free

    def test_prompts_are_packed_to_l_m_and_a_long_one_runs_alone(self) -> None:
        rig = Rig(Role.PREFILL, max_tokens=32)
        for request_id, num_tokens in ((1, 10), (2, 20), (3, 10), (4, 100), (5, 5)):
            rig.tell(prefill(request_id, num_tokens))
        rig.run()
        batches = [[row.sequence for row in plan.rows] for plan in rig.executor.plans if plan.rows]
        assert batches == [[1, 2], [3], [4], [5]]

    def test_prefill_memory_is_the_buffer_and_work_waits_for_room(self) -> None:
        rig = Rig(Role.PREFILL, num_blocks=6)
        for request_id in (1, 2, 3):
            rig.tell(prefill(request_id, 9))
        assert len(prefilled(rig.run())) == 2
        assert rig.scheduler.prefills.num_waiting == 1
        rig.tell(Release(1))
        assert len(prefilled(rig.run())) == 1

    def test_a_prompt_that_was_under_way_before_goes_first(self) -> None:
        rig = Rig(Role.PREFILL, max_tokens=8)
        rig.tell(prefill(5, 8))
        rig.tell(prefill(2, 8))
        assert [event.request_id for event in prefilled(rig.run())] == [2, 5]

    @pytest.mark.parametrize("max_tokens", [0, 1])
    def test_a_request_that_ends_on_its_first_token_hands_nothing_over(
        self, max_tokens: int
    ) -> None:
        rig = Rig(Role.PREFILL)
        rig.tell(prefill(1, 10, max_tokens=max_tokens))
        (event,) = prefilled(rig.run())
        assert event.handle is None
        assert event.finished == (FinishReason.LENGTH,)
        assert len(event.token_ids) == max_tokens
        assert rig.is_all_free

    def test_an_end_token_at_once_hands_nothing_over(self) -> None:
        rig = Rig(Role.PREFILL)
        first = scripted_token(prefill(1, 10).prompt, 0, 0)
        rig.tell(prefill(1, 10, end_token_ids=(first,)))
        (event,) = prefilled(rig.run())
        assert event.finished == (FinishReason.STOP,)
        assert rig.is_all_free

    def test_choices_share_one_prefill_and_one_handle(self) -> None:
        rig = Rig(Role.PREFILL)
        rig.tell(prefill(1, 10, num_choices=3))
        (event,) = prefilled(rig.run())
        assert len(set(event.token_ids)) == 3
        assert event.handle is not None
        assert len(event.handle.block_ids) == 3
        assert rig.scheduler.counters.prefill_tokens == 10

    def test_a_waiting_prompt_is_aborted_at_once(self) -> None:
        rig = Rig(Role.PREFILL)
        rig.tell(prefill(1, 10))
        rig.tell(Abort(1, (1000,)))
        assert results(rig.run()) == [Gone(1, (1000,))]
        assert rig.is_all_free

    def test_a_prompt_aborted_while_its_step_runs_frees_its_blocks_then(self) -> None:
        rig = Rig(Role.PREFILL)
        rig.tell(prefill(1, 10))
        plan = rig.scheduler.plan()
        assert plan is not None
        launched = rig.executor.launch(plan)
        rig.scheduler.launched(plan, 1.0)
        rig.tell(Abort(1, (1000,)))
        assert not rig.is_all_free
        rig.scheduler.collect(launched, started_s=1.0, ended_s=2.0)
        assert results(rig.take_events()) == [Gone(1, (1000,))]
        rig.run()
        assert rig.is_all_free

    def test_aborting_what_is_not_there_changes_nothing(self) -> None:
        rig = Rig(Role.PREFILL)
        rig.tell(Abort(77, (1,)))
        assert rig.run() == []

    def test_a_prompt_larger_than_the_pool_is_refused(self) -> None:
        rig = Rig(Role.PREFILL, num_blocks=2)
        rig.tell(prefill(1, 9))
        (event,) = rig.run()
        assert isinstance(event, Refused)
        assert "9 tokens do not fit" in event.reason


class TestDecode:
    def test_a_pulled_prompt_is_decoded_to_its_end_without_any_prefill(self) -> None:
        rig = Rig(Role.DECODE)
        command = decode(rig, 1, 10, max_tokens=5)
        rig.tell(command)
        events = rig.run()
        assert isinstance(events[0], Pulled)
        assert tokens_of(events, 1000) == [
            scripted_token(command.prompt, 0, i) for i in range(1, 5)
        ]
        assert rig.scheduler.counters.prefill_tokens == 0
        assert rig.scheduler.counters.num_pulls == 1
        assert rig.is_all_free

    def test_choices_are_pulled_once_and_decoded_apart_B14(self) -> None:
        rig = Rig(Role.DECODE)
        command = decode(rig, 1, 10, num_choices=3)
        rig.tell(command)
        events = rig.run()
        for choice in range(3):
            expected = [scripted_token(command.prompt, choice, i) for i in range(1, 8)]
            assert tokens_of(events, 1000 + choice) == expected
        assert len(rig.exchange.pulls) == 1
        assert rig.is_all_free

    def test_shared_full_blocks_count_once(self) -> None:
        rig = Rig(Role.DECODE)
        rig.tell(decode(rig, 1, 8, num_choices=4))
        rig.step()
        assert rig.scheduler.pool.num_in_use == 2
        rig.step()
        assert rig.scheduler.pool.num_in_use == 2 + 4

    def test_a_prompt_waits_until_there_is_room_for_it(self) -> None:
        rig = Rig(Role.DECODE, num_blocks=4)
        rig.tell(decode(rig, 1, 8, max_tokens=4))
        rig.tell(decode(rig, 2, 8, max_tokens=4))
        rig.step()
        assert [pull.handle.request_id for pull in rig.exchange.pulls] == [1]
        rig.run()
        assert [pull.handle.request_id for pull in rig.exchange.pulls] == [1, 2]
        assert rig.is_all_free

    def test_the_youngest_is_preempted_when_the_pool_is_full(self) -> None:
        rig = Rig(Role.DECODE, num_blocks=6)
        rig.tell(decode(rig, 1, 8, max_tokens=12))
        rig.tell(decode(rig, 2, 4, max_tokens=12))
        events = rig.run()
        assert [e.seq_id for e in events if isinstance(e, Preempted)] == [2000]
        assert len(tokens_of(events, 1000)) == 11
        assert rig.scheduler.decodes.num_preempted == 1
        assert rig.is_all_free

    def test_an_aborted_choice_leaves_the_others_running(self) -> None:
        rig = Rig(Role.DECODE)
        rig.tell(decode(rig, 1, 10, num_choices=2))
        rig.step()
        rig.step()
        rig.tell(Abort(1, (1001,)))
        events = rig.run()
        assert Gone(1, (1001,)) in events
        assert len(tokens_of(events, 1000)) == 7
        assert rig.is_all_free

    def test_what_waits_to_be_pulled_is_dropped_when_its_source_dies(self) -> None:
        rig = Rig(Role.DECODE, num_blocks=4)
        rig.tell(decode(rig, 1, 8))
        rig.tell(decode(rig, 2, 8))
        rig.step()
        rig.tell(PeerDown("there", 5))
        events = rig.run()
        assert Gone(2, (2000,)) in events
        assert len(tokens_of(events, 1000)) == 7

    def test_a_handle_of_an_unknown_peer_is_refused(self) -> None:
        rig = Rig(Role.DECODE)
        command = decode(rig, 1, 8)
        rig.exchange.known.clear()
        rig.tell(command)
        assert rig.run() == [Refused(1, (1000,), "not connected")]

    def test_a_batch_has_its_limit(self) -> None:
        rig = Rig(Role.DECODE, max_batch=2)
        for request_id in (1, 2, 3):
            rig.tell(decode(rig, request_id, 4))
        rig.run()
        assert max(len(plan.rows) for plan in rig.executor.plans) == 2
        assert rig.is_all_free


class TestMixed:
    @pytest.mark.parametrize("chunk_tokens", [None, 1, 5, 16])
    def test_prompts_are_prefilled_and_decoded_here(self, chunk_tokens: int | None) -> None:
        rig = Rig(Role.MIXED, chunk_tokens=chunk_tokens)
        commands = [prefill(i, 5 * i, num_choices=1 + i % 3) for i in range(1, 6)]
        for command in commands:
            rig.tell(command)
        events = rig.run()
        for command in commands:
            (first,) = [e for e in prefilled(events) if e.request_id == command.request_id]
            assert first.handle is None
            for i, seq_id in enumerate(command.seq_ids):
                got = [first.token_ids[i], *tokens_of(events, seq_id)]
                assert got == [scripted_token(command.prompt, i, n) for n in range(8)]
        assert rig.exchange.pulls == []
        assert rig.is_all_free

    def test_a_chunked_step_keeps_to_its_budget_and_never_stops_decoding(self) -> None:
        rig = Rig(Role.MIXED, chunk_tokens=8)
        rig.tell(prefill(1, 4, max_tokens=20))
        rig.step()
        rig.tell(prefill(2, 40))
        rig.run()
        for plan in rig.executor.plans:
            assert sum(row.num_new for row in plan.rows) <= 8
        beside = [
            plan for plan in rig.executor.plans if {1000, 2} <= {r.sequence for r in plan.rows}
        ]
        assert len(beside) == 6  # 40 tokens in chunks of 7

    @pytest.mark.parametrize("chunk_tokens", [None, 8])
    def test_choices_of_new_prompts_never_pass_the_batchs_limit(
        self, chunk_tokens: int | None
    ) -> None:
        rig = Rig(Role.MIXED, max_batch=4, chunk_tokens=chunk_tokens)
        for request_id in range(1, 7):
            rig.tell(prefill(request_id, 3, num_choices=3))
        most = 0
        while rig.step():
            most = max(most, rig.scheduler.decodes.num_running)
        assert most == 3
        assert len(prefilled(rig.take_events())) == 6

    def test_a_prompt_aborted_between_its_chunks_is_gone(self) -> None:
        rig = Rig(Role.MIXED, chunk_tokens=8)
        rig.tell(prefill(1, 40))
        rig.step()
        rig.tell(Abort(1, (1000,)))
        assert results(rig.run()) == [Gone(1, (1000,))]
        assert rig.is_all_free

    def test_a_role_changes_for_what_comes_and_not_for_what_is_there_B28(self) -> None:
        rig = Rig(Role.MIXED, chunk_tokens=8)
        rig.tell(prefill(1, 40))
        rig.step()
        rig.tell(SetRole(Role.PREFILL, MixedPolicy()))
        rig.tell(prefill(2, 4))
        first, second = prefilled(rig.run())
        assert (first.request_id, first.handle) == (1, None)
        assert second.handle is not None
        assert rig.scheduler.counters.decode_tokens == 7

    def test_a_first_choice_that_ends_at_once_leaves_the_others(self) -> None:
        rig = Rig(Role.MIXED)
        first = scripted_token(prefill(1, 10).prompt, 0, 0)
        rig.tell(prefill(1, 10, num_choices=2, end_token_ids=(first,)))
        events = rig.run()
        assert prefilled(events)[0].finished == (FinishReason.STOP, None)
        assert len(tokens_of(events, 1001)) == 7
        assert rig.is_all_free
