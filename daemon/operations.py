"""What an operator may do to the instances: replace one, add one, remove one, or take over another
placement, while clients notice nothing.

Each begins by draining what is to go, for a bounded time; what is still there then is started
again elsewhere, as after a death. Every operation can be asked what it would do instead.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from daemon.admission import Capacity
from daemon.config import DaemonConfig
from daemon.controller import Controller
from daemon.errors import ConfigError, ExitError
from daemon.feasibility import check_placement
from daemon.model_sizes import ModelOutline
from daemon.placement import nodes_of, own_node
from daemon.supervisor import Supervisor
from daemon.ward import Ward
from daemon.worker_configs import WorkerConfigs
from ipc.placement_file import crossings
from ipc.vocabulary import InstanceSpec, Parallelism, Placement, Role, Segment

logger = logging.getLogger(__name__)


class OperationRefused(Exception):
    """It makes no sense in the node's present state; nothing was changed."""


class Parts(msgspec.Struct, frozen=True):
    """Whom operations move."""

    config: DaemonConfig
    outline: ModelOutline
    controller: Controller
    supervisor: Supervisor
    configs: WorkerConfigs
    capacity: Capacity


class Operations:
    """One operation at a time: another one is refused meanwhile."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._supervisor = parts.supervisor
        self._controller = parts.controller
        self._under_way: str | None = None

    async def restart(self, name: str, deadline_s: float) -> None:
        """Replace an instance by a fresh one; returns when that can serve.

        Raises:
            OperationRefused: there is no such instance, another operation is under way, it was
                taken back while it was being drained, or it died or waits for another node
                instead of coming back; it is tried again then.
        """
        ward = self._ward(name)
        with self._alone(f"restart {name}"), self._promised([ward.spec]):
            await self._drain(name, deadline_s)
            before, restarts = ward.life, ward.restarts
            await self._supervisor.replace(ward)
            await self._until(
                lambda: (
                    ward.restarts > restarts
                    or ward.waits_for is not None
                    or (ward.life is not before and ward.is_ready)
                )
            )
            if ward.restarts > restarts:
                raise OperationRefused(f"{name} did not come back at once: {ward.last_exit}")
            if ward.waits_for is not None:
                raise OperationRefused(f"{name} comes back later: {ward.waits_for}")

    async def add(self, role: Role, parallelism: Parallelism) -> str:
        """Start one more instance on free devices of this node; its name, once it can serve.

        Raises:
            OperationRefused: the model or the memory does not allow it.
        """
        spec = self.next_spec(role, parallelism)
        with self._alone(f"add {spec.name}"):
            await self._add(spec)
        return spec.name

    async def remove(self, name: str, deadline_s: float) -> None:
        """Drain an instance and let it go.

        Raises:
            OperationRefused: nobody would be left for one of the phases.
        """
        ward = self._ward(name)
        self._check_left([spec for spec in self._specs if spec.name != name])
        with self._alone(f"remove {name}"):
            await self._remove(ward, deadline_s)

    async def apply(self, placement: Placement, deadline_s: float) -> None:
        """Turn the running instances into the placement's: those that stay as they are go on.

        New ones on free devices are started first, then the old ones are drained and let go, then
        the others are started. All or nothing: where one of these fails, what was begun is undone.

        Raises:
            OperationRefused: the placement cannot run here, or a part of it failed; says what
                stands, where the former placement could not be restored as it was.
        """
        change = self.change_to(placement)
        before = self._specs
        with self._alone("apply a placement"), self._promised([*before, *change.added]):
            try:
                await self._take_over(change, deadline_s)
            except OperationRefused as refused:
                undone = await self._put_back(before, deadline_s)
                raise OperationRefused(f"{refused}; {undone}") from refused

    # ---- what would be ----------------------------------------------------------------------

    def next_spec(self, role: Role, parallelism: Parallelism) -> InstanceSpec:
        """The instance that `add` would start. Raises OperationRefused."""
        names = {spec.name for spec in self._specs}
        number = next(i for i in range(len(names) + 1) if f"{role.value}-{i}" not in names)
        first = max(_devices(self._specs), default=-1) + 1
        config = self._parts.config
        spec = InstanceSpec(
            name=f"{role.value}-{number}",
            role=role,
            parallelism=parallelism,
            segments=tuple(
                Segment(self._node, tuple(range(start, start + parallelism.tp)))
                for start in range(first, first + parallelism.num_workers, parallelism.tp)
            ),
            chunk_tokens=config.chunk_tokens if role is Role.MIXED else None,
        )
        self._check([*self._specs, spec])
        return spec

    def change_to(self, placement: Placement) -> "Change":
        """What `apply` would do. Raises OperationRefused."""
        specs = placement.instances
        self._check(specs)
        self._check_left(specs)
        present = {spec.name: spec for spec in self._specs}
        wanted = {spec.name: spec for spec in specs}
        change = Change(
            kept=tuple(name for name in present if wanted.get(name) == present[name]),
            removed=tuple(name for name in present if wanted.get(name) != present[name]),
            added=tuple(s for s in specs if present.get(s.name) != s),
        )
        for spec in (*change.added, *(present[name] for name in change.removed)):
            if nodes_of([spec]) != [self._node]:
                raise OperationRefused(
                    f"{spec.name} is on {', '.join(nodes_of([spec]))}: instances of other nodes "
                    "change with a restart of their daemons"
                )
        return change

    def dry_run_restart(self, name: str) -> list[str]:
        """Raises OperationRefused."""
        ward = self._ward(name)
        return [f"drain {name} ({ward.state})", f"replace its {len(_devices([ward.spec]))} workers"]

    def dry_run_remove(self, name: str) -> list[str]:
        """Raises OperationRefused."""
        self._ward(name)
        self._check_left([spec for spec in self._specs if spec.name != name])
        return [f"drain {name}", f"let it go; {len(self._specs) - 1} instances are left"]

    # ---- how --------------------------------------------------------------------------------

    @property
    def _node(self) -> str:
        return own_node(self._parts.config, self._parts.configs.placement)

    @property
    def _specs(self) -> tuple[InstanceSpec, ...]:
        return self._parts.configs.placement.instances

    def _adopt(self, specs: Iterable[InstanceSpec]) -> None:
        placement = self._parts.configs.placement
        self._parts.configs.adopt(msgspec.structs.replace(placement, instances=tuple(specs)))

    async def _take_over(self, change: "Change", deadline_s: float) -> None:
        """As far as it goes."""
        taken = set(_devices(ward.spec for ward in self._supervisor.wards.values()))
        first = [spec for spec in change.added if not taken.intersection(_devices([spec]))]
        first = [spec for spec in first if spec.name not in self._supervisor.wards]
        for spec in first:
            await self._add(spec)
        for name in change.removed:
            await self._remove(self._supervisor.wards[name], deadline_s)
        for spec in change.added:
            if spec not in first:
                await self._add(spec)

    async def _put_back(self, before: Sequence[InstanceSpec], deadline_s: float) -> str:
        """Undo what a change has done; what came of it, in words.

        An instance that was let go and does not come back at once is tried again, as after a death:
        it could serve before.
        """
        late: dict[str, str] = {}
        try:
            for spec in [spec for spec in self._specs if spec not in before]:
                await self._remove(self._supervisor.wards[spec.name], deadline_s)
            for spec in [spec for spec in before if spec not in self._specs]:
                if (reason := await self._started(spec)) is not None:
                    late[spec.name] = reason
        except OperationRefused as refused:
            stand = ", ".join(spec.name for spec in self._specs)
            return f"the former placement could not be restored: {refused}; there are now: {stand}"
        self._adopt(before)  # in their order
        told = [f"{name} is not back yet and is tried again: {late[name]}" for name in late]
        return "; ".join(["the former placement is back", *told])

    async def _add(self, spec: InstanceSpec) -> None:
        if (reason := await self._started(spec)) is not None:
            await self._remove(self._supervisor.wards[spec.name], deadline_s=0.0)
            raise OperationRefused(f"{spec.name} could not be started: {reason}")

    async def _started(self, spec: InstanceSpec) -> str | None:
        """Start one and wait until it can serve; why it did not at the first try, if so."""
        self._adopt([*self._specs, spec])
        ward = self._supervisor.add(spec)
        await self._until(lambda: ward.is_ready or ward.last_exit is not None)
        return None if ward.is_ready else ward.last_exit

    async def _remove(self, ward: Ward, deadline_s: float) -> None:
        name = ward.spec.name
        await self._drain(name, deadline_s)
        await self._supervisor.remove(ward)
        await self._until(lambda: self._supervisor.wards.get(name) is not ward)
        self._parts.capacity.forget(name)
        self._adopt(spec for spec in self._specs if spec.name != name)

    async def _drain(self, name: str, deadline_s: float) -> None:
        """As far as it goes: what is left at the deadline is started again elsewhere."""
        if self._controller.instances.get(name) is None:
            return
        is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                is_draining = await self._controller.drain_instance(name)
        if not is_draining:
            raise OperationRefused(f"{name} was taken back while it was being drained")

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait for what comes with a change of an instance."""
        while not holds():
            await self._supervisor.changed()

    def _ward(self, name: str) -> Ward:
        ward = self._supervisor.wards.get(name)
        if ward is None:
            known = ", ".join(self._supervisor.wards) or "none"
            raise OperationRefused(f"there is no instance {name!r}; there are: {known}")
        return ward

    def _check(self, specs: Iterable[InstanceSpec]) -> None:
        placement = msgspec.structs.replace(self._parts.configs.placement, instances=tuple(specs))
        try:
            for crossing in crossings(placement.instances):
                raise ConfigError(f"not servable yet: {crossing}")
            check_placement(self._parts.config, placement, self._parts.outline)
        except ExitError as error:
            raise OperationRefused(str(error)) from error

    def _check_left(self, specs: Iterable[InstanceSpec]) -> None:
        roles = {spec.role for spec in specs}
        for phase, does in (("prefills", "prefill"), ("decodes", "decode")):
            if not any(getattr(role, phase) for role in roles):
                raise OperationRefused(f"nobody would be left to {does}")

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if self._under_way is not None:
            raise OperationRefused(f"another operation is under way: {self._under_way}")
        self._under_way = what
        logger.info("operation begun: %s", what)
        try:
            yield
        finally:
            self._under_way = None
            logger.info("operation over: %s", what)

    @contextlib.contextmanager
    def _promised(self, specs: Iterable[InstanceSpec]) -> Iterator[None]:
        """Requests that need one of these are taken, and wait for it."""
        promised = self._controller.instances.promised
        promised.update({spec.name: spec for spec in specs})
        try:
            yield
        finally:
            promised.clear()  # one operation at a time


class Change(msgspec.Struct, frozen=True):
    """From the running instances to a placement's."""

    kept: tuple[str, ...]
    removed: tuple[str, ...]
    added: tuple[InstanceSpec, ...]

    @property
    def sentences(self) -> list[str]:
        """For people: what would be done."""
        said = [f"keep {', '.join(self.kept)}"] if self.kept else []
        said += [f"drain and remove {name}" for name in self.removed]
        for spec in self.added:
            said.append(f"start {spec.name}, tp {spec.parallelism.tp}, pp {spec.parallelism.pp}")
        return said or ["nothing changes"]


def _devices(specs: Iterable[InstanceSpec]) -> list[int]:
    return [device for spec in specs for segment in spec.segments for device in segment.devices]
