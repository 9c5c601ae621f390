"""Choosing the next token of every row at once.

What a request asks for is applied in this order, which is vLLM's:

1. Logprobs are taken from the logits as they are (engine/logprobs.py).
2. `logit_bias`, then the penalties: repetition, frequency, presence (engine/penalties.py).
3. Tokens that `min_tokens` or a grammar forbids go. Where `temperature` is 0, the largest that is left is chosen.
4. `temperature`, `min_p`, `top_k`, `top_p`; each counts only what those before it left. Then a token is drawn.

A row's choice depends on its own logits, seed and position only: kept tokens are decided by a threshold on the logits
(so ties do not depend on a sort), weights are summed in whole units (so the order of a sum is irrelevant), and the one
random number of a token is a hash of (seed, position).
"""

import hashlib
import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.request import SamplingParams
from kernels.transfer import to_device

NO_TOKEN = -1
TOO_SHORT = -2  # the shortlist was
SHORTLIST = 1024
UNITS = 2.0**40  # of the largest weight; 2**23 such weights can be summed


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 32 random bits, the same on every machine."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=4).digest()
    return float(int.from_bytes(digest, "little") / 2**32)


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int | None]:
    """fp32 `logits` [rows, vocab] to a token id a row; `positions` are the places that the new tokens take.

    None for a row whose logits overflowed or are not numbers: any token would be made up.
    """
    draws = [uniform(param.seed, position) for param, position in zip(params, positions, strict=True)]
    tokens = _choose(logits, params, draws, SHORTLIST)
    short = [row for row, token in enumerate(tokens) if token == TOO_SHORT]
    if short:  # rare
        again = _choose(logits[short], [params[row] for row in short], [draws[row] for row in short], logits.shape[-1])
        for row, token in zip(short, again, strict=True):
            tokens[row] = token
    return [None if token == NO_TOKEN else token for token in tokens]


def _choose(logits: Tensor, params: Sequence[SamplingParams], draws: Sequence[float], shortlist: int) -> list[int]:
    """A token id a row, NO_TOKEN, or TOO_SHORT where more than the `shortlist` largest logits must be ranked. What is
    copied to the device is not waited for, and one copy comes back."""
    vocab = logits.shape[-1]
    largest, tokens = logits.max(-1)
    filtered: list[tuple[float, ...]] = []
    drawn: list[tuple[float, ...]] = []
    for row, param in enumerate(params):
        if param.temperature > 0:
            limit = param.top_k if 0 < param.top_k < vocab else vocab
            is_filtered = limit < vocab or param.top_p < 1
            floor = math.log(param.min_p) if param.min_p > 0 else -math.inf
            values = (row, param.temperature, limit, param.top_p, floor, draws[row])
            (filtered if is_filtered else drawn).append(values)
    if rows := filtered + drawn:
        table = to_device(rows, torch.float64, logits.device)
        places, temperature, limits, top_p, floors, draw = table.t().contiguous().unbind()
        index, count = places.long(), len(filtered)
        # the largest logit becomes 0 before the division, so that a tiny temperature cannot overflow it
        scaled = ((logits[index] - largest[index].unsqueeze(-1)).double() / temperature.unsqueeze(-1)).float()
        if any(param.min_p > 0 for param in params):
            scaled.masked_fill_(scaled < floors.float().unsqueeze(-1), -math.inf)
        is_short = torch.zeros(len(index), dtype=torch.bool, device=logits.device)
        if filtered:
            cut = scaled[:count]
            ranked = cut.topk(min(shortlist, vocab)).values
            threshold, is_short[:count] = _cut(cut, ranked, limits[:count].long(), top_p[:count])
            cut.masked_fill_(cut < threshold.unsqueeze(-1), -math.inf)
        tokens[index] = _draw(scaled, draw).masked_fill_(is_short, TOO_SHORT)
    return tokens.masked_fill_(~largest.isfinite(), NO_TOKEN).tolist()


def weights(logits: Tensor) -> Tensor:
    """int64 units of `logits` of which the largest is 0: they can be summed in any order."""
    return logits.exp().mul_(UNITS).long()


def _cut(logits: Tensor, ranked: Tensor, limit: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest logit [n] that stays in each row of `logits` [n, vocab], and where `ranked` [n, k], the largest
    logits in order, does not reach far enough. Equal logits stay or go together.

    `limit` [n]: how many tokens may stay at most; `top_p` [n]: the share of what those weigh that must stay.
    """
    length = ranked.shape[-1]
    lowest = ranked.gather(-1, (limit.clamp(max=length) - 1).unsqueeze(-1))
    is_kept = (logits >= lowest) | (limit > length).unsqueeze(-1)
    wanted = top_p * weights(logits).mul_(is_kept).sum(-1)
    mass = weights(ranked).cumsum(-1)
    num_before = (mass < wanted.unsqueeze(-1)).sum(-1)  # the token that reaches the mass is the last to stay
    last = torch.where(top_p < 1, torch.minimum(num_before, limit - 1), limit - 1)
    # what `limit` tokens weigh is not known where that many were not ranked
    is_short = (last >= length) | ((limit > length) & (limit < logits.shape[-1]))
    return ranked.gather(-1, last.clamp(max=length - 1).unsqueeze(-1)).squeeze(-1), is_short


def _draw(logits: Tensor, draws: Tensor) -> Tensor:
    """Inverse of the cumulative distribution, in the order of the vocabulary. draws: fp64 [n]."""
    cumulative = weights(logits).cumsum(-1)
    target = (cumulative[:, -1] * draws).long()
    tokens = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
    # the sums of a row that is not sound have no place for a draw; its token is not used
    return tokens.clamp_(max=logits.shape[-1] - 1)
