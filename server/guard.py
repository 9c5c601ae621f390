"""Keys at the door of both protocols: nothing is answered without one but what says that the process lives."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import RequestError, invalid
from proto.quire.v1 import inference_pb2 as pb
from server.errors import abort, error_response
from server.keys import Tenant
from server.service import Service
from server.wire import read_header

OPEN_PATHS = frozenset({"/health/live", "/"})
SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
OPEN_SERVICE = "/grpc.health.v1.Health/"


class HttpGuard:
    """Lets a request with a known key through, whatever its route, and puts the tenant into its scope."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                scope["tenant"] = self._service.tenant(read_header(scope, b"authorization"))
            except RequestError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class GrpcGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without a known key, also of methods that do not exist."""

    def __init__(self) -> None:
        self.service: Service | None = None

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        if self.service is not None and not details.method.startswith(OPEN_SERVICE):
            try:
                tenant_of(self.service, details.invocation_metadata)
            except RequestError as error:
                return _refusing(error)
        return await continuation(details)


class GrpcReader(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Answers bytes that are no message of the method as a bad request; the library would say UNKNOWN."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        name = "unary_stream" if handler.response_streaming else "unary_unary"
        answer, read = getattr(handler, name), handler.request_deserializer

        def read_or_none(data: bytes) -> Any:
            try:
                return read(data)
            except DecodeError:
                return None

        async def answer_or_refuse(request: Any, context: grpc.aio.ServicerContext) -> Any:
            if request is None:
                error = invalid("the request is no message of the method's type", code="invalid_message")
                await abort(context, error)
            return await answer(request, context)

        return handler._replace(request_deserializer=read_or_none, **{name: answer_or_refuse})


def tenant_of(service: Service, metadata: Any) -> Tenant:
    """Whose key the metadata of a call carries. Raises RequestError."""
    return service.tenant(next((value for name, value in metadata or () if name == "authorization"), None))


def _refusing(error: RequestError) -> grpc.RpcMethodHandler:
    async def refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
        await abort(context, error)

    return grpc.unary_unary_rpc_method_handler(refuse)
