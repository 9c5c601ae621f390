"""A whole step of decode rows in one call: all layers of a model over the pages of a pool."""

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.library import KernelPath
from kernels.cpu.linear import CompiledProjection
from kernels.cpu.scratch import Scratch
from kernels.cpu.structs import DecoderLayer, Heads, Layer, Model, Step
from kernels.cpu.tables import DecodePages
from kernels.row_ops import Turn


def heads_of(turn: Turn) -> Heads:
    return Heads(turn.num_heads, turn.num_kv_heads, turn.head_dim, turn.is_rotated, turn.stores_before_rope)


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A layer of the model and its pages. Norms are fp32."""

    input_norm: Tensor
    post_norm: Tensor
    qk_norm: Tensor | None
    qk_balance: Tensor | None
    qkv: CompiledProjection
    output: CompiledProjection
    gate_up: CompiledProjection
    down: CompiledProjection
    turn: Turn
    pages: Layer

    @property
    def struct(self) -> DecoderLayer:
        norms = (self.input_norm, self.post_norm, self.qk_norm, self.qk_balance)
        projections = (self.qkv, self.output, self.gate_up, self.down)
        return DecoderLayer(
            *(None if norm is None else norm.data_ptr() for norm in norms),
            *(projection.struct for projection in projections),
            self.pages,
            heads_of(self.turn),
        )


class DecodeSteps:
    """Holds what the structures point to."""

    def __init__(
        self, path: KernelPath, layers: Sequence[LayerParts], norm: Tensor, head: CompiledProjection, eps: float
    ):
        self._path = path
        self._parts = (layers, norm, head)
        self._vocab_size = head.struct.num_outputs
        self._structs = (DecoderLayer * len(layers))(*(layer.struct for layer in layers))
        self._model = Model(
            self._structs,
            norm.data_ptr(),
            head.struct,
            num_layers=len(layers),
            hidden_size=len(norm),
            intermediate_size=layers[0].down.struct.num_inputs,
            eps=eps,
        )
        self._scratch = Scratch(max(path.scratch_bytes(byref(layer.pages)) for layer in layers))

    def logits(self, hidden: Tensor, cos: Tensor, sin: Tensor, rows: DecodePages) -> Tensor:
        """fp32 [rows, vocab]. `hidden`: fp32 [rows, hidden], which becomes the residual stream behind the last layer.
        `cos`, `sin`: fp32 [rows, 1, D/2]. K and V of the rows are written to their own pages."""
        logits = torch.empty(rows.num_rows, self._vocab_size)
        activations = torch.empty(self._path.num_activations(byref(self._model), rows.num_rows))
        tensors = (hidden, cos, sin, logits, activations, rows.parts, self._scratch.memory())
        step = Step(*(tensor.data_ptr() for tensor in tensors), self._scratch.num_bytes)
        self._path.decode(byref(self._model), byref(rows.struct), byref(step), torch.get_num_threads())
        return logits
