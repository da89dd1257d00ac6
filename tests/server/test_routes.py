"""Routes beside the generating ones, unknown ones, and the description of the API."""

import pytest
from tests.server.client import call, make_context, metric
from tests.server.fake_engine import FakeEngine


def test_models() -> None:
    context = make_context(FakeEngine())
    listed = call(context, "GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert [m["id"] for m in listed["data"]] == ["tiny", "alias"]
    assert listed["data"][0]["max_model_len"] == 100
    assert call(context, "GET", "/v1/models/alias").json()["id"] == "alias"
    missing = call(context, "GET", "/v1/models/some/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["message"] == "The model `some/other` does not exist."


def test_health_tells_life_and_death() -> None:
    engine = FakeEngine()
    context = make_context(engine)
    alive = call(context, "GET", "/health")
    assert (alive.status_code, alive.content) == (200, b"")
    engine.dead = True
    assert call(context, "GET", "/health").status_code == 503


def test_version() -> None:
    assert call(make_context(FakeEngine()), "GET", "/version").json() == {"version": "9.9"}


def test_metrics_route() -> None:
    response = call(make_context(FakeEngine()), "GET", "/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "vllm:num_requests_running" in response.text


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/nowhere", 404, "Not Found"),
        ("POST", "/v1/nowhere", 404, "Not Found"),
        ("GET", "/v1/completions", 405, "Method Not Allowed"),
        ("DELETE", "/v1/models", 405, "Method Not Allowed"),
    ],
)
def test_unknown_routes_and_methods(method: str, path: str, status: int, kind: str) -> None:
    response = call(make_context(FakeEngine()), method, path)
    assert response.status_code == status
    assert response.json() == {
        "error": {"message": kind, "type": kind, "param": None, "code": status}
    }
    assert response.headers["x-request-id"]


def test_requests_are_counted_by_declared_route() -> None:
    context = make_context(FakeEngine())
    for path in ("/v1/models/tiny", "/v1/models/other", "/made/up"):
        call(context, "GET", path)
    count = "moestro:http_requests_total"
    route = 'method="GET",route="/v1/models/{model_name:path}"'
    assert metric(context, f'{count}{{code="200",{route}}}') == 1
    assert metric(context, f'{count}{{code="404",{route}}}') == 1
    assert metric(context, f'{count}{{code="404",method="other",route="unknown"}}') == 1


def test_openapi_describes_the_bodies() -> None:
    described = call(make_context(FakeEngine()), "GET", "/openapi.json").json()
    for path, model in (
        ("/v1/completions", "CompletionRequest"),
        ("/v1/chat/completions", "ChatCompletionRequest"),
    ):
        body = described["paths"][path]["post"]["requestBody"]
        schema = body["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{model}"}
        assert "temperature" in described["components"]["schemas"][model]["properties"]


def test_no_page_that_needs_a_network() -> None:
    for path in ("/docs", "/redoc"):
        assert call(make_context(FakeEngine()), "GET", path).status_code == 404


def test_requests_are_logged_without_what_the_client_made_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = make_context(FakeEngine())
    with caplog.at_level("INFO", logger="moestro.server"):
        call(context, "GET", "/evil%0aline")
        call(context, "GET", "/health")
        response = call(context, "GET", "/v1/models")
    lines = [r.getMessage() for r in caplog.records if r.name == "moestro.server.middleware"]
    assert len(lines) == 2
    assert "other unknown 404" in lines[0]
    assert lines[1].endswith(f"GET /v1/models 200 {response.headers['x-request-id']}")
