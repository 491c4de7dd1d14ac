"""`distserve serve`: wires the daemon's parts together and runs them until told to stop.

One TaskGroup owns every task. The first signal drains: nothing new is taken, what is under way
may finish within the drain time and is ended by a clear error after it. A second signal ends
the waiting.
"""

import asyncio
import importlib.metadata
import logging
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack

import zmq.asyncio

from daemon import devices, garbage, http_server, listen_fds, planning, signals, worker_link
from daemon.admin_http import AdminHttp, build_admin_app
from daemon.admin_service import AdminService, Surroundings
from daemon.admission import Capacity
from daemon.api_keys import ring_of
from daemon.config import AUTO, DaemonConfig
from daemon.controller import Controller
from daemon.deadlines import TimeLimits
from daemon.door import Door
from daemon.errors import Draining, StoppedEarly
from daemon.event_log import EventLog
from daemon.feasibility import check_placement
from daemon.frontend.app import build_app
from daemon.frontend.bodies import Limits
from daemon.frontend.unknown_fields import UnknownFields
from daemon.guarded_protocol import Guards
from daemon.heartbeat import Heartbeat
from daemon.link_keys import keys_for
from daemon.link_terms import terms_of
from daemon.live_metrics import LiveMetrics
from daemon.loop_lag import LoopLag
from daemon.meeting_points import MeetingPoints
from daemon.metrics import Metrics
from daemon.model_sizes import read_outline
from daemon.neighbours import Neighbours
from daemon.node import Node
from daemon.operations import Parts
from daemon.placement import guests_of, hosts_of, own_node, placement_of
from daemon.preparation import first_exit_error, load_model, own_run_dir
from daemon.pulse import Pulse
from daemon.quarantine import Quarantine
from daemon.readiness import NodeReadiness
from daemon.reload import Reloader
from daemon.remote_node import RemoteNode
from daemon.sd_notify import Notifier
from daemon.segment_host import SegmentHost
from daemon.service_report import ServiceReport, Stage, status_line
from daemon.status_view import StatusBoard
from daemon.supervisor import Supervisor
from daemon.targets import slo_of, target_of
from daemon.trace_export import tracer_of
from daemon.welcome import welcome
from daemon.worker_configs import WorkerConfigs
from ipc.run_dir import RunDir
from ipc.sockets import DaemonSocket

logger = logging.getLogger(__name__)


def run(config: DaemonConfig, read: Callable[[], DaemonConfig]) -> None:
    """Serve until a signal; `read` reads the configuration again at SIGHUP.

    Raises:
        ExitError: it cannot start, or cannot go on.
    """
    reloader = Reloader(config, read)
    try:
        signals.before_the_loop()
        with ExitStack() as stack:
            passed = listen_fds.inherited()
            listener = stack.enter_context(passed or http_server.bind(config.host, config.port))
            http_server.check_listener(listener, config)
            notifier = stack.enter_context(Notifier.from_environment())
            run_dir = stack.enter_context(own_run_dir(config))
            stack.enter_context(devices.held(devices.read_devices(config.devices, config.device)))
            if config.placement == AUTO:
                notifier.extend(config.start_timeout_s, "searching a placement")
                config = planning.searched(config, run_dir.path)
                signals.before_the_loop()  # the search had handlers of its own
            daemon = Daemon(config, run_dir, notifier, reloader)
            asyncio.run(daemon.run(listener))
    except BaseExceptionGroup as group:
        raise first_exit_error(group) from group
    except KeyboardInterrupt as interrupt:
        raise StoppedEarly("stopped before it could serve") from interrupt


class Daemon:
    """All parts of one running node."""

    def __init__(
        self, config: DaemonConfig, run_dir: RunDir, notifier: Notifier, reloader: Reloader
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._notifier = notifier
        self._reloader = reloader
        self._drain_s: float | None = None  # as an operator wants it
        self._model = load_model(config)
        self._placement = placement_of(config)
        self._outline = read_outline(config)
        check_placement(config, self._placement, self._outline)
        self._target = target_of(config)
        self._book = http_server.book_of(config.max_connections, config.max_connections_per_peer)
        self._keys = keys_for(config, self._placement)
        ours = config.nodes.get(own_node(config, self._placement))
        self._meeting_points = MeetingPoints(run_dir.path, ours.host if ours else None)

    async def run(self, listener: socket.socket) -> None:
        """Until the first signal and the drain that follows it."""
        self._stop = stop = asyncio.Event()
        with signals.handled(stop.set, self._reload), ExitStack() as sockets:
            self._wire(listener)
            self._meeting_points.sweep()
            sockets.callback(self._meeting_points.sweep)
            sockets.callback(self._context.term)
            sockets.callback(self._link.close)
            sockets.callback(self._page.close)
            sockets.callback(self._tracer.close)
            if self._host is not None:
                sockets.callback(self._host.close)
            sockets.callback(self._admin.close)
            async with asyncio.TaskGroup() as house:
                background = [house.create_task(forever) for forever in self._endless()]
                lives = house.create_task(self._supervisor.run())
                house.create_task(self._server.serve(sockets=[listener]))
                house.create_task(self._page.serve())
                self._on_change()
                try:
                    await stop.wait()
                    await self._wind_down(stop)
                    await lives  # all reaped, on other nodes too
                finally:
                    for task in background:
                        task.cancel()

    def _endless(self) -> Iterator[Coroutine[None, None, None]]:
        """What runs beside the instances until they have ended."""
        yield worker_link.listen(
            self._link, self._supervisor, self._controller, self._heartbeat, self._host
        )
        yield self._heartbeat.run()
        yield self._report.run()
        yield self._controller.timekeeper.run()
        yield LoopLag(self._metrics.loop_lagged).run()
        yield self._admin.run()
        yield self._neighbours.run()
        if self._host is not None:
            yield self._host.serve()

    def _wire(self, listener: socket.socket) -> None:
        config = self._config
        self._url = http_server.url_of(listener)
        self._context = zmq.asyncio.Context()
        self._link = DaemonSocket(self._context, f"ipc://{self._run_dir.worker_socket}")
        self._metrics = Metrics(config.model_id, slo_of(config))
        capacity = Capacity(self._model.max_context)
        self._controller = Controller(
            self._model.tokenizer,
            self._metrics,
            Door(
                capacity,
                max_queued=config.max_queued,
                target=self._target,
            ),
            max_retries=config.max_retries,
            time_limits=TimeLimits(
                queue_s=config.queue_timeout_s,
                request_s=config.request_timeout_s,
                outage_s=config.outage_timeout_s,
            ),
        )
        configs = self._worker_configs()
        self._join_nodes(configs)
        self._supervisor = Supervisor(
            configs,
            self._link,
            self._controller,
            self._metrics,
            start_timeout_s=config.start_timeout_s,
            neighbours=self._neighbours,
            quarantine=Quarantine(config.quarantine_deaths),
        )
        self._heartbeat = beat = Heartbeat(
            self._supervisor,
            self._controller.instances,
            self._metrics,
            wedged_after_s=config.wedged_after_s,
        )
        version = importlib.metadata.version("distserved")
        events = EventLog()
        self._node = Node(
            config.model_id, version, self._controller, self._supervisor, self._host, events=events
        )
        around = Surroundings(
            node=self._node,
            parts=Parts(
                config, self._outline, self._controller, self._supervisor, configs, capacity
            ),
            heartbeat=beat,
            slo=self._metrics.slo,
            refused=self._metrics.tally.refused,
            events=events,
            reloader=self._reloader,
            shut_down=self._shut_down,
        )
        self._admin = AdminService(self._context, self._run_dir.admin_socket, around)
        self._supervisor.on_change = self._on_change
        sights = (self._node, self._controller, self._supervisor)
        self._metrics.registry.register(LiveMetrics(*sights, self._metrics.model_labels))
        board = StatusBoard(*sights, self._metrics)
        page = build_admin_app(board, self._node, self._render_metrics)
        self._page = AdminHttp(config.admin_host, config.admin_port, page)
        self._tracer = tracer_of(config, version)
        self._controller.timelines.on_ended = self._tracer.ended
        self._server = http_server.HttpServer(
            build_app(
                self._controller,
                self._model,
                NodeReadiness(self._node, self._controller.instances, beat, config.wedged_after_s),
                self._render_metrics,
                Limits(),
                config.cors_origins,
                ring_of(config, self._reloader),
                UnknownFields(self._metrics.unknown_field),
            ),
            book=self._book,
            guards=Guards(on_refused=self._metrics.refused),
        )
        parts = {"http": lambda: self._server.num_rounds, "heartbeat": lambda: beat.num_beats}
        self._report = ServiceReport(self._notifier, self._describe, Pulse(parts))
        self._controller.on_load = self._report.changed

    def _join_nodes(self, configs: WorkerConfigs) -> None:
        """Links to the nodes that instances are shared with; where none are, no socket opens."""
        self._neighbours, self._host = Neighbours(), None
        if self._keys is None:
            return
        config, placement = self._config, self._placement
        ours, terms = own_node(config, placement), terms_of(config, placement)
        self._neighbours = Neighbours(
            RemoteNode(
                self._context,
                name,
                config.nodes[name].address,
                self._keys,
                home=ours,
                terms=terms,
                silence_s=config.link_timeout_s,
                on_event=lambda *said: self._supervisor.on_event(*said),
            )
            for name in hosts_of(placement, ours)
        )
        if guests_of(placement, ours):
            self._host = SegmentHost(
                self._context,
                config.nodes[ours].address,
                self._keys,
                self._link,
                terms=terms,
                settle=configs.settled,
            )
            self._host.on_change = self._on_change

    def _worker_configs(self) -> WorkerConfigs:
        return WorkerConfigs(
            self._config,
            self._placement,
            endpoint=self._link.endpoint,
            meeting_points=self._meeting_points,
            max_context_tokens=self._model.max_context,
            num_token_ids=self._model.tokenizer.num_token_ids,
        )

    def _render_metrics(self) -> tuple[str, bytes]:
        return self._metrics.render(self._controller.count_phases())

    def _describe(self) -> str:
        return status_line(self._node.state, self._controller.num_open, self._node.progress)

    def _reload(self) -> None:
        with self._report.reloading():
            self._reloader.reload()

    def _on_change(self) -> None:
        """An instance moved: tell the service manager, and people once it can serve."""
        self._admin.feed.look()
        self._report.changed()
        if self._report.stage is not Stage.STARTING:
            return
        if self._node.is_helper:
            self._ready()
            logger.info("ready: %s", self._node.progress)
        elif self._node.refusal is None:
            self._ready()
            self._welcome()

    def _ready(self) -> None:
        garbage.settle()
        self._report.ready()

    def _welcome(self) -> None:
        num_ready = sum(ward.is_ready for ward in self._supervisor.wards.values())
        if num_ready < len(self._supervisor.wards):
            logger.info(
                "%d of %d instances are ready, the others are still loading",
                num_ready,
                len(self._supervisor.wards),
            )
        has_keys = self._config.api_keys is not None
        for line in welcome(self._config.model_id, self._url, has_keys=has_keys):
            logger.info("%s", line)

    def _shut_down(self, drain_s: float | None) -> None:
        """As by a signal, with a drain time of its own."""
        self._drain_s = drain_s
        self._stop.set()

    async def _wind_down(self, stop: asyncio.Event) -> None:
        """Drain, end what is left by an error, and let everything go."""
        stop.clear()
        drain_s = self._reloader.config.drain_s if self._drain_s is None else self._drain_s
        logger.info("stopping: %d requests may take %.0f s", self._controller.num_open, drain_s)
        drain = asyncio.ensure_future(self._node.drain(drain_s))
        await asyncio.sleep(0)  # it drains from here on
        self._report.stopping()
        again = asyncio.ensure_future(stop.wait())
        await asyncio.wait([drain, again], return_when=asyncio.FIRST_COMPLETED)
        for waiting in (drain, again):
            waiting.cancel()
        await asyncio.gather(drain, again, return_exceptions=True)
        self._controller.fail_all(
            Draining("the service was stopped before this request could finish")
        )
        self._server.stop()
        await self._supervisor.stop()
        if self._host is not None:
            await self._host.stop()
        self._page.stop()
        logger.info("stopped")
