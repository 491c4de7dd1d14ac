import httpx
import pytest

from daemon.errors import Draining, NotReady
from tests.daemon.frontend.http_calls import COMPLETIONS, HELLO, chunks, error_of
from tests.daemon.frontend.http_service import Service


async def test_the_served_model_is_listed(http: httpx.AsyncClient) -> None:
    content = (await http.get("/v1/models")).json()
    assert content["object"] == "list"
    assert content["data"] == [
        {
            "id": "tiny",
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "distserved",
            "root": "tiny",
            "max_model_len": 256,
        }
    ]


async def test_the_served_model_is_found_by_name(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/models/tiny")).json()["id"] == "tiny"


@pytest.mark.parametrize("name", ["nope", "some/other"])
async def test_another_model_is_not_found_by_name(http: httpx.AsyncClient, name: str) -> None:
    response = await http.get(f"/v1/models/{name}")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


async def test_health_says_ready(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200


async def test_health_says_why_it_is_not_ready_and_when_to_ask_again(
    service: Service, http: httpx.AsyncClient
) -> None:
    service.readiness.refusal = Draining("The service is ending.")
    response = await http.get("/health")
    assert (response.status_code, error_of(response)["code"]) == (503, "draining")
    assert response.headers["retry-after"] == "2"


async def test_the_process_lives_even_when_it_cannot_serve(
    service: Service, http: httpx.AsyncClient
) -> None:
    service.readiness.refusal = NotReady("Starting.")
    assert (await http.get("/health/live")).status_code == 200


@pytest.mark.parametrize("path", ["/ready", "/health/ready"])
async def test_ready_is_503_when_nothing_gets_on_though_health_is_well_D2_D4(
    service: Service, http: httpx.AsyncClient, path: str
) -> None:
    assert (await http.get(path)).status_code == 200
    service.readiness.stuck = NotReady("nobody who decodes has made progress")
    response = await http.get(path)
    assert (response.status_code, error_of(response)["code"]) == (503, "not_ready")
    assert (await http.get("/health")).status_code == 200


async def test_ping_is_answered_even_when_nothing_can_be_served(
    service: Service, http: httpx.AsyncClient
) -> None:
    service.readiness.refusal = NotReady("Starting.")
    assert (await http.get("/ping")).json() == {"status": "alive"}


async def test_metrics_are_those_of_the_renderer(http: httpx.AsyncClient) -> None:
    response = await http.get("/metrics")
    assert (response.headers["content-type"], response.text) == ("text/plain", "up 1\n")


async def test_the_version_is_told(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json()["version"]


async def test_a_connection_serves_one_stream_after_the_other(service: Service) -> None:
    limits = httpx.Limits(max_connections=1)
    async with httpx.AsyncClient(base_url=service.url, limits=limits) as http:
        for _ in range(3):
            await chunks(http, COMPLETIONS, HELLO)
    assert len(service.submitter.generations) == 3
