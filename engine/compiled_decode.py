"""Decode steps in one call of the compiled CPU kernels, where they serve all layers."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.llama import Llama
from kernels.cpu.backend import CpuBackend
from kernels.cpu.decode import DecodeSteps, LayerParts
from kernels.cpu.linear import CompiledProjection
from kernels.cpu.structs import Layer
from kernels.format.step import AttentionStep


class CompiledDecode:
    """Gives the bits that the model's own pass gives, without its calls from Python."""

    def __init__(self, model: Llama, backend: CpuBackend, pages: list[Layer]):
        self._model = model
        self._backend = backend
        self._steps = DecodeSteps(
            backend.path,
            [
                LayerParts(
                    layer.input_norm,
                    layer.post_norm,
                    layer.qk_norm,
                    layer.qk_balance,
                    _compiled(layer.qkv),
                    _compiled(layer.output),
                    _compiled(layer.gate_up),
                    _compiled(layer.down),
                    layer.turn,
                    layer_pages,
                )
                for layer, layer_pages in zip(model.layers, pages, strict=True)
            ],
            model.norm,
            _compiled(model.project_out),
            model.config.rms_norm_eps,
        )

    def can_run(self, step: AttentionStep) -> bool:
        return step.can_be_replayed

    def logits(self, token_ids: list[int], positions: list[int], step: AttentionStep) -> Tensor:
        """fp32 [rows, vocab]."""
        hidden = F.embedding(torch.tensor(token_ids), self._model.embedding).float()
        cos, sin = self._model.rotary.at(torch.tensor(positions))
        return self._steps.logits(hidden, cos, sin, self._backend.decode_pages(step))


def _compiled(projection: object) -> CompiledProjection:
    assert isinstance(projection, CompiledProjection)
    return projection
