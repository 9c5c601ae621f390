"""How each kind of error looks in each protocol. One table, used by HTTP and gRPC alike."""

import math
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status as RpcStatus
from starlette.responses import Response

from engine.errors import ErrorKind, RequestError
from server.wire import dump_json

# Clients wait this long before they try again; they ignore hints above 60.
RETRY_AFTER_SECONDS = 1


@dataclass(frozen=True, slots=True)
class Status:
    """`http` is the status code, `type` the class of error in OpenAI's words; `is_retryable`: later may work."""

    http: int
    type: str
    grpc: grpc.StatusCode
    is_retryable: bool = False


STATUSES = {
    ErrorKind.INVALID: Status(400, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT),
    ErrorKind.NOT_FOUND: Status(404, "invalid_request_error", grpc.StatusCode.NOT_FOUND),
    ErrorKind.TOO_LARGE: Status(413, "invalid_request_error", grpc.StatusCode.RESOURCE_EXHAUSTED),
    ErrorKind.LATE: Status(408, "timeout_error", grpc.StatusCode.DEADLINE_EXCEEDED),
    ErrorKind.UNAUTHENTICATED: Status(401, "authentication_error", grpc.StatusCode.UNAUTHENTICATED),
    ErrorKind.OVERLOADED: Status(429, "rate_limit_error", grpc.StatusCode.RESOURCE_EXHAUSTED, is_retryable=True),
    ErrorKind.UNAVAILABLE: Status(503, "server_unavailable", grpc.StatusCode.UNAVAILABLE, is_retryable=True),
    ErrorKind.DEADLINE: Status(504, "timeout_error", grpc.StatusCode.DEADLINE_EXCEEDED),
    ErrorKind.CANCELLED: Status(499, "cancelled", grpc.StatusCode.CANCELLED),
    ErrorKind.INTERNAL: Status(500, "server_error", grpc.StatusCode.INTERNAL),
}


def internal() -> RequestError:
    """What a client is told about a fault of the server: nothing but that it is one."""
    return RequestError(ErrorKind.INTERNAL, "the server failed; its log says why", code="internal_error")


def openai_body(error: RequestError) -> dict[str, Any]:
    """The error object of the OpenAI API: always four keys, `code` always a string."""
    kind = STATUSES[error.kind].type
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def retry_seconds(error: RequestError) -> float | None:
    """How long a client should wait before it tries again; None: trying again is of no use."""
    if not STATUSES[error.kind].is_retryable:
        return None
    return RETRY_AFTER_SECONDS if error.retry_after is None else error.retry_after


def http_headers(error: RequestError) -> dict[str, str]:
    if (seconds := retry_seconds(error)) is not None:
        return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
    # Without it the openai client sends every 408, 500 and 504 three times.
    headers = {"x-should-retry": "false"}
    return headers | {"www-authenticate": "Bearer"} if error.kind is ErrorKind.UNAUTHENTICATED else headers


def error_response(error: RequestError) -> Response:
    body = dump_json(openai_body(error))
    return Response(body, STATUSES[error.kind].http, http_headers(error), "application/json")


async def abort(context: Any, error: RequestError) -> None:
    """End a gRPC call with the error's status."""
    await context.abort(STATUSES[error.kind].grpc, error.message, grpc_metadata(error))


def grpc_metadata(error: RequestError) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata: the slug and field that HTTP puts in the body; for clients that retry the pause, once for
    grpc's own retries and once as google.rpc.RetryInfo in the status details."""
    pairs: list[tuple[str, str | bytes]] = [("error-code", error.code)]
    if error.param:
        pairs.append(("error-param", error.param))
    if (seconds := retry_seconds(error)) is not None:
        pairs.append(("grpc-retry-pushback-ms", str(math.ceil(seconds * 1000))))
        pairs.append(("grpc-status-details-bin", _details(error, seconds)))
    return tuple(pairs)


def _details(error: RequestError, seconds: float) -> bytes:
    info = RetryInfo()
    info.retry_delay.FromMilliseconds(math.ceil(seconds * 1000))
    status = RpcStatus(code=STATUSES[error.kind].grpc.value[0], message=error.message)
    status.details.add().Pack(info)
    serialized: bytes = status.SerializeToString()
    return serialized
