"""Logits changed as each sequence asks: bias, penalties, and tokens that may not come.

What a row asks for is a list of (row, token, factor, addend), each token once: its logit is divided by the factor where
it is positive, multiplied by it where it is negative (CTRL, arXiv 1909.05858, section 4.1), and the addend is added.
"""

import math
from collections.abc import Sequence as List

import torch
from torch import Tensor

from engine.masks import Masks
from engine.sequence import Sequence


def adjust(logits: Tensor, sequences: List[Sequence], masks: Masks) -> Tensor:
    """fp32 [rows, vocab] of `logits` and the sequences of its rows; `logits` itself where nothing is asked for.

    A logit that is not finite leaves its row without a largest one, whatever is forbidden.
    """
    stages = [_biases(sequences), _penalties(sequences), _bans(sequences, logits.shape[-1])]
    lengths = [sum(map(len, stage)) for stage in stages]
    if not any(lengths) and not masks.rows:
        return logits
    logits = logits.clone()
    if any(lengths):
        table = torch.cat([part for stage in stages for part in stage])
        for part in _send(table, logits.device).split(lengths):
            _apply(logits, part)
    if masks.rows:
        _forbid(logits, masks)
    return logits


def _entries(row: int, tokens: Tensor, factor: float, addends: Tensor | float) -> Tensor:
    """fp64 [n, 4]."""
    entries = torch.empty(len(tokens), 4, dtype=torch.float64)
    entries[:, 0], entries[:, 1], entries[:, 2], entries[:, 3] = row, tokens, factor, addends
    return entries


def _biases(sequences: List[Sequence]) -> list[Tensor]:
    parts = []
    for row, sequence in enumerate(sequences):
        if bias := sequence.request.sampling.logit_bias:
            tokens, addends = zip(*dict(bias).items(), strict=True)  # each token once
            parts.append(_entries(row, torch.tensor(tokens), 1.0, torch.tensor(addends, dtype=torch.float64)))
    return parts


def _penalties(sequences: List[Sequence]) -> list[Tensor]:
    """Frequency and presence by OpenAI's formula: of generated tokens, the one for each time, the other once."""
    parts = []
    for row, sequence in enumerate(sequences):
        known, sampling = sequence.counts, sequence.request.sampling
        if known is not None and known.tokens:
            tokens = torch.frombuffer(known.tokens, dtype=torch.int64)
            counts = torch.frombuffer(known.counts, dtype=torch.int64).double()
            addends = -sampling.frequency_penalty * counts - sampling.presence_penalty * counts.clamp(max=1)
            parts.append(_entries(row, tokens, sampling.repetition_penalty, addends))
    return parts


def _bans(sequences: List[Sequence], vocab: int) -> list[Tensor]:
    parts = []
    for row, sequence in enumerate(sequences):
        if banned := [token for token in sequence.banned_ids if token < vocab]:
            parts.append(_entries(row, torch.tensor(banned), 1.0, -math.inf))
    return parts


def _apply(logits: Tensor, entries: Tensor) -> None:
    rows, tokens = entries[:, :2].long().unbind(1)
    factors, addends = entries[:, 2:].unbind(1)
    values = logits[rows, tokens].double()
    logits[rows, tokens] = (torch.where(values > 0, values / factors, values * factors) + addends).float()


def _forbid(logits: Tensor, masks: Masks) -> None:
    words = _send(masks.words, logits.device)
    rows = _send(torch.tensor(masks.rows), logits.device)
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_allowed = ((words.unsqueeze(-1) >> places) & 1).bool().flatten(1)[:, : logits.shape[-1]]
    values = logits[rows]
    logits[rows] = torch.where(is_allowed, values, values - math.inf)


def _send(values: Tensor, device: torch.device) -> Tensor:
    """On CUDA what the device does now is not waited for."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
