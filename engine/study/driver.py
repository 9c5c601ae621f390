"""One request at a time through an engine without its thread, with its hidden states and its speed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.engine import Engine
from engine.errors import StartupError
from engine.plan import StepPlan
from engine.request import Delta, Event, Failed, Request, SamplingParams

Advance = Callable[[int], None]
"""Called with the number of tokens that were computed since the last call."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """`hidden`: fp32 [tokens, hidden] on the CPU. `seconds` of the prefill, without what is done with them."""

    hidden: Tensor
    seconds: float


@dataclass(frozen=True, slots=True)
class Decode:
    """Greedy tokens. `seconds` from the first of them to the last."""

    token_ids: tuple[int, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return (len(self.token_ids) - 1) / self.seconds


class _Collector:
    """Hidden states of one sequence by position, from `first` on."""

    def __init__(self, first: int, end: int, width: int):
        self._first = first
        self._hidden = torch.empty(end - first, width)
        self._num_missing = end - first

    def __call__(self, plan: StepPlan, hidden: Tensor) -> None:
        places = [(item.row.position, 1) for item in plan.decode]
        places += [(item.chunk.start, item.chunk.length) for item in plan.chunks]
        row = 0
        for start, length in places:
            skipped = min(length, max(0, self._first - start))
            begin, count = start + skipped - self._first, length - skipped
            self._hidden[begin : begin + count] = hidden[row + skipped : row + length]
            self._num_missing -= count
            row += length

    def take(self) -> Tensor:
        if self._num_missing:
            raise RuntimeError(f"{self._num_missing} hidden states were not computed: the prefix cache had their pages")
        return self._hidden


@dataclass(slots=True)
class _Listener:
    """Tokens of a request and when they came; raises where it failed."""

    name: str
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Failed):
            raise StartupError(f"{self.name}: {event.error.message}")
        if isinstance(event, Delta):
            self.token_ids += event.token_ids
            self.times.append(time.perf_counter())


class Driver:
    """Raises StartupError, naming the format, where the model gives no finite numbers. `salt` decides which requests
    may find each other's pages."""

    def __init__(self, engine: Engine, name: str, advance: Advance):
        self._core = engine.core
        self._name = name
        self._advance = advance
        self._num_requests = 0

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [n, vocab] of hidden states [n, hidden]; both on the CPU or the model's device."""
        model = self._core.runner.model
        return model.logits(hidden.to(model.device))

    def prefill(self, tokens: Sequence[int], salt: str, first: int = 0) -> Prefill:
        """Compute a prompt in chunks, as in serving, and keep the hidden states from position `first` on."""
        runner = self._core.runner
        collector = _Collector(first, len(tokens), runner.model.config.hidden_size)
        runner.observer = collector
        try:
            begin = time.perf_counter()
            listener = self._run(tokens, 1, salt)
        finally:
            runner.observer = None
        return Prefill(collector.take(), listener.times[0] - begin)

    def generate(self, prompt: Sequence[int], num_tokens: int, salt: str) -> Decode:
        """Continue a prompt greedily, past ends of text."""
        listener = self._run(prompt, num_tokens, salt)
        return Decode(tuple(listener.token_ids), listener.times[-1] - listener.times[0])

    def _run(self, prompt: Sequence[int], num_tokens: int, salt: str) -> _Listener:
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        request = Request(id=str(self._num_requests), prompt=tuple(prompt), sampling=sampling, salt=salt)
        listener = _Listener(self._name)
        self._core.add([request], [listener])
        num_left = len(prompt)
        while not self._core.is_idle:
            self._core.step()
            sequences = self._core.scheduler.running
            left = max((s.num_prompt_tokens - s.num_computed_tokens for s in sequences), default=0)
            self._advance(num_left - max(0, left))
            num_left = max(0, left)
        return listener
