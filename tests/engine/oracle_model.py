"""The model with its attention replaced by the oracle's: pages encoded and read by `kernels.reference`, in float64."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.engine import Engine
from kernels.format.layout import PageLayout, PageRef, Pool
from kernels.reference import PageReader, encode_page


def log_likelihoods(engine: Engine, tokens: Sequence[int]) -> list[float]:
    """Of each token but the first, in nats, under the sealed-page rule. Only the model and the page layout of `engine`
    are used; all tokens are one pass."""
    model, layout = engine.core.runner.model, engine.core.runner.backend.pool.layout
    positions = torch.arange(len(tokens))

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.from_numpy(_attend(layout, layer, *(x.float().numpy() for x in (q, k, v)))).float()

    with torch.inference_mode():
        hidden = model.forward(torch.tensor(tokens), positions, attention)
        logits = model.logits(hidden[:-1]).double()
    scores = logits - logits.exp().sum(-1, keepdim=True).log()
    return [float(row[token]) for row, token in zip(scores, tokens[1:], strict=True)]


def _attend(layout: PageLayout, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """[tokens, heads, D] of one layer: a sink page is read as it is, any other page before a query's own as stored."""
    recipe, size = layout.recipe, layout.page_tokens
    alone = PageLayout(
        replace(recipe, layers=(recipe.layers[layer],)),
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
    )
    full = len(q) // size
    paged = [x[: full * size].reshape(full, size, *x.shape[1:]).swapaxes(1, 2)[:, None] for x in (k, v)]
    sealed = np.stack([encode_page(alone, *page) for page in zip(*paged, strict=True)])
    reader = PageReader(alone, sealed, np.stack(paged, 2).astype(np.float64))
    reader.read = cache(reader.read)  # type: ignore[method-assign]
    pages = [PageRef(Pool.OPEN if page < recipe.sink_pages else Pool.SEALED, page) for page in range(full)]
    rows = []
    for position in range(len(q)):
        start = position // size * size
        own = slice(start, position + 1)
        rows.append(reader.attend(0, q[position], pages[: start // size], k[own], v[own])[0])
    return np.stack(rows)
