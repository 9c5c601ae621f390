"""Prefill and decode of the demo model: by context, number of sequences and recipe, beside what memory would allow."""

import time
from collections.abc import Sequence
from statistics import quantiles
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine.config import EngineConfig
from engine.engine import Engine
from engine.load import load_engine, resolve_layout
from engine.model.checkpoint import open_checkpoint
from engine.model.demo_checkpoint import DEMO_NAME
from tests.bench.steps import PARTS, Clock, add, clear, random_prompt, seat

RECIPES = ("native", "int8", "int4")
CONTEXTS = (512, 2000, 4000, 8000)
SEQUENCES = (1, 4, 8, 16)
PREFILLS = (512, 4000)
MAX_MODEL_LEN = 8192
ROUNDS = 5
STEPS = 6  # of a round
READ_BYTES = 2**29


def load(recipe: str) -> Engine:
    """With room for all contexts."""
    config = EngineConfig(
        model=DEMO_NAME,
        kv_format=recipe,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max(SEQUENCES),
        kv_memory=_bytes_for(recipe),
    )
    return load_engine(config, lambda done, total: None)


def _bytes_for(recipe: str) -> int:
    layout = resolve_layout(EngineConfig(model=DEMO_NAME, kv_format=recipe), open_checkpoint(DEMO_NAME))
    return int(1.1 * max(SEQUENCES) * (MAX_MODEL_LEN * layout.bytes_per_token + 4 * layout.slot_bytes))


class Memory:
    """How fast this machine reads what is in no cache."""

    def __init__(self) -> None:
        self._numbers = torch.ones(READ_BYTES // 4)

    def bytes_per_second(self) -> float:
        start = time.perf_counter()
        self._numbers.sum()
        return READ_BYTES / (time.perf_counter() - start)


def middle(values: Sequence[float]) -> dict[str, float]:
    low, median, high = quantiles(values, n=4)
    return {"median": median, "low": low, "high": high}


def decode(engines: dict[str, Engine], num_sequences: int, context: int) -> dict[str, dict[str, Any]]:
    """By recipe: seconds of a step and of its parts, and bytes that it reads. Rounds of all are interleaved."""
    memory = Memory()
    clocks: dict[str, list[Clock]] = {recipe: [] for recipe in engines}
    speeds = []
    for engine in engines.values():
        seat(engine, num_sequences, context)
    for number in range(ROUNDS + 1):
        speeds.append(memory.bytes_per_second())
        for recipe, engine in engines.items():
            for _ in range(STEPS):
                clock = Clock()
                with clock.watching(engine.core):
                    engine.core.step()
                if number:  # the first warms up
                    clocks[recipe].append(clock)
    results = {}
    for recipe, engine in engines.items():
        clear(engine)
        steps = [clock.step for clock in clocks[recipe]]
        model = engine.core.runner.model
        weights = model.project_out.num_bytes + sum(layer.num_bytes for layer in model.layers)
        num_bytes = weights + num_sequences * context * engine.info.bytes_per_token
        results[recipe] = {
            "step": middle(steps),
            "parts": {part: sum(clock.parts[part] for clock in clocks[recipe]) / sum(steps) for part in PARTS},
            "bytes": num_bytes,
            "memory": max(speeds),
            "share_of_limit": num_bytes / max(speeds) / middle(steps)["median"],
        }
    return results


def prefill(engines: dict[str, Engine], num_tokens: int) -> dict[str, dict[str, float]]:
    """By recipe: seconds of a prompt that nobody has asked before, up to its first token."""
    seconds: dict[str, list[float]] = {recipe: [] for recipe in engines}
    for number in range(4):
        for recipe, engine in engines.items():
            add(engine.core, "prefill", random_prompt(("prefill", number, time.monotonic()), num_tokens), 1)
            start = time.perf_counter()
            while not engine.core.is_idle:
                engine.core.step()
            if number:
                seconds[recipe].append(time.perf_counter() - start)
    return {recipe: middle(values) for recipe, values in seconds.items()}


def measure(console: Console) -> dict[str, Any]:
    engines = {recipe: load(recipe) for recipe in RECIPES}
    results: dict[str, Any] = {"threads": torch.get_num_threads(), "decode": [], "prefill": []}
    table = Table(title=f"decode, {next(iter(engines.values())).info.dtype}, {results['threads']} threads")
    for column in ("sequences", "context", "recipe", "ms a step", "quartiles", "tokens/s", "of the limit", *PARTS[:2]):
        table.add_column(column)
    for part in PARTS[3:]:
        table.add_column(part)
    for context in CONTEXTS:
        for num_sequences in SEQUENCES:
            for recipe, found in decode(engines, num_sequences, context).items():
                step, parts = found["step"], found["parts"]
                table.add_row(
                    str(num_sequences),
                    str(context),
                    recipe,
                    f"{step['median'] * 1e3:.1f}",
                    f"{step['low'] * 1e3:.1f} to {step['high'] * 1e3:.1f}",
                    f"{num_sequences / step['median']:.0f}",
                    f"{found['share_of_limit']:.0%}",
                    *(f"{parts[part]:.1%}" for part in PARTS if part != "model"),
                )
                results["decode"].append(
                    {"context": context, "sequences": num_sequences, "recipe": recipe, **found},
                )
    console.print(table)
    console.print("of the limit: (weights + K and V that are read) at the memory's speed in this run, over the step")
    console.print("plan, build, sample, emit: what of the steps goes into these; the rest is the model with attention")
    table = Table(title="prefill of one prompt")
    for column in ("tokens", "recipe", "seconds", "tokens/s"):
        table.add_column(column)
    for num_tokens in PREFILLS:
        for recipe, seconds in prefill(engines, num_tokens).items():
            median = seconds["median"]
            table.add_row(str(num_tokens), recipe, f"{median:.2f}", f"{num_tokens / median:.0f}")
            results["prefill"].append({"tokens": num_tokens, "recipe": recipe, **seconds})
    console.print(table)
    return results
