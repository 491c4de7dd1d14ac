"""The options that say how fast instances are and how much they hold, for `simulate` and `plan`.

The same words mean the same in both, so that a placement that was planned can be simulated.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from ipc.vocabulary import PrefillPolicy
from planner.arguments import count, count_to
from planner.bench.calibrate import Calibration
from planner.deployment import Settings
from planner.devices import device_sheets
from planner.latency.choose import Knowledge, profile_names
from planner.latency.profile_file import read_profile
from planner.memory import MemoryRules
from planner.simulate.overheads import NAMES, overhead, read_overheads, with_overheads
from planner.simulator.service import Overheads

Add = Callable[..., argparse.Action]
"""`add_argument` of a group."""

_BLOCK_SIZE = 16
_MAX_PREFILL = 1_000_000
_MAX_BLOCK_SIZE = 65_536


def add_knowledge(add: Add) -> None:
    """The model and where its step times come from; `knowledge` reads them."""
    add("--model", required=True, metavar="NAME|DIR",
        help="such as opt-13b or llama-3.1-8b, or a directory with a config.json")  # fmt: skip
    add("--device", metavar="SHEET",
        help=f"for rooflines, memory and links: {', '.join(device_sheets())}; default: the "
        "coefficients' own")  # fmt: skip
    add("--profile", type=Path, action="append", default=[], metavar="FILE",
        help="a table by `distserve profile`; may be given several times")  # fmt: skip
    add("--coefficients", choices=profile_names(), metavar="NAME",
        help=f"published for OPT on A100s: {', '.join(profile_names())}")  # fmt: skip


def add_limits(add: Add, add_pool: Add) -> None:
    """What an instance takes and holds; `settings` reads them. `add_pool` takes `--kv-tokens`."""
    add("--prefill-tokens", type=count_to(_MAX_PREFILL), metavar="N",
        help="L_m: prompts are packed up to so many tokens; default: what saturates each shape, "
        "by the latency model")  # fmt: skip
    add("--prefill-policy", type=PrefillPolicy, choices=list(PrefillPolicy),
        default=PrefillPolicy.FCFS, metavar="POLICY",
        help="fcfs, or skip-join: short prompts go first and long ones are computed in chunks of "
        "L_m; chunks beside decodes are always first come, first served; default: "
        "fcfs")  # fmt: skip
    add("--max-batch", type=count, default=256, metavar="N",
        help="sequences that decode together at most; default: 256")  # fmt: skip
    add_pool("--kv-tokens", type=count, metavar="N",
             help="tokens that each KV pool holds; default: what weights leave of "
             "memory")  # fmt: skip
    add("--block-size", type=count_to(_MAX_BLOCK_SIZE), metavar="N",
        help=f"tokens in a KV block; default: {_BLOCK_SIZE}, or a profile's")  # fmt: skip


def add_links(add: Add) -> None:
    """How pulls share what they go over; `settings` reads them."""
    add("--shared-link", action="store_true",
        help="all pulls share one link; otherwise each decode instance has its own")  # fmt: skip
    add("--pull-stalls-decode", action="store_true",
        help="pulls take the place of decode steps, as on CPU workers")  # fmt: skip


def add_overheads(add: Add) -> None:
    """What the service itself adds; `costs` reads them."""
    add("--overhead", type=overhead, action="append", default=[], metavar="NAME=TIME",
        help=f"the service's own time, such as decode_step=1ms: {', '.join(NAMES)}")  # fmt: skip
    add("--overheads", type=Path, metavar="FILE.json", help="the same and more from a file")


def knowledge(given: argparse.Namespace) -> Knowledge:
    """What there is to go by."""
    return Knowledge(given.model, given.device, tuple(given.profile), given.coefficients)


def costs(given: argparse.Namespace) -> tuple[Overheads, Calibration]:
    """Seconds, single ones before the file's, and the file's factors.

    Raises:
        PlannerError: the file cannot be read, or holds something else.
    """
    from_file, calibration = Overheads(), Calibration()
    if given.overheads is not None:
        from_file, calibration = read_overheads(given.overheads)
    return with_overheads(from_file, given.overhead), calibration


def settings(given: argparse.Namespace, overheads: Overheads) -> Settings:
    """What all instances share."""
    block_size = given.block_size
    if block_size is None:
        block_size = read_profile(given.profile[0]).block_size if given.profile else _BLOCK_SIZE
    return Settings(
        prefill_tokens=given.prefill_tokens,
        max_batch=given.max_batch,
        prefill_policy=given.prefill_policy,
        kv_tokens=given.kv_tokens,
        memory=MemoryRules(block_size=block_size),
        overheads=overheads,
        shares_link=given.shared_link,
        pull_stalls_decode=given.pull_stalls_decode,
    )
