"""POST /v1/completions and /v1/chat/completions: one call from its body to its last byte."""

import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import RequestError
from engine.request import Delta, Event, Finished, Scored, Usage
from engine.tokenizer import Tokenizer
from server.choices import ChatChoice, Choice, CompletionChoice
from server.connection import WAS_STALLED
from server.dialect import Dialect
from server.errors import internal, openai_body
from server.mailbox import merge
from server.openai import Call, Head, parse_chat, parse_completion, usage_object
from server.prompts import run_sized
from server.record import SLOW_READER, Caller
from server.service import Generation, Service
from server.wire import (
    DONE,
    STREAM_HEADERS,
    ClientLeft,
    dump_json,
    event,
    read_header,
    read_object,
    unless_disconnected,
)

log = logging.getLogger(__name__)

RAW_STREAM_HEADERS = [(name.encode(), value.encode()) for name, value in STREAM_HEADERS.items()]
Events = AsyncIterator[tuple[int, Scored | Delta | Finished]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route: how its body is read and its answers are worded. `make_choice` takes the choice's index, the call, the
    model's dialect and tokenizer, and the ids of the prompt."""

    id_prefix: str
    stream_object: str
    whole_object: str
    parse: Callable[[Mapping[str, Any]], Any]
    make_choice: Callable[[int, Any, Dialect, Tokenizer, tuple[int, ...]], Choice]


COMPLETIONS = Endpoint("cmpl", "text_completion", "text_completion", parse_completion, CompletionChoice)
CHAT = Endpoint("chatcmpl", "chat.completion.chunk", "chat.completion", parse_chat, ChatChoice)


class GenerateRoute:
    """An ASGI application, because a call must see its client leave whether it streams or not."""

    def __init__(self, service: Service, endpoint: Endpoint):
        self._service = service
        self._endpoint = endpoint
        self._fingerprint = service.fingerprint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = Caller("http", scope["tenant"], scope["request_id"], read_header(scope, b"traceparent"))
        try:
            # Outside of the call: a drain does not wait for bodies that may never come.
            raw = await read_object(HttpRequest(scope, receive))
        except ClientLeft:
            return
        except RequestError as error:
            self._service.refuse(caller, error)
            raise
        with contextlib.suppress(ClientLeft, Told), self._service.generation(caller) as generation:
            try:
                await unless_disconnected(receive, self._answer(raw, generation, scope, receive, send))
            except ClientLeft:
                if scope.get("state", {}).get(WAS_STALLED):
                    raise ClientLeft(SLOW_READER) from None
                raise

    async def _answer(
        self, raw: Mapping[str, Any], generation: Generation, scope: Scope, receive: Receive, send: Send
    ) -> None:
        call: Call = self._endpoint.parse(raw)
        ask = call.ask
        id = f"{self._endpoint.id_prefix}-{uuid.uuid4().hex}"
        forks = await self._service.forks(ask, id, generation.record)
        prompts = [fork[0].prompt for fork in forks for _ in fork]
        dialect, tokenizer = self._service.dialect, self._service.engine.tokenizer
        make = self._endpoint.make_choice
        choices = [make(index, call, dialect, tokenizer, prompt) for index, prompt in enumerate(prompts)]
        head = Head(id, int(time.time()), ask.model, self._fingerprint)
        generation.submit(forks)
        events = generation.events()
        if call.stream:
            # Nothing is sent before the first event, so that a refusal keeps its own status.
            first = await anext(events)
            await self._stream(self._parts(call, choices, head, _chain(first, events)), send)
        else:
            body = await self._whole(call, choices, head, events)
            await Response(body, media_type="application/json")(scope, receive, send)

    async def _whole(self, call: Call, choices: Sequence[Choice], head: Head, events: Events) -> bytes:
        heard: list[list[Event]] = [[] for _ in choices]
        async for index, item in events:
            heard[index].append(item)

        def word() -> bytes:
            parts: list[dict[str, Any]] = []
            usages: dict[int, Usage] = {}
            for index, (choice, own) in enumerate(zip(choices, heard, strict=True)):
                *others, finished = merge(own)
                assert isinstance(finished, Finished)
                parts.append(choice.whole([item for item in others if isinstance(item, Scored | Delta)], finished))
                usages[index] = finished.usage
            usage = usage_object(usages, call.ask.n)
            return dump_json(head.wrap(self._endpoint.whole_object, parts, usage=usage))

        return await run_sized(word, sum(_weight(item) for own in heard for item in own))

    async def _stream(self, parts: AsyncIterator[bytes], send: Send) -> None:
        """Send the stream. A failure ends it with an error event and no end of body: a clean end reads as success."""
        await send({"type": "http.response.start", "status": 200, "headers": RAW_STREAM_HEADERS})
        try:
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except Exception as error:
            if not isinstance(error, RequestError):
                log.exception("a stream failed")
            refusal = error if isinstance(error, RequestError) else internal()
            await send({"type": "http.response.body", "body": event(openai_body(refusal)), "more_body": True})
            raise Told(refusal) from error
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _parts(self, call: Call, choices: Sequence[Choice], head: Head, events: Events) -> AsyncIterator[bytes]:
        # Where usage was asked for, every chunk has the field; where it was not, clients expect none.
        extra: dict[str, Any] = {"usage": None} if call.include_usage else {}
        stream_object = self._endpoint.stream_object

        def chunks(pieces: list[dict[str, Any]]) -> bytes:
            return b"".join(event(head.wrap(stream_object, [piece], **extra)) for piece in pieces)

        # In index order and before any text: clients build their list of choices from these.
        if opening := b"".join(chunks(choice.opening()) for choice in choices):
            yield opening
        usages: dict[int, Usage] = {}
        async for index, item in events:
            if isinstance(item, Finished):
                usages[index] = item.usage
                yield chunks(choices[index].end(item))
            else:
                word = partial(lambda choice, item: chunks(choice.delta(item)), choices[index], item)
                if part := await run_sized(word, _weight(item)):
                    yield part
        if call.include_usage:
            yield event(head.wrap(stream_object, [], usage=usage_object(usages, call.ask.n)))
        yield DONE


class Told(RequestError):
    """A failure of which the client has been told in its stream."""

    def __init__(self, error: RequestError):
        super().__init__(error.kind, error.message, code=error.code)


def _weight(item: Event) -> int:
    """About how much there is to write down for an event."""
    logprobs = item.logprobs if isinstance(item, Scored | Delta) else ()
    return sum(1 + len(logprob.top) for logprob in logprobs if logprob is not None)


async def _chain(first: tuple[int, Scored | Delta | Finished], rest: Events) -> Events:
    yield first
    async for item in rest:
        yield item
