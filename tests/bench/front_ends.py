"""`make bench-front-ends`: what HTTP and gRPC cost beside the engine alone, and what overload does to those who are in.

The client shares the cores with the server, so cost is CPU time of the server's process for one token, against that of
a process that drives the same engine without front ends; rounds of both take turns. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.model.demo_checkpoint import DEMO_NAME
from server.bench.client import Client
from server.bench.endpoints import CompletionEndpoint, Prompt
from server.bench.grpc_client import GrpcClient
from server.bench.http_client import HttpClient
from server.bench.recording import Recording, RequestFailed
from tests.bench.front_ends_engine import FORMAT

ENGINE = (sys.executable, "-m", "tests.bench.front_ends_engine")
OPTIONS = ("--kv-format", FORMAT, "--http-port", "0", "--grpc-port", "0", "--log-level", "warning")
OVERLOAD = ("--max-num-seqs", "8", "--max-queued-requests", "8")
STREAMS = 32
TICKS = os.sysconf("SC_CLK_TCK")


class Process:
    """A child that says it is ready, and how much CPU time it has used."""

    def __init__(self, *command: str):
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline()

    def cpu_seconds(self) -> float:
        with open(f"/proc/{self.popen.pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *error: object) -> None:
        self.popen.terminate()
        self.popen.wait()


class Server(Process):
    def __init__(self, *options: str):
        super().__init__(sys.executable, "-m", "server.cli", "serve", DEMO_NAME, *OPTIONS, *options)
        self.http = self.grpc = ""
        while not self.http:
            line = self.line()
            assert line, "the server ended"
            if match := re.fullmatch(r"ready: (http://\S+) grpc://(\S+)\n", line):
                self.http, self.grpc = match.groups()

    async def client(self, api: str) -> Client:
        options: dict[str, Any] = {"model": None, "api_key": None, "ignore_eos": True, "timeout": 300.0}
        client: Client
        if api == "grpc":
            client = GrpcClient(self.grpc, time.monotonic, **options)
        else:
            client = HttpClient(self.http, CompletionEndpoint(), time.monotonic, **options)
        await client.connect()
        return client


class Engine(Process):
    """The same engine without front ends."""

    def __init__(self) -> None:
        super().__init__(*ENGINE)
        assert self.line() == "ready\n"

    def run(self, load: list[Prompt]) -> dict[str, float]:
        assert self.popen.stdin is not None
        texts = [prompt.content for prompt in load]
        self.popen.stdin.write(json.dumps({"prompts": texts, "num_tokens": load[0].max_tokens}) + "\n")
        self.popen.stdin.flush()
        result: dict[str, float] = json.loads(self.line())
        return result


def prompts(num: int, max_tokens: int, *seed: object) -> list[Prompt]:
    """Of some 60 tokens, no two alike."""
    rng = random.Random(repr(seed))
    return [Prompt(" ".join(f"w{rng.randrange(10**4)}" for _ in range(15)), max_tokens) for _ in range(num)]


async def ask(client: Client, prompt: Prompt) -> Recording:
    recording = Recording(None)
    try:
        await client.generate(prompt, recording)
    except RequestFailed as failure:
        recording.failure = failure
        recording.last = time.monotonic()
    return recording


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over rounds. CPU time is in milliseconds a token, of the server's process or the engine's."""

    api: str
    engine_ms: float
    server_ms: float

    @property
    def share(self) -> float:
        return self.server_ms / self.engine_ms - 1


async def costs(server: Server, engine: Engine, num_tokens: int, rounds: int) -> list[Cost]:
    """With `STREAMS` streams at once."""
    alone: list[float] = []
    served: dict[str, list[float]] = {"http": [], "grpc": []}
    for number in range(-1, rounds):  # the first warms up
        result = engine.run(prompts(STREAMS, num_tokens, number))
        if number >= 0:
            alone.append(1000 * result["cpu_seconds"] / result["num_tokens"])
        for api, times in served.items():
            client = await server.client(api)
            before = server.cpu_seconds()
            load = prompts(STREAMS, num_tokens, api, number)
            recordings = await asyncio.gather(*(ask(client, prompt) for prompt in load))
            used = server.cpu_seconds() - before
            await client.close()
            assert all(recording.is_done for recording in recordings)
            if number >= 0:
                times.append(1000 * used / (STREAMS * num_tokens))
    return [Cost(api, median(alone), median(times)) for api, times in served.items()]


async def first_tokens(server: Server, engine: Engine, num: int) -> dict[str, float]:
    """Median milliseconds to the first token of a request alone, by way."""
    clients = {api: await server.client(api) for api in ("http", "grpc")}
    times: dict[str, list[float]] = {"engine": [], "http": [], "grpc": []}
    for number in range(num):
        times["engine"].append(engine.run(prompts(1, 1, "first", number))["first_token_seconds"])
        for api, client in clients.items():
            (prompt,) = prompts(1, 1, "first", api, number)
            recording = await ask(client, prompt)
            assert recording.time_to_first_token is not None
            times[api].append(recording.time_to_first_token)
    for client in clients.values():
        await client.close()
    return {way: 1000 * median(values) for way, values in times.items()}


@dataclass(frozen=True, slots=True)
class Overload:
    """Accepted tokens a second without and with ten times the load; milliseconds until a reject was answered."""

    unloaded_tokens_per_second: float
    accepted_tokens_per_second: float
    num_rejected: int
    reject_p50_ms: float
    reject_p99_ms: float


async def overload(server: Server, seconds: float) -> Overload:
    client = await server.client("http")
    rng = random.Random(1)

    async def offer(interval: float, seconds: float) -> list[Recording]:
        end = time.monotonic() + seconds
        tasks: list[asyncio.Task[Recording]] = []
        while time.monotonic() < end:
            (prompt,) = prompts(1, 32, rng.randrange(2**40))
            tasks.append(asyncio.create_task(ask(client, prompt)))
            await asyncio.sleep(interval)
        return list(await asyncio.gather(*tasks))

    async def keep_busy(seconds: float) -> list[Recording]:
        """As many as run at once, all the time."""
        end = time.monotonic() + seconds
        done: list[Recording] = []

        async def work() -> None:
            while time.monotonic() < end:
                (prompt,) = prompts(1, 32, rng.randrange(2**40))
                done.append(await ask(client, prompt))

        await asyncio.gather(*(work() for _ in range(8)))
        return done

    def rate(recordings: list[Recording]) -> float:
        done = [recording for recording in recordings if recording.is_done]
        span = max(r.last for r in done) - min(r.sent for r in done)
        return sum(recording.num_output_tokens or 0 for recording in done) / span

    await keep_busy(3)
    unloaded = rate(await keep_busy(seconds))
    recordings = await offer(32 / unloaded / 10, seconds)
    rejects = sorted(1000 * (r.last - r.sent) for r in recordings if r.failure is not None)
    assert all(str(r.failure).startswith("HTTP 429") for r in recordings if r.failure is not None)
    await client.close()
    return Overload(unloaded, rate(recordings), len(rejects), median(rejects), rejects[len(rejects) * 99 // 100])


async def measure(is_small: bool, console: Console) -> dict[str, Any]:
    rounds, num_tokens, num_first, seconds = (1, 8, 5, 4.0) if is_small else (5, 64, 40, 30.0)
    with Engine() as engine, Server() as server:
        cost = await costs(server, engine, num_tokens, rounds)
        first = await first_tokens(server, engine, num_first)
    table = Table("front end", "engine, CPU ms/token", "server, CPU ms/token", "cost", "first token, ms", "added, ms")
    for row in cost:
        added = first[row.api] - first["engine"]
        table.add_row(
            row.api, f"{row.engine_ms:.3f}", f"{row.server_ms:.3f}", f"{row.share:+.1%}", f"{first[row.api]:.2f}",
            f"{added:.2f}",
        )  # fmt: skip
    console.print(table)
    with Server(*OVERLOAD) as server:
        load = await overload(server, seconds)
    change = load.accepted_tokens_per_second / load.unloaded_tokens_per_second - 1
    console.print(
        f"ten times the load: {load.accepted_tokens_per_second:.1f} accepted tokens/s against "
        f"{load.unloaded_tokens_per_second:.1f} ({change:+.1%}); "
        f"{load.num_rejected} rejects, p50 {load.reject_p50_ms:.1f} ms, p99 {load.reject_p99_ms:.1f} ms"
    )
    shown = [asdict(row) | {"share": row.share} for row in cost]
    return {"costs": shown, "first_token_ms": first, "overload": asdict(load)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-front-ends")
    parser.add_argument("--small", action="store_true", help="a smoke test of a minute")
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(measure(arguments.small, Console()))))


if __name__ == "__main__":
    main()
