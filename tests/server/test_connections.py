"""What a connection may cost: requests that never arrive, readers that stall, heads and bodies without an end."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest

from engine.request import Delta, Event, Request
from proto.quire.v1 import inference_pb2 as pb
from server.config import ConnectionLimits
from tests.server.conftest import Running, Web, within
from tests.server.wire import COMPLETION, send

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: quire\r\n"


@pytest.fixture
def limits() -> ConnectionLimits:
    return ConnectionLimits(max_connections=8, request_seconds=0.5, write_seconds=0.5)


async def talk_without_end(request: Request) -> AsyncIterator[Event]:
    """As fast as the loop allows."""
    while True:
        yield Delta("x" * 1000, (1,))


async def answer_to(web: Web, *parts: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body that a connection gets which sends `parts` and then nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    for part in parts:
        writer.write(part)
        await writer.drain()
    head = (await within(reader.readuntil(b"\r\n\r\n"))).decode()
    body = await within(reader.read())  # to the end: the server closes
    writer.close()
    status, *lines = head.split("\r\n")[:-2]
    return int(status.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


@pytest.mark.parametrize(
    "sent", [b"", b"PO", HEAD, HEAD + b"Content-Length: 100\r\n\r\n", HEAD + b'Content-Length: 100\r\n\r\n{"model"']
)
async def test_a_request_that_does_not_arrive_is_given_up(web: Web, sent: bytes) -> None:
    status, headers, body = await answer_to(web, sent)
    assert (status, headers["connection"]) == (408, "close")
    assert json.loads(body)["error"]["code"] == "request_timeout" and web.engine.requests == []
    await within(web.service.wait_idle())


async def test_bytes_that_trickle_in_do_not_extend_the_time(web: Web) -> None:
    """The client may not see the 408, because it goes on sending into the closed connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    num_sent = 0
    with contextlib.suppress(ConnectionError):
        for byte in HEAD * 3:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.03)
            num_sent += 1
        pytest.fail("the server took the whole head")
    assert num_sent < 60  # 0.5 s and some grace, at 33 bytes a second
    writer.close()


async def test_the_next_request_of_a_connection_has_the_same_bound(web: Web) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    writer.write(b"GET /health/live HTTP/1.1\r\nHost: quire\r\n\r\n")
    assert b"200" in await within(reader.readuntil(b"}"))
    writer.write(b"GET /hea")
    assert b" 408 " in await within(reader.read())
    writer.close()


async def test_slow_requests_hold_up_nobody(web: Web) -> None:
    slow = [asyncio.create_task(answer_to(web, HEAD)) for _ in range(6)]
    await asyncio.sleep(0)
    async with httpx.AsyncClient(base_url=web.url) as client:
        assert (await within(client.post("/v1/completions", json=COMPLETION))).status_code == 200
    assert {status for status, _, _ in await asyncio.gather(*slow)} == {408}


async def test_an_answer_may_take_longer_than_its_request(web: Web) -> None:
    async def slow(request: Request) -> AsyncIterator[Event]:
        await asyncio.sleep(1.2)  # more than both bounds
        async for event in type(web.engine)().script(request):
            yield event

    web.engine.script = slow
    async with httpx.AsyncClient(base_url=web.url) as client:
        response = await within(client.post("/v1/completions", json=COMPLETION))
    assert response.json()["choices"][0]["text"] == "Héllo"


async def test_more_connections_than_allowed_are_told(web: Web) -> None:
    held = [await asyncio.open_connection("127.0.0.1", web.port) for _ in range(8)]
    await within(answer_to(web))  # so that the others are accepted by now
    status, headers, body = await answer_to(web, b"GET /health/live HTTP/1.1\r\n\r\n")
    assert status == 503 and json.loads(body)["error"]["code"] == "too_many_connections"
    assert 1 <= int(headers["retry-after"]) <= 60
    for _, writer in held:
        writer.close()
    async with httpx.AsyncClient(base_url=web.url) as client:
        assert (await client.get("/health/live")).status_code == 200


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/x.y\r\n\r\n", HEAD + b"no colon\r\n\r\n"]
)
async def test_what_is_not_http_gets_an_error_that_programs_can_read(web: Web, sent: bytes) -> None:
    status, _, body = await answer_to(web, sent + b"\r\n\r\n")
    assert status == 400 and json.loads(body)["error"]["code"] == "invalid_http"


async def test_a_head_without_end_is_cut_off(web: Web) -> None:
    line = b"X-Filler: " + b"a" * 1000 + b"\r\n"
    status, _, _ = await answer_to(web, HEAD + line * 80)  # over 64 KiB
    assert status == 400


async def test_a_body_in_crumbs_is_refused_before_it_costs_much(web: Web) -> None:
    status, _, _ = await answer_to(web, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 5000)
    assert status == 400


@pytest.mark.parametrize("length", [b"5", b"0"])
async def test_two_lengths_are_no_request(web: Web, length: bytes) -> None:
    """A proxy and the server might each believe another one, and so see different requests (RFC 9112, 6.1)."""
    both = b"Content-Length: " + length + b"\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    status, headers, _ = await answer_to(web, HEAD + both + b"GET /health/live HTTP/1.1\r\n\r\n")
    assert (status, headers["connection"]) == (400, "close")


async def test_a_second_request_in_one_write_has_the_same_bound(web: Web) -> None:
    body = json.dumps(COMPLETION).encode()
    first = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    writer.write(first + HEAD + b"Content-Length: 100\r\n\r\n{")
    answers = await within(reader.read())  # to the end
    assert answers.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in answers
    writer.close()


async def test_a_drain_does_not_wait_for_a_body(web: Web) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", web.port)
    writer.write(HEAD + b"Content-Length: 100\r\n\r\n{")
    await writer.drain()
    async with httpx.AsyncClient(base_url=web.url) as client:
        assert (await client.get("/health/live")).status_code == 200  # what was sent before has been read
    await asyncio.wait_for(web.service.wait_idle(), 0.2)
    writer.close()


@pytest.mark.parametrize("inside", [b"[]", b"{}", b"[1]"])
async def test_millions_of_little_values_are_refused_unread(web: Web, inside: bytes) -> None:
    body = b'{"model":"tiny","prompt":[' + b",".join([inside] * 2_000_000) + b"]}"
    async with httpx.AsyncClient(base_url=web.url) as client:
        response = await client.post("/v1/completions", content=body[: 8 * 2**20 - 2] + b"]}")
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
        text = json.dumps({**COMPLETION, "prompt": '[{"a": [\\"' * 20_000}).encode()
        assert (await client.post("/v1/completions", content=text)).json()["error"]["code"] == "context_length_exceeded"


async def test_a_chunked_body_over_the_limit_is_413_before_its_end(web: Web) -> None:
    chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 9)
    head = await within(reader.readuntil(b"\r\n\r\n"))
    assert b" 413 " in head.split(b"\r\n")[0]
    writer.close()


async def test_a_reader_that_stalls_is_cut_off_and_costs_little(web: Web) -> None:
    web.engine.script = talk_without_end
    stalled = socket.socket()
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stalled.connect(("127.0.0.1", web.port))
    body = json.dumps({**COMPLETION, "stream": True}).encode()
    stalled.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await within(web.engine.saw_cancel.wait())
    await within(web.service.wait_idle())
    assert _reasons(web) == {"slow_reader": 1}
    stalled.close()


async def test_a_grpc_reader_that_stalls_is_cut_off(running: Running) -> None:
    running.engine.script = talk_without_end
    call = running.stub.Generate(pb.GenerateRequest(model="tiny", text="hi"))
    await within(running.engine.saw_cancel.wait(), 20)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_one_that_reads_slowly_gets_everything(web: Web) -> None:
    """Slower than the engine, but never silent for longer than the bound."""

    async def much(request: Request) -> AsyncIterator[Event]:
        for _ in range(400):
            yield Delta("x" * 1000, (1,))
        async for event in type(web.engine)().script(request):
            yield event

    web.engine.script = much
    reader, writer = await send(web, "/v1/completions", {**COMPLETION, "stream": True})
    received = b""
    while b"[DONE]" not in received:
        received += await within(reader.read(50_000))
        await asyncio.sleep(0.02)
    assert received.count(b"x") >= 400_000
    writer.close()


def _reasons(web: Web) -> dict[str, float]:
    samples = [sample for metric in web.service.telemetry.collect() for sample in metric.samples]
    return {s.labels["reason"]: s.value for s in samples if s.name == "quire_requests_aborted_total" and s.value}
