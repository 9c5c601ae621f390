"""The server's log, as text or as one JSON object a line, and the line that each call leaves."""

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any

from server.record import CallRecord, End

FIELDS = "call_fields"
TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-")

log = logging.getLogger("quire.calls")


class JsonFormatter(logging.Formatter):
    """One object a line: `ts`, `level`, `logger`, `message`, and for a call its fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def _is_news(record: logging.LogRecord) -> bool:
    """Not where uvicorn tells of a stream that we ended without its end, so that its client sees the failure."""
    return "without completing response" not in record.getMessage()


def set_up(level: str, is_json: bool) -> None:
    """Log to stderr from now on."""
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if is_json:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())


def log_call(record: CallRecord) -> None:
    """One line about a call that is over."""
    if not log.isEnabledFor(logging.INFO):
        return
    fields = call_fields(record)
    text = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
    log.info("%s", text, extra={FIELDS: fields})


def call_fields(record: CallRecord) -> dict[str, Any]:
    """Times are in milliseconds since the call arrived; `queue_ms` is that of its first choice to start."""
    caller, usages, first = record.caller, record.usages, record.first_token
    started = min(
        (c.finished.started for c in record.choices if c.finished and c.finished.started is not None), default=None
    )
    assert record.closed is not None
    return {
        "request_id": caller.request_id,
        "trace_id": trace_id(caller.traceparent),
        "api": caller.api,
        "key": caller.tenant.name,
        "model": record.model or None,
        "end": record.end.value,
        "reason": record.reason,
        "error": getattr(record.error, "code", None) if record.end is End.REJECTED else None,
        "choices": len(record.choices),
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": usages[0].num_cached_tokens if usages else None,
        "completion_tokens": sum(choice.num_tokens for choice in record.choices),
        "queue_ms": _milliseconds(record.submitted, started),
        "ttft_ms": _milliseconds(record.opened, first),
        "e2e_ms": _milliseconds(record.opened, record.closed),
    }


def trace_id(traceparent: str | None) -> str | None:
    """The trace of a W3C `traceparent` header: version-trace-span-flags."""
    found = TRACEPARENT.match(traceparent or "")
    return None if found is None else found[1]


def _milliseconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(max(0.0, end - start) * 1000, 1)
