"""Choosing the next token of every row at once.

A row's choice depends on its own logits, seed and position only: kept tokens are decided by a threshold on the logits
(so ties do not depend on a sort), and the one random number of a token is a hash of (seed, position).
"""

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.request import SamplingParams

SHORTLIST = 1024  # a fixed count, so that a row's sums do not depend on what other rows ask for


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 32 random bits, the same on every machine."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=4).digest()
    return float(int.from_bytes(digest, "little") / 2**32)


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """fp32 `logits` [rows, vocab] to a token id a row; `positions` are the places that the new tokens take."""
    tokens = logits.argmax(-1)
    random = [row for row, param in enumerate(params) if param.temperature > 0]
    if random:
        index = torch.tensor(random, device=logits.device)
        chosen = [params[row] for row in random]
        draws = [uniform(params[row].seed, positions[row]) for row in random]
        tokens[index] = _draw(_filter(logits[index], chosen), draws)
    return [int(token) for token in tokens.tolist()]


def _filter(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Scaled logits with -inf where top_k, then top_p, exclude a token."""
    temperature = logits.new_tensor([param.temperature for param in params], dtype=torch.float64)
    # the largest logit becomes 0 before the division, so that a tiny temperature cannot overflow it
    scaled = ((logits - logits.amax(-1, keepdim=True)).double() / temperature.unsqueeze(-1)).float()
    for row, param in enumerate(params):
        if 0 < param.top_k < scaled.shape[-1] or param.top_p < 1:
            scaled[row].masked_fill_(scaled[row] < _threshold(scaled[row], param), float("-inf"))
    return scaled


def _threshold(logits: Tensor, param: SamplingParams) -> Tensor:
    """The smallest logit that stays. Equal logits stay or go together."""
    vocab = len(logits)
    limit = param.top_k if 0 < param.top_k < vocab else vocab
    ranked = logits.topk(min(SHORTLIST, vocab)).values
    if limit < vocab and limit > len(ranked):
        ranked = logits.sort(descending=True).values
    if param.top_p == 1:
        return ranked[limit - 1]
    kept = logits if limit == vocab else logits.masked_fill(logits < ranked[limit - 1], float("-inf"))
    wanted = param.top_p * kept.exp().double().sum()
    mass = ranked.exp().double().cumsum(0)
    if mass[-1] < wanted and len(ranked) < limit:
        ranked = logits.sort(descending=True).values
        mass = ranked.exp().double().cumsum(0)
    # the token that reaches the mass is the last to stay
    return ranked[min(int((mass < wanted).sum()), limit - 1)]


def _draw(logits: Tensor, draws: Sequence[float]) -> Tensor:
    """Inverse of the cumulative distribution, in the order of the vocabulary."""
    cumulative = logits.exp().double().cumsum(-1)
    target = cumulative[:, -1] * torch.tensor(draws, dtype=torch.float64, device=logits.device)
    tokens = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
    # sums that are not finite have no place for a draw; what comes out must still be a token
    return tokens.clamp_(max=logits.shape[-1] - 1)
