"""Announces that an instance's life begins or has ended: to its peers, and to the controller.

Who may pull learns of the pools when they come up and forgets them when they go down.
"""

import logging
from collections.abc import Callable, Iterator

from daemon.controller import Controller
from daemon.incarnation import Incarnation
from daemon.instances import Instance
from daemon.introductions import introduce, mismatch
from daemon.metrics import Metrics
from daemon.partings import part
from daemon.worker_configs import WorkerConfigs
from ipc.messages import Command
from ipc.prefill_policy import FirstComeFirstServed, prefill_queue
from ipc.sockets import DaemonSocket, PeerGone
from ipc.vocabulary import WorkerName

logger = logging.getLogger(__name__)


class Announcer:
    """`lives_up` are all that are announced at the moment."""

    def __init__(
        self,
        configs: WorkerConfigs,
        link: DaemonSocket,
        controller: Controller,
        metrics: Metrics,
        lives_up: Callable[[], Iterator[Incarnation]],
    ) -> None:
        self._configs = configs
        self._link = link
        self._controller = controller
        self._metrics = metrics
        self._lives_up = lives_up

    def suits(self, life: Incarnation) -> bool:
        """Whether blocks can be copied between its pools and its peers'; it is doomed if not."""
        for peer in self._lives_up():
            if (reason := mismatch(life, peer)) is not None:
                life.give_up(reason)
                return False
        return True

    def up(self, life: Incarnation) -> None:
        """Introduce its pools to its peers and theirs to it, then let it be given work."""
        for peer in self._lives_up():
            introduce(life, peer, self._tell)
            introduce(peer, life, self._tell)
        life.is_up = True
        ready = life.ready[life.leader]
        logger.info(
            "%s is ready: loaded in %.1f s, %d blocks of %d tokens, %s kernels",
            life.spec.name,
            ready.load_s,
            ready.layout.num_blocks,
            ready.layout.block_size,
            ready.kernels,
        )
        self._metrics.instance_up(life.spec, ready.kernels)
        self._controller.instance_up(self._instance_of(life))

    def down(self, life: Incarnation, reason: str, *, tells_peers: bool) -> None:
        """All its processes are reaped."""
        self._metrics.instance_down(life.spec, life.ready[life.leader].kernels)
        if tells_peers:
            part(life, self._lives_up(), self._tell)
        self._controller.instance_down(life.spec.name, life.epoch, reason)

    def _instance_of(self, life: Incarnation) -> Instance:
        spec, layout = life.spec, life.ready[life.leader].layout

        def send(command: Command) -> None:
            self._link.send(life.leader, life.epoch, command)

        policy: FirstComeFirstServed[int] = prefill_queue(self._configs.limits_of(spec))
        return Instance(spec, life.epoch, layout, send, policy)

    def _tell(self, life: Incarnation, name: WorkerName, command: Command) -> None:
        try:
            life.tell(name, command)
        except PeerGone as error:
            logger.info("%s did not hear %s: %s", name, type(command).__name__, error)
