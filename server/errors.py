"""How each kind of error looks in each protocol. One table, used by HTTP and gRPC alike."""

from dataclasses import dataclass
from typing import Any

import grpc

from engine.errors import ErrorKind, RequestError

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


def http_headers(error: RequestError) -> dict[str, str]:
    if STATUSES[error.kind].is_retryable:
        return {"retry-after": str(RETRY_AFTER_SECONDS)}
    # Without it the openai client sends every 500 and 504 three times.
    return {"x-should-retry": "false"}


def grpc_metadata(error: RequestError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata: the slug and field that HTTP puts in the body, and a pause for clients that retry."""
    pairs = [("error-code", error.code)]
    if error.param:
        pairs.append(("error-param", error.param))
    if STATUSES[error.kind].is_retryable:
        pairs.append(("grpc-retry-pushback-ms", str(RETRY_AFTER_SECONDS * 1000)))
    return tuple(pairs)
