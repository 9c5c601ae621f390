"""The model once more, plain and differentiable: what K and V are, and how much the loss minds when they change.

All weights in fp32, attention over the whole window at once. It costs memory that serving does not have to spare and
gives what serving does not need: gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import StartupError
from engine.model.checkpoint import Checkpoint, expected_tensors
from engine.model.rope import make_rotary
from engine.study.sinks import ResidualPeaks
from kernels.rope import turn


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """One layer over a window of T tokens, fp32. `q` [T, heads, D] after RoPE; `k` before RoPE and `v`
    [T, kv_heads, D]; `mixed` [T, heads, D], what attention gives. `*_grad`: gradients of the window's loss, the sum of
    the negative log-likelihoods of its tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    mixed: Tensor
    k_grad: Tensor
    v_grad: Tensor
    mixed_grad: Tensor


@dataclass(frozen=True, slots=True)
class WindowTrace:
    """`peaks`: behind each layer. `nll`: mean negative log-likelihood of a token, in nats."""

    layers: tuple[LayerTrace, ...]
    peaks: tuple[ResidualPeaks, ...]
    nll: float


@dataclass(slots=True)
class _Kept:
    """Tensors of the graph of one layer that gradients are wanted of."""

    q: Tensor
    k: Tensor
    v: Tensor
    mixed: Tensor


class DenseModel:
    """Raises StartupError where a window gives a number that is not finite."""

    def __init__(self, checkpoint: Checkpoint, max_model_len: int, device: torch.device, advance: Callable[[], None]):
        """`advance` is called for each layer that is read."""
        self.config = checkpoint.config
        self.device = device
        self._weights: dict[str, Tensor] = {}
        layer = "0"
        for name in expected_tensors(self.config):
            self._weights[name] = checkpoint.tensor(name).float().to(device)
            if name.startswith("model.layers.") and name.split(".")[2] != layer:
                layer = name.split(".")[2]
                advance()
        advance()
        self.rotary = make_rotary(self.config.rope, self.config.head_dim, max_model_len, device)

    def trace(self, tokens: Sequence[int]) -> WindowTrace:
        """Forward and backward over one window."""
        ids = torch.tensor(tokens, device=self.device)
        cos, sin = self.rotary.at(torch.arange(len(ids), device=self.device))
        # a leaf that wants a gradient makes autograd keep the graph; the weights want none
        hidden = F.embedding(ids, self._weights["model.embed_tokens.weight"]).requires_grad_()
        kept, peaks = [], []
        for layer in range(self.config.num_layers):
            hidden, item = self._layer(layer, hidden, cos, sin)
            kept.append(item)
            peaks.append(ResidualPeaks.of(hidden.detach()))
        loss = self._loss(hidden, ids)
        if not torch.isfinite(loss):
            raise StartupError("the model gives numbers that are not finite on this text; its weights may be damaged")
        wanted = [tensor for item in kept for tensor in (item.k, item.v, item.mixed)]
        grads = torch.autograd.grad(loss, wanted)
        if not all(bool(grad.isfinite().all()) for grad in grads):
            raise StartupError("the gradients of this model are not finite on this text")
        layers = tuple(
            LayerTrace(
                item.q.detach(), item.k.detach(), item.v.detach(), item.mixed.detach(), *grads[3 * i : 3 * i + 3]
            )
            for i, item in enumerate(kept)
        )
        return WindowTrace(layers, tuple(peaks), loss.item() / (len(ids) - 1))

    def _layer(self, layer: int, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, _Kept]:
        q, k, v = self._project(layer, hidden, cos, sin)
        mixed = attend(q, _turned(k, cos, sin), v)
        return self._finish(layer, hidden, mixed), _Kept(q, k, v, mixed)

    def _project(self, layer: int, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        x = self._normalise(hidden, f"{layer}.input_layernorm")
        q, k, v = (
            self._linear(x, f"{layer}.self_attn.{part}_proj", config.qkv_bias).unflatten(-1, (-1, config.head_dim))
            for part in "qkv"
        )
        if config.qk_norm:
            q = self._normalise(q, f"{layer}.self_attn.q_norm")
            k = self._normalise(k, f"{layer}.self_attn.k_norm")
        return _turned(q, cos, sin), k, v

    def _finish(self, layer: int, hidden: Tensor, mixed: Tensor) -> Tensor:
        config = self.config
        hidden = hidden + self._linear(mixed.flatten(1), f"{layer}.self_attn.o_proj", config.output_bias)
        x = self._normalise(hidden, f"{layer}.post_attention_layernorm")
        gate, up = (self._linear(x, f"{layer}.mlp.{part}_proj", config.mlp_bias) for part in ("gate", "up"))
        return hidden + self._linear(F.silu(gate) * up, f"{layer}.mlp.down_proj", config.mlp_bias)

    def _predict(self, hidden: Tensor) -> Tensor:
        name = "model.embed_tokens.weight" if self.config.tie_embeddings else "lm_head.weight"
        scaled = F.rms_norm(hidden, hidden.shape[-1:], self._weights["model.norm.weight"], self.config.rms_norm_eps)
        return F.linear(scaled, self._weights[name])

    def _loss(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(self._predict(hidden[:-1]), ids[1:], reduction="sum")

    def _normalise(self, x: Tensor, name: str) -> Tensor:
        weight = self._weights[f"model.layers.{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _linear(self, x: Tensor, name: str, has_bias: bool) -> Tensor:
        bias = self._weights[f"model.layers.{name}.bias"] if has_bias else None
        return F.linear(x, self._weights[f"model.layers.{name}.weight"], bias)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention [T, heads, D] of q [T, heads, D] over k (after RoPE) and v [T, kv_heads, D]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1).transpose(0, 1).unsqueeze(0) for x in (k, v))
    mixed = F.scaled_dot_product_attention(q.transpose(0, 1).unsqueeze(0), keys, values, is_causal=True)
    return mixed.squeeze(0).transpose(0, 1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if not x.requires_grad:
        return turn(x, cos, sin)
    # `rotate` writes into a tensor of its own, which autograd does not follow
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
