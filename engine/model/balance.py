"""Balance between Q and K before they are rotated: K is multiplied by a factor per channel, Q divided by it.

A rotation spreads the quantization error of K evenly over channels, so the error of a logit goes with
(sum over channels of Q^2) * (sum of K's variation^2). That is least where each factor is the fourth root of the ratio
of the two; MiKV's balancer (arXiv 2402.18096) and SmoothQuant (arXiv 2211.10438) divide in the same way. What K does
not vary by within a page costs nothing, since a page stores a zero for each channel.

The statistics are those of the model on fixed random tokens: no text is needed, and every start finds the same factors.
docs/log.md has what other tokens would give.
"""

from collections.abc import Sequence
from math import log2

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.llama import Llama

NUM_TOKENS = 512
PAGE_TOKENS = 64  # whatever the recipe has: within smaller groups factors were no better (docs/log.md)
LARGEST = 64.0
STEPS = 8  # factors are powers of 2^(1/8): last bits of the statistics, which vary with the processor, do not matter


def probe_tokens(vocab_size: int) -> Tensor:
    """int64 [NUM_TOKENS], the same in every process."""
    return torch.randint(vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def measure_balance(model: Llama, rotation: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    """fp32 [kv_heads, D] for each of `layers`: the factors on K. `rotation`: what Q and K were rotated by."""
    tokens = probe_tokens(model.config.vocab_size).to(model.device)
    factors: dict[int, Tensor] = {}

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in layers:
            factors[layer] = balance(*(torch.matmul(x.float(), rotation) for x in (q, k)))
        queries, keys, values = (x.float().transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return mixed[0].transpose(0, 1)

    model.forward(tokens, torch.arange(NUM_TOKENS, device=model.device), attention)
    return factors


def balance(q: Tensor, k: Tensor) -> Tensor:
    """fp32 [kv_heads, D] of q [T, heads, D] and k [T, kv_heads, D] after RoPE."""
    by_group = q.unflatten(1, (k.shape[1], -1))
    # the first page has the sinks, and stays in 16 bit
    pages = k[PAGE_TOKENS:].unflatten(0, (-1, PAGE_TOKENS))
    wanted, varied = by_group.square().mean((0, 2)), pages.var(1, correction=0).mean(0)
    # where both are zero it does not matter; where one is, the bound below decides
    tiny = torch.finfo(torch.float32).tiny
    power = (wanted.clamp(min=tiny).log2() - varied.clamp(min=tiny).log2()) / 4
    largest = log2(LARGEST)
    return torch.exp2((power.clamp(-largest, largest) * STEPS).round() / STEPS)
