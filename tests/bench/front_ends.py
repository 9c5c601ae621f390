"""`make bench-front-ends`: what HTTP and gRPC cost beside the engine alone, and what overload does to those who are in.

The client shares the cores with the server, so cost is CPU time of the server's process for one token, against that of
the same process when its engine is driven without them; the thread of the front ends is also looked at alone. What they
add to the first token is what a client waits beyond what the engine takes for the same request, and beside it what the
same client waits at a bare server. The last line is one JSON object.
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
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any, Self, TypeVar
from urllib.request import urlopen

from rich.console import Console
from rich.table import Table

from engine.model.demo_checkpoint import DEMO_NAME
from server.bench.client import Client, ClientOptions
from server.bench.endpoints import CompletionEndpoint, Prompt
from server.bench.grpc_client import GrpcClient
from server.bench.http_client import HttpClient
from server.bench.recording import Recording, RequestFailed

SERVER = (sys.executable, "-m", "tests.bench.front_ends_server", DEMO_NAME)
OPTIONS = ("--kv-format", "int4", "--http-port", "0", "--grpc-port", "0", "--log-level", "warning")
OVERLOAD = ("--max-num-seqs", "8", "--max-queued-requests", "8")
STREAMS = 32
T = TypeVar("T")
TICKS = os.sysconf("SC_CLK_TCK")


class Server:
    """A child that serves, and drives its engine without front ends when told to on stdin."""

    def __init__(self, *options: str):
        command = (*SERVER, *OPTIONS, *options)
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ports: dict[str, str] = {}
        while len(self.ports) < 4:
            line = self._line()
            assert line, "the server ended"
            if match := re.fullmatch(r"(ready|bare): (http://\S+) (grpc://\S+)\n", line):
                prefix = "bare " if match[1] == "bare" else ""
                self.ports |= {f"{prefix}http": match[2], f"{prefix}grpc": match[3]}

    def _line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline()

    def _tell(self, order: dict[str, Any]) -> dict[str, float]:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(order) + "\n")
        self.popen.stdin.flush()
        answer: dict[str, float] = json.loads(self._line())
        return answer

    def drive(self, load: list[Prompt]) -> None:
        """Run `load` without front ends."""
        self._tell({"prompts": [prompt.content for prompt in load], "num_tokens": load[0].max_tokens})

    def engine_seconds(self) -> float:
        """From the submission of the last request to its first token, in the engine."""
        return self._tell({})["engine_seconds"]

    def cpu_seconds(self) -> tuple[float, float]:
        """Of the process, and of the thread of the front ends alone."""
        with open(f"/proc/{self.popen.pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        with open(f"/proc/{self.popen.pid}/task/{self.popen.pid}/schedstat") as stat:
            nanoseconds = int(stat.read().split()[0])
        return (int(fields[11]) + int(fields[12])) / TICKS, nanoseconds / 1e9

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self.popen.stdin is not None
        self.popen.terminate()
        self.popen.stdin.close()
        self.popen.wait()

    def num_generated_tokens(self) -> float:
        with urlopen(f"{self.ports['http']}/metrics") as answer:
            found = re.search(r"^quire_generation_tokens_total (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found, "no such metric"
        return float(found[1])

    async def client(self, api: str) -> Client:
        url, options = self.ports[api], ClientOptions(timeout=300.0)
        client: Client
        if api.endswith("grpc"):
            client = GrpcClient(url, time.monotonic, options)
        else:
            client = HttpClient(url, CompletionEndpoint(), time.monotonic, options)
        await client.connect()
        return client


def prompts(num: int, max_tokens: int, *seed: object, num_words: int = 15) -> list[Prompt]:
    """Of some 4 tokens a word, no two alike."""
    rng = random.Random(repr(seed))
    return [Prompt(" ".join(f"w{rng.randrange(10**4)}" for _ in range(num_words)), max_tokens) for _ in range(num)]


def turn(ways: Sequence[T], number: int) -> Sequence[T]:
    """Each of `ways` is the first of a round as often as the others."""
    number %= len(ways)
    return (*ways[number:], *ways[:number])


async def ask(client: Client, prompt: Prompt) -> Recording:
    recording = Recording(None)
    try:
        await client.generate(prompt, recording)
    except RequestFailed as failure:
        recording.failure = failure
        recording.last = time.monotonic()
    return recording


@dataclass(slots=True)
class CpuTimes:
    """Milliseconds a token by round: of the process, and of the thread of the front ends."""

    process: list[float] = field(default_factory=list)
    thread: list[float] = field(default_factory=list)


async def costs(server: Server, num_tokens: int, rounds: int) -> dict[str, CpuTimes]:
    """With `STREAMS` streams at once, by way."""
    clients = {api: await server.client(api) for api in ("http", "grpc")}
    times = {way: CpuTimes() for way in ("engine", "http", "grpc")}
    for number in range(-1, rounds):  # the first warms up
        for way in turn(list(times), number):
            load = prompts(STREAMS, num_tokens, "cost", way, number)
            before = server.cpu_seconds()
            if way == "engine":
                server.drive(load)
            else:
                recordings = await asyncio.gather(*(ask(clients[way], prompt) for prompt in load))
                assert all(recording.is_done for recording in recordings)
            if number >= 0:
                used = [
                    1000 * (now - then) / (STREAMS * num_tokens)
                    for now, then in zip(server.cpu_seconds(), before, strict=True)
                ]
                times[way].process.append(used[0])
                times[way].thread.append(used[1])
    for client in clients.values():
        await client.close()
    return times


async def first_tokens(server: Server, rounds: int) -> dict[str, list[float]]:
    """Milliseconds that a client of an idle server waits for its first token beyond what the engine takes for it."""
    clients = {api: await server.client(api) for api in ("http", "grpc", "bare http", "bare grpc")}
    added: dict[str, list[float]] = {api: [] for api in clients}
    for number in range(-5, rounds):
        for api in turn(list(clients), number):
            (prompt,) = prompts(1, 1, "first", api, number, num_words=4)
            seconds = (await ask(clients[api], prompt)).time_to_first_token
            assert seconds is not None
            if number >= 0:
                added[api].append(1000 * (seconds - server.engine_seconds()))
    for client in clients.values():
        await client.close()
    return added


@dataclass(frozen=True, slots=True)
class Overload:
    """Accepted tokens a second without and with ten times the load, by round; milliseconds until a reject's answer."""

    unloaded: list[float]
    overloaded: list[float]
    num_rejected: int
    reject_p50_ms: float
    reject_p99_ms: float


async def overload(server: Server, seconds: float, rounds: int) -> Overload:
    client = await server.client("http")
    rng = random.Random(1)
    rejects: list[float] = []

    async def offer(interval: float) -> None:
        """One request after the other for ever, whatever became of those before."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(one())
                await asyncio.sleep(interval)

    async def keep_busy() -> None:
        """As many as run at once, for ever."""

        async def work() -> None:
            while True:
                await one()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(8):
                tasks.create_task(work())

    async def one() -> None:
        (prompt,) = prompts(1, 32, rng.randrange(2**40))
        recording = await ask(client, prompt)
        if recording.failure is not None:
            assert str(recording.failure).startswith("HTTP 429"), recording.failure
            rejects.append(1000 * (recording.last - recording.sent))

    async def rate(load: Coroutine[Any, Any, None]) -> float:
        """Tokens a second while there is `load`, without its beginning and its end."""
        task = asyncio.create_task(load)
        await asyncio.sleep(seconds / 4)
        began, before = time.monotonic(), await asyncio.to_thread(server.num_generated_tokens)
        await asyncio.sleep(seconds)
        found = (await asyncio.to_thread(server.num_generated_tokens) - before) / (time.monotonic() - began)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), task.exception()
        return found

    unloaded: list[float] = []
    overloaded: list[float] = []
    for _ in range(rounds):
        unloaded.append(await rate(keep_busy()))
        overloaded.append(await rate(offer(32 / unloaded[-1] / 10)))
    await client.close()
    rejects.sort()
    return Overload(unloaded, overloaded, len(rejects), median(rejects), rejects[len(rejects) * 99 // 100])


def spread(values: list[float], form: str) -> str:
    low, middle, high = quantiles(values, n=4)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


async def measure(is_small: bool, console: Console) -> dict[str, Any]:
    rounds, num_tokens, num_first, overloads, seconds = (2, 4, 4, 2, 4.0) if is_small else (12, 16, 150, 3, 20.0)
    with Server() as server:
        cost = await costs(server, num_tokens, rounds)
        first = await first_tokens(server, num_first)
    alone = cost["engine"]
    table = Table("front end", "CPU ms/token", "more", "of its thread", "added to first token, ms", "by a bare server")
    table.add_row("none", f"{median(alone.process):.2f}", "", f"{median(alone.thread):.3f}", "", "")
    for api in ("http", "grpc"):
        times = cost[api]
        more = [ours / engines - 1 for ours, engines in zip(times.process, alone.process, strict=True)]
        table.add_row(
            api, f"{median(times.process):.2f}", spread(more, "+.1%"), f"{median(times.thread):.3f}",
            spread(first[api], ".2f"), spread(first[f"bare {api}"], ".2f"),
        )  # fmt: skip
    console.print(table, f"medians over rounds (in brackets the quartiles); {STREAMS} streams, first tokens at idle")
    with Server(*OVERLOAD) as server:
        load = await overload(server, seconds, overloads)
    change = [with_it / without - 1 for with_it, without in zip(load.overloaded, load.unloaded, strict=True)]
    console.print(
        f"ten times the load: {median(load.overloaded):.1f} accepted tokens/s against {median(load.unloaded):.1f} "
        f"({median(change):+.1%}; {min(change):+.1%} to {max(change):+.1%}); "
        f"{load.num_rejected} rejects, p50 {load.reject_p50_ms:.1f} ms, p99 {load.reject_p99_ms:.1f} ms"
    )
    return {
        "cpu_ms_per_token": {way: asdict(times) for way, times in cost.items()},
        "first_token_ms": first,
        "overload": asdict(load),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-front-ends")
    parser.add_argument("--small", action="store_true", help="a smoke test of a minute")
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(measure(arguments.small, Console()))))


if __name__ == "__main__":
    main()
