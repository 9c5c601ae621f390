"""A name for what a loaded model computes, so that pages on disk are used by nothing else."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from engine.model.linear import Projection
from engine.model.llama import Llama

NUM_ELEMENTS = 4096
NUM_COLUMNS = 4


def fingerprint(model: Llama, kernels: str) -> str:
    """32 hex digits from a sample of every weight as loaded, the config, the dtype, and what decides last bits: how
    rows are batched, what computes (`kernels` names it), the build of PyTorch, the kind of processor. The same in every
    process of one machine."""
    # which tokens end a text changes no page
    config = replace(model.config, eos_token_ids=frozenset())
    header = (config, model.dtype, model._rows, kernels, torch.__version__)
    digest = hashlib.sha256(repr((*header, _processor(model.device))).encode())
    for name, tensor in _samples(model):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()[:32]


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()


def _samples(model: Llama) -> Iterator[tuple[str, Tensor]]:
    config = model.config
    for name, weight in (("embedding", model.embedding), ("norm", model.norm)):
        yield f"{name} {tuple(weight.shape)}", _spread(weight)
    yield "head", _columns(model.project_out, config.hidden_size, model)
    # the longest context, too, may decide how positions turn K
    for name, table in zip(("cos", "sin"), model.rotary.at(torch.ones(1, device=model.device)), strict=True):
        yield name, table
    for index, layer in enumerate(model.layers):
        yield f"{index} input_norm", _spread(layer.input_norm)
        if layer.qk_norm is not None:
            yield f"{index} qk_norm", layer.qk_norm
        if layer.qk_balance is not None:
            yield f"{index} qk_balance", layer.qk_balance
        yield f"{index} post_norm", _spread(layer.post_norm)
        for name, projection, width in (
            ("qkv", layer.qkv, config.hidden_size),
            ("output", layer.output, config.num_heads * config.head_dim),
            ("gate_up", layer.gate_up, config.hidden_size),
            ("down", layer.down, config.intermediate_size),
        ):
            yield f"{index} {name}", _columns(projection, width, model)


def _spread(weight: Tensor) -> Tensor:
    """Elements all over `weight`. The step is odd, so that it does not stay in one column."""
    return weight.flatten()[:: (weight.numel() // NUM_ELEMENTS) | 1]


def _columns(projection: Projection, width: int, model: Llama) -> Tensor:
    """The bias and some columns of the weight plus the bias, [1 + columns, out].

    A product with unit vectors gives them exactly, in whatever order a projection keeps its weights or adds up.
    """
    columns = torch.linspace(0, width - 1, NUM_COLUMNS).long()
    units = torch.zeros(1 + NUM_COLUMNS, width)
    units[torch.arange(1, 1 + NUM_COLUMNS), columns] = 1
    return projection(units.to(model.device, model.dtype))
