"""POST /v1/completions and /v1/chat/completions: one call from its body to its last byte."""

import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import RequestError
from engine.request import Delta, Finished, FinishReason, Usage
from server.errors import internal, openai_body
from server.openai import Call, Head, Shape, usage_object
from server.service import Generation, Service
from server.wire import DONE, ClientLeft, dump_json, event, read_object, unless_disconnected

log = logging.getLogger(__name__)

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
Events = AsyncIterator[tuple[int, Delta | Finished]]


class GenerateEndpoint:
    """An ASGI application, because a call must see its client leave whether it streams or not."""

    def __init__(self, service: Service, parse: Callable[[Mapping[str, Any]], Call], shape: Shape):
        self._service = service
        self._parse = parse
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            raw = await read_object(HttpRequest(scope, receive))
            async with self._service.generation() as generation:
                await unless_disconnected(receive, self._answer(raw, generation, scope, receive, send))
        except ClientLeft:
            log.info("a client left before its answer was complete")

    async def _answer(
        self, raw: Mapping[str, Any], generation: Generation, scope: Scope, receive: Receive, send: Send
    ) -> None:
        call = self._parse(raw)
        self._service.check_model(call.model)
        id = f"{self._shape.id_prefix}-{uuid.uuid4().hex}"
        forks = await self._service.forks(
            call.prompts,
            call.fields,
            id=id,
            prompt_param=call.prompt_param,
            default_max_tokens=call.default_max_tokens,
        )
        head = Head(id, int(time.time()), call.model)
        generation.submit(forks)
        events = generation.events()
        if call.stream:
            # Nothing is sent before the first event, so that a refusal keeps its own status.
            first = await anext(events)
            await self._stream(call, head, _chain(first, events), send)
        else:
            body = await self._whole(call, head, events)
            await Response(dump_json(body), media_type="application/json")(scope, receive, send)

    async def _whole(self, call: Call, head: Head, events: Events) -> dict[str, Any]:
        texts = [""] * call.num_choices
        reasons = [FinishReason.STOP] * call.num_choices
        usages: dict[int, Usage] = {}
        async for index, item in events:
            if isinstance(item, Delta):
                texts[index] += item.text
            else:
                reasons[index] = item.reason
                usages[index] = item.usage
        choices = [
            self._shape.whole(index, text, reason)
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return head.wrap(self._shape.whole_object, choices, usage=usage_object(usages, call.n))

    async def _stream(self, call: Call, head: Head, events: Events, send: Send) -> None:
        """Send the stream. A failure ends it with an error event and no end of body: a clean end reads as success."""
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            async for part in self._parts(call, head, events):
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except RequestError as error:
            await send({"type": "http.response.body", "body": event(openai_body(error)), "more_body": True})
        except Exception:
            log.exception("a stream failed")
            await send({"type": "http.response.body", "body": event(openai_body(internal())), "more_body": True})
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _parts(self, call: Call, head: Head, events: Events) -> AsyncIterator[bytes]:
        shape = self._shape
        # Where usage was asked for, every chunk has the field; where it was not, clients expect none.
        extra: dict[str, Any] = {"usage": None} if call.include_usage else {}

        def chunk(choice: dict[str, Any]) -> bytes:
            return event(head.wrap(shape.stream_object, [choice], **extra))

        # In index order and before any text: clients build their list of choices from these.
        for index in range(call.num_choices):
            if opening := shape.opening(index):
                yield chunk(opening)
        usages: dict[int, Usage] = {}
        async for index, item in events:
            if isinstance(item, Finished):
                usages[index] = item.usage
                yield chunk(shape.end(index, item.reason))
            elif item.text:
                yield chunk(shape.text(index, item.text))
        if call.include_usage:
            yield event(head.wrap(shape.stream_object, [], usage=usage_object(usages, call.n)))
        yield DONE


async def _chain(first: tuple[int, Delta | Finished], rest: Events) -> Events:
    yield first
    async for item in rest:
        yield item
