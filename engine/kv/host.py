"""Host memory for pages that left the pool, and the moves between both."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.errors import StartupError
from engine.kv.moves import Move, Poison, Restore, Save
from kernels.backend import PoolTensors

BLOCK_BYTES = 2**30  # PyTorch rounds pinned blocks up to a power of two, so one large block could waste half
NAN_BYTE = 0xFF  # repeated, a NaN in fp16, bf16 and fp32


class HostMemory:
    """Records 1 to `num_records`, of `page_bytes` bytes, pinned where the pool is on CUDA. Which of them are free an
    `Allocator` says elsewhere; record 0 would be its null page."""

    def __init__(self, num_records: int, page_bytes: int, device: torch.device):
        """`device` is the pool's. Raises StartupError where the host cannot give that much."""
        is_pinned = device.type == "cuda"
        self._page_bytes = page_bytes
        self._block_records = max(1, BLOCK_BYTES // page_bytes) if is_pinned else num_records
        try:
            self._blocks = [
                torch.empty(min(self._block_records, left), page_bytes, dtype=torch.uint8, pin_memory=is_pinned)
                for left in range(num_records, 0, -self._block_records)
            ]
        except (RuntimeError, TypeError) as error:  # out of memory; a count that no tensor can have
            raise StartupError(
                f"--host-memory: {num_records * page_bytes} bytes are more than the host can give; lower it"
            ) from error
        self._stream = torch.cuda.Stream(device) if torch.cuda.is_available() and is_pinned else None

    def put(self, records: Sequence[int], source: Tensor) -> None:
        """Fill `records` with `source`, flat uint8 on any device, which must take just as many. From CUDA that is not
        waited for: `source` may be written at once."""
        if source.is_cuda:
            source = source.clone()
        with self._beside(source):
            for record, part in zip(records, source.split(self._page_bytes), strict=True):
                self._record(record)[: len(part)].copy_(part, non_blocking=True)

    def get(self, records: Sequence[int], target: Tensor) -> None:
        """Fill `target`, flat uint8 on any device, from `records`. On CUDA what the current stream does next waits for
        it; who reads or writes records from the CPU synchronizes first."""
        with self._beside(target):
            for record, part in zip(records, target.split(self._page_bytes), strict=True):
                part.copy_(self._record(record)[: len(part)], non_blocking=True)
        if self._stream is not None and target.is_cuda:
            torch.cuda.current_stream().wait_stream(self._stream)

    @contextmanager
    def _beside(self, memory: Tensor) -> Iterator[None]:
        """For memory on CUDA: on a stream of its own, behind what the current one has done with it so far."""
        if self._stream is None or not memory.is_cuda:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        memory.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def _record(self, index: int) -> Tensor:
        block, row = divmod(index - 1, self._block_records)
        return self._blocks[block][row]


class PageMover:
    """Does moves, one after the other. Without host memory it only poisons."""

    def __init__(self, pool: PoolTensors, host: HostMemory | None):
        self._pool = pool
        self._host = host

    def run(self, moves: Sequence[Move]) -> None:
        """The order is kept, also between lists, so a record or a page may be reused by the very next move."""
        for move in moves:
            memory = self._pool.record(move.page)
            match move:
                case Save(records=records):
                    self._memory.put(records, memory)
                case Restore(records=records):
                    self._memory.get(records, memory)
                case Poison():
                    memory.fill_(NAN_BYTE)

    @property
    def _memory(self) -> HostMemory:
        if self._host is None:
            raise RuntimeError("a page cannot be saved or restored: there is no host memory")
        return self._host
