"""The HTTP front end: routes, errors in one shape, and an id on every answer."""

import contextlib
import logging
import time
from collections.abc import AsyncIterator
from functools import cached_property
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import ErrorKind, RequestError, invalid
from engine.kv.stats import PoolSnapshot
from server.errors import error_response, internal
from server.fields import DetokenizeFields, TokenizeFields
from server.generate import CHAT, COMPLETIONS, GenerateRoute
from server.guard import HttpGuard
from server.messages import parse_messages
from server.metrics import Exporter
from server.openai import model_object
from server.openapi import document
from server.page import Page
from server.pool import pool_object, read_flag, read_interval
from server.pool_map import read_selected, with_member
from server.prompts import run_sized
from server.record import request_id
from server.service import Service
from server.tokens import detokenize, text_of, tokenize_chat, tokenize_text, tokenizer_object
from server.validation import parse
from server.wire import STREAM_HEADERS, dump_json, dump_lines, event_of, read_header, read_object

log = logging.getLogger(__name__)


def build_app(service: Service) -> ASGIApp:
    """The ASGI application of one service."""
    routes = Routes(service)
    app = Starlette(
        routes=[
            Route("/v1/completions", GenerateRoute(service, COMPLETIONS), methods=["POST"]),
            Route("/v1/chat/completions", GenerateRoute(service, CHAT), methods=["POST"]),
            Route("/v1/models", routes.models, methods=["GET"]),
            Route("/v1/models/{name:path}", routes.model, methods=["GET"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/tokenizer_info", routes.tokenizer_info, methods=["GET"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/health/live", routes.live, methods=["GET"]),
            Route("/health/ready", routes.ready, methods=["GET"]),
            Route("/health", routes.ready, methods=["GET"]),
            Route("/v1/pool", routes.pool, methods=["GET"]),
            Route("/v1/pool/events", routes.pool_events, methods=["GET"]),
            Route("/v1/pool/map", routes.pool_map, methods=["GET"]),
            Route("/", Page.load().answer, methods=["GET"]),
            Route("/metrics", routes.metrics, methods=["GET"]),
            Route("/version", routes.version, methods=["GET"]),
            Route("/openapi.json", routes.openapi, methods=["GET"]),
        ],
        exception_handlers={RequestError: _on_request_error, HTTPException: _on_http_error, Exception: _on_fault},
    )
    # Outside of Starlette, whose own handler of faults runs outside of its middleware.
    return RequestIds(HttpGuard(app, service))


def answer(value: Any) -> Response:
    return Response(dump_json(value), media_type="application/json")


class Routes:
    """The routes that generate nothing."""

    def __init__(self, service: Service):
        self._service = service
        self._exporter = Exporter(service)
        self._created = int(time.time())

    async def models(self, request: HttpRequest) -> Response:
        return answer({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        self._service.check_model(request.path_params["name"])
        return answer(self._model())

    async def tokenize(self, request: HttpRequest) -> Response:
        fields = parse(TokenizeFields, await read_object(request))
        if fields.model is not None:
            self._service.check_model(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise invalid("give either prompt, a string, or messages, a list of messages", "prompt")
        if fields.messages is not None:
            if fields.add_special_tokens:
                raise invalid("add_special_tokens must be false: the chat template adds them", "add_special_tokens")
            ids = await tokenize_chat(self._service, parse_messages(fields.messages))
        else:
            special = fields.add_special_tokens is not False
            ids = await tokenize_text(self._service, fields.prompt or "", add_special_tokens=special)
        body: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self._service.engine.info.max_model_len,
            "tokens": ids,
        }
        if fields.return_token_strs:
            body["token_strs"] = await run_sized(lambda: [text_of(self._service, [id]) for id in ids], len(ids))
        return answer(body)

    async def detokenize(self, request: HttpRequest) -> Response:
        fields = parse(DetokenizeFields, await read_object(request))
        if fields.model is not None:
            self._service.check_model(fields.model)
        return answer({"prompt": await detokenize(self._service, fields.tokens, "tokens")})

    async def tokenizer_info(self, request: HttpRequest) -> Response:
        return answer(tokenizer_object(self._service))

    async def live(self, request: HttpRequest) -> Response:
        return answer({"status": "live"})

    async def ready(self, request: HttpRequest) -> Response:
        self._service.check_ready()
        return answer({"status": "ready"})

    async def pool(self, request: HttpRequest) -> Response:
        check = read_flag(request.query_params, "check")
        snapshot = await self._service.engine.inspect(check)
        return Response(dump_lines(pool_object(snapshot, is_checked=check)) + b"\n", media_type="application/json")

    async def pool_map(self, request: HttpRequest) -> Response:
        worded = await self._service.map_watch.json(read_selected(request.query_params))
        return Response(worded, media_type="application/json")

    async def pool_events(self, request: HttpRequest) -> Response:
        query = request.query_params
        has_map, selected = read_flag(query, "map"), read_selected(query)
        authorization = read_header(request.scope, b"authorization")
        snapshots = self._service.pool_watch.snapshots(
            read_interval(query), lambda: self._service.tenant(authorization)
        )

        async def worded(snapshot: PoolSnapshot) -> bytes:
            pool = dump_json(pool_object(snapshot, is_checked=False))
            return with_member(pool, "map", await self._service.map_watch.json(selected)) if has_map else pool

        first = await worded(await anext(snapshots))  # so that a refusal has its own status

        async def events() -> AsyncIterator[bytes]:
            if request.method == "HEAD":  # it has no body, so nothing would end it
                return
            yield event_of(first)
            with contextlib.suppress(RequestError):  # the server shuts down, or the key is not known any more
                async for snapshot in snapshots:
                    yield event_of(await worded(snapshot))

        return StreamingResponse(events(), headers=STREAM_HEADERS)

    async def metrics(self, request: HttpRequest) -> Response:
        text, content_type = await self._exporter.render(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    async def version(self, request: HttpRequest) -> Response:
        return answer({"version": self._service.version})

    async def openapi(self, request: HttpRequest) -> Response:
        return answer(self._document)

    @cached_property
    def _document(self) -> dict[str, Any]:
        return document(self._service.version)

    def _model(self) -> dict[str, Any]:
        info = self._service.engine.info
        return model_object(info.model_name, self._created, info.max_model_len)


def _on_request_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


def _on_http_error(request: HttpRequest, error: Exception) -> Response:
    """Starlette's own: a route that does not exist, or not for this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        refusal = RequestError(ErrorKind.INVALID, f"this route takes {allowed}", code="method_not_allowed")
    else:
        refusal = RequestError(ErrorKind.NOT_FOUND, "there is no such route", code="route_not_found")
    response = error_response(refusal)
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


def _on_fault(request: HttpRequest, error: Exception) -> Response:
    return error_response(internal())


class RequestIds:
    """Gives every answer an `x-request-id`: the client's where it is safe to repeat, else a new one."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id = scope["request_id"] = request_id(read_header(scope, b"x-request-id"))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", id.encode())]}
            await send(message)

        await self._app(scope, receive, send_with_id)
