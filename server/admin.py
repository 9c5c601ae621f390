"""What an operator may do on the machine itself: the routes of --admin-port, which listens on the loopback only."""

import sys
import traceback

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from engine.errors import ErrorKind, RequestError
from server.errors import error_response, internal
from server.pool import pool_object
from server.service import Service
from server.wire import dump_lines


def build_admin_app(service: Service) -> Starlette:
    """`GET /ready`, `POST /flush`, `GET /check`, `GET /stacks`."""

    async def ready(request: HttpRequest) -> Response:
        """For `quire healthcheck`, which has no key."""
        service.check_ready()
        return _json({"status": "ready"})

    async def flush(request: HttpRequest) -> Response:
        if "origin" in request.headers:
            message = "this route is not for pages in a browser"
            return error_response(RequestError(ErrorKind.INVALID, message, code="cross_origin"))
        return _json({"flushed_pages": await service.engine.flush()})

    async def check(request: HttpRequest) -> Response:
        return _json(pool_object(await service.engine.inspect(check=True), is_checked=True))

    async def stacks(request: HttpRequest) -> Response:
        """Where each thread is, for a server that hangs."""
        frames = sys._current_frames().items()
        return PlainTextResponse("\n".join(f"thread {id}\n{''.join(traceback.format_stack(f))}" for id, f in frames))

    async def on_error(request: HttpRequest, error: Exception) -> Response:
        return error_response(error if isinstance(error, RequestError) else internal())

    return Starlette(
        routes=[
            Route("/ready", ready, methods=["GET"]),
            Route("/flush", flush, methods=["POST"]),
            Route("/check", check, methods=["GET"]),
            Route("/stacks", stacks, methods=["GET"]),
        ],
        exception_handlers={RequestError: on_error, Exception: on_error},
    )


def _json(value: object) -> Response:
    return Response(dump_lines(value) + b"\n", media_type="application/json")
