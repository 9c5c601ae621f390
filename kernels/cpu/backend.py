"""The compiled CPU backend: attention over page records where they lie. Writing and sealing pages is PyTorch's, but for
steps in one call (kernels/cpu/decode.py)."""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.backend import PoolTensors
from kernels.cpu.library import KernelPath
from kernels.cpu.scratch import Scratch
from kernels.cpu.structs import RAW_CODES, Buffers, Chunk, Layer, store_of
from kernels.cpu.tables import DecodePages, page_entries
from kernels.format.layout import StoreFields
from kernels.format.step import AttentionStep
from kernels.rope import Rotary
from kernels.torch_backend.backend import ExtendedTorchBackend
from kernels.torch_backend.mass import exact_sum
from kernels.torch_backend.tables import StepTables, step_tables

MOST_LANES = 16  # the weights of a page are whole vectors


@dataclass(frozen=True, slots=True)
class CpuTables:
    """`rows`: the decode rows, None where there are none. `chunks`: for each chunk the pages before it and its own."""

    step: StepTables
    rows: DecodePages | None
    chunks: tuple[NDArray[np.int64], ...]


class CpuBackend(ExtendedTorchBackend):
    """Which layers are compiled is decided here, once; those that store K before RoPE, or keep rows or numbers in 16
    bit, are PyTorch's. `whole_layers`: all of them, None where one is PyTorch's."""

    def __init__(self, pool: PoolTensors, rotary: Rotary | None, *, num_heads: int, path: KernelPath):
        super().__init__(pool, rotary)
        self._num_heads = num_heads
        self.path = path
        self._compiled = [layer_of(pool, index, num_heads) for index in range(len(pool.layout.layers))]
        served = [layer for layer in self._compiled if layer is not None]
        self._scratch, self._chunk_scratch = (
            Scratch(max((num_bytes(ctypes.byref(layer)) for layer in served), default=0))
            for num_bytes in (path.scratch_bytes, path.chunk_scratch_bytes)
        )
        num_left = len(self._compiled) - len(served)
        self.whole_layers = served if num_left == 0 else None
        self.name = f"cpu ({path.name})" + f", torch in {num_left} of {len(self._compiled)} layers" * (num_left > 0)

    def prepare(self, step: AttentionStep) -> CpuTables:  # type: ignore[override]
        return CpuTables(
            step_tables(step, self._page_tokens, self._device, self._rotary, has_decode=self.whole_layers is None),
            self.decode_pages(step) if step.decode else None,
            tuple(page_entries(chunk.context + chunk.targets) for chunk in step.chunks),
        )

    def decode_pages(self, step: AttentionStep) -> DecodePages:
        return DecodePages(step.decode, self._page_tokens, self._num_heads, self.pool.layout.head_dim)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, tables: CpuTables) -> Tensor:  # type: ignore[override]
        compiled, rows, step = self._compiled[layer], tables.rows, tables.step
        if compiled is None:
            return super().attend(layer, q, k, v, step)
        parts = [] if rows is None else [self._attend_rows(compiled, q[: rows.num_rows], rows)]
        if rows is not None and len(rows.observed):
            step.mass.sums[: len(rows.observed)] += exact_sum(rows.observed_shares(), (1,))
        for chunk, pages in zip(step.chunks, tables.chunks, strict=True):
            own = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
            parts.append(self._attend_chunk(compiled, q[own], k[own], v[own], pages))
            if chunk.mass is not None:  # for what it adds to the mass: being observed changes no output
                self._prefill(self._layers[layer], q[own], k[own], v[own], chunk, None)
        if step.num_rows < len(q):
            parts.append(q.new_zeros(len(q) - step.num_rows, *q.shape[1:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_rows(self, layer: Layer, q: Tensor, rows: DecodePages) -> Tensor:
        q = q.float().contiguous()
        out = torch.empty_like(q)
        tensors = (q, out, rows.parts, rows.shares, self._scratch.memory())
        buffers = Buffers(*(tensor.data_ptr() for tensor in tensors), self._scratch.num_bytes)
        structs = (ctypes.byref(value) for value in (layer, rows.struct, buffers))
        self.path.attend(*structs, torch.get_num_threads())
        return out

    def _attend_chunk(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, pages: NDArray[np.int64]) -> Tensor:
        q, k, v = (tensor.float().contiguous() for tensor in (q, k, v))
        out = torch.empty_like(q)
        pointers = (tensor.data_ptr() for tensor in (q, k, v, out, self._chunk_scratch.memory()))
        num_context = len(pages) - -(-len(q) // self._page_tokens)
        chunk = Chunk(pages.ctypes.data, *pointers, self._chunk_scratch.num_bytes, num_context, len(q))
        self.path.attend_chunk(ctypes.byref(layer), ctypes.byref(chunk), torch.get_num_threads())
        return out


def layer_of(pool: PoolTensors, index: int, num_heads: int) -> Layer | None:
    """What the kernels must know of a layer, None where they cannot serve it."""
    layout = pool.layout
    recipe, fields = layout.recipe.layers[index], layout.layers[index]
    if recipe.before_rope or recipe.outliers is not None or recipe.k.num_outliers or recipe.v.num_outliers:
        return None
    if layout.page_tokens % MOST_LANES:
        return None

    def store(side: StoreFields, is_key: bool) -> object:
        return store_of(side, layout.dtype, is_key=is_key)

    layer = Layer(
        k=store(fields.k, True),
        v=store(fields.v, False),
        norm=-1 if fields.k_norm is None else fields.k_norm.offset,
        sealed=pool.sealed.data_ptr(),
        open=pool.open[0, index].data_ptr(),
        page_bytes=pool.sealed.stride(0),
        slot_bytes=pool.open.stride(0) * pool.open.itemsize,
        slot_code=RAW_CODES[layout.dtype],
        num_kv_heads=layout.num_kv_heads,
        group=num_heads // layout.num_kv_heads,
        page_tokens=layout.page_tokens,
        head_dim=layout.head_dim,
    )
    return None if min(layer.k.code, layer.v.code) < 0 else layer
