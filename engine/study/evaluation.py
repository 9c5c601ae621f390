"""KV formats measured on a model and a text, through the engine that serves: `quire eval`."""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import StartupError
from engine.load import build_engine, resolve_layout
from engine.model.checkpoint import Checkpoint
from engine.study.driver import Driver
from engine.study.perplexity import WindowScore, compare
from engine.study.probes import Case, Outcome
from engine.study.results import ResultsFolder
from engine.study.windows import Tokens
from engine.tokenizer import Tokenizer
from kernels.format.layout import PageLayout
from kernels.format.recipe import Recipe

REFERENCE = "native"
NUM_DECODE_TOKENS = 64
LARGEST_NATS = 200.0  # a token; e to the power of it is still a number

Listen = Callable[[str, int], None]
"""Called with what is being done and the number of prompt tokens computed since the last call."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A KV format under study: the engine to measure, and what to call it. `recipe` takes the place of the format that
    `config` names."""

    name: str
    config: EngineConfig
    recipe: Recipe | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """The model under study."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer

    def layout(self, config: EngineConfig, recipe: Recipe | None = None) -> PageLayout:
        return resolve_layout(config, self.checkpoint, recipe)

    def build(self, config: EngineConfig, recipe: Recipe | None = None) -> Engine:
        return build_engine(config, self.checkpoint, self.tokenizer, lambda done, total: None, recipe)


@dataclass(frozen=True, slots=True)
class FormatResult:
    """What was measured of a format so far. `outcomes` go by the names of probe cases."""

    name: str
    recipe_id: str
    windows: tuple[WindowScore, ...] = ()
    decode_tokens_per_second: float | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)


class _Answers:
    """Answers probes through a driver."""

    def __init__(self, driver: Driver, tokenizer: Tokenizer, salt: str):
        self._driver = driver
        self._tokenizer = tokenizer
        self._salt = salt

    def answer(self, prompt: Sequence[int], num_tokens: int) -> str:
        return self._tokenizer.decode(self._driver.generate(prompt, num_tokens, self._salt).token_ids)

    def continue_as(self, prompt: Sequence[int], expected: Sequence[int]) -> tuple[bool, float]:
        """Computed in one prefill: as long as the continuation is the expected one, each token sees what it would see
        if it had been generated."""
        first = len(prompt) - 1
        prefill = self._driver.prefill([*prompt, *expected[:-1]], self._salt, first)
        targets = torch.tensor(expected)
        (score, _) = compare(self._driver.logits, prefill.hidden, None, targets)
        found = self._driver.logits(prefill.hidden).argmax(-1).cpu()
        return bool((found == targets).all()), score.log_likelihood


class Evaluation:
    """Measures contenders one after the other, the reference first; each takes up what `folder` has of it."""

    def __init__(
        self,
        subject: Subject,
        windows: Sequence[Tokens],
        cases: Sequence[Case],
        folder: ResultsFolder,
        listen: Listen,
    ):
        self._subject = subject
        self._windows = windows
        self._cases = cases
        self._folder = folder
        self._listen = listen

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that a contender computes in all."""
        decode = len(self._decode_prompt)
        return self._num_window_tokens(len(self._windows)) + decode + _num_case_tokens(self._cases)

    def measure(self, contender: Contender) -> FormatResult:
        """Raises StartupError where the format gives no finite numbers, or the folder has another recipe's results."""
        result = self._load(contender)
        num_done = len(result.windows)
        cases = [case for case in self._cases if case.name not in result.outcomes]
        has_speed = result.decode_tokens_per_second is not None
        left = self.num_tokens - self._num_window_tokens(num_done) - len(self._decode_prompt) * has_speed
        self._listen(contender.name, self.num_tokens - left + _num_case_tokens(self._cases) - _num_case_tokens(cases))
        if num_done == len(self._windows) and has_speed and not cases:
            return result
        driver = self._driver(contender)
        for index in range(num_done, len(self._windows)):
            result = replace(result, windows=(*result.windows, self._score(driver, contender.name, index)))
            self._folder.save(contender.name, asdict(result))
        if not has_speed:
            decode = driver.generate(self._decode_prompt, self._num_decode_tokens, _salt(len(self._windows) - 1))
            result = replace(result, decode_tokens_per_second=decode.tokens_per_second)
            self._folder.save(contender.name, asdict(result))
        for case in cases:
            outcome = case.ask(_Answers(driver, self._subject.tokenizer, case.probe))
            result = replace(result, outcomes={**result.outcomes, case.name: outcome})
            self._folder.save(contender.name, asdict(result))
        return result

    def _load(self, contender: Contender) -> FormatResult:
        recipe_id = self._subject.layout(contender.config, contender.recipe).recipe.id
        result = self._folder.load(contender.name, FormatResult)
        if result is None:
            return FormatResult(contender.name, recipe_id)
        if result.recipe_id != recipe_id:
            raise StartupError(f"the results folder has {contender.name} of another recipe; name another folder")
        if result.name != contender.name or not _is_possible(result, self._windows):
            raise StartupError(f"the results folder has numbers of {contender.name} that cannot be; start again")
        return result

    def _driver(self, contender: Contender) -> Driver:
        gc.collect()  # the engine before it is a graph with cycles, and this one needs its room
        engine = self._subject.build(contender.config, contender.recipe)
        return Driver(engine, contender.name, lambda count: self._listen(contender.name, count))

    def _score(self, driver: Driver, name: str, index: int) -> WindowScore:
        """The last token of a window is only predicted."""
        *tokens, last = self._windows[index]
        prefill = driver.prefill(tokens, salt=_salt(index))
        is_reference = name == REFERENCE
        reference = None if is_reference else self._folder.load_reference(index, prefill.hidden.shape)
        targets = torch.from_numpy(np.array([*tokens[1:], last]))
        try:
            whole, late = compare(driver.logits, prefill.hidden, reference, targets)
        except StartupError as error:
            raise StartupError(f"--kv-format {name}, window {index}: {error}") from error
        if is_reference:
            self._folder.save_reference(index, prefill.hidden)
        return WindowScore(whole, late, len(targets), prefill.seconds)

    @property
    def _num_decode_tokens(self) -> int:
        return min(NUM_DECODE_TOKENS, len(self._windows[-1]) // 2)

    @property
    def _decode_prompt(self) -> Tokens:
        """What decode is measured behind: the last window, whose pages are found in the cache, but for its end."""
        return self._windows[-1][: -self._num_decode_tokens]

    def _num_window_tokens(self, count: int) -> int:
        return sum(len(window) - 1 for window in self._windows[:count])


def _is_possible(result: FormatResult, windows: Sequence[Tokens]) -> bool:
    """Whether this can have been measured: a file that was damaged or edited may say anything."""
    speed = result.decode_tokens_per_second
    parts = [part for score in result.windows for part in (score.all, score.late)]
    return (
        len(result.windows) <= len(windows)
        and all(score.num_tokens == len(window) - 1 for score, window in zip(result.windows, windows, strict=False))
        and all(0 < score.prefill_seconds < math.inf for score in result.windows)
        and (speed is None or 0 < speed < math.inf)
        and all(
            -LARGEST_NATS < part.log_likelihood <= 0 and abs(part.kl) < LARGEST_NATS and 0 <= part.agreement <= 1
            for part in parts
        )
    )


def _num_case_tokens(cases: Sequence[Case]) -> int:
    return sum(case.num_prompt_tokens for case in cases)


def _salt(index: int) -> str:
    return f"window {index}"
