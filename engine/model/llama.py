"""The decoder block of the Llama family, over a flat batch of tokens. Attention is handed in.

Products run in the model's dtype, or in fp32 with weights in that dtype. What adds up over layers stays in fp32: the
residual stream, the norms and the queries, which are never stored. Against a 16-bit residual this halves the divergence
from an fp32 model (docs/log.md).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.model.linear import Projection
from engine.model.rows import Rows
from kernels.rope import Rotary
from kernels.row_ops import RowOps, Turn

NUM_LEADERS = 64
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
AfterLayer = Callable[[int, Tensor], None]
"""Called behind each layer with its index and the residual stream, fp32 [rows, hidden]."""


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One layer: q, k and v in one projection, gate and up in one projection. The weights of norms are fp32. `qk_norm`
    [heads + kv_heads, D], if there is one: the weight for each head. `qk_balance` [heads + kv_heads, D], if there is
    one: factors after RoPE."""

    input_norm: Tensor
    qkv: Projection
    qk_norm: Tensor | None
    output: Projection
    post_norm: Tensor
    gate_up: Projection
    down: Projection
    qk_balance: Tensor | None
    turn: Turn

    @property
    def num_bytes(self) -> int:
        projections = (self.qkv, self.output, self.gate_up, self.down)
        norms = (self.input_norm, self.post_norm, *([] if self.qk_norm is None else [self.qk_norm]))
        return sum(norm.nbytes for norm in norms) + sum(item.num_bytes for item in projections)


class Llama:
    """Weights and the forward pass. Holds no state of requests."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Tensor,
        layers: Sequence[LlamaLayer],
        norm: Tensor,
        project_out: Projection,
        rotary: Rotary,
        rows: Rows,
        row_ops: RowOps,
    ):
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.embedding = embedding
        self.layers = list(layers)
        self.norm = norm
        self.project_out = project_out
        self.rotary = rotary
        self._rows = rows
        self._row_ops = row_ops

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights. Tied embeddings count once, or twice where they are kept in another order as well."""
        head = 0 if self.project_out.weight is self.embedding else self.project_out.num_bytes
        return self.embedding.nbytes + self.norm.nbytes + head + sum(layer.num_bytes for layer in self.layers)

    def balance(self, factors: Mapping[int, Tensor]) -> None:
        """Multiply K of each of these layers by fp32 [kv_heads, D] after RoPE, and divide Q by it."""
        group = self.config.num_heads // self.config.num_kv_heads
        for index, factor in factors.items():
            both = torch.cat([1 / factor.repeat_interleave(group, 0), factor])
            self.layers[index] = replace(self.layers[index], qk_balance=both)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, after_layer: AfterLayer | None = None
    ) -> Tensor:
        """int64 [rows] token ids and positions to fp32 hidden states [rows, hidden] before the last norm.

        `attention(layer, q, k, v)` takes q fp32 [rows, heads, D], k and v [rows, kv_heads, D] after RoPE and rotation,
        k before RoPE where it is stored so.
        """
        cos, sin = self.rotary.at(positions)
        hidden = F.embedding(token_ids, self.embedding).float()
        (x,) = self._rows.apply(lambda rows: (self._row_ops.normalise(rows, self.layers[0].input_norm),), hidden)
        # logits are of few rows, so the last norm of all rows here is for nothing; it keeps the layers alike
        norms = (*(layer.input_norm for layer in self.layers[1:]), self.norm)
        for index, (layer, norm) in enumerate(zip(self.layers, norms, strict=True)):
            q, k, v = self._rows.apply(lambda *rows, layer=layer: self._project(layer, *rows), x, cos, sin)
            mixed = attention(index, q, k, v)
            hidden, x = self._rows.apply(
                lambda *rows, layer=layer, norm=norm: self._finish(layer, norm, *rows), hidden, mixed
            )
            if after_layer is not None:
                after_layer(index, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [n, vocab] of hidden states [n, hidden]."""
        padding = self._rows.padded(len(hidden)) - len(hidden)
        (logits,) = self._rows.apply(self._predict, F.pad(hidden, (0, 0, 0, padding)))
        return logits[: len(hidden)]

    def _project(self, layer: LlamaLayer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._row_ops.turn(layer.turn, layer.qkv(x), cos, sin, layer.qk_norm, layer.qk_balance)

    def _finish(self, layer: LlamaLayer, norm: Tensor, hidden: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream behind the layer, and the normalised rows that the next layer takes."""
        ops = self._row_ops
        hidden, x = ops.add_normalise(hidden, layer.output(mixed.flatten(1)), layer.post_norm)
        return ops.add_normalise(hidden, layer.down(ops.gate(layer.gate_up(x))), norm)

    def _predict(self, hidden: Tensor) -> tuple[Tensor]:
        hidden = self._row_ops.normalise(hidden, self.norm)
        products = self.project_out(hidden)
        logits = products.float()
        weight = self.project_out.weight
        if products.dtype != torch.float32 and weight is not None:
            # a 16-bit logit of 25 moves in steps of 1/8, so the leaders tie: compute those again
            leaders = logits.topk(min(NUM_LEADERS, logits.shape[-1])).indices
            exact = torch.matmul(weight[leaders].float(), hidden.float().unsqueeze(-1)).squeeze(-1)
            logits.scatter_(1, leaders, exact)
        return (logits,)
