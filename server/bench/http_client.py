"""A client of the OpenAI API.

aiohttp, because the client shares cores with what it measures: with 32 streams a chunk cost it a third of the CPU time
that it cost httpx (docs/log.md).
"""

import asyncio
import json
import os
import ssl
from collections.abc import Callable
from typing import Any

import aiohttp

from engine.errors import StartupError
from server.bench.client import ClientOptions
from server.bench.endpoints import Endpoint, Prompt
from server.bench.recording import Recording, RequestFailed
from server.bench.stream import StreamReader, count, error_message

CONNECT_SECONDS = 10.0
# Less than servers keep idle connections open (uvicorn: 5 s), so that none is used that the server is closing.
KEEP_ALIVE_SECONDS = 2.0
MAX_BODY_BYTES = 2**20


class HttpClient:
    """Build it inside the event loop that will run it. `url` has no trailing slash and no /v1."""

    def __init__(self, url: str, endpoint: Endpoint, clock: Callable[[], float], options: ClientOptions):
        self._url = url
        self._endpoint = endpoint
        self._clock = clock
        self._given_model = options.model
        self._fixed: dict[str, Any] = {
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if options.ignore_eos else {}),
        }
        key = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        tls = ssl.create_default_context(cadata=options.ca)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, ssl=tls),
            timeout=aiohttp.ClientTimeout(total=options.timeout, sock_connect=CONNECT_SECONDS),
            headers={"content-type": "application/json"} | key,
        )

    @property
    def model(self) -> str:
        assert self._given_model is not None, "connect comes first"
        return self._given_model

    async def connect(self) -> None:
        try:
            async with self._session.get(f"{self._url}/v1/models") as response:
                status, listed = response.status, await _json(response)
        except (aiohttp.ClientError, OSError) as error:
            raise StartupError(f"--url {self._url}: no answer ({_why(error)}); is the server running there?") from None
        if self._given_model is None:
            self._given_model = _first_model(listed)
        if self._given_model is None:
            told = error_message(listed)
            said = f"{status} {told}".strip() if status != 200 else "no model"
            cure = "give a key by --api-key" if status == 401 else "name the model by --model"
            raise StartupError(f"{self._url}/v1/models answers {said}; {cure}")

    async def generate(self, prompt: Prompt, recording: Recording) -> None:
        fields = {"model": self.model, "max_tokens": prompt.max_tokens, **self._fixed}
        body = json.dumps(fields | self._endpoint.body(prompt.content)).encode()
        reader = StreamReader(self._endpoint, recording)
        recording.send(self._clock())
        try:
            async with self._session.post(self._url + self._endpoint.path, data=body) as response:
                if response.status != 200:
                    raise RequestFailed(f"HTTP {response.status}", error_message(await _json(response)))
                if response.content_type != "text/event-stream":
                    raise RequestFailed("the answer is not an event stream", error_message(await _json(response)))
                async for part in response.content.iter_any():
                    reader.feed(part, self._clock())
            reader.close(recording.last)
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed(_why(error)) from None

    async def count_tokens(self, text: str) -> int | None:
        for body in self._endpoint.tokenize_bodies(text):
            try:
                async with self._session.post(f"{self._url}/tokenize", json={"model": self.model, **body}) as response:
                    found = await response.json(content_type=None) if response.status == 200 else None
            except (aiohttp.ClientError, OSError, ValueError):
                continue
            if isinstance(found, dict):
                tokens = found.get("tokens")
                length = len(tokens) if isinstance(tokens, list) else count(found.get("count"))
                if length:
                    return length
        return None

    async def close(self) -> None:
        await self._session.close()


async def _json(response: aiohttp.ClientResponse) -> object:
    """The start of a body as JSON, or None if it is none."""
    try:
        try:
            body = await response.content.readexactly(MAX_BODY_BYTES)
        except asyncio.IncompleteReadError as end:
            body = end.partial
        return json.loads(body)
    except (ValueError, RecursionError, aiohttp.ClientPayloadError):
        return None


def _first_model(listed: object) -> str | None:
    data = listed.get("data") if isinstance(listed, dict) else None
    first = data[0] if isinstance(data, list) and data else None
    name = first.get("id") if isinstance(first, dict) else None
    return name if isinstance(name, str) and name else None


def _why(error: Exception) -> str:
    match error:
        case TimeoutError():
            return "timeout"
        case aiohttp.ClientConnectorCertificateError():
            return f"its certificate is not trusted: {error.certificate_error}"
        case aiohttp.ClientConnectorError():
            return f"no connection: {_told(error.os_error)}"
        case aiohttp.ClientPayloadError() | aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError():
            return "the connection was lost"
        case aiohttp.ClientResponseError():
            return "the answer is not HTTP"
        case _:
            return type(error).__name__


def _told(error: OSError) -> str:
    """Without the address that asyncio puts in; numbers below 0 are the resolver's."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or type(error).__name__
