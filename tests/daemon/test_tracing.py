"""Traces of requests, as an exporter gets them."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from daemon.config import DaemonConfig
from daemon.errors import ConfigError, ServiceFailed
from daemon.generation import Origin
from daemon.text import Tokenizer
from daemon.trace_export import NoTracer, tracer_of
from daemon.tracing import RequestTracer
from ipc.vocabulary import Role
from tests.daemon.frontend.http_calls import COMPLETIONS, HELLO, LIMITS, REPLY
from tests.daemon.frontend.http_service import Service
from tests.daemon.small_tokenizers import byte_level_json
from tests.end_to_end.town import Town, spec, tokenizer_of

DISAGGREGATED = {"p0": Role.PREFILL, "d0": Role.DECODE}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.fixture
def town(tmp_path: Path) -> Town:
    return Town(tokenizer_of(tmp_path, byte_level_json()), DISAGGREGATED)


@pytest.fixture
def exporter(town: Town) -> InMemorySpanExporter:
    """What the town's requests leave."""
    exporter = InMemorySpanExporter()
    tracer = RequestTracer(SimpleSpanProcessor(exporter), "tiny", "1.2")
    town.controller.timelines.on_ended = tracer.ended
    return exporter


def request_of(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = [s for s in exporter.get_finished_spans() if s.name == "request"]
    return span


def test_a_request_is_a_span_and_its_stages_are_spans_below_it(
    town: Town, exporter: InMemorySpanExporter
) -> None:
    town.ask(spec([1, 2, 3]))
    assert not exporter.get_finished_spans()
    town.settle()
    request = request_of(exporter)
    assert request.kind is SpanKind.SERVER
    assert request.parent is None
    stages = [s for s in exporter.get_finished_spans() if s is not request]
    assert [s.name for s in stages] == [
        "prefill_queue",
        "prefill",
        "decode_queue",
        "transfer",
        "decode_queue",
        "decode",
    ]
    assert {s.parent.span_id for s in stages if s.parent} == {request.context.span_id}
    assert {s.attributes["distserve.instance"] for s in stages if s.attributes} == {"p0", "d0"}
    assert request.attributes is not None
    told = {key: request.attributes[key] for key in request.attributes}
    assert told["gen_ai.request.model"] == "tiny"
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (3, 8)
    assert told["distserve.ending"] == "finished"


def test_a_span_lasts_as_long_as_its_request(town: Town, exporter: InMemorySpanExporter) -> None:
    town.ask(spec([1, 2, 3]))
    town.settle()
    (timeline,) = town.controller.timelines.ended_ones()
    request = request_of(exporter)
    assert request.end_time is not None
    assert request.start_time is not None
    assert timeline.ended_s is not None
    lasted_s = (request.end_time - request.start_time) / 1e9
    assert lasted_s == pytest.approx(timeline.ended_s - timeline.arrived_s, abs=1e-6)


@pytest.mark.parametrize("flags", ["01", "00"])
def test_a_clients_trace_goes_on_where_it_is_wanted(
    town: Town, exporter: InMemorySpanExporter, flags: str
) -> None:
    origin = Origin("mine", f"00-{TRACE}-{PARENT}-{flags}")
    town.controller.submit([spec([1, 2, 3])], origin)
    while town.controller.num_open:
        town.tick()
    if flags == "00":
        assert not exporter.get_finished_spans()
        return
    request = request_of(exporter)
    assert request.parent is not None
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == PARENT
    assert request.attributes is not None
    assert request.attributes["distserve.request_id"] == "mine"


@pytest.mark.parametrize("nonsense", ["", "x", f"00-{'0' * 32}-{PARENT}-01", "00-1-2-3"])
def test_a_parent_that_is_none_begins_a_trace(
    town: Town, exporter: InMemorySpanExporter, nonsense: str
) -> None:
    town.controller.submit([spec([1, 2, 3])], Origin("mine", nonsense))
    while town.controller.num_open:
        town.tick()
    assert request_of(exporter).parent is None


def test_a_request_that_failed_or_was_left_says_so(
    town: Town, exporter: InMemorySpanExporter
) -> None:
    town.ask(spec([1, 2, 3]))
    town.controller.fail_all(ServiceFailed())
    failed = request_of(exporter)
    assert failed.status.status_code is StatusCode.ERROR
    exporter.clear()
    town.ask(spec([4, 5])).leave()
    left = request_of(exporter)
    assert left.status.status_code is StatusCode.UNSET
    assert left.attributes is not None
    assert left.attributes["distserve.ending"] == "aborted"


def test_nothing_is_traced_unless_an_endpoint_is_configured() -> None:
    assert isinstance(tracer_of(DaemonConfig(), "1"), NoTracer)


def test_an_endpoint_without_opentelemetry_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "daemon.tracing", None)
    config = DaemonConfig(otlp_endpoint="http://127.0.0.1:4318")
    with pytest.raises(ConfigError, match=r"needs OpenTelemetry: pip install 'distserved\[otel\]'"):
        tracer_of(config, "1")


@pytest.mark.parametrize(
    ("given", "kept"),
    [(f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01"), ("x" * 129, ""), (None, "")],
)
async def test_the_name_and_the_trace_of_a_call_are_its_clients(
    tokenizer: Tokenizer, given: str | None, kept: str
) -> None:
    service = Service(tokenizer, reply=REPLY, limits=LIMITS)
    headers = {"x-request-id": "mine"} | ({"traceparent": given} if given else {})
    async with service.running(), service.client() as http:
        assert (await http.post(COMPLETIONS, json=HELLO, headers=headers)).status_code == 200
    assert service.submitter.origins == [Origin("mine", kept)]


@pytest.mark.parametrize(("path", "asked"), [("", "/v1/traces"), ("/mine", "/mine")])
def test_spans_reach_a_collector_at_the_latest_when_the_daemon_ends(
    town: Town, path: str, asked: str
) -> None:
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{collector.server_port}{path}"
        tracer = tracer_of(DaemonConfig(otlp_endpoint=endpoint), "1.2")
        town.controller.timelines.on_ended = tracer.ended
        town.ask(spec([1, 2, 3]))
        town.settle()
        tracer.close()
        collector.shutdown()
        thread.join()
    ((where, body),) = got
    assert where == asked
    assert b"prefill_queue" in body
