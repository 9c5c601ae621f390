"""Recipes: how K and V are stored in each layer, and the page geometry. Pure values, no torch."""

import hashlib
from dataclasses import dataclass, replace

from kernels.format.codec import Raw, Store


@dataclass(frozen=True, slots=True)
class LargestValues:
    """The `num` tokens of a page with the largest norm of V over all heads keep both rows in 16 bit."""

    num: int

    def __str__(self) -> str:
        return f"{self.num} tokens of largest V in 16 bit"


@dataclass(frozen=True, slots=True)
class MarkedTokens:
    """The first `num` tokens of a page that the recipe's `SinkRule` marks keep both rows in 16 bit."""

    num: int

    def __str__(self) -> str:
        return f"up to {self.num} marked tokens in 16 bit"


@dataclass(frozen=True, slots=True)
class SinkRule:
    """Which tokens are attention sinks (KVSink, arXiv 2508.04257): those whose residual stream behind layer `layer` has
    a magnitude above `threshold` in one of `channels`. It looks at each token alone, so it is causal."""

    layer: int
    channels: tuple[int, ...]
    threshold: float


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """How one layer stores K and V.

    `rotate_k`, `rotate_v`: an orthonormal Hadamard rotation over head_dim, V's inside the weights. `norm_k`: each K
    token is divided by its norm over all kv heads before its ranges are taken. Both are OScaR's (arXiv 2605.19660,
    section 3). `balance_k`: before it is rotated, K is multiplied by factors per channel that Q is divided by; they
    follow from the model (engine/model/balance.py). `before_rope`: K is stored before RoPE, also in slots, and turned
    when it is read; a rotation of K is then undone first and Q is not rotated. `outliers`: tokens whose rows are kept
    in 16 bit and left out of ranges. Raises ValueError for a balance before RoPE.
    """

    k: Store
    v: Store
    rotate_k: bool = False
    norm_k: bool = False
    rotate_v: bool = False
    balance_k: bool = False
    before_rope: bool = False
    outliers: LargestValues | MarkedTokens | None = None

    def __post_init__(self) -> None:
        if self.balance_k and self.before_rope:
            raise ValueError("balance_k is after RoPE, so it cannot be with before_rope")

    @property
    def is_raw(self) -> bool:
        return isinstance(self.k.codec, Raw) and isinstance(self.v.codec, Raw)

    def __str__(self) -> str:
        if self.is_raw:
            return "K and V as they are" + (", K before RoPE" if self.before_rope else "")
        k = (
            "K"
            + " before RoPE" * self.before_rope
            + " balanced" * self.balance_k
            + " rotated" * self.rotate_k
            + " normed" * self.norm_k
        )
        parts = [f"{k} {self.k}", f"V{' rotated' * self.rotate_v} {self.v}"]
        return "; ".join(parts + [str(self.outliers)] * (self.outliers is not None))


@dataclass(frozen=True, slots=True)
class Recipe:
    """How all layers store pages, and their geometry: `page_tokens` (P), `sink_pages` (S) and `window_pages` (W)."""

    name: str
    layers: tuple[LayerRecipe, ...]
    page_tokens: int
    sink_pages: int
    window_pages: int = 0
    sink_rule: SinkRule | None = None

    @property
    def id(self) -> str:
        """Names the content of pages: equal recipes, and only those, have equal ids."""
        return hashlib.sha256(repr(replace(self, name="")).encode()).hexdigest()[:16]

    @property
    def renumbers(self) -> bool:
        """Whether positions can be those in the cache, whatever was dropped: no layer stores them (StreamingLLM)."""
        return all(layer.before_rope for layer in self.layers)
