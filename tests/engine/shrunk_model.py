"""A plain model, one token at a time in float64, whose tokens read only what a shrink hook left, in the form that the
sealed-page rule says: the definitions of docs/hooks.md and docs/architecture.md over lists of positions, without pages
of memory or chunks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.kv.shrink import HeavyHitters, Shrink, SnapKV, Streaming
from tests.engine.plain_model import Weight, rms_norm

MOST_TOKENS = 2048


@dataclass
class Page:
    """Positions of one page that are there, and the attention that observed queries gave to them."""

    index: int
    positions: list[int] = field(default_factory=list)
    mass: float = 0.0


class ShrunkModel:
    """`feed` a token, get its logits. `num_prompt`: tokens that are the prompt. No output or MLP biases.

    `before_rope`: K is kept before RoPE, and positions are counted over the tokens that are left. `seal`: what K and V
    of a page become, but for `sinks`, a token's own page and the `window` pages before that. `residual` [layers,
    hidden]: of the last token, behind each layer."""

    def __init__(self, config: ModelConfig, weight: Weight, num_prompt: int, page_tokens: int, sinks: int,
                 shrink: Shrink | None, *, before_rope: bool = False, window: int = 0,
                 seal: Callable[[Tensor], Tensor] = lambda x: x):  # fmt: skip
        self._before_rope, self._window, self._seal = before_rope, window, seal
        self.residual = torch.zeros(config.num_layers, config.hidden_size, dtype=torch.float64)
        self._config, self._weight = config, weight
        self._num_prompt, self._page_tokens, self._sinks, self._shrink = num_prompt, page_tokens, sinks, shrink
        self._known: dict[str, Tensor] = {}
        shape = (config.num_layers, MOST_TOKENS, config.num_heads, config.head_dim)
        self._keys, self._values = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        half = torch.arange(config.head_dim // 2, dtype=torch.float64)
        self._frequencies = config.rope.theta ** (-2 * half / config.head_dim)
        self.pages: list[Page] = []
        self.num_tokens = 0

    def feed(self, token: int) -> Tensor:
        """float64 [vocab]."""
        position, size, shrink = self.num_tokens, self._page_tokens, self._shrink
        if position % size == 0:
            self.pages.append(Page(position // size))
        own = self.pages[-1]
        own.positions.append(position)
        if isinstance(shrink, Streaming):
            self.pages = [p for p in self.pages if p.index < self._sinks or p.index >= own.index - shrink.recent]
        kept = [p for page in self.pages for p in page.positions]
        is_exact = [page.index < self._sinks or page.index >= own.index - self._window for page in self.pages]
        sealed = [not exact for page, exact in zip(self.pages, is_exact, strict=True) for _ in page.positions]
        logits, weights = self._forward(token, position, kept, sealed)
        if self._is_observed(position):
            seen = dict(zip(kept, weights.tolist(), strict=True))
            for page in self.pages:
                page.mass += sum(seen[p] for p in page.positions)
        self.num_tokens += 1
        self._drop()
        return logits

    def _is_observed(self, position: int) -> bool:
        match self._shrink:
            case HeavyHitters(window=window):
                return position >= self._num_prompt - window
            case SnapKV(window=window):
                return self._num_prompt - window <= position < self._num_prompt
        return False

    def _drop(self) -> None:
        is_prompt_end = self.num_tokens == self._num_prompt
        full = [page for page in self.pages if len(page.positions) == self._page_tokens]
        match self._shrink:
            case HeavyHitters(heavy=num_best, recent=recent) if is_prompt_end or (
                self.num_tokens > self._num_prompt and self.num_tokens % self._page_tokens == 0
            ):
                reach = 0
            case SnapKV(keep=num_best, window=window, kernel=kernel) if is_prompt_end:
                recent, reach = math.ceil(window / self._page_tokens), kernel // 2
            case _:
                return
        middle = [page for page in full[self._sinks :] if page not in full[len(full) - recent :]]
        near = [[other.mass for other in middle if abs(other.index - page.index) <= reach] for page in middle]
        votes = {page.index: max(masses) for page, masses in zip(middle, near, strict=True)}
        best = sorted(middle, key=lambda page: votes[page.index])[-num_best:]
        self.pages = [page for page in self.pages if page not in middle or page in best]

    def _forward(self, token: int, position: int, kept: list[int], sealed: list[bool]) -> tuple[Tensor, Tensor]:
        """Logits, and the attention weight of each kept position, summed over layers and heads. `sealed`: those of
        `kept` that are read in sealed form."""
        config, group = self._config, self._config.num_heads // self._config.num_kv_heads
        hidden, total = self._get("model.embed_tokens.weight")[token], torch.zeros(len(kept), dtype=torch.float64)
        for layer in range(config.num_layers):
            name = f"model.layers.{layer}"
            x = rms_norm(hidden, self._get(f"{name}.input_layernorm.weight"), config.rms_norm_eps)
            q, k, v = (self._linear(x, f"{name}.self_attn.{part}_proj").view(-1, config.head_dim) for part in "qkv")
            place = len(kept) - 1 if self._before_rope else position
            kept_k = k if self._before_rope else self._turn(k, [place])
            self._keys[layer, position] = kept_k.repeat_interleave(group, 0)
            self._values[layer, position] = v.repeat_interleave(group, 0)
            keys, values = self._keys[layer, kept], self._values[layer, kept]  # [kept, heads, D]
            keys[sealed], values[sealed] = self._seal(keys[sealed]), self._seal(values[sealed])
            if self._before_rope:
                keys = self._turn(keys, range(len(kept)))
            scores = torch.einsum("hd,khd->hk", self._turn(q, [place]), keys) / math.sqrt(config.head_dim)
            weights = scores.softmax(-1)
            total += weights.sum(0)
            attended = torch.einsum("hk,khd->hd", weights, values).flatten()
            hidden = hidden + F.linear(attended, self._get(f"{name}.self_attn.o_proj.weight"))
            x = rms_norm(hidden, self._get(f"{name}.post_attention_layernorm.weight"), config.rms_norm_eps)
            gate, up = (F.linear(x, self._get(f"{name}.mlp.{part}_proj.weight")) for part in ("gate", "up"))
            hidden = hidden + F.linear(F.silu(gate) * up, self._get(f"{name}.mlp.down_proj.weight"))
            self.residual[layer] = hidden
        hidden = rms_norm(hidden, self._get("model.norm.weight"), config.rms_norm_eps)
        head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
        return F.linear(hidden, self._get(head)), total

    def _turn(self, x: Tensor, positions: Sequence[int]) -> Tensor:
        """RoPE of [tokens, heads, D], or of [heads, D] at one position."""
        half = x.shape[-1] // 2
        angles = torch.tensor(list(positions), dtype=torch.float64)[:, None, None] * self._frequencies
        cos, sin = (part if x.dim() == 3 else part[0] for part in (angles.cos(), angles.sin()))
        low, high = x[..., :half], x[..., half:]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._get(f"{name}.weight"), self._get(f"{name}.bias") if self._config.qkv_bias else None)

    def _get(self, name: str) -> Tensor:
        if name not in self._known:
            self._known[name] = self._weight(name).double()
        return self._known[name]
