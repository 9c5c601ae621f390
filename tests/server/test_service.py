"""What both front ends share."""

import socket
from dataclasses import replace

import pytest

from engine.errors import ErrorKind, RequestError
from server.ask import Ask
from server.config import ServerConfig
from server.keys import ANYONE
from server.ports import bind_http
from server.prompts import TextPrompt
from server.record import Caller, CallRecord
from server.service import Service
from server.validation import GenerationFields
from tests.fakes import FakeEngine


async def test_more_prompts_than_the_queue_holds_are_invalid_and_not_a_reason_to_retry() -> None:
    engine = FakeEngine()
    engine.info = replace(engine.info, max_queued_requests=2)
    service = Service(engine)  # type: ignore[arg-type]
    record = CallRecord(Caller("http", ANYONE, "id"))

    def ask(*texts: str) -> Ask:
        prompts = tuple(TextPrompt(text) for text in texts)
        return Ask(
            model="tiny", prompts=prompts, prompt_param="prompt", fields=GenerationFields(), default_max_tokens=16
        )

    assert len(await service.forks(ask("a", "b"), "x", record)) == 2
    with pytest.raises(RequestError, match="prompt has 3 prompts; this server queues at most 2") as caught:
        await service.forks(ask("a", "b", "c"), "x", record)
    assert caught.value.kind is ErrorKind.INVALID


def test_connections_are_refused_until_the_server_listens() -> None:
    """A probe during loading must not hang on a socket that nobody serves yet."""
    with bind_http(ServerConfig(http_port=0)) as bound:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(bound.getsockname()[:2], timeout=5)
        bound.listen()
        socket.create_connection(bound.getsockname()[:2], timeout=5).close()
