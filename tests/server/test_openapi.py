"""The document of the HTTP interface: true to the routes, and a source of requests none of which may be the server's
fault."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.http import build_app
from server.openapi import document
from server.service import Service
from tests.fakes import FakeEngine, FakeInfo
from tests.server.schema_values import JSON, allowed
from tests.server.test_keys import all_routes
from tests.server.wire import BODIES

POSTS = [path for path, item in document("")["paths"].items() if "post" in item]


def schema_of(path: str) -> dict[str, Any]:
    described = document("")
    reference = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema: dict[str, Any] = described["components"]["schemas"][reference.rsplit("/", 1)[1]]
    return schema


def bodies(path: str) -> st.SearchStrategy[Any]:
    """What the document allows; the same with some fields replaced by anything; and anything."""
    valid = allowed(schema_of(path))
    known = schema_of(path)["properties"]
    fields = st.fixed_dictionaries({}, optional={name: JSON for name in known})
    real = st.just({"model": "tiny", "tokens": [1], **BODIES.get(path, {"prompt": "x"})})
    return valid | JSON | st.tuples(valid | real, fields).map(lambda pair: {**pair[0], **pair[1]})


async def post(path: str, body: Any) -> httpx.Response:
    engine = FakeEngine(info=FakeInfo(max_model_len=10**6))
    service = Service(engine)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(build_app(service)), base_url="http://quire") as client:
        response = await client.post(path, json=body)
    await service.dialect.close()
    assert not engine.running
    return response


@pytest.mark.parametrize("path", POSTS)
def test_no_body_is_the_servers_fault(path: str) -> None:
    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(bodies(path))
    def check(body: Any) -> None:
        response = asyncio.run(post(path, body))
        assert response.status_code in (200, 400, 404), (response.status_code, body)
        if response.status_code != 200:
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"} and len(response.content) < 4096

    check()


async def test_it_describes_every_route(client: httpx.AsyncClient, service: Service) -> None:
    described = (await client.get("/openapi.json")).json()
    assert described["openapi"].startswith("3.1") and json.dumps(described) == json.dumps(document(service.version))
    assert {path.replace("{name}", "tiny") for path in described["paths"]} == set(all_routes(service))
    for path, item in described["paths"].items():
        (method,) = item
        other = "GET" if method == "post" else "POST"
        assert (await client.request(other, path.replace("{name}", "tiny"))).status_code == 405


async def test_the_documented_example_bodies_fit(client: httpx.AsyncClient) -> None:
    for path, body in BODIES.items():
        known = schema_of(path)["properties"]
        assert set(body) <= set(known)
        for name in schema_of(path)["required"]:
            broken = {key: value for key, value in body.items() if key != name}
            assert (await client.post(path, json=broken)).json()["error"]["param"] == name
