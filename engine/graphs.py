"""Decode steps as graphs: one launch for all kernels of a step, recorded for each size on a ladder of powers of two."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.llama import Llama
from kernels.format.step import AttentionStep
from kernels.transfer import to_device
from kernels.triton.backend import TritonBackend
from kernels.triton.tables import StepTables

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Runs a function on the device and records what it does there. Returns what does that again, and the result, which is
overwritten each time."""


def cuda_recorder() -> Record:
    """Records CUDA graphs that share their memory, since they run one after the other."""
    pool = torch.cuda.graph_pool_handle()

    def record(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()  # compiles kernels and lets libraries allocate, which may not be recorded
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = function()
        return graph.replay, result

    return record


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The inputs that a graph reads, int64 [2, rows] token ids and positions and the tables, and its logits."""

    rows: Tensor
    tables: StepTables
    replay: Callable[[], None]
    logits: Tensor


class DecodeGraphs:
    """Logits of decode steps. A size is recorded when it first occurs, which takes a moment."""

    def __init__(self, model: Llama, backend: TritonBackend, record: Record):
        self._model = model
        self._backend = backend
        self._record = record
        self._by_size: dict[tuple[int, int, int], _Recorded] = {}

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Rows, splits and pages of what was recorded."""
        return list(self._by_size)

    def can_run(self, step: AttentionStep) -> bool:
        return step.can_be_replayed and self._backend.can_pad

    def logits(self, token_ids: list[int], positions: list[int], step: AttentionStep) -> Tensor:
        """fp32 [rows, vocab], to be used before the next call."""
        tables = self._backend.prepare_decode(step)
        padding = [0] * (tables.num_rows - len(token_ids))
        rows = to_device([token_ids + padding, positions + padding], torch.int64, self._model.device)
        recorded = self._by_size.get(tables.size)
        if recorded is None:
            recorded = self._by_size[tables.size] = self._recorded(rows, tables)
        recorded.rows.copy_(rows)
        recorded.tables.overwrite(tables)
        recorded.replay()
        return recorded.logits[: len(token_ids)]

    def _recorded(self, rows: Tensor, tables: StepTables) -> _Recorded:
        model, backend = self._model, self._backend

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            backend.append(layer, k, v, tables)
            return backend.attend(layer, q, k, v, tables)

        replay, logits = self._record(lambda: model.logits(model.forward(rows[0], rows[1], attention)))
        return _Recorded(rows, tables, replay, logits)
