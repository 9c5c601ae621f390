"""Keys and tenants: who gets in, whose pages are whose, and how much one key may use."""

import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.routing import Route

from engine.errors import ErrorKind, RequestError, StartupError
from proto.quire.v1 import inference_pb2 as pb
from server.http import build_app
from server.keys import KeyFile, Tenant
from server.quota import Quota
from server.service import Service
from tests.fakes import FakeEngine, hang_after
from tests.server.conftest import Running, Web, within
from tests.server.wire import COMPLETION, send

ALICE, BOB, HASHED = "alice-key-0123456789", "Bob-key-0123456789abc", "carol-key-0123456789"
LINES = f"""# who, and what they may
alice {ALICE} requests=2 tokens_per_minute=600

bob   {BOB}
carol sha256:{hashlib.sha256(HASHED.encode()).hexdigest()}
"""
OTHER = {**COMPLETION, "model": "other"}
KEY = "0123456789abcdef"
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        """Also with another time stamp, however fast the tests are."""
        path = tmp_path / "keys"
        before = path.stat().st_mtime_ns if path.exists() else 0
        path.write_text(text)
        if before:
            os.utime(path, ns=(before + 10**9, before + 10**9))
        return path

    return write


@pytest.fixture
async def service(engine: FakeEngine, write: Write) -> AsyncIterator[Service]:
    service = Service(engine, KeyFile(write(LINES)))  # type: ignore[arg-type]
    yield service
    await service.dialect.close()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_each_key_is_its_tenant(service: Service) -> None:
    tenants = [service.tenant(f"Bearer {key}") for key in (ALICE, BOB, HASHED)]
    assert [tenant.name for tenant in tenants] == ["alice", "bob", "carol"]
    assert (tenants[0].max_requests, tenants[0].tokens_per_minute) == (2, 600)
    assert len({tenant.salt for tenant in tenants}) == 3 and all(len(tenant.salt) == 64 for tenant in tenants)
    for tenant, key in zip(tenants, (ALICE, BOB, HASHED), strict=True):
        assert key not in tenant.salt and hashlib.sha256(key.encode()).hexdigest() not in tenant.salt


def all_routes(service: Service) -> Iterator[str]:
    app: Any = build_app(service)
    while not hasattr(app, "routes"):
        app = app._app
    for route in app.routes:
        assert isinstance(route, Route)
        yield route.path.replace("{name:path}", "tiny")


async def test_every_route_needs_a_key_but_the_live_one(client: httpx.AsyncClient, service: Service) -> None:
    paths = [*all_routes(service), "/nowhere", "/v1", "//health/live", "/health/live/", "/metrics/", "/%2e%2e/metrics"]
    assert "/metrics" in paths and "/v1/pool" in paths
    for path in paths:
        for method in ("GET", "POST", "OPTIONS", "HEAD"):
            response = await client.request(method, path)
            if path in ("/health/live", "/"):  # and the pool page, which shows nothing without a key
                assert response.status_code in (200, 405)
                continue
            assert (path, response.status_code) == (path, 401)
            assert response.headers["www-authenticate"] == "Bearer" and response.headers["x-request-id"]
            if method != "HEAD":
                assert response.json()["error"]["code"] == "missing_api_key"


@pytest.mark.parametrize(
    "header",
    [
        f"Bearer {ALICE.upper()}", f"Bearer {ALICE}x", f"Bearer {ALICE[:-1]}", f"Basic {ALICE}", ALICE, "Bearer", "",
        "Bearer ", f"Bearer sha256:{hashlib.sha256(ALICE.encode()).hexdigest()}", f"Bearer {ALICE} {BOB}",
        "Bearer \xff\xfe",
    ],
)  # fmt: skip
async def test_what_is_no_key_is_refused(client: httpx.AsyncClient, header: str) -> None:
    response = await client.get("/v1/models", headers=[(b"authorization", header.encode("latin-1"))])
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (401, "authentication_error")
    assert error["code"] in ("missing_api_key", "invalid_api_key") and "alice" not in error["message"]


async def test_a_key_opens_both_protocols(running: Running, web: Web) -> None:
    async with httpx.AsyncClient(base_url=web.url, headers=bearer(BOB)) as client:
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
    request = pb.GenerateRequest(model="tiny", text="hi")
    call = running.stub.Generate(request, metadata=[("authorization", f"Bearer {BOB}")])
    assert [message async for message in call][-1].HasField("finish")
    ours, theirs = running.engine.requests
    assert ours.salt == theirs.salt == running.service.tenant(f"Bearer {BOB}").salt


async def test_grpc_without_a_key(running: Running) -> None:
    for method in ("/quire.v1.InferenceService/GetModel", "/quire.v1.InferenceService/Generate", "/no.Such/Method",
                   "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"):  # fmt: skip
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.channel.unary_unary(method)(b"")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    health = health_pb2_grpc.HealthStub(running.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING


async def test_keys_of_a_changed_file(client: httpx.AsyncClient, write: Write) -> None:
    async def status(key: str) -> int:
        return (await client.get("/v1/models", headers=bearer(key))).status_code

    assert (await status(ALICE), await status("new-key-0123456789ab")) == (200, 401)
    write("dora new-key-0123456789ab\n")
    assert (await status(ALICE), await status("new-key-0123456789ab")) == (401, 200)
    path = write("dora short\n")  # wrong: what was read before stays
    assert await status("new-key-0123456789ab") == 200
    path.unlink()
    assert await status("new-key-0123456789ab") == 200


async def test_a_key_that_is_taken_away_watches_no_longer(running: Running, web: Web, write: Write) -> None:
    call = running.stub.WatchPool(pb.WatchPoolRequest(interval_ms=100), metadata=[("authorization", f"Bearer {ALICE}")])
    await within(call.read())
    async with (
        httpx.AsyncClient(base_url=web.url, headers=bearer(ALICE)) as client,
        client.stream("GET", "/v1/pool/events?interval_ms=100&map=true") as stream,
    ):
        lines = stream.aiter_lines()
        await within(anext(lines))
        write(f"bob {BOB}\n")
        await within(_to_the_end(lines))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await within(call.read()):
            pass
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def _to_the_end(events: AsyncIterator[object]) -> None:
    async for _ in events:
        pass


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "has no key"), ("# nothing\n\n", "has no key"), ("alice\n", "line 1 is not"),
        (f"al/ice {KEY}\n", "line 1"), ("a short\n", "at least 16 characters"), ("a sha256:abc\n", "64 hex digits"),
        (f"a {KEY} rps=3\n", "requests=N"), (f"a {KEY} requests=0\n", "at least 1"),
        (f"a {KEY} requests=1 requests=2\n", "requests=N"), (f"a {KEY} requests=1.5\n", "requests=N"),
        (f"a {KEY} requests={'9' * 5000}\n", "requests=N"), (f"a {KEY} requests=٣\n", "requests=N"),
        (f"a {KEY}é\n", "all of them ASCII"),
        (f"a {KEY}\nb {KEY}\n", "line 2: its name or key"), (f"a {KEY}\na {KEY}g\n", "line 2"),
    ],
)  # fmt: skip
def test_a_wrong_key_file_is_one_line(write: Write, text: str, what: str) -> None:
    with pytest.raises(StartupError) as caught:
        KeyFile(write(text))
    message = str(caught.value)
    assert what in message and "\n" not in message and "--api-keys" in message
    assert KEY[:-1] not in message


def test_a_key_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--api-keys .*: No such file"):
        KeyFile(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StartupError, match="is not a regular file"):
        KeyFile(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StartupError, match="is not UTF-8 text"):
        KeyFile(tmp_path / "binary")


async def test_a_key_may_have_so_many_requests_open(web: Web) -> None:
    web.engine.script = hang_after(1)

    async def ask(key: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=web.url, headers=bearer(key)) as client:
            return await within(client.post("/v1/completions", json=COMPLETION))

    writers = []
    for _ in range(2):
        web.engine.saw_submit.clear()
        _, writer = await send(web, "/v1/completions", COMPLETION, bearer(ALICE))
        await within(web.engine.saw_submit.wait())
        writers.append(writer)
    refused = await ask(ALICE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_requests")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    web.engine.script = FakeEngine().script
    assert (await ask(BOB)).status_code == 200  # another key is not concerned
    for writer in writers:
        writer.close()
    await within(web.service.wait_idle())
    assert (await ask(ALICE)).status_code == 200


async def test_a_refused_call_takes_no_room(client: httpx.AsyncClient) -> None:
    for _ in range(5):
        assert (await client.post("/v1/completions", json=OTHER, headers=bearer(ALICE))).status_code == 404
    assert (await client.post("/v1/completions", json=COMPLETION, headers=bearer(ALICE))).status_code == 200


def test_tokens_a_minute_against_arithmetic() -> None:
    now = 100.0
    quota = Quota(lambda: now)
    tenant = Tenant(name="a", salt="", tokens_per_minute=600)  # 10 a second

    def is_open() -> bool:
        try:
            quota.open(tenant)
        except RequestError as error:
            assert error.kind is ErrorKind.OVERLOADED and error.code == "key_tokens"
            assert error.retry_after is not None and 0 < error.retry_after <= 60
            return False
        quota.close()
        return True

    assert is_open()
    quota.spend(599)
    assert is_open()
    quota.spend(101)  # 100 over
    assert not is_open()
    now += 10.0
    assert not is_open()  # 600 left: just full
    now += 0.2
    assert is_open()
    now += 3600
    quota.spend(600)
    now += 3600  # the hour before does not count twice
    assert is_open()


async def test_tokens_a_minute_of_a_served_key(client: httpx.AsyncClient) -> None:
    prompt = [1] * 120
    statuses = []
    for _ in range(6):  # each uses 120 + 4 of 600
        body = {**COMPLETION, "prompt": prompt}
        statuses.append((await client.post("/v1/completions", json=body, headers=bearer(ALICE))).status_code)
    assert statuses[:5] == [200] * 5 and statuses[5] == 429
