"""What one call was and how it ended: for the log, for metrics, for traces. Never a word of its text."""

import asyncio
import re
import time
import uuid
from dataclasses import dataclass, field
from enum import Enum

from engine.errors import ErrorKind, RequestError
from engine.request import Delta, Event, Finished, Usage
from server.keys import Tenant

REFUSALS = (
    ErrorKind.INVALID, ErrorKind.NOT_FOUND, ErrorKind.TOO_LARGE, ErrorKind.LATE, ErrorKind.UNAUTHENTICATED,
    ErrorKind.OVERLOADED,
)  # fmt: skip
SLOW_READER = "slow_reader"
# By so much gRPC's idea of a deadline may differ from ours.
CLOCK_SECONDS = 0.1
# What a client may call its request: nothing that could break a header or a log line.
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def request_id(given: str | None) -> str:
    """The client's where it is safe to repeat, else a new one."""
    return given if given is not None and REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call, and how. `api` is `http` or `grpc`; `deadline`, if any, is in the monotonic clock's seconds."""

    api: str
    tenant: Tenant
    request_id: str
    traceparent: str | None = None
    deadline: float | None = None


class End(Enum):
    """How a call ended: as asked; refused, because of itself or of how busy the server is; or cut off."""

    FINISHED = "finished"
    REJECTED = "rejected"
    ABORTED = "aborted"


@dataclass(slots=True)
class ChoiceRecord:
    """One choice of a call. Times are the monotonic clock's seconds; None: it did not come so far."""

    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0
    finished: Finished | None = None


@dataclass(slots=True)
class CallRecord:
    """`error`: what ended the call, if it did not end as asked. `started_at` is in seconds since 1970."""

    caller: Caller
    opened: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.time)
    submitted: float | None = None
    closed: float | None = None
    model: str = ""
    is_chat: bool = False
    num_prompt_tokens: int = 0
    choices: list[ChoiceRecord] = field(default_factory=list)
    error: BaseException | None = None

    def hear(self, index: int, event: Event) -> float | None:
        """An event of a choice has come. Returns the seconds since its last token, if it is one more."""
        choice, now, gap = self.choices[index], time.monotonic(), None
        if isinstance(event, Delta):
            if choice.last_token is None:
                choice.first_token = now
            else:
                gap = now - choice.last_token
            choice.last_token = now
            choice.num_tokens += len(event.token_ids)
        elif isinstance(event, Finished):
            choice.finished = event
        return gap

    @property
    def first_token(self) -> float | None:
        """When the first token of the call came."""
        return min((choice.first_token for choice in self.choices if choice.first_token is not None), default=None)

    @property
    def usages(self) -> list[Usage]:
        return [choice.finished.usage for choice in self.choices if choice.finished is not None]

    @property
    def end(self) -> End:
        if self.error is None:
            return End.FINISHED
        if not isinstance(self.error, RequestError) or self.error.code == SLOW_READER:
            return End.ABORTED
        is_refused = self.submitted is None and self.error.kind is not ErrorKind.CANCELLED
        return End.REJECTED if is_refused or self.error.kind in REFUSALS else End.ABORTED

    @property
    def reason(self) -> str:
        """A short word for `end`: for a rejected call what was wrong, for an aborted one who ended it."""
        error = self.error
        if error is None:
            return ",".join(sorted({choice.finished.reason.value for choice in self.choices if choice.finished}))
        if self.end is End.REJECTED:
            assert isinstance(error, RequestError)
            return error.code if error.kind is ErrorKind.OVERLOADED else error.kind.value
        if isinstance(error, asyncio.CancelledError):
            deadline = self.caller.deadline
            is_late = deadline is not None and time.monotonic() >= deadline - CLOCK_SECONDS
            return "deadline" if is_late else "client"
        if isinstance(error, RequestError):
            if error.code == SLOW_READER:
                return SLOW_READER
            kinds = {ErrorKind.CANCELLED: "client", ErrorKind.DEADLINE: "deadline", ErrorKind.UNAVAILABLE: "shutdown"}
            return kinds.get(error.kind, "failure")
        return "failure"
