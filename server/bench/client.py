"""What a run needs of a client, whatever it speaks."""

from typing import Protocol

from server.bench.endpoints import Prompt
from server.bench.recording import Recording


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
