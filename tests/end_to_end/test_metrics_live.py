"""What a real service tells of itself after a load: metrics, dashboards, the status page."""

import json
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.samples import Sample

from daemon.status_view import StatusView
from tests.daemon.metric_samples import all_samples
from tests.daemon.queries import Selector, panels, rules, selectors
from tests.end_to_end.browser import Browser, browser_program
from tests.end_to_end.service import Service, eventually, serving

TTFT = "vllm:time_to_first_token_seconds"
# The queries of vLLM's dashboards, as far as they name what is asked for: "vLLM", "Performance
# Statistics" and "Query Statistics", and the gauges that older ones and gateways read.
VLLM_ASKS = (
    *(f"{TTFT}_{part}" for part in ("bucket", "sum", "count")),
    *(f"vllm:inter_token_latency_seconds_{part}" for part in ("bucket", "sum", "count")),
    *(f"vllm:time_per_output_token_seconds_{part}" for part in ("bucket", "sum", "count")),
    *(f"vllm:request_time_per_output_token_seconds_{part}" for part in ("bucket", "sum", "count")),
    *(f"vllm:e2e_request_latency_seconds_{part}" for part in ("bucket", "sum", "count")),
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_swapped",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_success_total",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_inference_time_seconds_sum",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_params_n_bucket",
    "vllm:request_params_max_tokens_bucket",
    "vllm:iteration_tokens_total_bucket",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:cache_config_info",
)
MAY_BE_ZERO = re.compile(r"num_requests|cache_usage|preemptions|prefix_cache|_bucket|cached")
NUM_REQUESTS = 12


class Told:
    """One request: what its client saw, and what the histogram gained by it, in seconds."""

    def __init__(self, client_s: float, histogram_s: float) -> None:
        self.client_s = client_s
        self.histogram_s = histogram_s


class Loaded:
    """The service after a load, and where its status page is."""

    def __init__(self, service: Service, admin_url: str) -> None:
        self.service = service
        self.admin_url = admin_url
        self.told = [self._ask(number) for number in range(NUM_REQUESTS)]
        self.service.complete([9] * 20, n=2, max_tokens=5)

    def samples(self) -> list[Sample]:
        return list(all_samples(httpx.get(f"{self.admin_url}/metrics").text))

    def value(self, name: str, **labels: str) -> float:
        return total(self.samples(), name, **labels)

    def _ask(self, number: int) -> Told:
        before_s = self.value(f"{TTFT}_sum")
        body = {"prompt": [number + 5] * 40, "max_tokens": 8, "stream": True, "ignore_eos": True}
        with self.service.client() as http:
            http.get("/health")  # the connection is there
            started_s = time.monotonic()
            with http.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(line for line in lines if line.startswith("data: {"))
                client_s = time.monotonic() - started_s
                assert list(lines)[-2:] == ["data: [DONE]", ""]
        return Told(client_s, self.value(f"{TTFT}_sum") - before_s)


def total(samples: list[Sample], name: str, **labels: str) -> float:
    found = (s for s in samples if s.name == name and labels.items() <= s.labels.items())
    return sum(sample.value for sample in found)


@pytest.fixture(scope="module")
def loaded(tiny_llama: Path) -> Iterator[Loaded]:
    flags = ("--dtype", "float32", "--kv-cache-gib", "0.02", "--admin-port", "0")
    with serving(tiny_llama, *flags, "--ttft", "30s", "--tpot", "7s") as service:
        service.until_told("status page: http")
        found = re.search(r"status page: (http://\S+)", service.log)
        assert found
        loaded = Loaded(service, found[1])
        eventually(lambda: loaded.value("distserve_requests_open") == 0, 20, "all have ended")
        yield loaded


def test_the_histogram_and_the_client_agree_on_the_time_to_the_first_token(loaded: Loaded) -> None:
    """The client's time has the way there and back on top: a few milliseconds, if nobody disturbs;
    of twelve requests somebody disturbs not all."""
    more_s = [told.client_s - told.histogram_s for told in loaded.told]
    assert all(told.histogram_s > 0 for told in loaded.told)
    assert min(more_s) >= 0
    assert min(more_s) < 0.03


def test_the_five_stages_add_up_to_the_whole(loaded: Loaded) -> None:
    samples = loaded.samples()
    whole_s = total(samples, "vllm:e2e_request_latency_seconds_sum")
    assert total(samples, "distserve_stage_seconds_sum") == pytest.approx(whole_s, abs=1e-6)
    phases = ("queue_time", "prefill_time", "decode_time")
    by_vllm_s = sum(total(samples, f"vllm:request_{phase}_seconds_sum") for phase in phases)
    assert by_vllm_s == pytest.approx(whole_s, abs=1e-6)
    every = [s for s in samples if s.name == "distserve_stage_seconds_sum"]
    assert len(every) == 5
    assert all(s.value > 0 for s in every)


@pytest.mark.parametrize("name", VLLM_ASKS)
def test_what_vllm_s_dashboards_ask_for_is_told_after_a_load(loaded: Loaded, name: str) -> None:
    found = [s for s in loaded.samples() if s.name == name]
    model = loaded.service.complete([5], max_tokens=1)["model"]
    assert {(s.labels["model_name"], s.labels["engine"]) for s in found} == {(model, "0")}
    if not MAY_BE_ZERO.search(name):
        assert sum(s.value for s in found) > 0


def asked_by_us() -> list[Selector]:
    """Every series that a panel or a rule of ours selects."""
    queries = [*rules().values(), *(query for asked in panels().values() for query in asked)]
    return sorted({s for query in queries for s in selectors(query) if s.name != "up"})


def test_every_series_that_our_panels_and_rules_select_is_told_after_a_load(
    loaded: Loaded,
) -> None:
    samples = loaded.samples()
    empty = [s for s in asked_by_us() if not any(s.selects(sample) for sample in samples)]
    assert not empty


def test_decode_computed_no_prompt_and_every_prompt_was_pulled_A19(loaded: Loaded) -> None:
    samples = loaded.samples()
    assert total(samples, "distserve_prefilled_on_decode_tokens_total") == 0
    num_pulls = total(samples, "distserve_kv_transfer_bytes_count")
    assert num_pulls == NUM_REQUESTS + 1  # those of one token stay at prefill
    assert num_pulls == total(samples, "distserve_instance", count="num_pulls")


def test_the_answers_are_judged_by_the_configured_targets(loaded: Loaded) -> None:
    samples = loaded.samples()
    finished = total(samples, "distserve_requests_ended_total", ending="finished")
    assert total(samples, "distserve_slo_requests_total", slo="both") == finished
    assert total(samples, f"{TTFT}_bucket", le="30.0") == total(
        samples, "distserve_slo_requests_total", slo="ttft", met="true"
    )
    assert total(samples, "distserve_slo_target_seconds", slo="tpot") == 7.0


def test_the_service_s_own_port_tells_the_same_metrics(loaded: Loaded) -> None:
    there = {s.name for s in all_samples(httpx.get(f"{loaded.service.url}/metrics").text)}
    assert {s.name for s in loaded.samples()} <= there


def test_the_workers_processes_are_told(loaded: Loaded) -> None:
    samples = loaded.samples()
    workers = [s for s in samples if s.name == "distserve_worker_resident_memory_bytes"]
    assert {s.labels["instance"] for s in workers} == {"prefill-0", "decode-0"}
    assert all(s.value > 1e6 for s in workers)
    assert total(samples, "process_resident_memory_bytes") > 1e6


def test_the_status_tells_what_the_metrics_tell(loaded: Loaded) -> None:
    body = httpx.get(f"{loaded.admin_url}/status.json").content
    view = msgspec.json.decode(body, type=StatusView, strict=True)
    assert view.ended["finished"] == loaded.value("distserve_requests_ended_total")
    assert view.windows["1h"].num_requests == view.ended["finished"]
    assert view.windows["1h"].attainment == 1.0
    assert (view.targets.ttft_s, view.targets.tpot_s) == (30.0, 7.0)
    assert [one.state for one in view.instances] == ["ready", "ready"]


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    if (program := browser_program()) is None:
        pytest.skip("no Chromium on this machine: the page is shown to nobody")
    return Browser(program, tmp_path)


def test_a_browser_shows_the_status_and_complains_of_nothing(
    loaded: Loaded, browser: Browser
) -> None:
    elements, complaints = browser.text_of(loaded.admin_url)
    assert complaints == ""
    shown = re.sub(r"<script>.*?</script>|<style>.*?</style>|<[^>]+>", " ", elements, flags=re.S)
    for text in ("ready", "prefill-0", "decode-0", "KV blocks:", "target 30.0 s", "answered"):
        assert text in shown
    assert "The daemon does not answer" not in shown
    finished = int(loaded.value("distserve_requests_ended_total", ending="finished"))
    assert f"{finished} answers" in shown
    assert elements.count('role="img"') == 2  # the charts


def test_a_browser_draws_it_on_a_phone_too(loaded: Loaded, browser: Browser) -> None:
    picture = browser.picture_of(loaded.admin_url, "500,2000")
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">II", picture[16:24]) == (500, 2000)
    assert len(picture) > 20_000  # a blank page takes a tenth of it


def test_the_dashboard_file_is_json_that_grafana_imports() -> None:
    body = json.loads(Path("daemon/dashboards/grafana.json").read_text(encoding="utf-8"))
    assert {"title", "uid", "panels", "templating", "schemaVersion"} <= set(body)
    assert len({panel["id"] for panel in body["panels"]}) == len(body["panels"])
