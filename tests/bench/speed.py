"""Prefill and decode of the demo model, beside transformers on the same prompts in the same run."""

import json
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.load import load_engine
from engine.model.demo_checkpoint import DEMO_NAME
from engine.request import Request, SamplingParams
from tests.bench.export import export_demo

RECIPES = ("native", "int8", "int4")
BATCHES = (1, 8)
PROMPT_TOKENS = 512
NUM_TOKENS = 33
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: `prefill` to the first token of all prompts, `decode` a step after that."""

    prefill: float
    decode: float


def demo_core(recipe: str, dtype: str = "auto", max_num_seqs: int = 8) -> EngineCore:
    config = EngineConfig(
        model=DEMO_NAME,
        kv_format=recipe,
        dtype=dtype,
        max_model_len=PROMPT_TOKENS + 256,
        max_num_seqs=max_num_seqs,
    )
    return load_engine(config, lambda done, total: None).core


def random_prompts(count: int) -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(100, 40000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def time_quire(core: EngineCore, prompts: list[list[int]]) -> Timing:
    """All prompts at once. Several chunks make the prefill, so its end is the first token of the last prompt."""
    firsts: list[float] = []
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        seen: list[object] = []

        def listen(event: object, seen: list[object] = seen) -> None:
            if not seen:
                firsts.append(time.perf_counter())
            seen.append(event)

        core.add([Request(id=str(index), prompt=tuple(prompt), sampling=sampling)], [listen])
    start = time.perf_counter()
    steps = 0
    while len(firsts) < len(prompts):
        core.step()
    prefill_end = time.perf_counter()
    while not core.is_idle:
        core.step()
        steps += 1
    return Timing(prefill_end - start, (time.perf_counter() - prefill_end) / steps)


class Transformers:
    """A worker process that times transformers; `versions` is what it says of itself."""

    def __init__(self, process: "subprocess.Popen[str]"):
        self._process = process
        self.versions: dict[str, Any] = json.loads(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def time(self, prompts: list[list[int]]) -> Timing:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": NUM_TOKENS}) + "\n")
        self._process.stdin.flush()
        return Timing(**json.loads(self._read()))


@contextmanager
def transformers(python: str) -> Iterator[Transformers]:
    worker = Path(__file__).parent / "transformers_worker.py"
    with tempfile.TemporaryDirectory() as folder:
        export_demo(Path(folder), torch.bfloat16)
        with subprocess.Popen(
            [python, str(worker), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            yield Transformers(process)
            assert process.stdin is not None
            process.stdin.close()


def middle(timings: list[Timing]) -> Timing:
    return Timing(median(t.prefill for t in timings), median(t.decode for t in timings))


def measure_speed(peer: Transformers | None) -> Iterator[tuple[int, str, Timing]]:
    """(batch, who, median timing); runs of all are interleaved, the first round warms up."""
    cores = {recipe: demo_core(recipe) for recipe in RECIPES}
    for batch in BATCHES:
        prompts = random_prompts(batch)
        timings: dict[str, list[Timing]] = {}
        for number in range(ROUNDS + 1):
            results = {recipe: time_quire(core, prompts) for recipe, core in cores.items()}
            if peer is not None:
                results["transformers"] = peer.time(prompts)
            for who, timing in results.items() if number else ():
                timings.setdefault(who, []).append(timing)
        for who, items in timings.items():
            yield batch, who, middle(items)
