"""Every error a user can cause: one at start (`StartupError`), one per request (`RequestError`)."""

from enum import Enum


class StartupError(Exception):
    """The server cannot start with what it was given; the message is one line that says what to do."""


class ErrorKind(Enum):
    """What went wrong with a request, independent of the protocol that will say so."""

    INVALID = "invalid"
    NOT_FOUND = "not_found"
    TOO_LARGE = "too_large"
    LATE = "late"
    UNAUTHENTICATED = "unauthenticated"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class RequestError(Exception):
    """A request that was refused or failed.

    `param` names the offending field; `code` is a stable slug that programs can match on; `retry_after`: seconds after
    which the same request may succeed, where that is known.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ):
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code or kind.value
        self.retry_after = retry_after


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> RequestError:
    return RequestError(ErrorKind.INVALID, message, param=param, code=code)
