"""Log-probabilities of tokens, and of the likeliest beside them."""

import math
from collections.abc import Sequence as List

import torch
from torch import Tensor

from engine.plan import StepPlan
from engine.request import TokenLogprob
from engine.sampler import UNITS, weights
from engine.sequence import Sequence
from kernels.transfer import to_device

TILE = 64  # rows whose logits are there at a time


def token_logprobs(logits: Tensor, tokens: List[int], num_top: int) -> list[TokenLogprob | None]:
    """Of one token a row of fp32 `logits` [rows, vocab], with the `num_top` likeliest of the row. None for a row whose
    logits overflowed or are not numbers.

    A row's result does not depend on other rows: the sum is one of whole units, as where tokens are drawn.
    """
    num_top = min(num_top, logits.shape[-1])
    chosen = to_device(list(tokens), torch.int64, logits.device)
    largest = logits.amax(-1, keepdim=True)
    totals = weights(logits - largest).sum(-1, keepdim=True)
    shift = largest.double() + (totals.double() / UNITS).log()
    columns = [largest.double(), shift, logits.gather(-1, chosen.unsqueeze(-1)).double()]
    if num_top:
        top, ids = logits.topk(num_top)
        num_reaching = (logits >= top[:, -1:]).sum(-1, keepdim=True)
        columns += [num_reaching.double(), top.double(), ids.double()]
    results: list[TokenLogprob | None] = []
    for row, (best, log_total, logit, *rest) in enumerate(torch.cat(columns, -1).tolist()):
        if not math.isfinite(best):
            results.append(None)
            continue
        likeliest: list[tuple[float, int]] = []
        if rest:
            likeliest = [(value, int(id)) for value, id in zip(rest[1 : 1 + num_top], rest[1 + num_top :], strict=True)]
            if rest[0] > num_top:  # which of those with the last logit `topk` took is not said
                likeliest = _with_lowest(likeliest, logits[row])
            likeliest.sort(key=lambda pair: (-pair[0], pair[1]))
        top_logprobs = tuple((id, value - log_total) for value, id in likeliest)
        results.append(TokenLogprob(tokens[row], logit - log_total, top_logprobs))
    return results


def _with_lowest(likeliest: List[tuple[float, int]], logits: Tensor) -> list[tuple[float, int]]:
    """The same logits, of those that equal the last one the lowest ids."""
    last = likeliest[-1][0]
    larger = [pair for pair in likeliest if pair[0] > last]
    equal = (logits == last).nonzero().flatten()[: len(likeliest) - len(larger)]
    return larger + [(last, id) for id in equal.tolist()]


class PromptRows:
    """Rows of a step behind which comes a token of a prompt whose log-probability is asked for and not known.

    `rows`: their numbers in the step; `tokens`: what follows each; `sequences`: whose each is.
    """

    def __init__(self, plan: StepPlan):
        self.rows: list[int] = []
        self.tokens: list[int] = []
        self.sequences: list[Sequence] = []
        self.num_top = 0
        first = len(plan.decode)
        for item in plan.chunks:
            sequence, chunk = item.sequence, item.chunk
            if (num_top := sequence.num_prompt_logprobs) is not None:
                self.num_top = max(self.num_top, num_top)
                end = min(chunk.start + chunk.length, sequence.num_prompt_tokens - 1)
                for position in range(max(chunk.start, len(sequence.scores)), end):
                    self.rows.append(first + position - chunk.start)
                    self.tokens.append(sequence.tokens[position + 1])
                    self.sequences.append(sequence)
            first += chunk.length
