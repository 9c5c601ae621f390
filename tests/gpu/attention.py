"""Decode and prefill of one layer, in every format, beside PyTorch's attention in bf16."""

from collections.abc import Iterator
from dataclasses import asdict
from math import ceil
from typing import Any

import torch
from torch import Tensor

from kernels.backend import torch_dtype
from tests.gpu import sdpa
from tests.gpu.pages import FilledPages, decode_bytes, decode_pages, layout_of
from tests.gpu.plan import Plan
from tests.gpu.timer import Timer

MOST_SETS = 128
SHARE_OF_MEMORY = 0.9
FREE_ON_CPU = 2**30


class Attention:
    """Times of `plan`, on one device."""

    def __init__(self, plan: Plan, device: torch.device, timer: Timer):
        self._plan = plan
        self._device = device
        self._timer = timer

    def copy_bandwidth(self) -> float:
        """Bytes a second, read and written, of a copy on the device."""
        source = torch.ones(self._plan.copy_bytes, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self._timer.seconds([lambda: target.copy_(source)])

    def decode_baselines(self) -> Iterator[dict[str, Any]]:
        """For each context and batch: how PyTorch's attention does. Least memory first."""
        plan, heads = self._plan, self._plan.heads
        for context, batch in sorted(plan.decode, key=lambda shape: shape[0] * shape[1]):
            result: dict[str, Any] = {"context": context, "batch": batch}
            size = 2 * batch * heads.num_kv_heads * context * heads.head_dim * 2
            if size > self._free_memory:
                yield result | {"left_out": f"{size} bytes of K and V do not fit"}
                continue
            inputs = [self._dense_inputs(context, batch) for _ in range(self._num_sets(size))]
            best = sdpa.fastest(self._timer, {"gqa": sdpa.plain, "packed": sdpa.packed}, inputs)
            yield result | asdict(best) | {"bytes": size, "bytes_per_second": size / best.seconds}
            del inputs

    def _dense_inputs(self, context: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        heads = self._plan.heads
        q, k, v = (
            torch.empty(batch, count, length, heads.head_dim, dtype=torch.bfloat16, device=self._device).normal_()
            for count, length in ((heads.num_heads, 1), (heads.num_kv_heads, context), (heads.num_kv_heads, context))
        )
        return q, k, v

    def decode(self, name: str) -> Iterator[dict[str, Any]]:
        """For each context and batch: how `name` does."""
        plan, layout = self._plan, layout_of(name, self._plan.heads, self._plan.dtype)
        shapes = []
        for context, batch in plan.decode:
            count = self._num_sets(decode_bytes(layout, context, batch))
            num_pages, num_slots = count * batch * decode_pages(layout, context), 2 * count * batch
            shapes.append((num_pages * layout.page_bytes + num_slots * layout.slot_bytes, context, batch, count))
        shapes.sort()
        free = self._free_memory
        fitting = [shape for shape in shapes if shape[0] <= free]
        for _, context, batch, _ in shapes[len(fitting) :]:
            yield {"format": name, "context": context, "batch": batch, "left_out": "its pages do not fit"}
        if not fitting:
            return
        pages = FilledPages(
            name,
            plan.heads,
            plan.dtype,
            self._device,
            num_pages=max(count * batch * decode_pages(layout, context) for _, context, batch, count in fitting),
            num_slots=max(2 * count * batch for _, _, batch, count in fitting),
        )
        for _, context, batch, count in fitting:
            pages.free_all()
            tables = [pages.backend.prepare(pages.decode_step(context, batch)) for _ in range(count)]
            q, k, v = pages.activations(batch)
            seconds = self._timer.seconds([lambda t=t: pages.backend.attend(0, q, k, v, t) for t in tables])  # noqa: B023
            size = decode_bytes(layout, context, batch)
            yield {
                "format": name,
                "context": context,
                "batch": batch,
                "seconds": seconds,
                "bytes": size,
                "bytes_per_second": size / seconds,
            }

    def prefill(self, name: str) -> Iterator[dict[str, Any]]:
        plan, heads = self._plan, self._plan.heads
        num_pages = max(count * ceil(length / heads.page_tokens) for count, length in plan.prefill)
        num_slots = max(2 * count for count, _ in plan.prefill)
        pages = FilledPages(name, heads, plan.dtype, self._device, num_pages=num_pages, num_slots=num_slots)
        for count, length in plan.prefill:
            pages.free_all()
            tables = pages.backend.prepare(pages.prefill_step(count, length))
            q, k, v = pages.activations(count * length)
            seconds = self._timer.seconds([lambda: pages.backend.attend(0, q, k, v, tables)])  # noqa: B023
            yield self._prefill_result(name, count, length, seconds)

    def prefill_baselines(self) -> Iterator[dict[str, Any]]:
        heads, dtype = self._plan.heads, torch_dtype(self._plan.dtype)
        for count, length in self._plan.prefill:
            sizes = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
            q, k, v = (
                torch.randn(count, size, length, heads.head_dim, device=self._device).to(dtype) for size in sizes
            )
            best = sdpa.fastest(self._timer, {"gqa": sdpa.causal}, [(q, k, v)])
            yield self._prefill_result("sdpa", count, length, best.seconds) | {"way": best.way, "others": best.others}

    def _prefill_result(self, name: str, count: int, length: int, seconds: float) -> dict[str, Any]:
        """Operations: two products, of the half that a causal mask leaves."""
        heads = self._plan.heads
        operations = count * 4 * heads.num_heads * heads.head_dim * (length * (length + 1) // 2)
        rate = operations / seconds
        return {"format": name, "chunks": count, "length": length, "seconds": seconds, "operations_per_second": rate}

    def _num_sets(self, size: int) -> int:
        """Copies of rows of `size` bytes, so many that none is in a cache when its turn comes."""
        return min(MOST_SETS, ceil(self._plan.least_set_bytes / size))

    @property
    def _free_memory(self) -> int:
        if self._device.type != "cuda":
            return FREE_ON_CPU
        torch.cuda.empty_cache()
        return int(SHARE_OF_MEMORY * torch.cuda.mem_get_info(self._device)[0])
