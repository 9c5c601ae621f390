"""What a model computes inside on a text: Q, K, V and the residual stream, one layer at a time.

Nothing is kept here, so that memory is bounded by one layer: an `Observer` takes from each layer what it needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import StartupError
from engine.model.checkpoint import Checkpoint
from engine.model.linear import MakeProjection
from engine.model.llama import Llama
from engine.model.rows import AllRows
from engine.model.weights import Progress, load_llama
from kernels.format.codec import raw
from kernels.format.recipe import LayerRecipe, Recipe
from kernels.rope import turn

PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer's attention on one window, all fp32 and unrotated. q: [tokens, heads, D] after RoPE; k and v:
    [tokens, kv_heads, D]; output: [tokens, heads, D] of exact causal attention. cos, sin: [tokens, 1, D/2]."""

    layer: int
    q: Tensor
    k_before_rope: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    cos: Tensor
    sin: Tensor

    def turn(self, k: Tensor) -> Tensor:
        """RoPE at the window's positions."""
        return turn(k, self.cos, self.sin)


class Observer(Protocol):
    def attended(self, tensors: LayerTensors) -> None:
        """A layer's attention was computed."""

    def finished(self, layer: int, hidden: Tensor) -> None:
        """The layer is done; `hidden` is the residual stream behind it, fp32 [tokens, hidden]."""


def load_for_capture(
    checkpoint: Checkpoint,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    make_projection: MakeProjection,
    progress: Progress,
) -> Llama:
    """The model with K before RoPE and nothing rotated, as `capture` takes it."""
    layer = LayerRecipe(raw(), raw(), before_rope=True)
    return load_llama(
        checkpoint,
        Recipe("capture", (layer,) * checkpoint.config.num_layers, PAGE_TOKENS, sink_pages=0),
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
        rows=AllRows(),
        make_projection=make_projection,
        progress=progress,
    )


@torch.inference_mode()
def capture(model: Llama, tokens: Sequence[int], observer: Observer) -> Tensor:
    """Run one window from position 0 with exact attention and show each layer to `observer`. Returns fp32 hidden states
    [tokens, hidden] before the last norm. Raises StartupError at the first layer whose numbers are not finite."""
    positions = torch.arange(len(tokens), device=model.device)
    cos, sin = model.rotary.at(positions)

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k_before_rope, v = q.float(), k.float(), v.float()
        k = turn(k_before_rope, cos, sin)
        _check_finite(model, layer, q, k, v)
        output = F.scaled_dot_product_attention(
            _heads_first(q), _heads_first(k), _heads_first(v), is_causal=True, enable_gqa=True
        )
        output = output[0].transpose(0, 1)
        observer.attended(LayerTensors(layer, q, k_before_rope, k, v, output, cos, sin))
        return output

    def after_layer(layer: int, hidden: Tensor) -> None:
        _check_finite(model, layer, hidden)
        observer.finished(layer, hidden)

    return model.forward(torch.tensor(tokens, device=model.device), positions, attention, after_layer)


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)


def _check_finite(model: Llama, layer: int, *tensors: Tensor) -> None:
    if not all(tensor.isfinite().all() for tensor in tensors):
        dtype = str(model.dtype).removeprefix("torch.")
        raise StartupError(
            f"layer {layer} gives numbers that are not finite in {dtype}; try --dtype float32, else its weights are bad"
        )
