"""Gauges that are looked up when they are asked for: what is where at this moment.

Instances, workers and their processes come and go; a value that is read from them cannot go stale,
and what has gone is told no more. Labels are names of the placement and words of our own.
"""

import platform
from collections.abc import Iterable, Iterator

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from daemon.admin_views import NodeState
from daemon.controller import Controller
from daemon.node import Node
from daemon.supervisor import Supervisor
from daemon.ward import Ward
from ipc.messages import Stats
from ipc.vocabulary import Role, WorkerName

WORKER_STATES = (
    "loading",
    "ready",
    "ending",
    "leaving",
    "restarting",
    "waiting",
    "quarantined",
)
_PER_WORKER = ["instance", "worker"]
_PLAN = ["instance", "role", "tp", "pp", "stage", "node", "devices"]


class LiveMetrics(Collector):
    """Reads the node's parts; `model_labels` are those of vLLM's metrics."""

    def __init__(
        self,
        node: Node,
        controller: Controller,
        supervisor: Supervisor,
        model_labels: dict[str, str],
    ) -> None:
        self._node = node
        self._controller = controller
        self._supervisor = supervisor
        self._model = model_labels
        self._processes: dict[int, psutil.Process] = {}

    def collect(self) -> Iterator[Metric]:
        yield self._build()
        yield self._node_state()
        yield from self._requests()
        yield from self._placement()
        yield from self._worker_processes()
        yield from self._caches()

    def _build(self) -> Metric:
        about = {"version": self._node.version, "python": platform.python_version()}
        return _info("distserve_build_info", "Which version this is", [about], list(about))

    def _node_state(self) -> Metric:
        present = self._node.state
        states = GaugeMetricFamily(
            "distserve_node_state", "1 for the state that the node is in", labels=["state"]
        )
        for state in NodeState:
            states.add_metric([state], state is present)
        return states

    def _requests(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "distserve_requests_open", "Requests under way", value=self._controller.num_open
        )
        trips = GaugeMetricFamily(
            "distserve_trips",
            "Trips under way, by phase; a request's choices make one or more",
            labels=["phase"],
        )
        for phase, count in self._controller.count_phases().items():
            trips.add_metric([phase], count)
        yield trips
        queue = GaugeMetricFamily(
            "distserve_queue_tokens", "Prompt tokens that wait or run", labels=["instance"]
        )
        for instance in self._controller.instances:
            if instance.role.prefills:
                queue.add_metric([instance.name], instance.prefill_load.queued_tokens)
        yield queue

    # ---- placement and workers --------------------------------------------------------------

    def _placement(self) -> Iterator[Metric]:
        wards = self._supervisor.wards.values()
        plan = [segment for ward in wards for segment in _segments(ward)]
        yield _info("distserve_plan_info", "1 for each segment of the placement", plan, _PLAN)
        states = GaugeMetricFamily(
            "distserve_worker_state",
            "1 for the state that a worker is in; worker is stage.rank",
            labels=[*_PER_WORKER, "state"],
        )
        for ward in wards:
            present = worker_state(ward)
            for name in _names(ward):
                for state in WORKER_STATES:
                    states.add_metric([*_labels(name), state], state == present)
        yield states

    def _worker_processes(self) -> Iterator[Metric]:
        cpu = CounterMetricFamily(
            "distserve_worker_cpu_seconds", "CPU time of a worker's process", labels=_PER_WORKER
        )
        memory = GaugeMetricFamily(
            "distserve_worker_resident_memory_bytes",
            "Memory of a worker's process, with the pools that it maps",
            labels=_PER_WORKER,
        )
        files = GaugeMetricFamily(
            "distserve_worker_open_fds", "Open files of a worker's process", labels=_PER_WORKER
        )
        for name, process in self._running():
            try:
                with process.oneshot():
                    times, used = process.cpu_times(), process.memory_info().rss
                    num_files = process.num_fds()
            except psutil.Error:  # it has just ended
                continue
            cpu.add_metric(_labels(name), times.user + times.system)
            memory.add_metric(_labels(name), used)
            files.add_metric(_labels(name), num_files)
        yield from (cpu, memory, files)

    def _running(self) -> Iterator[tuple[WorkerName, psutil.Process]]:
        """Worker processes of this machine; each is looked up once."""
        known, self._processes = self._processes, {}
        for ward in self._supervisor.wards.values():
            for name in ward.life.workers_here if ward.life else ():
                pid = ward.life.workers[name].pid if ward.life else 0
                try:
                    self._processes[pid] = known.get(pid) or psutil.Process(pid)
                except psutil.Error:
                    continue
                yield name, self._processes[pid]

    # ---- vLLM's words for the pools ---------------------------------------------------------

    def _caches(self) -> Iterator[Metric]:
        instances = list(self._controller.instances)
        usage = max((_usage([i.stats for i in instances if i.role is r]) for r in Role), default=0)
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            family = GaugeMetricFamily(
                name, "Used share of the KV blocks of the fullest role", labels=list(self._model)
            )
            family.add_metric(list(self._model.values()), usage)
            yield family
        layouts = [instance.layout for instance in instances if instance.role.decodes]
        about = [
            self._model
            | {
                "block_size": str(layouts[0].block_size),
                "cache_dtype": layouts[0].dtype.value,
                "enable_prefix_caching": "False",
                "num_gpu_blocks": str(sum(layout.num_blocks for layout in layouts)),
            }
            for _ in layouts[:1]
        ]
        names = ["block_size", "cache_dtype", "enable_prefix_caching", "num_gpu_blocks"]
        text = "The pools of all instances that decode, in vLLM's words"
        yield _info("vllm:cache_config_info", text, about, [*self._model, *names])


def worker_state(ward: Ward) -> str:
    """One of `WORKER_STATES`: an instance's workers live and die together."""
    if ward.life is None:
        if ward.quarantined is not None:
            return "quarantined"
        return "restarting" if ward.waits_for is None else "waiting"
    if ward.is_leaving:
        return "leaving"
    if ward.life.is_ending:
        return "ending"
    return "ready" if ward.life.is_up else "loading"


def _segments(ward: Ward) -> Iterator[dict[str, str]]:
    shape = ward.spec.parallelism
    for stage, segment in enumerate(ward.spec.segments):
        yield {
            "instance": ward.spec.name,
            "role": ward.spec.role.value,
            "tp": str(shape.tp),
            "pp": str(shape.pp),
            "stage": str(stage),
            "node": segment.node,
            "devices": ",".join(map(str, segment.devices)),
        }


def _names(ward: Ward) -> Iterator[WorkerName]:
    for stage, segment in enumerate(ward.spec.segments):
        for tp_rank in range(len(segment.devices)):
            yield WorkerName(ward.spec.name, stage, tp_rank)


def _labels(name: WorkerName) -> list[str]:
    return [name.instance, f"{name.stage}.{name.tp_rank}"]


def _usage(books: list[Stats]) -> float:
    total = sum(stats.blocks_total for stats in books)
    free = sum(stats.blocks_free for stats in books)
    return (total - free) / total if total else 0.0


def _info(name: str, text: str, about: Iterable[dict[str, str]], labels: list[str]) -> Metric:
    """A gauge of 1 that says things by its labels."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values in about:
        family.add_metric([values[label] for label in labels], 1)
    return family
