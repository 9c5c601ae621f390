"""`make bench-page`: what watching the pool page costs. First over the full pool of `pool_micro` and real HTTP: the map
in the engine's thread, and its words in the server's, in CPU time of one thread, so that other programs on the machine
do not count. Then for the demo model: the time of the same steps with viewers and without, in turn."""

import argparse
import asyncio
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

from engine.kv.map import PoolMap
from engine.kv.report import PageSizes
from engine.kv.stats import PoolSnapshot
from server.config import ServerConfig
from server.http import build_app
from server.pool_map import MAP_SECONDS
from server.ports import bind_http
from server.service import Service
from server.web import http_server
from tests.bench.front_ends import Server, prompts, turn
from tests.bench.pool_micro import ROWS, Bench
from tests.fakes import FakeEngine
from tests.server.conftest import LIMITS

SIZES = PageSizes(page_bytes=368_640, slot_bytes=1_474_560)
CALLS = 50
SETTLE_SECONDS = 1.0  # viewers connect meanwhile
EVENTS = f"/v1/pool/events?map=true&request=0&interval_ms={MAP_SECONDS * 1000:.0f}"  # as the page asks


class WatchedEngine(FakeEngine):
    """Answers with what a full pool said, at no cost."""

    def __init__(self, snapshot: PoolSnapshot, pool_map: PoolMap):
        super().__init__()
        self.snapshot, self.map = snapshot, pool_map


def call_ms(call: Callable[[], object]) -> float:
    """The median of `CALLS` calls."""
    costs = []
    for _ in range(CALLS):
        start = time.thread_time()
        call()
        costs.append(time.thread_time() - start)
    return 1e3 * median(costs)


@contextmanager
def viewers(url: str, count: int) -> Iterator[list[Path]]:
    """Tabs with the page open; what each of them gets goes to a file. They are `curl`, so that they take none of this
    process's time."""
    with TemporaryDirectory() as folder:
        files = [Path(folder) / str(number) for number in range(count)]
        tabs = [subprocess.Popen(["curl", "-sN", "-o", file, url + EVENTS]) for file in files]
        try:
            yield files
        finally:
            for tab in tabs:
                tab.terminate()
                tab.wait()


async def server_ms(engine: WatchedEngine, num_viewers: int, seconds: float) -> tuple[float, bytes]:
    """Milliseconds of the server's thread in a second, and what all viewers got."""
    service = Service(engine)  # type: ignore[arg-type]
    server = http_server(build_app(service), LIMITS)
    with bind_http(ServerConfig(http_port=0)) as bound:
        task = asyncio.create_task(server.serve(sockets=[bound]))
        while not server.started:
            await asyncio.sleep(0.001)
        with viewers(f"http://127.0.0.1:{bound.getsockname()[1]}", num_viewers) as files:
            await asyncio.sleep(SETTLE_SECONDS)
            start, began = time.thread_time(), time.monotonic()
            await asyncio.sleep(seconds)
            spent = 1e3 * (time.thread_time() - start) / (time.monotonic() - began)
            events = b"".join(file.read_bytes() for file in files)
        server.should_exit = True
        await task
    await service.dialect.close()
    return spent, events


def seconds_of_steps(num_viewers: int, rounds: int, num_streams: int = 32, num_tokens: int = 32) -> list[float]:
    """What viewers add to the time of the same work, as a share, by round."""
    shares, load = [], prompts(num_streams, num_tokens, "page")
    with Server() as server:
        for number in range(-1, rounds):  # the first warms up
            spent = {}
            for count in turn((0, num_viewers), number):
                with viewers(server.ports["http"], count):
                    time.sleep(SETTLE_SECONDS)
                    start = time.monotonic()
                    server.drive(load)
                    spent[count] = time.monotonic() - start
            if number >= 0:
                shares.append(spent[num_viewers] / spent[0] - 1)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--viewers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=16)
    options = parser.parse_args()
    bench = Bench(ROWS)
    scheduler = bench.scheduler
    told = scheduler.map(SIZES)
    engine = WatchedEngine(scheduler.snapshot(SIZES), told)
    map_ms, snapshot_ms = call_ms(lambda: scheduler.map(SIZES)), call_ms(lambda: scheduler.snapshot(SIZES))
    idle, _ = asyncio.run(server_ms(engine, 0, options.seconds))
    watched, events = asyncio.run(server_ms(engine, options.viewers, options.seconds))
    # One map whoever watches; a snapshot for each viewer at most.
    engine_ms = (map_ms + options.viewers * snapshot_ms) / MAP_SECONDS
    low, middle, high = quantiles(seconds_of_steps(options.viewers, options.rounds), n=4)
    result = {
        "cached_pages": bench.cache.sealed.num_cached,
        "rows": len(scheduler.running),
        "runs": len(told.runs),
        "viewers": options.viewers,
        "map_ms": map_ms,
        "snapshot_ms": snapshot_ms,
        "bytes_per_event": round(len(events) / max(1, events.count(b"\n\n"))),
        "engine_ms_per_second": engine_ms,
        "server_ms_per_second": watched - idle,
        "share_of_a_core": (engine_ms + watched - idle) / 1e3,
        "added_to_step_time": middle,
        "added_to_step_time_low": low,
        "added_to_step_time_high": high,
    }
    print(json.dumps({name: round(value, 5) for name, value in result.items()}, indent=2))


if __name__ == "__main__":
    main()
