"""Calls that the tests of HTTP share, and what they read from the wire."""

import asyncio
import json
import re
from typing import Any

from tests.server.conftest import Web, within

COMPLETION = {"model": "tiny", "prompt": "hi"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
BODIES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
MESSAGES: Any = CHAT["messages"]


async def send(
    web: Web, route: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """One POST on a connection of its own, so that a test sees every byte and can leave when it wants."""
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    payload = json.dumps(body).encode()
    lines = [f"{name}: {value}" for name, value in {"Content-Length": len(payload), **(headers or {})}.items()]
    head = "\r\n".join([f"POST {route} HTTP/1.1", "Host: quire", *lines])
    writer.write(head.encode() + b"\r\n\r\n" + payload)
    await writer.drain()
    return reader, writer


async def read_chunked(reader: asyncio.StreamReader) -> tuple[bytes, bytes, bool]:
    """Head, body, and whether the body ended as HTTP says it must (a chunk of length zero)."""
    head = await within(reader.readuntil(b"\r\n\r\n"))
    body = b""
    while size_line := await within(reader.readline()):
        size = int(size_line, 16)
        body += await within(reader.readexactly(size))
        await within(reader.readexactly(2))
        if size == 0:
            return head, body, True
    return head, body, False


def chunks_of(body: bytes) -> list[dict[str, Any]]:
    """The JSON of each event, after checking that nothing else is on the wire."""
    assert re.fullmatch(rb"(data: [^\r\n]+\n\n)+", body), body
    events = [line.removeprefix("data: ") for line in body.decode().split("\n\n")[:-1]]
    assert events.pop() == "[DONE]"
    return [json.loads(item) for item in events]
