"""Run requests through a service: the same dispatch as the daemon's, with a simulated clock."""

from daemon.dispatch import DecodeLoad, PrefillLoad, pick_decode, pick_prefill
from ipc.vocabulary import Role
from planner.errors import WorkloadError
from planner.simulator.decode import DecodePool, Link
from planner.simulator.lane import UNBOUNDED
from planner.simulator.mixed import MixedInstance
from planner.simulator.passage import Agenda, Passage, Record
from planner.simulator.prefill import PrefillEngine
from planner.simulator.service import InstanceModel, Service
from planner.simulator.speculative import SpeculativePool
from planner.simulator.timeline import Timeline
from planner.workload.requests import Requests


def simulate(
    service: Service, requests: Requests, *, seed: int = 0, max_skip: int = UNBOUNDED
) -> Timeline:
    """What each request would have seen.

    Args:
        seed: of the draws of speculative decoding, the only chance in it.
        max_skip: decode steps taken at once at most; 1 takes every step by itself, with the same
            result and many times slower.

    Raises:
        WorkloadError: a request does not fit the pools, and the service would refuse it.
    """
    return _Simulation(service, requests, seed, max_skip).run()


class _Simulation:
    def __init__(self, service: Service, requests: Requests, seed: int, max_skip: int) -> None:
        self._service = service
        self._requests = requests
        self._agenda = Agenda()
        self._record = Record(len(requests))
        self._seed = seed
        self._prefills: list[PrefillEngine | MixedInstance] = []
        self._decodes: list[DecodePool] = []
        link = Link()
        for model in service.instances:
            self._add(model, max_skip)
        if service.shares_link:
            for pool in self._decodes:
                pool.link = link

    def run(self) -> Timeline:
        self._check_fits()
        agenda, size = self._agenda, self._service.block_size
        requests, delay_s = self._requests, self._service.overheads.arrival_s
        arrivals = zip(
            (requests.arrival_s + delay_s).tolist(),
            requests.input_tokens.tolist(),
            requests.output_tokens.tolist(),
            strict=True,
        )
        for index, (arrival_s, num_input, num_output) in enumerate(arrivals):
            while agenda.next_s < arrival_s:
                agenda.run_next()
            self._to_prefill(arrival_s, Passage(index, num_input, num_output, size))
        while self._record.num_ended < len(requests):
            agenda.run_next()
        return self._record.timeline(requests)

    def _add(self, model: InstanceModel, max_skip: int) -> None:
        if model.role is Role.PREFILL:
            self._prefills.append(
                PrefillEngine(
                    self._service, model, self._agenda, self._record, on_prefilled=self._prefilled
                )
            )
            return
        pool = self._pool(model)
        pool.max_skip = min(max_skip, pool.max_skip)
        if isinstance(pool, MixedInstance):
            self._prefills.append(pool)
        self._decodes.append(pool)  # mixed ones take what others have prefilled, too

    def _pool(self, model: InstanceModel) -> DecodePool:
        speculation = self._service.speculation
        kind: type[DecodePool] = DecodePool if speculation is None else SpeculativePool
        if model.role is Role.MIXED:
            kind = MixedInstance
        pool = kind(self._service, model, self._agenda, self._record, on_preempted=self._to_prefill)
        if isinstance(pool, SpeculativePool) and speculation is not None:
            pool.speculate(speculation, self._seed + len(self._decodes))
        return pool

    def _check_fits(self) -> None:
        limit = self._service.max_tokens
        num_tokens = self._requests.input_tokens + self._requests.output_tokens
        if len(num_tokens) and num_tokens.max() > limit:
            raise WorkloadError(
                f"a request of {num_tokens.max()} tokens does not fit: the smallest KV pool "
                f"holds {limit}"
            )

    def _to_prefill(self, now_s: float, passage: Passage) -> None:
        engines = self._prefills
        if len(engines) == 1:
            chosen = 0
        else:
            loads = [PrefillLoad(e.queued_tokens, e.num_sequences) for e in engines]
            chosen = pick_prefill(loads)
        engines[chosen].arrive(now_s, passage)

    def _prefilled(self, now_s: float, passage: Passage) -> None:
        """The first token is drawn; on to decode, unless it was the last one too."""
        record, costs, index = self._record, self._service.overheads, passage.index
        passage.remaining -= 1
        if passage.is_first:
            record.first_token(index, now_s, costs.token_s)
        if passage.remaining:
            self._agenda.add(now_s + costs.handover_s, self._to_decode, passage)
        else:
            assert passage.source is not None, "a prefill instance names itself"
            passage.source.release(passage, now_s)
            record.last_token(index, now_s + costs.token_s)

    def _to_decode(self, now_s: float, passage: Passage) -> None:
        pools = self._decodes
        chosen = 0
        if len(pools) > 1:
            loads = [DecodeLoad(p.used_blocks, p.num_blocks, p.num_sequences) for p in pools]
            chosen = pick_decode(loads)
        pools[chosen].used_blocks += passage.blocks
        pools[chosen].offer(now_s, passage)
