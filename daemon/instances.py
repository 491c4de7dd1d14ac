"""The controller's mirror of its instances: who is up, what each has taken on."""

from collections.abc import Callable, Iterator

from daemon.dispatch import DecodeLoad, PrefillLoad, pick_decode, pick_prefill
from ipc.kv_layout import RankLayout
from ipc.messages import Command, Stats
from ipc.vocabulary import Role


class Instance:
    """One incarnation of an instance that can serve."""

    def __init__(
        self,
        name: str,
        epoch: int,
        role: Role,
        layout: RankLayout,
        send: Callable[[Command], None],
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.role = role
        self.layout = layout
        self.send = send  # to its leader; raises PeerGone
        self.queued: dict[int, int] = {}  # tokens to prefill, by request id
        self.sequences: dict[int, int] = {}  # blocks in decode, by sequence id
        self.stats = Stats()

    def can_hold(self, num_tokens: int) -> bool:
        return num_tokens <= self.layout.num_blocks * self.layout.block_size

    @property
    def prefill_load(self) -> PrefillLoad:
        return PrefillLoad(queued_tokens=sum(self.queued.values()))

    @property
    def decode_load(self) -> DecodeLoad:
        return DecodeLoad(
            used_blocks=sum(self.sequences.values()),
            total_blocks=self.layout.num_blocks,
            num_sequences=len(self.sequences),
        )


class InstanceTable:
    """Instances that are up, by name."""

    def __init__(self) -> None:
        self._up: dict[str, Instance] = {}

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._up.values())

    def add(self, instance: Instance) -> None:
        self._up[instance.name] = instance

    def remove(self, name: str, epoch: int) -> Instance | None:
        instance = self.get(name, epoch)
        if instance is not None:
            del self._up[name]
        return instance

    def get(self, name: str, epoch: int | None = None) -> Instance | None:
        """The instance, if it is up (in that epoch)."""
        instance = self._up.get(name)
        return instance if instance and epoch in (None, instance.epoch) else None

    @property
    def can_serve(self) -> bool:
        """Somebody prefills and somebody decodes."""
        return any(i.role.prefills for i in self) and any(i.role.decodes for i in self)

    def best_prefill(self, num_tokens: int) -> Instance | None:
        """Who prefills a sequence that may become so long; None when nobody up can hold it."""
        candidates = [i for i in self if i.role.prefills and i.can_hold(num_tokens)]
        if not candidates:
            return None
        return candidates[pick_prefill([c.prefill_load for c in candidates])]

    def best_decode(self, num_tokens: int) -> Instance | None:
        """Who decodes a sequence that may become so long; None when nobody up can hold it."""
        candidates = [i for i in self if i.role.decodes and i.can_hold(num_tokens)]
        if not candidates:
            return None
        return candidates[pick_decode([c.decode_load for c in candidates])]
