"""What a hit saves: prompt tokens that clients with one prompt compute together, and time to first token."""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from engine.core import EngineCore
from engine.engine import Engine
from engine.plan import StepPlan
from engine.request import Request
from engine.runner import Runner, StepOutput
from tests.bench.pool_load import PAGE, DemoModel, random_tokens
from tests.helpers import Recorder, greedy
from tests.listener import Listener

CLIENTS = 16
HERD_PAGES = 4
HERD_REST = (1, 32, 64)
RECIPES = ("int4", "native")


@dataclass(frozen=True, slots=True)
class Herd:
    """Prompt tokens that `CLIENTS` equal prompts of 4P + `rest` tokens computed, and what they must."""

    rest: int
    num_computed_tokens: int
    num_expected_tokens: int

    @property
    def is_exact(self) -> bool:
        return self.num_computed_tokens == self.num_expected_tokens


class PromptCounter:
    """A runner that counts the prompt tokens that it is given to compute; one alone behind cached ones comes as a
    decode row."""

    def __init__(self, runner: Runner):
        self.num_tokens = 0
        self._runner = runner

    def run(self, plan: StepPlan) -> StepOutput:
        self.num_tokens += sum(item.chunk.length for item in plan.chunks)
        self.num_tokens += sum(item.row.position < item.sequence.num_prompt_tokens for item in plan.decode)
        return self._runner.run(plan)


def herds(model: DemoModel) -> Iterator[Herd]:
    """Clients of the engine's thread, all at once."""
    engine = model.engine("int4", max_num_seqs=CLIENTS, max_model_len=(HERD_PAGES + 2) * PAGE)
    counter = PromptCounter(engine.core.runner)
    engine.core.runner = counter  # type: ignore[assignment]
    engine.start()
    for rest in HERD_REST:
        counter.num_tokens = 0
        prompt = random_tokens(random.Random(rest), HERD_PAGES * PAGE + rest)
        asyncio.run(_ask(engine, [greedy(f"{rest} {client}", prompt, 4) for client in range(CLIENTS)]))
        yield Herd(rest, counter.num_tokens, HERD_PAGES * PAGE + CLIENTS * rest)
    engine.stop()


async def _ask(engine: Engine, requests: list[Request]) -> None:
    await asyncio.gather(*(Listener(engine, request).events() for request in requests))


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Median seconds to the first token of a prompt of `num_tokens` tokens."""

    recipe: str
    num_tokens: int
    miss: float
    hit: float

    @property
    def ratio(self) -> float:
        return self.hit / self.miss


def first_tokens(model: DemoModel, num_tokens: int, num_rounds: int) -> list[FirstToken]:
    """Every round has a prompt of its own, which each recipe computes and then finds."""
    cores = {recipe: model.engine(recipe, max_num_seqs=1, max_model_len=num_tokens + PAGE).core for recipe in RECIPES}
    rng = random.Random(0)
    for core in cores.values():
        _first_token(core, random_tokens(rng, 4 * PAGE))  # warms up
    misses: dict[str, list[float]] = {recipe: [] for recipe in RECIPES}
    hits: dict[str, list[float]] = {recipe: [] for recipe in RECIPES}
    for _ in range(num_rounds):
        prompt = random_tokens(rng, num_tokens)
        for recipe, core in cores.items():
            misses[recipe].append(_first_token(core, prompt))
            hits[recipe].append(_first_token(core, prompt))
    return [FirstToken(recipe, num_tokens, median(misses[recipe]), median(hits[recipe])) for recipe in RECIPES]


def _first_token(core: EngineCore, prompt: tuple[int, ...]) -> float:
    recorder = Recorder()
    start = time.perf_counter()
    core.add([greedy("one", prompt, 1)], [recorder])
    while not core.is_idle:
        core.step()
    return time.perf_counter() - start
