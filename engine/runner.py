"""From a plan to tensors, through the model, to sampled tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.kv.host import PageMover
from engine.logprobs import TILE, PromptRows, token_logprobs
from engine.masks import fill_masks
from engine.model.llama import Llama
from engine.model.rows import Rows
from engine.penalties import adjust
from engine.plan import StepPlan
from engine.request import TokenLogprob
from engine.sampler import sample
from engine.sequence import Sequence
from kernels.backend import AttentionBackend
from kernels.format.recipe import Recipe, SinkRule
from kernels.format.step import AttentionStep
from kernels.transfer import to_device

HiddenObserver = Callable[[StepPlan, Tensor], None]
"""Called with a step and the fp32 hidden states [rows, hidden] of its rows, before the last norm."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`tokens`: the next token of each of `plan.sampled`, None where the logits are not finite. `mass`: see
    `AttentionBackend.mass`. `marks`: see `StepPlan.marked_places`; empty where the recipe has no sink rule.

    `logprobs`: of the next tokens, where asked for. `refusals`: why a sequence has no token, though its logits may be
    sound. `scores`: what the step adds to `Sequence.scores`."""

    tokens: list[int | None]
    mass: list[list[float]]
    marks: list[list[int]]
    logprobs: dict[Sequence, TokenLogprob] = field(default_factory=dict)
    refusals: dict[Sequence, str] = field(default_factory=dict)
    scores: dict[Sequence, list[TokenLogprob | None]] = field(default_factory=dict)


class Replay(Protocol):
    """Runs steps in fewer launches than their kernels have (engine/graphs.py)."""

    def can_run(self, step: AttentionStep) -> bool: ...

    def logits(self, token_ids: list[int], positions: list[int], step: AttentionStep) -> Tensor:
        """fp32 [rows, vocab] of the rows of `step`, to be used before the next call."""


class Runner:
    """Runs steps of pages of `recipe`. Holds the model, the backend and the memory that pages move to, no state of
    requests.

    `is_strict`: a number that is not finite anywhere ends the engine (`--poison`). `observer` sees the hidden states
    of every step while it is set. `replay`, if any, runs the steps that it can."""

    def __init__(
        self,
        model: Llama,
        backend: AttentionBackend,
        recipe: Recipe,
        mover: PageMover,
        rows: Rows,
        *,
        is_strict: bool = False,
        replay: Replay | None = None,
    ):
        self.model = model
        self.observer: HiddenObserver | None = None
        self.backend = backend
        self.mover = mover
        self._recipe = recipe
        self._rows = rows
        self._is_strict = is_strict
        self.replay = replay

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Move pages, compute the step, seal and copy what `plan` says, and sample."""
        self.mover.run(plan.moves)
        if plan.is_empty:
            return StepOutput([], [], [])
        token_ids: list[int] = []
        sampled_rows: list[int] = []
        for item in plan.decode:
            sampled_rows += [len(token_ids)] * (1 + len(item.forks))
            token_ids.append(item.sequence.tokens[item.row.position])
        for scheduled in plan.chunks:
            start, end = scheduled.chunk.start, scheduled.chunk.start + scheduled.chunk.length
            token_ids += scheduled.sequence.tokens[start:end]
            if scheduled.is_last:
                sampled_rows += [len(token_ids) - 1] * (1 + len(scheduled.forks))
        step, recipe = plan.attention, self._recipe
        positions = step.cache_positions(recipe.page_tokens) if recipe.renumbers else step.positions
        if self.replay is not None and self.observer is None and self.replay.can_run(step):
            logits = self.replay.logits(token_ids, positions, step)
            self._finish(plan, [])
            return replace(self._sample(plan, logits[self._index(sampled_rows)]), mass=[[] for _ in plan.decode])
        padding = [0] * (self._rows.padded(len(token_ids)) - len(token_ids))
        ids, places = to_device([token_ids + padding, positions + padding], torch.int64, self.model.device)
        tables = self.backend.prepare(step)
        marked = torch.zeros(0, dtype=torch.bool)

        def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.backend.append(layer, k, v, tables)
            return self.backend.attend(layer, q, k, v, tables)

        def after_layer(layer: int, hidden: torch.Tensor) -> None:
            nonlocal marked
            if recipe.sink_rule is not None and layer == recipe.sink_rule.layer:
                marked = find_sinks(hidden, recipe.sink_rule)
                self.backend.mark(tables, marked)

        hidden = self.model.forward(ids, places, attention, after_layer)
        if self._is_strict and not hidden[: len(token_ids)].isfinite().all():
            raise RuntimeError("a hidden state is not finite: a page was read that nobody had written")
        if self.observer is not None:
            self.observer(plan, hidden[: len(token_ids)])
        marks: list[list[int]] = []
        if recipe.sink_rule is not None:
            marks = plan.marked_places(set(marked.nonzero().flatten().tolist()), recipe.page_tokens)
        self._finish(plan, marks)
        output = StepOutput([], [], [])
        if sampled_rows:
            output = self._sample(plan, self.model.logits(hidden[self._index(sampled_rows)]))
        return replace(output, mass=self.backend.mass(tables), marks=marks, scores=self._score(plan, hidden))

    def _finish(self, plan: StepPlan, marks: list[list[int]]) -> None:
        """Seal the pages that are full now, and copy the slots of forks."""
        if seals := plan.seals:
            slots, pages = zip(*seals, strict=True)
            self.backend.seal(list(slots), list(pages), plan.seal_marks(marks) if marks else ())
        if copies := plan.copies:
            sources, targets = zip(*copies, strict=True)
            self.backend.copy(list(sources), list(targets))

    def _index(self, rows: list[int]) -> Tensor:
        return to_device(rows, torch.int64, self.model.device)

    def _sample(self, plan: StepPlan, logits: Tensor) -> StepOutput:
        """Masks are filled while the device computes the logits; what comes behind waits for it."""
        sequences = plan.sampled
        masks = fill_masks(sequences, logits.shape[-1])
        params = [sequence.request.sampling for sequence in sequences]
        places = [len(sequence.tokens) for sequence in sequences]
        tokens = sample(adjust(logits, sequences, masks), params, places)
        asked: dict[int, tuple[int, int]] = {}
        for row, (token, param) in enumerate(zip(tokens, params, strict=True)):
            if param.num_logprobs is not None and token is not None:
                asked[row] = (token, param.num_logprobs)
        logprobs: dict[Sequence, TokenLogprob] = {}
        if asked:
            chosen, counts = zip(*asked.values(), strict=True)
            found = token_logprobs(logits[self._index(list(asked))], chosen, max(counts))
            for row, count, one in zip(asked, counts, found, strict=True):
                assert one is not None  # or there were no token
                logprobs[sequences[row]] = one.limited(count)
        return StepOutput(tokens, [], [], logprobs, masks.refusals)

    def _score(self, plan: StepPlan, hidden: Tensor) -> dict[Sequence, list[TokenLogprob | None]]:
        """In tiles, so that logits of a whole prompt are never there at once."""
        asked = PromptRows(plan)
        scores: dict[Sequence, list[TokenLogprob | None]] = {}
        for first in range(0, len(asked.rows), TILE):
            tile = slice(first, first + TILE)
            logits = self.model.logits(hidden[self._index(asked.rows[tile])])
            found = token_logprobs(logits, asked.tokens[tile], asked.num_top)
            for sequence, one in zip(asked.sequences[tile], found, strict=True):
                scores.setdefault(sequence, []).append(one)
        return scores


def find_sinks(hidden: Tensor, rule: SinkRule) -> Tensor:
    """bool [rows]: which of the tokens with these hidden states [rows, hidden] `rule` marks."""
    return (hidden[:, list(rule.channels)].abs() > rule.threshold).any(1)
