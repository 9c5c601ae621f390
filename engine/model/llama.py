"""The decoder block of the Llama family, over a flat batch of tokens. Attention is handed in.

Products run in the model's dtype. What adds up over layers stays in fp32: the residual stream, the norms and the
queries, which are never stored. Against a 16-bit residual this halves the divergence from an fp32 model (docs/log.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.model.linear import Projection
from engine.model.rows import Rows
from kernels.rope import Rotary, rotate

NUM_LEADERS = 64
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One layer: q, k and v in one projection, gate and up in one projection. The weights of norms and `k_rotation`
    [D, D], if there is one, are fp32."""

    input_norm: Tensor
    qkv: Projection
    output: Projection
    post_norm: Tensor
    gate_up: Projection
    down: Projection
    k_rotation: Tensor | None

    @property
    def num_bytes(self) -> int:
        projections = (self.qkv, self.output, self.gate_up, self.down)
        return self.input_norm.nbytes + self.post_norm.nbytes + sum(item.num_bytes for item in projections)


class Llama:
    """Weights and the forward pass. Holds no state of requests."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Tensor,
        layers: Sequence[LlamaLayer],
        norm: Tensor,
        head: Tensor,
        project_out: Projection,
        rotary: Rotary,
        rows: Rows,
    ):
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._project_out = project_out
        self._rotary = rotary
        self._rows = rows

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights. Tied embeddings count once, a copy of them in another order as well."""
        outer = {tensor.data_ptr(): tensor.nbytes for tensor in (self._embedding, self._norm, self._head)}
        copy = self._project_out.num_bytes if self._project_out.copies else 0
        return sum(outer.values()) + copy + sum(layer.num_bytes for layer in self._layers)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """int64 [rows] token ids and positions to fp32 hidden states [rows, hidden] before the last norm.

        `attention(layer, q, k, v)` takes q fp32 [rows, heads, D], k and v [rows, kv_heads, D] after RoPE and rotation.
        """
        cos, sin = self._rotary.at(positions)
        hidden = F.embedding(token_ids, self._embedding).float()
        for index, layer in enumerate(self._layers):
            q, k, v = self._rows.apply(lambda *rows, layer=layer: self._project(layer, *rows), hidden, cos, sin)
            mixed = attention(index, q, k, v)
            (hidden,) = self._rows.apply(lambda *rows, layer=layer: self._finish(layer, *rows), hidden, mixed)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [n, vocab] of hidden states [n, hidden]."""
        padding = self._rows.padded(len(hidden)) - len(hidden)
        (logits,) = self._rows.apply(self._predict, F.pad(hidden, (0, 0, 0, padding)))
        return logits[: len(hidden)]

    def _normalise(self, hidden: Tensor, weight: Tensor) -> Tensor:
        # on a CPU F.rms_norm takes six times as long for 1024 rows
        length: Tensor = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        scale = length.square_().div_(hidden.shape[-1]).add_(self.config.rms_norm_eps).rsqrt_()
        return (hidden * scale).mul_(weight).to(self.dtype)

    def _project(self, layer: LlamaLayer, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        config = self.config
        qkv = layer.qkv(self._normalise(hidden, layer.input_norm))
        heads = qkv.view(len(qkv), -1, config.head_dim)
        turned = config.num_heads + config.num_kv_heads
        qk = rotate(heads[:, :turned], cos, sin)
        if layer.k_rotation is not None:
            qk = torch.matmul(qk, layer.k_rotation)
        q, k = qk[:, : config.num_heads], qk[:, config.num_heads :]
        return q, k.to(self.dtype), heads[:, turned:].to(self.dtype)

    def _finish(self, layer: LlamaLayer, hidden: Tensor, mixed: Tensor) -> tuple[Tensor]:
        hidden = hidden + layer.output(mixed.flatten(1).to(self.dtype))
        gate_up = layer.gate_up(self._normalise(hidden, layer.post_norm))
        gate, up = gate_up.chunk(2, dim=-1)
        inner = (F.silu(gate) * up).to(self.dtype)
        return (hidden + layer.down(inner),)

    def _predict(self, hidden: Tensor) -> tuple[Tensor]:
        hidden = self._normalise(hidden, self._norm)
        logits = self._project_out(hidden).float()
        if self.dtype != torch.float32:
            # a 16-bit logit of 25 moves in steps of 1/8, so the leaders tie: compute those again
            leaders = logits.topk(min(NUM_LEADERS, logits.shape[-1])).indices
            exact = torch.matmul(self._head[leaders].float(), hidden.float().unsqueeze(-1)).squeeze(-1)
            logits.scatter_(1, leaders, exact)
        return (logits,)
