"""Bucket edges of the histograms: vLLM's, so that its dashboards read ours, and the SLO's own.

A share of requests within a target can only be asked of a histogram whose edges hold that target:
there is no `le="2"` between 1 and 2.5. So each target becomes one more edge.
"""

TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TPOT_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TRANSFER_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    10.0,
)  # fmt: skip
LAG_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
STAGE_S = (0.0001, 0.0005, *TTFT_S)  # transfers take less than any first token
BYTES = tuple(float(1 << power) for power in range(12, 37, 2))  # 4 KiB to 64 GiB
TOKENS = tuple(float(m * 10**p) for p in range(6) for m in (1, 2, 5))
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)


def with_edge(edges: tuple[float, ...], target_s: float | None) -> tuple[float, ...]:
    """The same edges and the target's, in order, once."""
    return edges if target_s is None else tuple(sorted({*edges, target_s}))
