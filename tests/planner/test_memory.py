"""KV capacity: the published OPT capacities, and what does not fit says why."""

import pytest

from ipc.vocabulary import Parallelism
from planner.devices import device_sheet
from planner.errors import InfeasibleShape, PlannerError
from planner.memory import MemoryRules, all_degrees, kv_capacity, survey, weight_bytes
from planner.model_catalog import model_shape
from tests.planner.reference_data import reference_rows

A100 = device_sheet("A100")


@pytest.mark.parametrize(
    ("name", "tp", "pp", "num_tokens"),
    [
        ("opt-13b", 1, 1, 66_144),
        ("opt-13b", 2, 1, 163_008),
        ("opt-13b", 4, 1, 356_736),
        ("opt-13b", 8, 8, 6_168_896),
        ("opt-66b", 2, 1, 11_600),
        ("opt-66b", 4, 1, 78_496),
        ("opt-66b", 2, 2, 78_512),
        ("opt-66b", 8, 1, 212_304),
        ("opt-175b", 8, 1, 59_520),
        ("opt-175b", 3, 3, 76_192),
        ("opt-175b", 4, 3, 126_160),
    ],
)
def test_published_capacities_come_out_to_within_a_block(
    name: str, tp: int, pp: int, num_tokens: int
) -> None:
    capacity = kv_capacity(model_shape(name), A100, Parallelism(tp, pp))
    assert abs(capacity.num_tokens - num_tokens) <= 16


def test_all_published_capacities_come_out_to_within_a_block() -> None:
    rows = reference_rows("distserve_a100_opt_max_kv_tokens.csv")
    assert len(rows) == 76
    for row in rows:
        parallelism = Parallelism(int(row["tp"]), int(row["pp"]))
        capacity = kv_capacity(model_shape(row["model"]), A100, parallelism)
        assert abs(capacity.num_tokens - int(row["max_num_tokens"])) <= 16, row


def test_a_model_too_large_is_refused_in_numbers() -> None:
    with pytest.raises(InfeasibleShape, match=r"weights take 122\.4 GiB of the 74\.4 GiB"):
        kv_capacity(model_shape("opt-66b"), A100, Parallelism(1, 1))


def test_a_survey_drops_nothing() -> None:
    degrees = all_degrees(max_tp=8, max_pp=4)
    feasible, infeasible = survey(model_shape("opt-66b"), A100, degrees)
    assert len(feasible) + len(infeasible) == len(degrees) == 32
    reasons = {i.parallelism: i.reason for i in infeasible}
    assert "do not divide by 5" in reasons[Parallelism(5, 1)]
    assert "equal stages" in reasons[Parallelism(2, 3)]
    assert "does not fit" in reasons[Parallelism(1, 1)]


def test_degrees_stop_at_the_number_of_devices() -> None:
    assert all(p.num_workers <= 4 for p in all_degrees(8, 8, max_devices=4))
    assert Parallelism(2, 2) in all_degrees(8, 8, max_devices=4)


def test_opt_175b_as_a_pair_does_not_fit_one_node_of_eight() -> None:
    """640 GB of memory, 700 GB of weights (paper section 4.2): both halves at tp 4 fail."""
    with pytest.raises(InfeasibleShape):
        kv_capacity(model_shape("opt-175b"), A100, Parallelism(4, 1))


def test_four_bit_weights_leave_room_for_more_tokens() -> None:
    shape = model_shape("llama-3-70b")
    whole, small = (weight_bytes(s, Parallelism()) for s in (shape, shape.quantised(weight_bits=4)))
    assert whole == pytest.approx(2 * shape.num_params, rel=1e-4)
    assert small == pytest.approx(whole - 1.5 * shape.matrix_params)
    assert kv_capacity(shape.quantised(weight_bits=4), A100, Parallelism()).num_tokens > 100_000


def test_split_token_tables_leave_room_for_more_tokens() -> None:
    shape, tp8 = model_shape("llama-3-70b"), Parallelism(8, 1)
    whole = kv_capacity(shape, A100, tp8)
    split = kv_capacity(shape, A100, tp8, MemoryRules(splits_vocabulary=True))
    saved = whole.weight_bytes_per_device - split.weight_bytes_per_device
    assert saved == pytest.approx(2 * shape.embedding_params * 7 / 8)
    assert split.num_blocks > whole.num_blocks


def test_all_experts_take_memory_whether_used_or_not() -> None:
    mixtral = model_shape("mixtral-8x7b")
    assert weight_bytes(mixtral, Parallelism()) == pytest.approx(2 * mixtral.num_params, rel=1e-4)


def test_an_unknown_device_gets_one_sentence_with_the_known_ones() -> None:
    with pytest.raises(PlannerError, match=r"unknown device 'b300'.*a100-sxm4-80gb"):
        device_sheet("b300")
