"""What a run needs of a client, whatever it speaks."""

from dataclasses import dataclass
from typing import Protocol

from server.bench.endpoints import Prompt
from server.bench.recording import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """`model` None: the server's first. `timeout` bounds each request, in seconds. `ca`: certificates in PEM that vouch
    for the server; None: those of the system."""

    model: str | None = None
    api_key: str | None = None
    ignore_eos: bool = True
    timeout: float
    ca: str | None = None


class Client(Protocol):
    async def connect(self) -> None:
        """Find the model. Raises StartupError if the server cannot be reached or does not say which it serves."""

    @property
    def model(self) -> str: ...

    async def generate(self, prompt: Prompt, recording: Recording) -> None:
        """Send one request and record its answer to the end. Raises RequestFailed; cancelling closes the stream."""

    async def count_tokens(self, text: str) -> int | None:
        """Length of the prompt that the server makes of `text`, without generating; None: it cannot say."""

    async def close(self) -> None: ...
