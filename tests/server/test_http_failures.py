"""Calls over HTTP that do not end well: failures before and in mid-stream, clients that leave, shutdown."""

import asyncio
import json
from typing import Any

import grpc
import httpx
import openai
import pytest

from engine.errors import ErrorKind, RequestError
from engine.request import Delta, Finished, FinishReason, Usage
from proto.quire.v1 import inference_pb2 as pb
from tests.fakes import FakeEngine, fail_after, hang_after
from tests.server.conftest import Running, Web, within
from tests.server.wire import BODIES, COMPLETION, MESSAGES, read_chunked, send


@pytest.mark.parametrize("route", BODIES)
async def test_failure_in_mid_stream_is_an_error_event_and_a_broken_body(web: Web, route: str) -> None:
    web.engine.script = fail_after(2)
    reader, writer = await send(web, route, {**BODIES[route], "stream": True})
    head, body, is_complete = await read_chunked(reader)
    writer.close()
    assert head.startswith(b"HTTP/1.1 200") and not is_complete
    assert b"[DONE]" not in body and b'finish_reason":"' not in body
    last = json.loads(body.decode().split("\n\n")[-2].removeprefix("data: "))
    assert last == {
        "error": {"message": "the step failed", "type": "server_error", "param": None, "code": "internal_error"}
    }


async def test_failure_in_mid_stream_raises_in_the_openai_client(web: Web) -> None:
    web.engine.script = fail_after(2)
    stream = await web.openai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="the step failed"):
        async for _ in stream:
            pass


@pytest.mark.parametrize("stream", [True, False])
async def test_failure_before_the_first_token_has_its_own_status(client: httpx.AsyncClient, engine: FakeEngine,
                                                                 stream: bool) -> None:  # fmt: skip
    engine.script = fail_after(0, RequestError(ErrorKind.OVERLOADED, "the pool is full", code="pool_full"))
    response = await client.post("/v1/completions", json={**COMPLETION, "stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "pool_full")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_the_engine_cancels_is_not_an_answer(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    async def cancelled(request: Any) -> Any:
        yield Finished(FinishReason.CANCELLED, Usage(1, 0, 0))

    engine.script = cancelled
    response = await client.post("/v1/completions", json={**COMPLETION, "stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (499, "cancelled")


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize(("stream", "deltas"), [(True, 0), (True, 2), (False, 0), (False, 2)])
async def test_a_client_that_leaves_cancels_its_request(web: Web, route: str, stream: bool, deltas: int) -> None:
    """In the queue or prefill (no event yet) and in decode, streaming or not."""
    web.engine.script = hang_after(deltas)
    reader, writer = await send(web, route, {**BODIES[route], "stream": stream})
    if stream and deltas:
        await within(reader.readuntil(b"t1 "))
    else:
        await within(web.engine.saw_submit.wait())
    writer.close()
    await within(web.engine.saw_cancel.wait())
    assert web.engine.cancelled == [web.engine.requests[0].id]
    await within(web.service.wait_idle())


async def test_a_client_that_leaves_while_sending_submits_nothing(web: Web) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", web.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: quire\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    async with httpx.AsyncClient(base_url=web.url) as client:
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
    assert len(web.engine.requests) == 1


async def test_a_broken_event_source_is_500_and_ends_the_request(web: Web) -> None:
    async def broken(request: Any) -> Any:
        yield Delta(7, (1,))  # type: ignore[arg-type]
        yield Finished(FinishReason.STOP, Usage(1, 0, 1))

    web.engine.script = broken
    async with httpx.AsyncClient(base_url=web.url) as client:
        response = await client.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert response.headers["x-should-retry"] == "false" and response.headers["x-request-id"]


async def test_calls_that_have_not_come_to_the_engine_fail_too(
    web: Web, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while their chat template or grammar is worked on when a second signal comes."""
    waiting = asyncio.Semaphore(0)

    async def never(*arguments: Any) -> Any:
        waiting.release()
        await asyncio.Event().wait()

    monkeypatch.setattr(web.service, "forks", never)
    async with httpx.AsyncClient(base_url=web.url) as client:
        over_http = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
        over_grpc = asyncio.ensure_future(running.stub.Generate(pb.GenerateRequest(model="tiny", text="x")).read())
        for _ in range(2):
            await within(waiting.acquire())
        web.service.fail(RequestError(ErrorKind.UNAVAILABLE, "the server stops", code="server_unavailable"))
        response = await within(over_http)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "server_unavailable")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await within(over_grpc)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await within(web.service.wait_idle())


async def test_draining_refuses_new_calls_and_lets_running_ones_finish(web: Web) -> None:
    go_on = asyncio.Event()

    async def waits(request: Any) -> Any:
        await go_on.wait()
        yield Finished(FinishReason.STOP, Usage(1, 0, 0))

    web.engine.script = waits
    async with httpx.AsyncClient(base_url=web.url) as client:
        running_call = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
        await within(web.engine.saw_submit.wait())
        web.service.drain()
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 503
        go_on.set()
        assert (await within(running_call)).status_code == 200
    await within(web.service.wait_idle())
