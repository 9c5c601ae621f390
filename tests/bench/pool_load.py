"""Requests for the pool to run short under, and what came of them."""

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from torch import Tensor

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.engine import Engine
from engine.kv.sizing import num_slots
from engine.load import build_engine
from engine.model.checkpoint import open_checkpoint
from engine.model.demo_checkpoint import DEMO_NAME
from engine.request import Delta, Finished, FinishReason, Request
from engine.tokenizer import Tokenizer
from kernels.format.layout import PageLayout
from kernels.format.named import named_recipe
from tests.helpers import Recorder, greedy

PAGE = 64
EXACT = {"dtype": "float32", "batch_invariant": True}
NUM_STEMS = 16
STEM_PAGES = (0, 0, 0, 0, 1, 1, 1, 2, 2, 3)
NEAR_PAGE_END = (-6, -5, -4, -3, -2, -1, 0, 1)
NUM_TOKENS = (4, 4, 4, 5, 6, 8, 16)
LONGEST_PROMPT = 330
LONGEST_SEPARATE = 4 * PAGE - 1


class DemoModel:
    """The demo model's checkpoint, which keeps its tensors: for building many engines."""

    def __init__(self) -> None:
        self._checkpoint = open_checkpoint(DEMO_NAME)
        self._tokenizer = self._checkpoint.tokenizer()
        self._tensors: dict[str, Tensor] = {}
        self.name = self._checkpoint.name
        self.config = self._checkpoint.config
        self.sampling_defaults = self._checkpoint.sampling_defaults

    def tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            self._tensors[name] = self._checkpoint.tensor(name)
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._checkpoint.shape(name)

    def file(self, name: str) -> str:
        return self._checkpoint.file(name)

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def engine(self, recipe: str, **options: object) -> Engine:
        """`options` are fields of EngineConfig."""
        config = EngineConfig(model=DEMO_NAME, kv_format=recipe, **options)  # type: ignore[arg-type]
        return build_engine(config, self, self._tokenizer, lambda done, total: None)

    def memory(self, num_pages: int, recipe: str, dtype: str, max_num_seqs: int) -> int:
        """`--kv-memory` that gives just `num_pages` sealed pages beside the slots."""
        model = self.config
        pages = named_recipe(
            recipe, num_layers=model.num_layers, has_k_bias=model.has_k_bias, page_tokens=PAGE, sink_pages=1
        )
        layout = PageLayout(pages, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype=dtype)
        slots = num_slots(max_num_seqs, layout.recipe.sink_pages)
        return slots * layout.slot_bytes + (1 + num_pages) * layout.page_bytes


def mixed_requests(count: int, seed: int) -> list[Request]:
    """Prompts of 1 to `LONGEST_PROMPT` tokens, many with a stem that others have, too, most of them ending next to the
    end of a page; a few are equal. Outputs of 4 to 16 tokens."""
    rng = random.Random(seed)
    stems = [random_tokens(rng, max(STEM_PAGES) * PAGE) for _ in range(NUM_STEMS)]
    prompts: list[tuple[int, ...]] = []
    for _ in range(count):
        kind = rng.random()
        if kind < 0.05 and prompts:
            prompts.append(rng.choice(prompts))
        elif kind < 0.1:
            prompts.append(random_tokens(rng, rng.randint(LONGEST_PROMPT - 100, LONGEST_PROMPT)))
        else:
            near_end = PAGE * rng.choice((1, 1, 2)) + rng.choice(NEAR_PAGE_END)
            tail = near_end if rng.random() < 0.7 else rng.randint(1, 90)
            prompts.append(rng.choice(stems)[: rng.choice(STEM_PAGES) * PAGE] + random_tokens(rng, tail))
    return [greedy(str(index), prompt, rng.choice(NUM_TOKENS)) for index, prompt in enumerate(prompts)]


def separate_requests(count: int, seed: int, num_tokens: int) -> list[Request]:
    """Prompts of 120 to `LONGEST_SEPARATE` tokens that share nothing. Each soon needs a page more: not all find one."""
    rng = random.Random(seed)
    prompts = [random_tokens(rng, PAGE * rng.randint(2, 4) - rng.randint(1, 8)) for _ in range(count)]
    return [greedy(str(index), prompt, num_tokens) for index, prompt in enumerate(prompts)]


def random_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(100, 40000) for _ in range(count))


def salted(requests: Sequence[Request]) -> list[Request]:
    """The same, each under a salt of its own, so that none finds a page of another."""
    return [replace(request, salt=f"salt {request.id}") for request in requests]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave. `preempted`, `hit`: ids of requests that were preempted, or found cached pages. `counts`: how
    far the pool's counters moved. After each step, `used` and `held`: pages of the sealed pool that are not free, and
    that sequences hold, as shares of all; `running`: sequences that were in it or admitted to it."""

    tokens: dict[str, tuple[int, ...]]
    cancelled: set[str]
    preempted: set[str]
    hit: set[str]
    counts: Counter[str]
    used: list[float]
    held: list[float]
    running: list[int]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated ones."""
        return sum(map(len, self.tokens.values())) / self.seconds

    def summary(self) -> dict[str, Any]:
        """Numbers only."""
        return {
            "num_requests": len(self.tokens),
            "num_cancelled": len(self.cancelled),
            "num_hit_requests": len(self.hit),
            **self.counts,
            "mean_use": mean(self.used),
            "max_use": max(self.used),
            "mean_held": mean(self.held),
            "mean_running": mean(self.running),
            "max_running": max(self.running),
            "num_steps": len(self.used),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }


def play(core: EngineCore, requests: Sequence[Request], *, num_live: int, cancel_share: float = 0.0) -> Outcome:
    """Run requests to their ends, at most `num_live` of them waiting or running at a time, and check the pool after
    every step. `cancel_share` of them are cancelled, whichever and whenever it hits."""
    rng = random.Random(0)
    arriving = list(reversed(requests))
    recorders: dict[str, Recorder] = {}
    live: dict[str, Recorder] = {}
    cancelled: set[str] = set()
    preempted: set[str] = set()
    used, held, running = [], [], []
    counts, start = _counts(core), time.perf_counter()
    while arriving or live:
        while arriving and len(live) < num_live:
            request = arriving.pop()
            recorders[request.id] = live[request.id] = Recorder()
            core.add([request], [live[request.id]])
        before = core.scheduler.running
        core.step()
        core.scheduler.check()
        live = _without_ended(live)
        preempted |= {s.request.id for s in before if not s.is_running and s.request.id in live}
        while live and len(cancelled) < cancel_share * (len(recorders) - len(live)):
            victim = rng.choice(list(live))
            core.cancel(victim)
            cancelled.add(victim)
            del live[victim]
        sealed = core.scheduler.pools.cache.sealed
        used.append(1 - sealed.num_free / sealed.num_total)
        held.append(sealed.num_held / sealed.num_total)
        running.append(len({*before, *core.scheduler.running}))
    seconds = time.perf_counter() - start
    ends = {id: _finished(recorder) for id, recorder in recorders.items()}
    assert cancelled == {id for id, end in ends.items() if end.reason is FinishReason.CANCELLED}
    return Outcome(
        tokens={id: recorder.token_ids for id, recorder in recorders.items()},
        cancelled=cancelled,
        preempted=preempted,
        hit={id for id, end in ends.items() if end.usage.num_cached_tokens},
        counts=Counter({name: value - counts[name] for name, value in _counts(core).items()}),
        used=used,
        held=held,
        running=running,
        seconds=seconds,
    )


def _without_ended(live: dict[str, Recorder]) -> dict[str, Recorder]:
    return {
        id: recorder for id, recorder in live.items() if not recorder.events or isinstance(recorder.events[-1], Delta)
    }


def _finished(recorder: Recorder) -> Finished:
    assert isinstance(recorder.terminal, Finished), recorder.terminal
    return recorder.terminal


def _counts(core: EngineCore) -> Counter[str]:
    stats = core.scheduler.pools.cache.stats
    return Counter(stats.counters() | {"num_reclaimed_pages": sum(stats.reclaimed.values())})
