"""What this machine and this model cannot run is refused with its numbers, before it is tried."""

import logging
from pathlib import Path

import orjson
import pytest

from daemon.config import DaemonConfig
from daemon.errors import ConfigError
from daemon.feasibility import (
    check_handovers,
    check_memory,
    check_placement,
    usable_memory,
)
from daemon.model_sizes import read_outline
from daemon.placement import counted_out
from ipc.vocabulary import DType, InstanceSpec, Parallelism, Placement, Role, Segment

LLAMA = {
    "hidden_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 12,
    "vocab_size": 10,
}
OPT = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 32,
    "vocab_size": 10,
}
GIB = 2**30


def model(directory: Path, sizes: dict[str, object]) -> str:
    (directory / "config.json").write_bytes(orjson.dumps(sizes))
    return str(directory)


def check(config: DaemonConfig) -> None:
    check_placement(config, counted_out(config), read_outline(config))


def test_sizes_are_read_in_the_words_of_both_families(tmp_path: Path) -> None:
    llama = read_outline(DaemonConfig(model=model(tmp_path, LLAMA)))
    assert (llama.sizes.num_kv_heads, llama.sizes.intermediate_size) == (2, 12)
    # 4 layers of q, k, v, o (8 x 4 x 2 x (6 + 2)) and gate, up, down, and one table.
    assert llama.num_weights == 4 * (512 + 3 * 8 * 12) + 80
    opt = read_outline(DaemonConfig(model=model(tmp_path, OPT)))
    assert (opt.sizes.num_kv_heads, opt.sizes.intermediate_size) == (4, 32)
    assert opt.num_weights == 2 * (8 * 2 * 2 * (4 + 4) + 2 * 8 * 32) + 80


@pytest.mark.parametrize("value", [None, 0, "4", True, 2.5])
def test_a_size_that_is_missing_or_no_count_is_named(tmp_path: Path, value: object) -> None:
    config = DaemonConfig(model=model(tmp_path, LLAMA | {"num_hidden_layers": value}))
    with pytest.raises(ConfigError, match=r"config\.json gives no num_hidden_layers of 1 or more"):
        read_outline(config)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({"prefill_tp": 4}, "prefill-0 cannot run: tp 4 does not divide the 6 attention heads"),
        ({"decode_tp": 3}, "decode-0 cannot run: tp 3 neither divides the 2 KV heads"),
        ({"mixed": 1, "mixed_pp": 5}, "mixed-0 cannot run: pp 5 is more than the 4 layers"),
    ],
)
def test_a_shape_that_the_model_cannot_have_is_refused_B9(
    tmp_path: Path, shape: dict[str, int], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        check(DaemonConfig(model=model(tmp_path, LLAMA), **shape))


def test_a_shape_with_shared_kv_heads_is_not_refused(tmp_path: Path) -> None:
    check(DaemonConfig(model=model(tmp_path, LLAMA), prefill_tp=6, decode_pp=4, kv_cache_gib=0.01))


def test_memory_is_counted_over_all_workers(tmp_path: Path) -> None:
    """A pool per worker; of uneven stages, the longest fills it."""
    name = model(tmp_path, LLAMA | {"num_hidden_layers": 3, "vocab_size": 1})
    config = DaemonConfig(model=name, prefill_tp=2, decode_pp=2, kv_cache_gib=1.0)
    placement, outline = counted_out(config), read_outline(config)
    check_memory(config, placement, outline, num_bytes=4 * GIB)
    with pytest.raises(
        ConfigError, match=r"needs 3\.50 GiB of memory \(3\.50 GiB of KV .*has 3\.49 GiB"
    ):
        check_memory(config, placement, outline, num_bytes=int(3.49 * GIB))


def test_every_instance_has_the_weights_once(tmp_path: Path) -> None:
    name = model(tmp_path, LLAMA | {"vocab_size": 2**26})  # a table of 2 GiB in fp32
    config = DaemonConfig(model=name, decode=2, decode_tp=2, dtype=DType.FP32, kv_cache_gib=0.01)
    with pytest.raises(ConfigError, match=r"6\.00 GiB of weights"):
        check_memory(config, counted_out(config), read_outline(config), num_bytes=5 * GIB)


def test_the_machine_has_some_memory() -> None:
    assert 2**28 < usable_memory() < 2**50


def test_more_workers_than_cores_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = model(tmp_path, LLAMA)
    with caplog.at_level(logging.WARNING):
        check(DaemonConfig(model=name, prefill=1024, kv_cache_gib=1e-6))
    assert "1025 workers share" in caplog.text


def across(*shapes: tuple[Role, tuple[str, ...]]) -> Placement:
    """Pipelines with one stage for each node that is named."""
    return Placement(
        1,
        tuple(
            InstanceSpec(
                role.value,
                role,
                Parallelism(1, len(nodes)),
                tuple(Segment(node, (i,)) for i, node in enumerate(nodes)),
            )
            for role, nodes in shapes
        ),
    )


def test_memory_is_counted_for_this_nodes_stages_alone(tmp_path: Path) -> None:
    config = DaemonConfig(model=model(tmp_path, LLAMA | {"vocab_size": 1}), node="n1")
    placement = across((Role.PREFILL, ("n0", "n1", "n1", "n1")), (Role.DECODE, ("n0", "n1")))
    with pytest.raises(ConfigError, match=r"needs 4\.00 GiB of memory .*has 3\.99 GiB"):
        check_memory(config, placement, read_outline(config), num_bytes=int(3.99 * GIB))


def test_layers_that_would_be_pulled_across_nodes_are_named(tmp_path: Path) -> None:
    """Two halves against four quarters share nodes by equal shares; a heavy head cuts otherwise."""
    even = read_outline(DaemonConfig(model=model(tmp_path, LLAMA | {"vocab_size": 1})))
    placement = across((Role.PREFILL, ("n0", "n1")), (Role.DECODE, ("n0", "n0", "n1", "n1")))
    check_handovers(placement, even)
    heavy = read_outline(DaemonConfig(model=model(tmp_path, LLAMA | {"vocab_size": 100})))
    with pytest.raises(ConfigError, match="share layers 2 to 2, but are on n0 and n1 there"):
        check_handovers(placement, heavy)
