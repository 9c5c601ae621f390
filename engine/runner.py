"""From a plan to tensors, through the model, to sampled tokens."""

import torch

from engine.model.llama import Llama
from engine.model.rows import Rows
from engine.sampler import sample
from engine.scheduler import StepPlan
from kernels.backend import AttentionBackend


class Runner:
    """Runs steps. Holds the model and the backend, no state of requests."""

    def __init__(self, model: Llama, backend: AttentionBackend, rows: Rows):
        self._model = model
        self.backend = backend
        self._rows = rows

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[int | None]:
        """The next token of each of `plan.sampled`, as `sample` gives it. Also seals what `plan` says."""
        token_ids: list[int] = []
        positions: list[int] = []
        sampled_rows: list[int] = []
        for item in plan.decode:
            sampled_rows.append(len(token_ids))
            token_ids.append(item.sequence.tokens[item.row.position])
            positions.append(item.row.position)
        for scheduled in plan.chunks:
            start, end = scheduled.chunk.start, scheduled.chunk.start + scheduled.chunk.length
            token_ids += scheduled.sequence.tokens[start:end]
            positions += range(start, end)
            if scheduled.is_last:
                sampled_rows.append(len(token_ids) - 1)
        padding = [0] * (self._rows.padded(len(token_ids)) - len(token_ids))
        device = self._model.device
        ids, places = (torch.tensor(values + padding, device=device) for values in (token_ids, positions))
        tables = self.backend.prepare(plan.attention)

        def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.backend.append(layer, k, v, tables)
            return self.backend.attend(layer, q, k, v, tables)

        hidden = self._model.forward(ids, places, attention)
        seals = [(item.row.pages[-1].id, item.seal_to.id) for item in plan.decode if item.seal_to is not None]
        if seals:
            slots, pages = zip(*seals, strict=True)
            self.backend.seal(list(slots), list(pages))
        if not sampled_rows:
            return []
        logits = self._model.logits(hidden[torch.tensor(sampled_rows, device=device)])
        sequences = plan.sampled
        return sample(logits, [s.request.sampling for s in sequences], [len(s.tokens) for s in sequences])
