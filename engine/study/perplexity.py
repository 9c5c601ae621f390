"""What a window of text says about a KV format: likelihood of the text, and distance from the reference's predictions.

KL divergence and top-1 agreement are those of llama.cpp's perplexity tool: of the next-token distributions, over the
positions of a text.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import StartupError

BLOCK_ROWS = 512  # logits of a block take 100 MB at 49152 tokens, where those of a window would take 1.6 GB

Logits = Callable[[Tensor], Tensor]
"""fp32 [n, vocab] of hidden states [n, hidden]."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """Means over positions: log-likelihood of the text and KL(reference || this) in nats a token, and the share of
    positions where both find the same token most likely."""

    log_likelihood: float
    kl: float
    agreement: float


@dataclass(frozen=True, slots=True)
class WindowScore:
    """Of all predicted tokens of a window, and of those in its second half. `prefill_seconds` is for `num_tokens`."""

    all: Likeness
    late: Likeness
    num_tokens: int
    prefill_seconds: float


@torch.inference_mode()
def compare(logits: Logits, hidden: Tensor, reference: Tensor | None, targets: Tensor) -> tuple[Likeness, Likeness]:
    """Score hidden states [n, hidden], where row i predicts `targets[i]` (int64 [n]), against those of the reference,
    which None says they are themselves. Returns the scores of all rows and of those from n // 2 on.

    Raises StartupError where a log-likelihood is not finite.
    """
    blocks = []
    for start in range(0, len(hidden), BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        theirs = None if reference is None else reference[rows]
        blocks.append(_compare_rows(logits, hidden[rows], theirs, targets[rows]).cpu())
    scores = torch.cat(blocks, 1)
    if not scores.isfinite().all():
        first = int((~scores.isfinite().all(0)).nonzero()[0])
        raise StartupError(f"the logits of token {first} are not finite; try --dtype float32")
    whole, late = (Likeness(*part.mean(1).tolist()) for part in (scores, scores[:, scores.shape[1] // 2 :]))
    return whole, late


def _compare_rows(logits: Logits, hidden: Tensor, reference: Tensor | None, targets: Tensor) -> Tensor:
    """float64 [3, n]: log-likelihood, KL divergence and agreement of each row."""
    ours = logits(hidden).log_softmax(-1)
    likelihood = ours.gather(1, targets.to(ours.device)[:, None])[:, 0].double()
    if reference is None:
        return torch.stack((likelihood, torch.zeros_like(likelihood), torch.ones_like(likelihood)))
    theirs = logits(reference).log_softmax(-1)
    agreement = ours.argmax(-1) == theirs.argmax(-1)
    divergence = torch.mul(theirs.exp(), theirs - ours).sum(-1)
    return torch.stack((likelihood, divergence.double(), agreement.double()))
