"""How numbers of K and V are distributed over channels and tokens."""

from dataclasses import dataclass
from enum import Enum
from math import ceil

import torch
from torch import Tensor

from engine.study.capture import LayerTensors
from kernels.format.hadamard import hadamard

OUTLIER_RATIO = 4.0
TOP_SHARE = 0.01


class Kind(Enum):
    """A form in which K or V can be stored; `value` is its name in files."""

    K_BEFORE_ROPE = "k_before_rope"
    K = "k"
    K_ROTATED = "k_rotated"
    V = "v"
    V_ROTATED = "v_rotated"

    @property
    def is_key(self) -> bool:
        return self not in (Kind.V, Kind.V_ROTATED)

    @property
    def is_rotated(self) -> bool:
        return self in (Kind.K_ROTATED, Kind.V_ROTATED)

    @property
    def label(self) -> str:
        return self.value.replace("_", " ").replace("k", "K", 1).replace("v", "V", 1).replace("rope", "RoPE")

    def read(self, tensors: LayerTensors) -> Tensor:
        """fp32 [tokens, kv_heads, D]. Rotated: by the orthonormal Hadamard matrix over D, after RoPE."""
        match self:
            case Kind.K_BEFORE_ROPE:
                return tensors.k_before_rope
            case Kind.K | Kind.K_ROTATED:
                plain = tensors.k
            case Kind.V | Kind.V_ROTATED:
                plain = tensors.v
        return rotate_head(plain) if self.is_rotated else plain


def rotate_head(x: Tensor) -> Tensor:
    """The Hadamard rotation of the last axis; its own inverse."""
    return torch.matmul(x, torch.tensor(hadamard(x.shape[-1]), device=x.device))


@dataclass(frozen=True, slots=True)
class ChannelStats:
    """Of each channel over the tokens of a window, fp64 [kv_heads, D]: mean and largest magnitude, standard deviation
    and kurtosis (NaN for a constant channel). `is_outlier`: bool, the mean magnitude is at least `OUTLIER_RATIO` times
    that of the median channel of all heads."""

    mean: Tensor
    largest: Tensor
    deviation: Tensor
    kurtosis: Tensor
    is_outlier: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "ChannelStats":
        """Of fp32 [tokens, kv_heads, D]."""
        x = x.double()
        mean = x.abs().mean(0)
        return cls(
            mean.cpu(),
            x.abs().amax(0).cpu(),
            x.std(0, correction=0).cpu(),
            kurtosis(x).cpu(),
            (mean >= OUTLIER_RATIO * mean.median().clamp(min=torch.finfo(torch.float64).tiny)).cpu(),
        )


def kurtosis(x: Tensor) -> Tensor:
    """Over the first axis, in fp64: the fourth central moment over the square of the second. 3 for a normal
    distribution, 1.8 for a uniform one, NaN where all numbers are equal."""
    centred = x.double() - x.double().mean(0)
    squares = centred.square()
    return squares.square().mean(0) / squares.mean(0).square()


def top_energy(x: Tensor) -> float:
    """The share of the sum of squares that the largest 1 % of channels have, at least one of them. `x`: fp32 [tokens,
    kv_heads, D]."""
    energy = x.double().square().sum(0).flatten()
    total = energy.sum()
    return float(energy.topk(ceil(TOP_SHARE * len(energy))).values.sum() / total) if total > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of one kind in one layer. `kurtosis`: of all numbers together."""

    layer: int
    kind: Kind
    channels: ChannelStats
    kurtosis: float
    top_energy: float

    @classmethod
    def of(cls, tensors: LayerTensors, kind: Kind) -> "Distribution":
        x = kind.read(tensors)
        return cls(tensors.layer, kind, ChannelStats.of(x), float(kurtosis(x.flatten())), top_energy(x))

    @property
    def num_outliers(self) -> int:
        return int(self.channels.is_outlier.sum())
