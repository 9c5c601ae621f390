"""One HTTP connection with bounds: how long a request may take to arrive or a reader to stall, how many are open."""

import asyncio
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.errors import ErrorKind, RequestError, invalid
from server.config import ConnectionLimits
from server.errors import STATUSES, http_headers, openai_body
from server.wire import dump_json

# In a request's state: its client took nothing for too long, and the connection was cut.
WAS_STALLED = "was_stalled"
LINGER_SECONDS = 1.0
MAX_HEAD_BYTES = 2**16
# Reading a chunk of one byte costs as much as reading one of kilobytes.
MAX_PARTS = 4096
LEAST_PART_BYTES = 64
ARRIVING = (h11.IDLE, h11.SEND_BODY)


class BoundedParser(h11.Connection):
    """Refuses what costs far more to read than it is worth, and what two servers could read differently.

    An answer's head leaves together with the first of its body: sent alone, it would wake the client for nothing."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._num_parts = self._num_bytes = 0
        self._head = b""

    def send(self, event: Any) -> Any:
        written: bytes | None = super().send(event)
        if isinstance(event, h11.Response):
            self._head = written or b""
            return b""
        written, self._head = self._head + (written or b""), b""
        return written

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_parts = self._num_bytes = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("two lengths (RFC 9112, 6.1)")
        elif isinstance(event, h11.Data):
            self._num_parts += 1
            self._num_bytes += len(event.data)
            if self._num_parts > MAX_PARTS and self._num_bytes < self._num_parts * LEAST_PART_BYTES:
                raise h11.RemoteProtocolError("a body in crumbs")
        return event


class BoundedConnection(H11Protocol):
    """Uvicorn's connection, which itself waits without end for the rest of a request, and for a reader that has stopped
    reading."""

    def __init__(self, limits: ConnectionLimits, **arguments: Any):
        super().__init__(**arguments)
        self.conn = BoundedParser()
        self._limits = limits
        self._arrival: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            message = f"{self._limits.max_connections} connections are open, and no more may be; try again later"
            self._refuse(RequestError(ErrorKind.UNAVAILABLE, message, code="too_many_connections"))
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_arrived()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        self._watch_arrival()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_arrival()  # of a request that came behind the last one, as far as it has come

    def _watch_arrival(self) -> None:
        if self.transport.is_closing() or self.conn.their_state not in ARRIVING:
            self._request_arrived()
        else:
            self._await_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(self._limits.write_seconds, self._cut_off)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _should_upgrade(self) -> bool:
        """Requests to speak another protocol are answered in this one, without a warning for each."""
        return False

    def send_400_response(self, msg: str) -> None:
        self._refuse(invalid("the server cannot read this as an HTTP/1.1 request", code="invalid_http"))

    def _cut_off(self) -> None:
        self.scope["state"][WAS_STALLED] = True
        self.transport.abort()

    def _await_request(self) -> None:
        """The time of a request runs from the connection's start, or from its first byte where it is a later one."""
        if self._arrival is None:
            self._arrival = self.loop.call_later(self._limits.request_seconds, self._give_up)

    def _request_arrived(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _give_up(self) -> None:
        message = f"the request did not arrive within {self._limits.request_seconds:g} s; send it faster"
        self._refuse(RequestError(ErrorKind.LATE, message, code="request_timeout"))

    def _refuse(self, error: RequestError) -> None:
        """Answer without the application, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else an answer has begun
            body, status = dump_json(openai_body(error)), STATUSES[error.kind].http
            headers = {"content-type": "application/json", "content-length": len(body), "connection": "close"}
            head = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
            head += [f"{name}: {value}" for name, value in (headers | http_headers(error)).items()]
            self.transport.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        self._is_refused = True
        if self.transport.can_write_eof():
            # Closed while the client still sends, the connection would be reset, and the answer lost.
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.abort)
        else:
            self.transport.close()

    def eof_received(self) -> None:
        if self._is_refused:
            self.transport.close()
