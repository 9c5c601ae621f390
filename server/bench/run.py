"""The run of `quire bench`: find the server, make prompts, load it level by level, tell what was measured."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console

from engine.errors import StartupError
from server.bench.client import Client
from server.bench.config import BenchConfig
from server.bench.dataset import Dataset, read_dataset
from server.bench.endpoints import Prompt
from server.bench.load import ClosedLoop, Level, Runner
from server.bench.prompts import Synthetic, make_ruler
from server.bench.report import as_json, show
from server.bench.summary import summarize, unit_of
from server.terminal import widen

LEAST_WIDTH = 150
STDOUT = "-"
WARM_UP_LEVEL = -1


class Source(Protocol):
    async def take(self, level: int, num_prompts: int) -> Sequence[Prompt]: ...


class Bench:
    """One run. `levels` and `model` hold what there is of it, whenever it is stopped."""

    def __init__(self, config: BenchConfig, errors: Console):
        self.config = config
        self.model = ""
        self.levels: list[Level] = []
        self._errors = errors

    async def run(self) -> None:
        """Raises StartupError if the server cannot be reached or the dataset cannot be used."""
        config = self.config
        takes_messages = config.endpoint is not None and config.endpoint.takes_messages
        dataset = config.dataset and Dataset(
            read_dataset(config.dataset, max_tokens=config.output_tokens, takes_messages=takes_messages)
        )
        client = open_client(config)
        try:
            await client.connect()
            self.model = client.model
            source = dataset or await self._synthetic(client)
            runner = Runner(client, time.perf_counter, max_seconds=config.max_seconds, seed=config.seed)
            if config.warm_up:
                await self._warm_up(runner, source)
            for index, load in enumerate(config.loads):
                prompts = await source.take(index, config.requests or load.num_requests)
                level = Level(load, len(prompts))
                self.levels.append(level)
                await runner.run(level, prompts)
                num_done = sum(recording.is_done for recording in level.recordings)
                self._errors.print(
                    f"{load.name} {load.amount:g}: {num_done} of {len(prompts)} requests done, {level.seconds:.1f} s"
                )
        finally:
            await client.close()

    async def _synthetic(self, client: Client) -> Source:
        config = self.config
        ruler = await make_ruler(client, config.seed)
        if not ruler.is_known:
            self._errors.print("the server does not say how long prompts are; a word is taken for a token")
        return Synthetic(config.input_tokens, config.output_tokens, config.prefix_share, config.seed, ruler)

    async def _warm_up(self, runner: Runner, source: Source) -> None:
        level = Level(ClosedLoop(1), 1)
        await runner.run(level, await source.take(WARM_UP_LEVEL, 1))
        if failure := level.recordings[0].failure:
            self._errors.print(f"the request to warm up failed: {failure}")


def open_client(config: BenchConfig) -> Client:
    # Here, so that HTTP loads no gRPC, and the other way round.
    if config.endpoint is None:
        from server.bench.grpc_client import GrpcClient

        return GrpcClient(config.url, time.perf_counter, config.client)
    from server.bench.http_client import HttpClient

    return HttpClient(config.url, config.endpoint, time.perf_counter, config.client)


def run_bench(config: BenchConfig, json_target: str | None, *, output: Console, errors: Console) -> int:
    """Measure, print and write. Returns the exit code: 1 if every request failed, 130 if stopped by Ctrl-C."""
    bench = Bench(config, errors)
    is_complete = True
    try:
        asyncio.run(bench.run())
    except KeyboardInterrupt:
        is_complete = False
    unit = unit_of(bench.levels)
    summaries = [summarize(level, unit) for level in bench.levels if level.recordings]
    if json_target != STDOUT and summaries:
        widen(output, LEAST_WIDTH)
        show(config, bench.model, summaries, output)
    if json_target is not None and summaries:
        _write_json(as_json(config, bench.model, summaries, is_complete=is_complete), json_target)
    if not is_complete:
        told = "what was measured until then is above" if summaries else "nothing was measured"
        errors.print(f"quire: stopped; {told}")
        return 130
    first_failure = next((summary.first_failure for summary in summaries if summary.first_failure), None)
    if first_failure is not None and not any(summary.num_done + summary.num_abandoned for summary in summaries):
        errors.print(f"quire: every request failed; the first: {first_failure}")
        return 1
    return 0


def _write_json(value: dict[str, object], target: str) -> None:
    text = json.dumps(value, indent=2) + "\n"
    if target == STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StartupError(f"--json {target}: cannot be written ({error.strerror})") from error
