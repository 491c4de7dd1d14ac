"""The latency model of each shape: the best there is, with the pulls and the drafts asked for."""

from collections.abc import Sequence
from math import inf

from ipc.vocabulary import Parallelism
from planner.errors import ProfileError
from planner.latency.choose import Knowledge, device_of, latency_model
from planner.latency.interface import Chunk, Estimate, LatencyModel, Source, StepLine
from planner.latency.pull import WithPull, pull_over
from planner.latency.roofline import RooflineLatency
from planner.latency.speculative import Speculative
from planner.model_catalog import model_shape
from planner.model_shape import ModelShape
from planner.simulate.options import Deployment, Drafting


class FreeDraft:
    """Drafts that cost nothing, such as those looked up in the prompt."""

    def __init__(self, target: LatencyModel) -> None:
        self.num_stages, self.num_devices = target.num_stages, target.num_devices
        self.slowest = target.slowest
        self.source = target.source
        self._nothing = Estimate(0.0, target.source)

    def prefill(self, chunks: Sequence[Chunk]) -> Estimate:
        return self._nothing

    def decode(self, batch: int, context_tokens: float) -> StepLine:
        return StepLine(0.0, 0.0, inf, self.source)

    def mixed(self, chunks: Sequence[Chunk], batch: int, context_tokens: float) -> Estimate:
        return self._nothing

    def transfer(self, num_tokens: int) -> Estimate:
        return self._nothing


def target_latency(
    asked: Deployment, shape: ModelShape, parallelism: Parallelism, *, pulls: bool
) -> LatencyModel:
    """Of the model itself.

    Raises:
        InfeasibleShape: it does not run in that shape.
        ProfileError: nothing is known of the shape, or of pulls where it `pulls`.
    """
    model = latency_model(asked.known, parallelism)
    device = device_of(asked.known)
    if model.source is Source.ROOFLINE and device is not None:
        model = RooflineLatency(shape, device, parallelism)
    if not pulls or (_can_pull(model) and not asked.across_nodes):
        return model
    if device is None:
        raise ProfileError(
            f"how long a pull to tp {parallelism.tp}, pp {parallelism.pp} takes is not known: "
            "the profile of that shape has none, and no --device names a link"
        )
    pull = pull_over(device, shape, parallelism, across_nodes=asked.across_nodes)
    return WithPull(model, pull)


def with_drafts(
    target: LatencyModel, drafting: Drafting, known: Knowledge, parallelism: Parallelism
) -> LatencyModel:
    """Steps that draft and check; a draft model's times are a roofline's."""
    if drafting.model is None:
        return Speculative(target, FreeDraft(target), drafting.num_drafted)
    device = device_of(known)
    if device is None:
        raise ProfileError(
            f"how fast the draft model {drafting.model} is comes from a roofline: give a --device"
        )
    draft = RooflineLatency(model_shape(drafting.model), device, Parallelism(parallelism.tp))
    return Speculative(target, draft, drafting.num_drafted)


def _can_pull(model: LatencyModel) -> bool:
    try:
        model.transfer(1)
    except ProfileError:
        return False
    return True
