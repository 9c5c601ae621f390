"""A Llama in float64 with separate weights and full attention, written from the papers: what ours is compared with."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig, YarnRope

Weight = Callable[[str], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """arXiv 1910.07467."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: Tensor, frequencies: Sequence[float]) -> Tensor:
    """RoPE (arXiv 2104.09864) of [tokens, heads, D]: channel pair (i, i + D/2) of token t as a complex number, turned
    by t times the i-th frequency."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * torch.tensor(frequencies, dtype=torch.float64)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)


def logits(config: ModelConfig, weight: Weight, frequencies: Sequence[float], tokens: Sequence[int]) -> Tensor:
    """float64 [tokens, vocab]."""

    def get(name: str) -> Tensor:
        return weight(name).double()

    def linear(x: Tensor, name: str, has_bias: bool) -> Tensor:
        return F.linear(x, get(f"{name}.weight"), get(f"{name}.bias") if has_bias else None)

    scale = config.rope.attention_factor if isinstance(config.rope, YarnRope) else 1.0
    count, group = len(tokens), config.num_heads // config.num_kv_heads
    hidden = get("model.embed_tokens.weight")[list(tokens)]
    future = torch.ones(count, count, dtype=torch.bool).triu(1)
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}"
        x = rms_norm(hidden, get(f"{name}.input_layernorm.weight"), config.rms_norm_eps)
        q, k, v = (
            linear(x, f"{name}.self_attn.{part}_proj", config.qkv_bias).view(count, -1, config.head_dim)
            for part in "qkv"
        )
        if config.qk_norm:
            q, k = (
                rms_norm(x, get(f"{name}.self_attn.{part}_norm.weight"), config.rms_norm_eps)
                for part, x in (("q", q), ("k", k))
            )
        q, k = scale * turn(q, frequencies), scale * turn(k, frequencies)
        heads = []
        for head in range(config.num_heads):
            keys, values = k[:, head // group], v[:, head // group]
            scores = (q[:, head] @ keys.T / math.sqrt(config.head_dim)).masked_fill(future, -math.inf)
            heads.append(scores.softmax(-1) @ values)
        hidden = hidden + linear(torch.cat(heads, -1), f"{name}.self_attn.o_proj", config.output_bias)
        x = rms_norm(hidden, get(f"{name}.post_attention_layernorm.weight"), config.rms_norm_eps)
        gate = linear(x, f"{name}.mlp.gate_proj", config.mlp_bias)
        up = linear(x, f"{name}.mlp.up_proj", config.mlp_bias)
        hidden = hidden + linear(gate * torch.sigmoid(gate) * up, f"{name}.mlp.down_proj", config.mlp_bias)
    hidden = rms_norm(hidden, get("model.norm.weight"), config.rms_norm_eps)
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return hidden @ get(head).T
