"""From a checkpoint to the fused, rotated weights of the model."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.model.balance import measure_balance
from engine.model.checkpoint import Checkpoint
from engine.model.linear import MakeProjection, Projection
from engine.model.llama import Llama, LlamaLayer
from engine.model.rope import make_rotary
from engine.model.rows import Rows
from kernels.format.hadamard import hadamard
from kernels.format.recipe import LayerRecipe, Recipe
from kernels.row_ops import MakeRowOps, Turn
from kernels.torch_backend.row_ops import TorchRowOps

Progress = Callable[[int, int], None]
"""Called with (layers done, layers in all)."""


def load_llama(
    checkpoint: Checkpoint,
    recipe: Recipe,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    rows: Rows,
    make_projection: MakeProjection,
    progress: Progress,
    make_row_ops: MakeRowOps = TorchRowOps,
) -> Llama:
    """Reads every weight once. The rotation of V goes into its weights here, in fp32 with one rounding.

    `max_model_len`: the longest context that will be served; dynamic RoPE takes its frequencies from it.
    """
    config = checkpoint.config
    rotation = torch.tensor(hadamard(config.head_dim))
    loader = _Loader(checkpoint, rotation, dtype, device, make_projection)
    layers = []
    for index, layer_recipe in enumerate(recipe.layers):
        layers.append(loader.layer(index, layer_recipe))
        progress(index + 1, config.num_layers)
    embedding = loader.place(checkpoint.tensor("model.embed_tokens.weight"))
    head = embedding if config.tie_embeddings else loader.place(checkpoint.tensor("lm_head.weight"))
    model = Llama(
        config,
        embedding=embedding,
        layers=layers,
        norm=loader.place_norm(checkpoint.tensor("model.norm.weight")),
        project_out=make_projection(head, None),
        rotary=make_rotary(config.rope, config.head_dim, max_model_len, device),
        rows=rows,
        row_ops=make_row_ops(dtype, config.rms_norm_eps, rotation.to(device)),
    )
    if balanced := [index for index, layer in enumerate(recipe.layers) if layer.balance_k]:
        model.balance(measure_balance(model, rotation.to(device), balanced))
    return model


def rotate_value_rows(weight: Tensor, rotation: Tensor) -> Tensor:
    """v_proj weight [kv_heads·D, hidden] or bias [kv_heads·D] so that each head's output comes out rotated, fp32."""
    heads = weight.float().view(-1, len(rotation), *weight.shape[1:])
    return torch.einsum("hd...,de->he...", heads, rotation).flatten(0, 1)


def unrotate_output_columns(weight: Tensor, rotation: Tensor) -> Tensor:
    """o_proj weight [hidden, heads·D] so that it takes rotated heads, fp32."""
    return torch.matmul(weight.float().view(len(weight), -1, len(rotation)), rotation).flatten(1)


class _Loader:
    def __init__(
        self,
        checkpoint: Checkpoint,
        rotation: Tensor,
        dtype: torch.dtype,
        device: torch.device,
        make_projection: MakeProjection,
    ):
        self._checkpoint = checkpoint
        self._config: ModelConfig = checkpoint.config
        self._rotation = rotation
        self._dtype = dtype
        self._device = device
        self._make_projection = make_projection

    def place(self, *tensors: Tensor) -> Tensor:
        """Stack along the output axis, in the model's dtype, on the device."""
        parts = [tensor.to(self._dtype) for tensor in tensors]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous().to(self._device)

    def place_norm(self, weight: Tensor) -> Tensor:
        return weight.float().to(self._device)

    def layer(self, index: int, recipe: LayerRecipe) -> LlamaLayer:
        config = self._config

        def read(name: str) -> Tensor:
            return self._checkpoint.tensor(f"model.layers.{index}.{name}")

        def read_value(kind: str) -> Tensor:
            tensor = read(f"self_attn.v_proj.{kind}")
            return rotate_value_rows(tensor, self._rotation) if recipe.rotate_v else tensor

        def read_output() -> Tensor:
            tensor = read("self_attn.o_proj.weight")
            return unrotate_output_columns(tensor, self._rotation) if recipe.rotate_v else tensor

        def read_qk_norm() -> Tensor:
            norms = (("q_norm", config.num_heads), ("k_norm", config.num_kv_heads))
            return torch.cat([read(f"self_attn.{name}.weight").expand(heads, -1) for name, heads in norms])

        def fuse(weights: list[Tensor], biases: list[Tensor]) -> Projection:
            return self._make_projection(self.place(*weights), self.place(*biases) if biases else None)

        def read_all(kind: str, *names: str) -> list[Tensor]:
            return [read(f"{name}.{kind}") for name in names]

        qk, gate_up = ("self_attn.q_proj", "self_attn.k_proj"), ("mlp.gate_proj", "mlp.up_proj")
        return LlamaLayer(
            input_norm=self.place_norm(read("input_layernorm.weight")),
            qkv=fuse(
                [*read_all("weight", *qk), read_value("weight")],
                [*read_all("bias", *qk), read_value("bias")] if config.qkv_bias else [],
            ),
            qk_norm=self.place_norm(read_qk_norm()) if config.qk_norm else None,
            output=fuse([read_output()], read_all("bias", "self_attn.o_proj") if config.output_bias else []),
            post_norm=self.place_norm(read("post_attention_layernorm.weight")),
            gate_up=fuse(read_all("weight", *gate_up), read_all("bias", *gate_up) if config.mlp_bias else []),
            down=fuse(
                read_all("weight", "mlp.down_proj"), read_all("bias", "mlp.down_proj") if config.mlp_bias else []
            ),
            qk_balance=None,
            turn=Turn(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                is_rotated=recipe.rotate_k,
                stores_before_rope=recipe.before_rope,
            ),
        )
