"""Whether the pool changes a token: hits, preemption, cancelled neighbours, host memory, disk, a pool too small."""

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engine.core import EngineCore
from engine.kv.sizing import num_sequence_pages
from engine.request import Request
from tests.bench.pool_load import (
    EXACT,
    LONGEST_PROMPT,
    LONGEST_SEPARATE,
    NUM_TOKENS,
    PAGE,
    DemoModel,
    Outcome,
    mixed_requests,
    play,
    salted,
    separate_requests,
)
from tests.helpers import pool_of

MAX_MODEL_LEN = LONGEST_PROMPT + max(NUM_TOKENS)
SEPARATE_TOKENS = 24
SEPARATE_LEN = LONGEST_SEPARATE + SEPARATE_TOKENS
CANCEL_SHARE = 0.2
BF16_RECIPES = ("int4", "native")


@dataclass(frozen=True, slots=True)
class Load:
    """How much to run. `num_pages`: sealed pages of the small pool, fewer than `num_seqs` sequences fill.
    `num_separate`: requests that share nothing, for the quarter pool and for texts in 16 bit."""

    num_requests: int = 500
    num_alone: int = 40
    num_again: int = 100
    num_seqs: int = 32
    num_pages: int = 22
    num_separate: int = 32

    @property
    def num_live(self) -> int:
        return self.num_seqs + self.num_seqs // 2


FULL_LOAD = Load()
SMALL_LOAD = Load(num_requests=16, num_alone=1, num_again=12, num_seqs=6, num_pages=5, num_separate=6)


@dataclass(frozen=True, slots=True)
class Equality:
    """A way to serve requests, how many gave the tokens of the reference (of the cancelled: a prefix), and how much of
    what it is about happened. `num_restored_pages` came from host memory, where pages from disk lie first if the pool
    is full; `num_loaded_pages` from disk."""

    recipe: str
    name: str
    num_equal: int
    outcome: Outcome
    num_happened: int
    num_loaded_pages: int = 0

    @property
    def is_exact(self) -> bool:
        """And it proves something."""
        return self.num_equal == len(self.outcome.tokens) and self.num_happened > 0


def equalities(model: DemoModel, recipe: str, load: Load) -> Iterator[Equality]:
    """Each request against itself in a run where nothing is shared and no page is short, which a sample of requests
    that run alone confirms."""
    requests = mixed_requests(load.num_requests, seed=0)
    small: dict[str, object] = {
        "kv_memory": model.memory(load.num_pages, recipe, "float32", load.num_seqs),
        "poison": True,
    }
    plain = _core(model, recipe, load)
    reference = play(plain, salted(requests), num_live=load.num_live)
    assert not reference.hit and not reference.preempted
    expected = reference.tokens
    assert len(set(expected.values())) > 0.9 * len({request.prompt for request in requests}), "texts are too much alike"

    sample = random.Random(0).sample(requests, load.num_alone)
    alone = play(plain, [replace(request, salt=f"alone {request.id}") for request in sample], num_live=1)
    yield _compare(recipe, "alone", expected, alone, len(alone.tokens))

    core = _core(model, recipe, load, **small)
    pressed = play(core, requests, num_live=load.num_live, cancel_share=CANCEL_SHARE)
    happened = min(len(pressed.preempted), len(pressed.hit), len(pressed.cancelled))
    yield _compare(recipe, "small pool, 20 % cancelled", expected, pressed, happened)
    again = play(core, requests, num_live=load.num_live)
    yield _compare(recipe, "the same engine again", expected, again, len(again.hit))

    few = requests[: load.num_again]
    with tempfile.TemporaryDirectory() as folder:
        options = small | {"host_memory": 2**30, "cache_dir": folder}
        engine = model.engine(recipe, **_options(load), **options)
        first = play(engine.core, few, num_live=load.num_live)
        yield _compare(recipe, "with host memory", expected, first, first.counts["num_saved_pages"])
        restored = play(engine.core, few, num_live=load.num_live)
        yield _compare(recipe, "again, from host memory", expected, restored, restored.counts["num_restored_pages"])
        engine.start()
        engine.stop()  # saves
        core = _core(model, recipe, load, **options)
        num_loaded = sum(1 for _ in core.scheduler.pools.cache.tree.nodes())
        loaded = play(core, few, num_live=load.num_live)
        happened = min(num_loaded, loaded.counts["num_restored_pages"], len(loaded.hit))
        yield _compare(recipe, "after a restart, from disk", expected, loaded, happened, num_loaded)


def _core(model: DemoModel, recipe: str, load: Load, **options: object) -> EngineCore:
    return model.engine(recipe, **_options(load), **options).core


def _options(load: Load) -> dict[str, object]:
    return {**EXACT, "max_num_seqs": load.num_seqs, "max_model_len": MAX_MODEL_LEN}


def _compare(
    recipe: str,
    name: str,
    expected: dict[str, tuple[int, ...]],
    outcome: Outcome,
    num_happened: int,
    num_loaded_pages: int = 0,
) -> Equality:
    num_equal = 0
    for id, tokens in outcome.tokens.items():
        length = len(tokens) if id in outcome.cancelled else len(expected[id])
        num_equal += tokens == expected[id][:length]
    return Equality(recipe, name, num_equal, outcome, num_happened, num_loaded_pages)


@dataclass(frozen=True, slots=True)
class QuarterPool:
    """The same requests with a pool for all of them and with one for a quarter."""

    recipe: str
    num_pages: int
    num_equal: int
    whole: Outcome
    quarter: Outcome

    @property
    def is_exact(self) -> bool:
        return self.num_equal == len(self.whole.tokens) and len(self.quarter.preempted) > 0


def quarter_pool(model: DemoModel, recipe: str, load: Load) -> QuarterPool:
    requests = separate_requests(load.num_separate, 1, SEPARATE_TOKENS)
    num_pages = pages_of(requests)
    outcomes = []
    for share in (1, 4):
        memory = model.memory(num_pages // share, recipe, "float32", load.num_separate)
        options = {"max_num_seqs": load.num_separate, "max_model_len": SEPARATE_LEN, "kv_memory": memory}
        core = model.engine(recipe, **EXACT, **options).core
        outcomes.append(play(core, requests, num_live=len(requests)))
    whole, quarter = outcomes
    num_equal = sum(whole.tokens[id] == tokens for id, tokens in quarter.tokens.items())
    return QuarterPool(recipe, num_pages, num_equal, whole, quarter)


def pages_of(requests: Sequence[Request]) -> int:
    """Sealed pages that all of them need at once when nothing is shared."""
    return sum(num_sequence_pages(len(r.prompt) + r.sampling.max_tokens, PAGE, 1) for r in requests)


@dataclass(frozen=True, slots=True)
class EqualTexts:
    """Of greedy texts in 16 bit without `--batch-invariant`: the share that equals the text of a miss. `preempted` and
    `others` are of one run in a pool that is too small."""

    recipe: str
    num_texts: int
    num_hit: int
    hit: float
    num_preempted: int
    preempted: float
    others: float


def equal_texts(model: DemoModel, recipe: str, load: Load) -> EqualTexts:
    requests = separate_requests(2 * load.num_separate, 2, SEPARATE_TOKENS)
    options = {"max_num_seqs": load.num_seqs, "max_model_len": SEPARATE_LEN}
    core = model.engine(recipe, **options).core
    miss = play(core, requests, num_live=load.num_live)
    hit = play(core, requests, num_live=load.num_live)
    assert not miss.hit and not miss.preempted
    dtype = pool_of(core).layout.dtype
    memory = model.memory(pages_of(requests) // 4, recipe, dtype, load.num_seqs)
    pressed = play(model.engine(recipe, **options, kv_memory=memory).core, requests, num_live=load.num_live)

    def share(outcome: Outcome, ids: set[str]) -> float:
        return sum(outcome.tokens[id] == miss.tokens[id] for id in ids) / max(1, len(ids))

    everyone = set(miss.tokens)
    return EqualTexts(
        recipe=recipe,
        num_texts=len(requests),
        num_hit=len(hit.hit),
        hit=share(hit, hit.hit),
        num_preempted=len(pressed.preempted),
        preempted=share(pressed, pressed.preempted),
        others=share(pressed, everyone - pressed.preempted),
    )
