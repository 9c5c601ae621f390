"""What openai-python makes of a server that refuses, is full, or ends."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import Request, urlopen

import openai
from openai import DefaultHttpxClient, OpenAI

PROMPT = [7] * 20
SHORT = {"prompt": PROMPT, "max_tokens": 2, "extra_body": {"ignore_eos": True}}
# Pages that are dropped make room, so that the stream runs on after the context's end.
ENDLESS = {
    "prompt": PROMPT,
    "max_tokens": 1_000_000,
    "stream": True,
    "extra_body": {"ignore_eos": True, "kv_shrink": "streaming:recent=2"},
}


class Failures:
    """`url` serves `model` to who has `key`: one request runs, one waits. `doomed`: the URLs and process ids of servers
    without keys that may be ended; they give running requests no time."""

    def __init__(self, url: str, key: str, model: str, doomed: list[tuple[str, int]]):
        self.url = url
        self.key = key
        self.model = model
        self.doomed = doomed

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(**{"base_url": self.url, "api_key": self.key, "max_retries": 0, "timeout": 60} | options)

    def num_waiting(self) -> float:
        url = self.url.removesuffix("/v1") + "/metrics"
        with urlopen(Request(url, headers={"authorization": f"Bearer {self.key}"})) as response:
            lines = response.read().decode().splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith("quire_requests_waiting ")))

    @contextmanager
    def full_server(self) -> Iterator[openai.Stream[Any]]:
        """Gives the stream that runs; another request waits behind it."""
        with self.client() as client:
            stream = client.completions.create(model=self.model, **ENDLESS)
            next(iter(stream))
            waiting = threading.Thread(target=client.completions.create, kwargs={"model": self.model, **SHORT})
            waiting.start()
            try:
                deadline = time.monotonic() + 20
                while self.num_waiting() < 1:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                yield stream
            finally:
                stream.close()
                waiting.join()

    def check_keys(self) -> None:
        try:
            self.client(api_key="not-a-key-of-this-server").models.list()
        except openai.AuthenticationError as error:
            assert error.status_code == 401 and error.code == "invalid_api_key", error
        else:
            raise AssertionError("let in")
        assert self.client().models.list().data[0].id == self.model

    def check_full_queue(self) -> None:
        with self.full_server(), self.client() as client:
            try:
                client.completions.create(model=self.model, **SHORT)
            except openai.RateLimitError as error:
                assert error.code == "queue_full" and error.type == "rate_limit_error", error
                assert 1 <= int(error.response.headers["retry-after"]) <= 60
                assert 0 < int(error.response.headers["retry-after-ms"]) <= 60_000
            else:
                raise AssertionError("taken")

    def check_retries_after_a_full_queue(self) -> None:
        with self.full_server() as running:
            statuses: list[int] = []

            def hear(response: Any) -> None:
                """Make room as soon as the first attempt has been refused."""
                statuses.append(response.status_code)
                running.close()

            http = DefaultHttpxClient(event_hooks={"response": [hear]})
            with self.client(max_retries=2, http_client=http) as client:
                answer = client.completions.create(model=self.model, **SHORT)
            assert statuses == [429, 200]
            assert answer.usage and answer.usage.completion_tokens == 2

    def check_stream_of_a_server_that_stops(self) -> None:
        """It says so: an error event is what every version raises as its own error."""
        try:
            self.read_to_the_end(*self.doomed[0], signal.SIGTERM)
        except openai.APIError as error:
            assert error.code == "server_unavailable", error
        else:
            raise AssertionError("a clean end")

    def check_stream_of_a_server_that_dies(self) -> None:
        """Nothing is said, and the missing last chunk is the only sign. Before 3 the HTTP library's error comes out."""
        try:
            self.read_to_the_end(*self.doomed[1], signal.SIGKILL)
        except Exception as error:
            is_theirs = isinstance(error, openai.APIConnectionError)
            assert is_theirs if openai.__version__ >= "3" else type(error).__name__ == "RemoteProtocolError", error
        else:
            raise AssertionError("a clean end")

    def read_to_the_end(self, url: str, pid: int, signum: int) -> None:
        with self.client(base_url=url) as client:
            chunks = iter(client.completions.create(model=self.model, **ENDLESS))
            next(chunks)
            os.kill(pid, signum)
            for _ in chunks:
                pass
