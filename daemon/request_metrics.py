"""What requests took and how large they were, and whether that met the SLO.

Only requests that ended with their answer count here, once each, however often their work was
done again; those that were refused, left or failed are counted by how they ended, elsewhere.
"""

from daemon import metric_buckets as buckets
from daemon.generation import StageTimes
from daemon.metric_families import Families
from daemon.request import Request
from daemon.slo import SloBook, Targets, Verdict

STAGES = ("prefill_queue", "prefill", "transfer", "decode_queue", "decode")
SLOS = ("ttft", "tpot", "both")


class RequestMetrics:
    """Told of each answered request; keeps the book of how the SLO was met."""

    def __init__(self, families: Families, targets: Targets) -> None:
        self.slo = SloBook(targets)
        self._make_latencies(families, targets)
        self._make_sizes(families)
        judged = families.counter(
            "distserve_slo_requests",
            "Answered requests by SLO (ttft, tpot, both) and whether they met it",
            ["slo", "met"],
        )
        self._judged = {
            (slo, met): judged.labels(slo, str(met).lower())
            for slo in SLOS
            for met in (True, False)
        }
        self._goodput = families.counter(
            "distserve_goodput_requests", "Answered requests that met both targets"
        )
        target = families.gauge(
            "distserve_slo_target_seconds", "The configured targets; none is +Inf", ["slo"]
        )
        for slo, seconds in (("ttft", targets.ttft_s), ("tpot", targets.tpot_s)):
            target.labels(slo).set(float("inf") if seconds is None else seconds)

    def answered(self, request: Request) -> None:
        """It has ended with its answer."""
        self._observe_sizes(request)
        clock = request.clock
        if clock.ended_s is None or clock.first_token_s is None or clock.last_token_s is None:
            return  # a prompt that was only scored
        ttft_s = clock.first_token_s - clock.arrived_s
        tpot_s = tpot_of(request)
        self._ttft.observe(ttft_s)
        self._e2e.observe(clock.ended_s - clock.arrived_s)
        if tpot_s is not None:
            self._tpot.observe(tpot_s)
        if clock.stages is not None:
            self._observe_stages(clock.stages)
        self._count(self.slo.answered(clock.ended_s, ttft_s, tpot_s))

    def _count(self, verdict: Verdict) -> None:
        for slo in SLOS:
            self._judged[slo, getattr(verdict, slo)].inc()
        if verdict.both:
            self._goodput.inc()

    def _observe_sizes(self, request: Request) -> None:
        sampling = request.spec.sampling
        self._prompt_size.observe(len(request.spec.prompt))
        self._output_size.observe(request.num_output)
        self._longest.observe(max(len(choice.output) for choice in request.choices))
        self._num_choices.observe(request.spec.num_choices)
        self._max_tokens.observe(sampling.max_tokens)

    def _observe_stages(self, stages: StageTimes) -> None:
        for stage in STAGES:
            self._stages[stage].observe(getattr(stages, f"{stage}_s"))
        decode_s = stages.transfer_s + stages.decode_queue_s + stages.decode_s
        self._queue.observe(stages.prefill_queue_s)
        self._prefill.observe(stages.prefill_s)
        self._decode.observe(decode_s)
        self._inference.observe(stages.prefill_s + decode_s)

    def _make_latencies(self, families: Families, targets: Targets) -> None:
        histogram, latency = families.model_histogram, buckets.LATENCY_S
        self._ttft = histogram(
            "vllm:time_to_first_token_seconds",
            "Arrival to first token",
            buckets.with_edge(buckets.TTFT_S, targets.ttft_s),
        )
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds",
            "(last token - first token) / (output tokens - 1) of a request",
            buckets.with_edge(buckets.TPOT_S, targets.tpot_s),
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to end", latency)
        self._queue = histogram(
            "vllm:request_queue_time_seconds", "Arrival to the begin of the prefill", latency
        )
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "Begin to end of the prefill", latency
        )
        self._decode = histogram(
            "vllm:request_decode_time_seconds",
            "End of the prefill to the end: transfer, decode queue and decode",
            latency,
        )
        self._inference = histogram(
            "vllm:request_inference_time_seconds", "Begin of the prefill to the end", latency
        )
        stages = families.histogram(
            "distserve_stage_seconds",
            "The five stages of a request's life (DistServe, section 6.3); they add up to it",
            buckets.STAGE_S,
            ["stage"],
        )
        self._stages = {stage: stages.labels(stage) for stage in STAGES}

    def _make_sizes(self, families: Families) -> None:
        histogram, tokens = families.model_histogram, buckets.TOKENS
        self._prompt_size = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request", tokens
        )
        self._output_size = histogram(
            "vllm:request_generation_tokens", "Output tokens of a request", tokens
        )
        self._longest = histogram(
            "vllm:request_max_num_generation_tokens",
            "Output tokens of the longest choice of a request",
            tokens,
        )
        self._num_choices = histogram("vllm:request_params_n", "Choices asked for", buckets.CHOICES)
        self._max_tokens = histogram(
            "vllm:request_params_max_tokens", "Output tokens asked for, as capped", tokens
        )


def tpot_of(request: Request) -> float | None:
    """Time per output token of a request's longest choice; None where it has one token."""
    clock = request.clock
    num_output = max(len(choice.output) for choice in request.choices)
    if num_output < 2 or clock.first_token_s is None or clock.last_token_s is None:
        return None
    return (clock.last_token_s - clock.first_token_s) / (num_output - 1)
