"""The routes of the admin port, which are on no other."""

from collections.abc import AsyncIterator

import httpx
import pytest

from server.admin import build_admin_app
from server.config import ServerConfig
from server.ports import bind_admin
from server.service import Service
from tests.fakes import FakeEngine


@pytest.fixture
async def admin(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_admin_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        yield client


async def test_flush_check_and_stacks(admin: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await admin.post("/flush")).json() == {"flushed_pages": 17}
    assert (await admin.get("/check")).json()["check"] == "ok" and engine.checks == [True]
    assert "test_flush_check_and_stacks" in (await admin.get("/stacks")).text


async def test_a_page_in_a_browser_may_not_flush(admin: httpx.AsyncClient) -> None:
    response = await admin.post("/flush", headers={"origin": "http://evil.example"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "cross_origin")


@pytest.mark.parametrize("path", ["/flush", "/check", "/stacks"])
async def test_the_public_port_has_none_of_them(client: httpx.AsyncClient, path: str) -> None:
    assert {(await client.request(method, path)).status_code for method in ("GET", "POST")} == {404}


def test_it_listens_on_the_loopback_whatever_the_host() -> None:
    assert bind_admin(ServerConfig(host="0.0.0.0")) is None
    bound = bind_admin(ServerConfig(host="0.0.0.0", admin_port=0))
    assert bound is not None and bound.getsockname()[0] == "127.0.0.1"
    bound.close()
