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

NO_TOKEN = -1
SHORTLIST = 1024  # a fixed count, so that a row's sums do not depend on what other rows ask for


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 32 random bits, the same on every machine."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=4).digest()
    return float(int.from_bytes(digest, "little") / 2**32)


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int | None]:
    """fp32 `logits` [rows, vocab] to a token id a row; `positions` are the places that the new tokens take.

    None for a row whose logits overflowed or are not numbers: any token would be made up.
    """
    largest, tokens = logits.max(-1)
    random = [row for row, param in enumerate(params) if param.temperature > 0]
    if random:
        index = torch.tensor(random, device=logits.device)
        chosen = [params[row] for row in random]
        draws = [uniform(params[row].seed, positions[row]) for row in random]
        tokens[index] = _draw(_filter(logits[index], chosen), draws)
    tokens.masked_fill_(~largest.isfinite(), NO_TOKEN)
    return [None if token == NO_TOKEN else token for token in tokens.tolist()]


def _filter(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Scaled logits with -inf where top_k, then top_p, exclude a token."""
    temperature = logits.new_tensor([param.temperature for param in params], dtype=torch.float64)
    # the largest logit becomes 0 before the division, so that a tiny temperature cannot overflow it
    scaled = ((logits - logits.amax(-1, keepdim=True)).double() / temperature.unsqueeze(-1)).float()
    vocab = scaled.shape[-1]
    filtered = [row for row, param in enumerate(params) if 0 < param.top_k < vocab or param.top_p < 1]
    if filtered:
        index = torch.tensor(filtered, device=logits.device)
        limit = torch.tensor([params[row].top_k for row in filtered], device=logits.device)
        limit = limit.masked_fill_((limit == 0) | (limit > vocab), vocab)
        top_p = logits.new_tensor([params[row].top_p for row in filtered], dtype=torch.float64)
        rows = scaled[index]
        scaled[index] = rows.masked_fill(rows < _thresholds(rows, limit, top_p).unsqueeze(-1), float("-inf"))
    return scaled


def _thresholds(logits: Tensor, limit: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit [n] that stays in each row of `logits` [n, vocab]. Equal logits stay or go together.

    `limit` [n]: how many tokens may stay at most; `top_p` [n]: the share of what those weigh that must stay.
    """
    ranked = logits.topk(min(SHORTLIST, logits.shape[-1])).values
    threshold, is_short = _cut(logits, ranked, limit, top_p)
    for row in is_short.nonzero().flatten().tolist():  # rare: the shortlist was too short, so rank the whole row
        one = slice(row, row + 1)
        ranked = logits[one].sort(descending=True).values
        threshold[one], _ = _cut(logits[one], ranked, limit[one], top_p[one])
    return threshold


def _cut(logits: Tensor, ranked: Tensor, limit: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Thresholds [n], and where `ranked` [n, k], the largest logits in order, does not reach far enough."""
    length = ranked.shape[-1]
    lowest = ranked.gather(-1, (limit.clamp(max=length) - 1).unsqueeze(-1))
    is_kept = (logits >= lowest) | (limit > length).unsqueeze(-1)
    # running sums, whose order does not depend on the number of rows as that of a plain sum may
    wanted = top_p * logits.exp().double().mul_(is_kept).cumsum(-1)[:, -1]
    mass = ranked.exp().double().cumsum(-1)
    num_before = (mass < wanted.unsqueeze(-1)).sum(-1)  # the token that reaches the mass is the last to stay
    last = torch.where(top_p < 1, torch.minimum(num_before, limit - 1), limit - 1)
    return ranked.gather(-1, last.clamp(max=length - 1).unsqueeze(-1)).squeeze(-1), last >= length


def _draw(logits: Tensor, draws: Sequence[float]) -> Tensor:
    """Inverse of the cumulative distribution, in the order of the vocabulary."""
    cumulative = logits.exp().double().cumsum(-1)
    target = cumulative[:, -1] * torch.tensor(draws, dtype=torch.float64, device=logits.device)
    tokens = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
    # the sums of a row that is not sound have no place for a draw; its token is not used
    return tokens.clamp_(max=logits.shape[-1] - 1)
