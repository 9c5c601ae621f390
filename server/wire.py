"""Bytes in and out of HTTP: bodies with a limit, strict JSON, server-sent events, and clients that leave."""

import asyncio
import json
import re
from collections.abc import Coroutine
from typing import Any, TypeVar

from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope

from engine.errors import ErrorKind, RequestError, invalid

MAX_BODY_BYTES = 8 * 2**20
MAX_VALUES = 2**15
STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
T = TypeVar("T")


def read_header(scope: Scope, name: bytes) -> str | None:
    value = dict(scope["headers"]).get(name)
    return None if value is None else value.decode("latin-1")


class ClientLeft(RequestError):
    """The connection is closed; nobody reads an answer."""

    def __init__(self, code: str | None = None) -> None:
        super().__init__(ErrorKind.CANCELLED, "the client closed the connection", code=code)


async def read_object(request: HttpRequest) -> dict[str, Any]:
    """The body as a JSON object, whatever its content type says. Raises RequestError, at the limit before the end."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                message = f"the body is larger than {MAX_BODY_BYTES} bytes"
                raise RequestError(ErrorKind.TOO_LARGE, message, code="request_too_large")
    except ClientDisconnect:
        raise ClientLeft from None
    _check_values(body)
    try:
        # Refuses NaN, Infinity, bytes that are not UTF-8, lone surrogates, and depth that would exhaust the stack.
        value = from_json(bytes(body), allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    return value


def _check_values(body: bytearray) -> None:
    """Refuse what would hold up the event loop: millions of small lists, in a body of allowed size."""
    num_values = body.count(b"[") + body.count(b"{")
    if num_values > MAX_VALUES:
        outside = STRINGS.sub(b"", body)
        num_values = outside.count(b"[") + outside.count(b"{")
    if num_values > MAX_VALUES:
        raise invalid(f"the body has more than {MAX_VALUES} lists and objects", code="invalid_json")


def dump_json(value: Any) -> bytes:
    """Strict JSON on one line in UTF-8. Never fails on text: a lone surrogate becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def dump_lines(value: Any, indent: str = "") -> bytes:
    """JSON as `dump_json` writes it, for people: objects that hold objects take a line for each member."""
    if not isinstance(value, dict) or not any(isinstance(member, dict) for member in value.values()):
        return dump_json(value)
    deeper = indent + "  "
    members = [deeper.encode() + dump_json(key) + b": " + dump_lines(item, deeper) for key, item in value.items()]
    return b"{\n" + b",\n".join(members) + b"\n" + indent.encode() + b"}"


def event(value: Any) -> bytes:
    """One server-sent event: a data line and an empty line. Other fields make the openai client fail."""
    return event_of(dump_json(value))


def event_of(data: bytes) -> bytes:
    """`event` of JSON on one line."""
    return b"data: " + data + b"\n\n"


STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold events back
}
DONE = b"data: [DONE]\n\n"
ASK_AGAIN_SECONDS = 0.5


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, or cancel it as soon as the client is gone (raises ClientLeft)."""
    job = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((job, watch), return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            return job.result()
        raise ClientLeft
    finally:
        job.cancel()
        watch.cancel()
        await asyncio.gather(job, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Return when the client is gone.

    A client that sends more than its request (the next one, say) makes uvicorn stop reading until the application asks
    again, and a connection that is not read does not show its end. So ask again from time to time.
    """
    while True:
        try:
            message = await asyncio.wait_for(receive(), ASK_AGAIN_SECONDS)
        except TimeoutError:
            continue
        if message["type"] == "http.disconnect":
            return
