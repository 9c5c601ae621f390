"""PyTorch's attention on bf16 K and V, by the best of its backends: what there is without these kernels."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.gpu.timer import Timer

FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
LAST_RESORT = (SDPBackend.MATH,)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Best:
    """`seconds` of the way that was fastest; `others`: seconds of the others, or why they cannot."""

    seconds: float
    way: str
    others: dict[str, float | str]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Decode rows: the queries that share a KV head as queries of one head."""
    batch, heads, _, dim = q.shape
    return F.scaled_dot_product_attention(q.view(batch, k.shape[1], heads // k.shape[1], dim), k, v).view(q.shape)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def fastest(timer: Timer, ways: dict[str, Attend], inputs: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Best:
    """Of `ways` by every fused backend; the unfused one only where none of them can. Raises RuntimeError where that
    cannot either."""
    results = dict(_timings(timer, ways, inputs, FUSED))
    if not any(isinstance(result, float) for result in results.values()):
        results |= dict(_timings(timer, ways, inputs, LAST_RESORT))
    times = {way: result for way, result in results.items() if isinstance(result, float)}
    if not times:
        raise RuntimeError(f"no way to attend: {results}")
    best = min(times, key=times.__getitem__)
    return Best(times[best], best, {way: result for way, result in results.items() if way != best})


def _timings(
    timer: Timer,
    ways: dict[str, Attend],
    inputs: Sequence[tuple[Tensor, Tensor, Tensor]],
    backends: Sequence[SDPBackend],
) -> Iterator[tuple[str, float | str]]:
    for backend in backends:
        for name, attend in ways.items():
            way = f"{backend.name.removesuffix('_ATTENTION').lower()} {name}"
            result: float | str
            try:
                with sdpa_kernel([backend]):
                    result = timer.seconds([lambda qkv=qkv, attend=attend: attend(*qkv) for qkv in inputs])
            except RuntimeError as error:  # this backend has no kernel for these shapes, or too little memory
                result = str(error).splitlines()[0][:120]
            yield way, result
