"""Which tokens the grammars of a step's sequences allow."""

import logging
from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.grammar import Constraint
from engine.sequence import Sequence

logger = logging.getLogger(__name__)

GRAMMAR_FAILED = "the grammar of this request failed at one of its tokens; simplify the grammar, or ask without one"
NOTHING_ALLOWED = (
    "the grammar of this request allows no token here that may come (min_tokens keeps the end away); change the grammar"
)


@dataclass(frozen=True, slots=True)
class Masks:
    """`rows` of a step that have a grammar and the `words` of each, int32 [rows, ceil(vocab / 32)] on the CPU, where
    bit i % 32 of word i // 32 allows token i. `refusals`: sequences that get no token, and why."""

    rows: list[int]
    words: Tensor
    refusals: dict[Sequence, str]


def fill_masks(sequences: List[Sequence], vocab: int) -> Masks:
    """Of the sequences of a step's sampled rows."""
    constrained = [(row, sequence) for row, sequence in enumerate(sequences) if sequence.constraint is not None]
    words = torch.zeros(len(constrained), -(-vocab // 32), dtype=torch.int32)
    rows: list[int] = []
    refusals: dict[Sequence, str] = {}
    for row, sequence in constrained:
        assert sequence.constraint is not None
        mask = words[len(rows)].numpy()
        if reason := _fill(mask, sequence.constraint, sequence.banned_ids, vocab):
            refusals[sequence] = reason
            mask[:] = 0
        else:
            rows.append(row)
    return Masks(rows, words[: len(rows)], refusals)


def _fill(mask: NDArray[np.int32], constraint: Constraint, banned: frozenset[int], vocab: int) -> str | None:
    """Returns why there is no token, if so."""
    try:
        constraint.fill_mask(mask.data)
    except Exception:
        logger.warning("a grammar failed to say what may come next", exc_info=True)
        return GRAMMAR_FAILED
    bits = mask.view(np.uint32)
    if rest := vocab % 32:
        bits[-1] &= (1 << rest) - 1
    for token in banned:
        if token < vocab:
            bits[token // 32] &= ~np.uint32(1 << token % 32)
    return None if mask.any() else NOTHING_ALLOWED
