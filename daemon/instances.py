"""The controller's mirror of its instances: who is up, what each has taken on."""

from collections.abc import Callable, Iterator

from daemon.dispatch import DecodeLoad, PrefillLoad, pick_decode, pick_prefill
from daemon.prompt_queue import PromptQueue
from ipc.kv_layout import RankLayout
from ipc.messages import Command, Stats
from ipc.prefill_policy import FirstComeFirstServed
from ipc.vocabulary import InstanceSpec


class Instance:
    """One incarnation of an instance that can serve.

    Args:
        layout: of its leader; blocks are the same on all ranks.
        send: to its leader; raises PeerGone.
        policy: a queue such as its leader's; None: first come, first served.
    """

    def __init__(
        self,
        spec: InstanceSpec,
        epoch: int,
        layout: RankLayout,
        send: Callable[[Command], None],
        policy: FirstComeFirstServed[int] | None = None,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.role = spec.role
        self.epoch = epoch
        self.layout = layout
        self.send = send
        if policy is None:  # an empty one is false
            policy = FirstComeFirstServed(max_tokens=1)
        self.queued = PromptQueue(policy, layout.block_size, keeps=spec.role.decodes)
        self.sequences: dict[int, int] = {}  # blocks in decode, by sequence id
        self.is_draining = False
        self.stats = Stats()

    @property
    def has_work(self) -> bool:
        """It was given something that has not come back."""
        return bool(self.queued or self.sequences)

    @property
    def takes_prompts(self) -> bool:
        return self.role.prefills and not self.is_draining

    @property
    def takes_handles(self) -> bool:
        return self.role.decodes and not self.is_draining

    def can_hold(self, num_tokens: int) -> bool:
        return num_tokens <= self.layout.num_blocks * self.layout.block_size

    def reaches(self, decode: "Instance") -> bool:
        """Whether blocks that are filled here can be pulled there."""
        return self.spec.first_gap(decode.spec) is None

    @property
    def prefill_load(self) -> PrefillLoad:
        return PrefillLoad(self.queued.num_tokens, num_sequences=len(self.sequences))

    @property
    def decode_load(self) -> DecodeLoad:
        return DecodeLoad(
            used_blocks=sum(self.sequences.values()),
            total_blocks=self.layout.num_blocks,
            num_sequences=len(self.sequences),
        )


class InstanceTable:
    """Instances that are up, by name; those that drain get nothing new.

    `promised` are those that are replaced on purpose, `returning` those that died and are being
    started again: while one of them is missing, requests are taken and wait for it.
    """

    def __init__(self) -> None:
        self._up: dict[str, Instance] = {}
        self.promised: dict[str, InstanceSpec] = {}
        self.returning: dict[str, InstanceSpec] = {}
        self._reachable: dict[str, list[Instance]] = {}  # who decodes, by who prefills

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._up.values())

    def add(self, instance: Instance) -> None:
        self._up[instance.name] = instance
        self._survey()

    def remove(self, name: str, epoch: int) -> Instance | None:
        instance = self.get(name, epoch)
        if instance is not None:
            del self._up[name]
            self._survey()
        return instance

    def get(self, name: str, epoch: int | None = None) -> Instance | None:
        """The instance, if it is up (in that epoch)."""
        instance = self._up.get(name)
        return instance if instance and epoch in (None, instance.epoch) else None

    def set_draining(self, name: str, is_draining: bool) -> Instance:
        """Whether it gets anything new; what it has goes on."""
        instance = self._up[name]
        instance.is_draining = is_draining
        self._survey()
        return instance

    @property
    def can_take(self) -> bool:
        """Whether requests may come: they will be served, if not at once."""
        coming = self.returning | self.promised
        return self.can_serve or (bool(coming) and self._would_serve(coming))

    @property
    def can_serve(self) -> bool:
        """Somebody prefills, and somebody decodes what was prefilled there."""
        return any(self._reachable[i.name] for i in self if i.takes_prompts)

    def best_prefill(self, num_tokens: int) -> Instance | None:
        """Who prefills a sequence that may become so long; None when nobody up can hold it.

        While nobody decodes for some, the others are asked first.
        """
        able = [i for i in self if i.takes_prompts and i.can_hold(num_tokens)]
        candidates = [i for i in able if self._reachable[i.name]] or able
        if not candidates:
            return None
        return candidates[pick_prefill([c.prefill_load for c in candidates])]

    def best_decode(self, num_tokens: int, source: Instance) -> Instance | None:
        """Who decodes a sequence that may become so long and was prefilled at `source`; None when
        nobody up can reach and hold it."""
        candidates = [i for i in self._reachable[source.name] if i.can_hold(num_tokens)]
        if not candidates:
            return None
        return candidates[pick_decode([c.decode_load for c in candidates])]

    def _would_serve(self, coming: dict[str, InstanceSpec]) -> bool:
        """The same, were these up as well."""
        specs = ({i.name: i.spec for i in self if not i.is_draining} | coming).values()
        return any(
            source.role.prefills and reader.role.decodes and source.first_gap(reader) is None
            for source in specs
            for reader in specs
        )

    def _survey(self) -> None:
        """Who can hand over to whom: looked up with every request, changed by lives and deaths."""
        self._reachable = {
            source.name: [i for i in self if i.takes_handles and source.reaches(i)]
            for source in self
            if source.role.prefills
        }
