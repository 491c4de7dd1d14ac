"""What a run gave, simulated or live: one entry per request, in order of arrival."""

from dataclasses import dataclass

import numpy as np

from planner.slo import Slo
from planner.workload.requests import Bools, Floats, Requests


@dataclass(frozen=True, eq=False)
class Timeline:
    """Times in seconds from the run's start, as the client would see them, each float64[N].

    The five stages of the paper (section 6.3) lie between them: prefill queue up to
    `prefill_start_s`, prefill up to `prefill_end_s`, decode queue up to `pull_start_s` and from
    `pull_end_s` to `decode_start_s`, transfer between the two pulls, decode from there on. A
    request of one token ends with its prefill: its later stages are empty.
    Stages are of the first passage; what a preemption adds shows in `last_token_s` alone.
    """

    requests: Requests
    first_token_s: Floats
    last_token_s: Floats
    prefill_start_s: Floats
    prefill_end_s: Floats
    pull_start_s: Floats
    pull_end_s: Floats
    decode_start_s: Floats
    num_preemptions: int = 0

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def ttft_s(self) -> Floats:
        return self.first_token_s - self.requests.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """(last - first) / (output tokens - 1); zero for a single token."""
        steps = np.maximum(self.requests.output_tokens - 1, 1)
        return (self.last_token_s - self.first_token_s) / steps

    def meets(self, slo: Slo) -> Bools:
        """Which requests meet both targets, bool[N]."""
        return (self.ttft_s <= slo.ttft_s) & (self.tpot_s <= slo.tpot_s)

    def stages_s(self) -> dict[str, Floats]:
        """The five stages by name, each float64[N]."""
        arrival_s = self.requests.arrival_s
        return {
            "prefill_queue": self.prefill_start_s - arrival_s,
            "prefill": self.prefill_end_s - self.prefill_start_s,
            "transfer": self.pull_end_s - self.pull_start_s,
            "decode_queue": (self.pull_start_s - self.prefill_end_s)
            + (self.decode_start_s - self.pull_end_s),
            "decode": self.last_token_s - self.decode_start_s,
        }

    def part(self, rows: slice | Bools) -> "Timeline":
        """Of some of the requests."""
        return Timeline(
            requests=self.requests.part(rows),
            first_token_s=self.first_token_s[rows],
            last_token_s=self.last_token_s[rows],
            prefill_start_s=self.prefill_start_s[rows],
            prefill_end_s=self.prefill_end_s[rows],
            pull_start_s=self.pull_start_s[rows],
            pull_end_s=self.pull_end_s[rows],
            decode_start_s=self.decode_start_s[rows],
            num_preemptions=self.num_preemptions,
        )
