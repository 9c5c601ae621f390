"""From a plan to tensors, through the model, to sampled tokens."""

from dataclasses import dataclass

import torch

from engine.kv.host import PageMover
from engine.model.llama import Llama
from engine.model.rows import Rows
from engine.plan import StepPlan
from engine.sampler import sample
from kernels.backend import AttentionBackend


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`tokens`: the next token of each of `plan.sampled`, None where the logits are not finite. `mass`: see
    `AttentionBackend.mass`."""

    tokens: list[int | None]
    mass: list[list[float]]


class Runner:
    """Runs steps. Holds the model, the backend and the memory that pages move to, no state of requests.

    `is_strict`: a number that is not finite anywhere ends the engine (`--poison`)."""

    def __init__(
        self, model: Llama, backend: AttentionBackend, mover: PageMover, rows: Rows, *, is_strict: bool = False
    ):
        self._model = model
        self.backend = backend
        self.mover = mover
        self._rows = rows
        self._is_strict = is_strict

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Move pages, compute the step, seal and copy what `plan` says, and sample."""
        self.mover.run(plan.moves)
        if plan.is_empty:
            return StepOutput([], [])
        token_ids: list[int] = []
        positions: list[int] = []
        sampled_rows: list[int] = []
        for item in plan.decode:
            sampled_rows += [len(token_ids)] * (1 + len(item.forks))
            token_ids.append(item.sequence.tokens[item.row.position])
            positions.append(item.row.position)
        for scheduled in plan.chunks:
            start, end = scheduled.chunk.start, scheduled.chunk.start + scheduled.chunk.length
            token_ids += scheduled.sequence.tokens[start:end]
            positions += range(start, end)
            if scheduled.is_last:
                sampled_rows += [len(token_ids) - 1] * (1 + len(scheduled.forks))
        padding = [0] * (self._rows.padded(len(token_ids)) - len(token_ids))
        device = self._model.device
        ids, places = (torch.tensor(values + padding, device=device) for values in (token_ids, positions))
        tables = self.backend.prepare(plan.attention)

        def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.backend.append(layer, k, v, tables)
            return self.backend.attend(layer, q, k, v, tables)

        hidden = self._model.forward(ids, places, attention)
        if self._is_strict and not hidden[: len(token_ids)].isfinite().all():
            raise RuntimeError("a hidden state is not finite: a page was read that nobody had written")
        if seals := plan.seals:
            slots, pages = zip(*seals, strict=True)
            self.backend.seal(list(slots), list(pages))
        if copies := plan.copies:
            sources, targets = zip(*copies, strict=True)
            self.backend.copy(list(sources), list(targets))
        return StepOutput(self._sample(plan, hidden, sampled_rows), self.backend.mass(tables))

    def _sample(self, plan: StepPlan, hidden: torch.Tensor, rows: list[int]) -> list[int | None]:
        if not rows:
            return []
        logits = self._model.logits(hidden[torch.tensor(rows, device=self._model.device)])
        sequences = plan.sampled
        return sample(logits, [s.request.sampling for s in sequences], [len(s.tokens) for s in sequences])
