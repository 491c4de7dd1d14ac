"""What leaders report of their instances, and what becomes of them, as metrics.

Labels are names that the placement gives and words of our own: nothing a client sends becomes one.
"""

from daemon import metric_buckets as buckets
from daemon.instances import Instance
from daemon.metric_families import Families
from ipc.messages import Pulled, Stats
from ipc.vocabulary import InstanceSpec

BLOCK_STATES = ("free", "held", "in_use")
_OWN_COUNTS = (
    "num_steps",
    "prefill_tokens",
    "decode_tokens",
    "prefill_steps",
    "decode_steps",
    "num_pulls",
    "pulled_bytes",
    "pull_faults",
    "hidden_bytes",
    "num_preempted",
    "audit_failures",
    "control_s",
)


class InstanceMetrics:
    """Every count has one method that says when it changes."""

    def __init__(self, families: Families) -> None:
        self._make_gauges(families)
        self._make_counters(families)
        self._step_tokens = families.quick_histogram(
            ("vllm:iteration_tokens_total",),
            "Tokens of a step: each decode step; prefill steps on average between two reports",
            buckets.STEP_TOKENS,
        )
        self._preemptions = families.model_counter(
            "vllm:num_preemptions", "Choices that gave their blocks back under pressure"
        )
        self._transfer = families.histogram(
            "distserve_kv_transfer_seconds",
            "What a pull of a prompt's KV blocks took",
            buckets.TRANSFER_S,
        )
        self._transferred = families.histogram(
            "distserve_kv_transfer_bytes", "How large a pull was", buckets.BYTES
        )

    def up(self, spec: InstanceSpec, kernels: str) -> None:
        self._up.labels(*_shape(spec, kernels)).set(1)
        for counter in (self._wedged, self._restarts):
            counter.labels(spec.name)  # a count of 0 is shown
        if not spec.role.prefills:
            self._prefilled_on_decode.labels(spec.name)

    def down(self, spec: InstanceSpec, kernels: str) -> None:
        """What a dead incarnation held and did is no more."""
        self._up.labels(*_shape(spec, kernels)).set(0)
        self._progress_age.labels(spec.name).set(0)
        for stage in range(spec.parallelism.pp):
            for state in BLOCK_STATES:
                self._blocks.labels(spec.name, stage, state).set(0)

    def forget(self, instance: str) -> None:
        """It was removed: nobody is to wait for it in a graph."""
        for family in (self._up, self._progress_age, self._blocks, self._own, self._paths):
            family.remove_by_labels({"instance": instance})

    def reported(self, instance: Instance, stats: Stats) -> None:
        """New books of a leader; `instance.stats` are still those before."""
        for state in BLOCK_STATES:  # block ids are the instance's: each stage has as many
            for stage in range(instance.spec.parallelism.pp):
                self._blocks.labels(instance.name, stage, state).set(
                    getattr(stats, f"blocks_{state}")
                )
        for count in _OWN_COUNTS:
            self._own.labels(instance.name, count).set(getattr(stats, count))
        self._show_path(instance, stats.pull_path)
        self._count_prefills(instance, stats)

    def decode_step(self, num_tokens: int) -> None:
        self._step_tokens.observe(num_tokens)

    def pulled(self, event: Pulled) -> None:
        self._transfer.observe(event.ended_s - event.started_s)
        self._transferred.observe(event.num_bytes)

    def preempted(self) -> None:
        self._preemptions.inc()

    def got_on(self, instance: str, age_s: float) -> None:
        """How long ago an instance last got on."""
        self._progress_age.labels(instance).set(age_s)

    def wedged(self, instance: str) -> None:
        self._wedged.labels(instance).inc()

    def restarted(self, instance: str) -> None:
        self._restarts.labels(instance).inc()

    def _show_path(self, instance: Instance, path: str) -> None:
        before = instance.stats.pull_path
        if before and before != path:
            self._paths.labels(instance.name, before).set(0)
        if path:
            self._paths.labels(instance.name, path).set(1)

    def _count_prefills(self, instance: Instance, stats: Stats) -> None:
        num_steps = stats.prefill_steps - instance.stats.prefill_steps
        num_tokens = stats.prefill_tokens - instance.stats.prefill_tokens
        if num_steps > 0:
            self._step_tokens.observe(num_tokens / num_steps, times=num_steps)
        if num_tokens > 0 and not instance.role.prefills:
            self._prefilled_on_decode.labels(instance.name).inc(num_tokens)

    def _make_gauges(self, families: Families) -> None:
        self._blocks = families.gauge(
            "distserve_kv_blocks",
            "KV blocks by instance, stage (segment) and state: free + held + in_use is the pool",
            ["instance", "stage", "state"],
        )
        self._own = families.gauge(
            "distserve_instance",
            "An instance's own counts since it started",
            ["instance", "count"],
        )
        self._paths = families.gauge(
            "distserve_kv_pull_path",
            "1 for the slowest way by which an instance reads prompts' KV blocks: memory (CPU), "
            "local (the same GPU), peer (GPU to GPU) or host (through the host's memory: slow)",
            ["instance", "path"],
        )
        self._up = families.gauge(
            "distserve_instance_up",
            "1 while the instance can serve",
            ["instance", "role", "kernels", "tp", "pp"],
        )
        self._progress_age = families.gauge(
            "distserve_instance_progress_age_seconds",
            "How long ago an instance last answered or, where it has work, last took a step",
            ["instance"],
        )

    def _make_counters(self, families: Families) -> None:
        self._restarts = families.counter(
            "distserve_instance_restarts",
            "Times that an instance's workers died and were started again",
            ["instance"],
        )
        self._wedged = families.counter(
            "distserve_wedged",
            "Times that an instance got nowhere for too long and was replaced",
            ["instance"],
        )
        self._prefilled_on_decode = families.counter(
            "distserve_prefilled_on_decode_tokens",
            "Prompt tokens that a decode instance computed itself: never any",
            ["instance"],
        )


def _shape(spec: InstanceSpec, kernels: str) -> tuple[str, str, str, int, int]:
    """Few and fixed: an instance keeps its shape, and a machine has few kinds of kernels."""
    return spec.name, spec.role, kernels, spec.parallelism.tp, spec.parallelism.pp
