"""From a plan to tensors, through the model, to sampled tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.kv.host import PageMover
from engine.model.llama import Llama
from engine.model.rows import Rows
from engine.plan import StepPlan
from engine.sampler import sample
from kernels.backend import AttentionBackend
from kernels.format.recipe import Recipe, SinkRule
from kernels.format.step import AttentionStep
from kernels.transfer import to_device

HiddenObserver = Callable[[StepPlan, Tensor], None]
"""Called with a step and the fp32 hidden states [rows, hidden] of its rows, before the last norm."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`tokens`: the next token of each of `plan.sampled`, None where the logits are not finite. `mass`: see
    `AttentionBackend.mass`. `marks`: see `StepPlan.marked_places`; empty where the recipe has no sink rule."""

    tokens: list[int | None]
    mass: list[list[float]]
    marks: list[list[int]]


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
            return StepOutput(self._sample(plan, logits[self._index(sampled_rows)]), [[] for _ in plan.decode], [])
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
        sampled: list[int | None] = []
        if sampled_rows:
            sampled = self._sample(plan, self.model.logits(hidden[self._index(sampled_rows)]))
        return StepOutput(sampled, self.backend.mass(tables), marks)

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

    @staticmethod
    def _sample(plan: StepPlan, logits: torch.Tensor) -> list[int | None]:
        sequences = plan.sampled
        return sample(logits, [s.request.sampling for s in sequences], [len(s.tokens) for s in sequences])


def find_sinks(hidden: Tensor, rule: SinkRule) -> Tensor:
    """bool [rows]: which of the tokens with these hidden states [rows, hidden] `rule` marks."""
    return (hidden[:, list(rule.channels)].abs() > rule.threshold).any(1)
