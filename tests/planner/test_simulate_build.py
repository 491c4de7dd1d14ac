from pathlib import Path

import pytest

from ipc.vocabulary import Role
from planner.arguments import Load
from planner.deployment import saturation_tokens
from planner.errors import ProfileError
from planner.latency.interface import Chunk, Source
from planner.latency.measured import MeasuredLatency
from planner.latency.scaled import ScaledLatency
from planner.simulate.arguments import read_plan
from planner.simulate.build import Built, build
from planner.simulate.fitting_load import fitting_load
from planner.simulate.outlook import outlook
from planner.simulator.service import InstanceModel, MixedRules, Overheads
from planner.workload.lengths import LengthRules
from tests.planner.profile_tables import decode_ms, profile_table, written

OPT = ("--model", "opt-13b", "--coefficients", "distserve-raw")
LLAMA = ("--model", "llama-3.1-8b", "--device", "h100")


def built(*words: str) -> Built:
    return build(read_plan([*words]).deployment)


def instance(made: Built, role: Role) -> InstanceModel:
    return next(model for group, model in made.groups if group.role is role)


def decode_s(model: InstanceModel, batch: int = 8, context: int = 4096) -> float:
    return model.latency.decode(batch, context).seconds(context)


def test_without_counts_there_is_one_prefill_and_one_decode_instance() -> None:
    made = built(*OPT)
    assert [(group.role, group.count) for group, _ in made.groups] == [
        (Role.PREFILL, 1),
        (Role.DECODE, 1),
    ]
    assert made.service.num_devices == 2


def test_pools_are_the_published_capacities_unless_told() -> None:
    assert instance(built(*OPT), Role.DECODE).kv_blocks == 4133
    assert instance(built(*OPT, "--kv-tokens", "1000"), Role.DECODE).kv_blocks == 62


def test_a_pool_in_gib_is_of_each_device() -> None:
    one = instance(built(*LLAMA, "--kv-cache-gib", "1"), Role.DECODE).kv_blocks
    two = instance(built(*LLAMA, "--kv-cache-gib", "1", "--decode-tp", "2"), Role.DECODE).kv_blocks
    assert one == 2**30 // (16 * 131_072)
    assert two == 2 * one


def test_quantised_weights_decode_faster_and_leave_more_room() -> None:
    whole, quantised = (
        instance(built(*LLAMA, *bits), Role.DECODE) for bits in ((), ("--weight-bits", "4"))
    )
    assert decode_s(quantised) < 0.7 * decode_s(whole)
    assert quantised.kv_blocks > whole.kv_blocks


def test_keys_and_values_of_half_the_bits_fit_twice_as_often() -> None:
    pool = (*LLAMA, "--kv-cache-gib", "4")
    whole, halved = (
        instance(built(*pool, *bits), Role.DECODE).kv_blocks for bits in ((), ("--kv-bits", "8"))
    )
    assert halved == 2 * whole


def test_speculation_makes_steps_longer_and_a_draft_model_takes_room() -> None:
    plain = instance(built(*LLAMA), Role.DECODE)
    made = built(*LLAMA, "--speculate", "4:0.7:smollm2-135m")
    drafted = instance(made, Role.DECODE)
    assert made.service.speculation is not None
    assert made.service.speculation.num_drafted == 4
    assert decode_s(drafted) > decode_s(plain)
    assert drafted.kv_blocks < plain.kv_blocks
    looked_up = instance(built(*LLAMA, "--speculate", "4:0.7"), Role.DECODE)
    assert decode_s(plain) <= decode_s(looked_up) < decode_s(drafted)
    assert looked_up.kv_blocks == plain.kv_blocks


def test_pulls_across_nodes_take_the_network() -> None:
    near, far = (
        instance(built(*LLAMA, *words), Role.DECODE).latency.transfer(1000).seconds
        for words in ((), ("--across-nodes",))
    )
    assert far > 5 * near


def test_a_profile_answers_for_its_shape_and_says_measured(tmp_path: Path) -> None:
    table = written(tmp_path, profile_table())
    made = built("--model", "smollm2-135m", "--profile", str(table), "--kv-tokens", "20000")
    decode = instance(made, Role.DECODE)
    line = decode.latency.decode(4, 4 * 256)
    assert line.source is Source.MEASURED
    assert line.seconds(4 * 256) == pytest.approx(decode_ms(4, 4 * 256) / 1000)
    assert decode.limits.prefill_tokens == 256
    assert made.notes == ()


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    table = written(tmp_path, profile_table(), kv_bytes_per_token=131_072)
    with pytest.raises(ProfileError, match=r"profile.json is no profile of smollm2-135m: .* toy"):
        built("--model", "smollm2-135m", "--profile", str(table), "--kv-tokens", "20000")


def test_a_profile_without_pulls_takes_them_from_the_device(tmp_path: Path) -> None:
    table = written(tmp_path, profile_table(bare=True))
    words = ("--model", "smollm2-135m", "--profile", str(table), "--device", "cpu")
    decode = instance(built(*words), Role.DECODE)
    assert decode.latency.transfer(100).source is Source.ROOFLINE
    assert decode.latency.prefill([Chunk(64)]).source is Source.MEASURED


def test_single_overheads_win_over_those_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "overheads.json"
    file.write_text('{"token_s": 0.5, "arrival_s": 0.25, "decode_scale": 2}')
    made = built(*OPT, "--overheads", str(file), "--overhead", "token=2ms")
    assert made.service.overheads == Overheads(arrival_s=0.25, token_s=0.002)
    plain = instance(built(*OPT), Role.DECODE)
    assert decode_s(instance(made, Role.DECODE)) == pytest.approx(2 * decode_s(plain))


def test_links_and_chunks_are_as_told() -> None:
    made = built(*OPT, "--prefill", "2", "--decode", "2", "--shared-link", "--pull-stalls-decode")
    assert made.service.shares_link
    assert made.service.pull_stalls_decode
    assert len(made.service.instances) == 4
    mixed = built(*OPT, "--mixed", "2", "--chunk-tokens", "512")
    assert [model.chunk_tokens for model in mixed.service.instances] == [512, 512]


def test_mixed_instances_keep_vllms_rules_through_a_calibration(tmp_path: Path) -> None:
    mixed = (*OPT, "--mixed", "1", "--chunk-tokens", "2048")
    file = tmp_path / "overheads.json"
    file.write_text('{"decode_scale": 2}')
    made = built(*mixed, "--mixed-rules", "vllm", "--overheads", str(file))
    assert made.service.instances[0].rules is MixedRules.VLLM
    assert built(*mixed).service.instances[0].rules is MixedRules.OURS


def test_the_limit_on_lengths_is_the_least_of_positions_pool_and_what_is_told() -> None:
    def limit(told: int | None, *words: str) -> int:
        load = Load("sharegpt", None, LengthRules(max_total_tokens=told), seed=0)
        return fitting_load(load, built(*OPT, *words)).max_total_tokens

    assert limit(None) == 2048
    assert limit(1000) == 1000
    assert limit(1000, "--kv-tokens", "512") == 512


def test_caps_grow_with_instances_and_mixed_ones_share_their_time() -> None:
    plan = read_plan([*OPT])
    sample = plan.load.parsed().requests(500, 1.0)

    def caps(*words: str) -> tuple[float, float, float]:
        found = outlook(built(*OPT, *words), sample, plan.slo, 1.0)
        return found.prefill_cap, found.decode_cap, found.rate_cap

    prefill, decode, rate = caps("--prefill", "1", "--decode", "1")
    assert rate == min(prefill, decode)
    assert caps("--prefill", "2", "--decode", "3")[:2] == pytest.approx((2 * prefill, 3 * decode))
    mixed = caps("--mixed", "1")
    assert mixed[2] == pytest.approx(1 / (1 / prefill + 1 / decode))


@pytest.mark.parametrize(
    ("kind", "pp", "plans_ahead"), [("cuda", 1, True), ("cuda", 2, False), ("cpu", 1, False)]
)
def test_leaders_plan_ahead_on_gpus_where_no_stage_waits_to_be_told(
    kind: str, pp: int, plans_ahead: bool, tmp_path: Path
) -> None:
    profile = written(tmp_path, profile_table(pp=pp), device_kind=kind)
    shape = ("--prefill", "1", "--decode", "1", "--prefill-pp", str(pp), "--decode-pp", str(pp))
    words = ("--model", "smollm2-135m", "--profile", str(profile), "--kv-tokens", "9999", *shape)
    made = built(*words)
    assert [model.plans_ahead for _, model in made.groups] == [plans_ahead, plans_ahead]
    assert not any(model.leader_computes for _, model in made.groups)
    mixed = built(*words[:6], "--mixed", "1", "--mixed-pp", str(pp), "--chunk-tokens", "64")
    assert instance(mixed, Role.MIXED).plans_ahead is plans_ahead
    theirs = built(*words[:6], "--mixed", "1", "--chunk-tokens", "64", "--mixed-rules", "vllm")
    assert not instance(theirs, Role.MIXED).plans_ahead


def test_a_leader_on_cpu_computes_a_stage_itself(tmp_path: Path) -> None:
    profile = written(tmp_path, profile_table(pp=2))
    words = ("--model", "smollm2-135m", "--profile", str(profile), "--kv-tokens", "9999")
    made = built(*words, "--mixed", "1", "--mixed-pp", "2")
    assert instance(made, Role.MIXED).leader_computes


@pytest.mark.parametrize("bare", [False, True])
def test_a_calibration_or_another_link_leaves_the_tables_l_m(bare: bool, tmp_path: Path) -> None:
    """A bug: what was put on top of a table hid it, and L_m was guessed from its times."""
    profile = written(tmp_path, profile_table(bare=bare), saturation_tokens=77)
    factors = tmp_path / "factors.json"
    factors.write_text('{"prefill_scale": 1.2}')
    words = ("--model", "smollm2-135m", "--profile", str(profile), "--kv-tokens", "9999")
    extra = ("--overheads", str(factors), "--prefill", "1", "--mixed", "1", "--device", "cpu")
    for _, model in built(*words, *extra).groups:
        assert model.limits.prefill_tokens == 77
    known = MeasuredLatency.read(profile)
    assert saturation_tokens(ScaledLatency(known, prefill_scale=2.0)) == 77
