"""Server-sent events of the OpenAI API as a load tool reads them: little work for each, and nothing taken on trust."""

import json
from typing import Any

from server.bench.endpoints import Endpoint
from server.bench.recording import Recording, RequestFailed, TokenUsage

MAX_EVENT_BYTES = 8 * 2**20
DONE = b"[DONE]"
FAILED_REASONS = ("abort", "error")


class EventParser:
    """Splits a byte stream into the data of events. Comments and other fields are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> list[bytes]:
        """The events that `part` completes. Raises RequestFailed for one that never ends."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise RequestFailed("an event is too long")
        events = []
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events

    def close(self) -> list[bytes]:
        """The event that the end of the stream completes, if there is one."""
        return self.feed(b"\n\n")


class StreamReader:
    """Enters the events of one answer into its recording."""

    def __init__(self, endpoint: Endpoint, recording: Recording):
        self._endpoint = endpoint
        self._recording = recording
        self._events = EventParser()
        self._num_tokens_before = 0
        self._is_finished = False
        self._is_done = False

    def feed(self, part: bytes, now: float) -> None:
        """Take bytes that came at `now`. Raises RequestFailed for what is no stream of the API, or tells a failure."""
        self._recording.last = now
        for data in self._events.feed(part):
            self._read(data, now)

    def close(self, now: float) -> None:
        """Raises RequestFailed unless the stream was complete."""
        for data in self._events.close():
            self._read(data, now)
        if not self._is_finished:
            raise RequestFailed("the stream ended without finish_reason")
        if not self._is_done:
            raise RequestFailed("the stream ended without [DONE]")

    def _read(self, data: bytes, now: float) -> None:
        if data == DONE:
            self._is_done = True
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise RequestFailed("an event is not JSON") from None
        if not isinstance(event, dict):
            raise RequestFailed("an event is not a JSON object")
        if event.get("error") or event.get("object") == "error":
            raise RequestFailed("error event", error_message(event))
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._recording.usage = read_usage(usage)
        choices = event.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            self._read_choice(choices[0], usage is not None, now)

    def _read_choice(self, choice: dict[str, Any], has_usage: bool, now: float) -> None:
        reason = choice.get("finish_reason")
        token_ids = choice.get("token_ids")
        if token_ids or self._endpoint.has_text(choice):
            self._recording.add(now, len(token_ids) if isinstance(token_ids, list) else self._growth(has_usage))
        if reason is None:
            return
        if reason in FAILED_REASONS:
            raise RequestFailed(f"finish_reason {reason}")
        self._is_finished = True
        if not self._recording.chunk_times:
            # Tokens without any text: their end is all that can be seen of them.
            self._recording.add(now, None)

    def _growth(self, has_usage: bool) -> int | None:
        """Tokens since the chunk before, where the server sends usage with each."""
        usage = self._recording.usage
        if not has_usage or usage is None or usage.num_generated_tokens is None:
            return None
        before, self._num_tokens_before = self._num_tokens_before, usage.num_generated_tokens
        return max(0, usage.num_generated_tokens - before)


def read_usage(usage: dict[str, Any]) -> TokenUsage:
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return TokenUsage(count(usage.get("prompt_tokens")), count(usage.get("completion_tokens")), count(cached))


def count(value: object) -> int | None:
    """A count from a foreign server; None if it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def error_message(body: object) -> str:
    """What servers write in the bodies of errors: an object or a string under `error`, or `message` or `detail`."""
    if not isinstance(body, dict):
        return ""
    error = body.get("error") or body
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail")
    return error if isinstance(error, str) else ""
