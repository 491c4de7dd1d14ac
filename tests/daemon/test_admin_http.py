"""The admin listener: what it tells, to whom, and at what cost."""

import asyncio
import logging
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from daemon import http_server
from daemon.admin_http import AdminHttp, build_admin_app, content_policy
from daemon.live_metrics import WORKER_STATES, LiveMetrics
from daemon.node import Node
from daemon.request import Phase
from daemon.status_view import CHART_S, MAX_REQUESTS, STEP_S, StatusBoard, StatusView
from ipc.messages import Stats
from tests.daemon.metric_samples import all_samples
from tests.daemon.stage import MakeStage, Stage
from tests.end_to_end.town import spec


class House:
    """A stage of two instances, its board and its application, by a clock set by hand."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.now_s = 1000.0
        self.node = Node("tiny", "1.2", stage.controller, stage.supervisor)
        parts = (self.node, stage.controller, stage.supervisor)
        stage.metrics.registry.register(LiveMetrics(*parts, stage.metrics.model_labels))
        self.board = StatusBoard(*parts, stage.metrics, clock=lambda: self.now_s)
        self.app = build_admin_app(
            self.board, self.node, lambda: stage.metrics.render(stage.controller.count_phases())
        )

    def client(self, host: str = "127.0.0.1:9470") -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(transport=transport, base_url=f"http://{host}")


@pytest.fixture
async def house(make_stage: MakeStage) -> AsyncIterator[House]:
    house = House(await make_stage(prefill=1, prefill_tp=2, decode=1))
    keeping = house.stage.keep_all()
    await house.stage.all_ready(3)
    yield house
    await house.stage.supervisor.stop()
    await keeping


async def test_the_status_holds_its_schema_and_tells_the_placement(house: House) -> None:
    async with house.client() as http:
        answer = await http.get("/status.json")
    assert answer.headers["content-type"] == "application/json"
    view = msgspec.json.decode(answer.content, type=StatusView, strict=True)
    assert (view.v, view.model, view.state, view.refusal) == (1, "tiny", "ready", None)
    shapes = {one.name: (one.role, one.state, one.tp, one.segments[0].devices) for one in
              view.instances}  # fmt: skip
    assert shapes == {
        "prefill-0": ("prefill", "ready", 2, (0, 1)),
        "decode-0": ("decode", "ready", 1, (2,)),
    }
    assert len(view.chart) == CHART_S / STEP_S


async def test_what_is_under_way_is_told_up_to_a_bound(house: House) -> None:
    calls = [house.stage.controller.submit([spec([1, 2, 3])]) for _ in range(8)]
    with calls[0], calls[1]:
        house.now_s += 5.0
        view = house.board.view()
        assert view.num_open == 8
        assert [one.state for one in view.requests] == ["prefill"] * 8
        assert view.requests[0].instance == "prefill-0"
    assert len(house.board.view().requests) == 6 <= MAX_REQUESTS
    assert house.board.view().ended == {"aborted": 2}
    for call in calls:
        call.__exit__()


async def test_an_instance_that_died_is_told_with_how(house: House) -> None:
    ward = house.stage.supervisor.wards["decode-0"]
    assert ward.life is not None
    house.stage.metrics.got_on("decode-0", 4.0)
    (one,) = [i for i in house.board.view().instances if i.name == "decode-0"]
    assert one.progress_age_s == 4.0
    next(iter(ward.life.workers.values())).kill()
    await house.stage.supervisor.changed()
    (one,) = [i for i in house.board.view().instances if i.name == "decode-0"]
    assert one.state in ("ending", "restarting")
    assert one.progress_age_s is None
    view = house.board.view()
    assert view.state == "degraded"
    assert view.refusal is not None
    async with house.client() as http:
        assert (await http.get("/health")).status_code == 503


async def test_an_instance_that_was_removed_is_told_of_no_more(house: House) -> None:
    supervisor = house.stage.supervisor
    ward = supervisor.wards["decode-0"]
    assert ward.life is not None
    leaving = asyncio.create_task(supervisor.remove(ward))
    next(iter(ward.life.workers.values())).kill()
    await leaving
    while "decode-0" in supervisor.wards:
        await supervisor.changed()
    assert [one.name for one in house.board.view().instances] == ["prefill-0"]
    samples = list(all_samples(house.stage.metrics.render({})[1].decode()))
    gauges = [s for s in samples if s.labels.get("instance") == "decode-0"]
    assert {s.name for s in gauges if not s.name.endswith(("_total", "_created"))} == set()


async def test_the_chart_is_kept_step_by_step_and_forgets_what_is_too_old(house: House) -> None:
    slo = house.stage.metrics.slo
    for second in range(40):
        slo.answered(house.now_s + second, 0.1 if second < 20 else 0.4, 0.01)
    house.now_s += 39.0
    chart = house.board.view().chart
    assert [step.num_requests for step in chart[-5:]] == [0, 10, 10, 10, 10]
    assert [round(step.ttft_p50_s or 0, 1) for step in chart[-4:]] == [0.1, 0.1, 0.4, 0.4]
    house.now_s += 10.0
    assert [step.num_requests for step in house.board.view().chart[-5:]] == [10, 10, 10, 10, 0]
    house.now_s += CHART_S
    assert not any(step.num_requests for step in house.board.view().chart)


async def test_the_status_is_made_at_most_twice_a_second(house: House) -> None:
    first = house.board.body
    house.stage.metrics.tally.ended[Phase.FINISHED] += 1
    house.now_s += 0.4
    assert house.board.body is first
    house.now_s += 0.2
    assert house.board.body != first


async def test_the_page_allows_nothing_but_its_own_script_and_node(house: House) -> None:
    async with house.client() as http:
        answer = await http.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy == content_policy(answer.text)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for outside in ("http://", "https://", "//cdn", "@import", " style=", "onclick"):
        assert outside not in answer.text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    "name", ["localhost", "localhost:1", "127.0.0.1", "127.1.2.3:9", "[::1]:9"]
)
async def test_loopback_names_are_answered(house: House, name: str) -> None:
    async with house.client() as http:
        assert (await http.get("/status.json", headers={"host": name})).status_code == 200


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1:9470", ""])
async def test_a_page_elsewhere_cannot_read_it_by_a_name_that_points_here(
    house: House, name: str
) -> None:
    async with house.client() as http:
        for path in ("/", "/status.json", "/metrics", "/health"):
            answer = await http.get(path, headers={"host": name})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")


async def test_nothing_can_be_changed_there(house: House) -> None:
    async with house.client() as http:
        for path in ("/", "/status.json", "/metrics", "/health"):
            for verb in ("POST", "PUT", "DELETE", "PATCH"):
                assert (await http.request(verb, path)).status_code == 405
        assert (await http.get("/v1/models")).status_code == 404


async def test_the_live_metrics_tell_each_worker_s_state_once(house: House) -> None:
    async with house.client() as http:
        text = (await http.get("/metrics")).text
    states: dict[tuple[str, str], list[str]] = {}
    for sample in all_samples(text):
        if sample.name == "distserve_worker_state":
            worker = (sample.labels["instance"], sample.labels["worker"])
            states.setdefault(worker, []).extend([sample.labels["state"]] * int(sample.value))
    assert states == {
        ("prefill-0", "0.0"): ["ready"],
        ("prefill-0", "0.1"): ["ready"],
        ("decode-0", "0.0"): ["ready"],
    }
    assert "ready" in WORKER_STATES


async def test_vllm_s_usage_is_the_fullest_role_s(house: House) -> None:
    for instance in house.stage.controller.instances:
        used = 6 if instance.role.decodes else 2
        instance.stats = Stats(blocks_total=8, blocks_free=8 - used, blocks_in_use=used)
    text = house.stage.metrics.render({})[1].decode()
    usage = {s.name: s.value for s in all_samples(text) if s.name.endswith("cache_usage_perc")}
    assert usage == {"vllm:kv_cache_usage_perc": 0.75, "vllm:gpu_cache_usage_perc": 0.75}
    (info,) = [s for s in all_samples(text) if s.name == "vllm:cache_config_info"]
    assert (info.labels["block_size"], info.labels["num_gpu_blocks"]) == ("4", "8")


async def test_a_taken_port_is_told_and_the_daemon_serves_without(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    with http_server.bind("127.0.0.1", 0) as taken, caplog.at_level(logging.WARNING):
        listener = AdminHttp("127.0.0.1", taken.getsockname()[1], house.app)
    assert listener.url is None
    assert "no status page: somebody has 127.0.0.1:" in caplog.text
    listener.stop()
    listener.close()


async def test_none_means_no_listener(house: House) -> None:
    listener = AdminHttp("none", 9470, house.app)
    assert listener.url is None
    await listener.serve()
