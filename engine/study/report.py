"""The results of `quire eval` as one JSON value."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from engine.kv.sizing import max_full_sequences
from engine.study.evaluation import FormatResult
from engine.study.interval import Interval, paired_loss
from engine.study.perplexity import Likeness, WindowScore
from engine.study.probes import Case, Outcome
from kernels.format.layout import PageLayout


@dataclass(frozen=True, slots=True)
class ProbeScore:
    """Of `num_counted` cases that the reference passes, `num_passed` are passed. `log_likelihood`: mean of all cases,
    in nats a token."""

    probe: str
    num_counted: int
    num_passed: int
    log_likelihood: float | None


@dataclass(frozen=True, slots=True)
class FormatReport:
    """`loss_percent`: how much larger the perplexity is than the reference's. KL divergence is in nats a token.
    `num_sequences` of the window's length fit in the stated memory. `outcomes` go by the names of probe cases."""

    name: str
    recipe: str
    bits_per_element: float
    bytes_per_token: float
    num_sequences: int
    num_tokens: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    perplexity: float
    late_perplexity: float
    loss_percent: Interval
    late_loss_percent: Interval
    kl: float
    late_kl: float
    agreement: float
    probes: tuple[ProbeScore, ...]
    windows: tuple[WindowScore, ...]
    outcomes: dict[str, Outcome]


def report_format(
    result: FormatResult,
    reference: FormatResult,
    layout: PageLayout,
    cases: Sequence[Case],
    *,
    context: int,
    kv_memory: int,
) -> FormatReport:
    """`result` beside the reference, over the same windows and cases."""
    windows = result.windows
    assert result.decode_tokens_per_second is not None
    elements = len(layout.layers) * 2 * layout.num_kv_heads * layout.head_dim
    num_sequences = max_full_sequences(layout, kv_memory, context)
    return FormatReport(
        name=result.name,
        recipe=", ".join(dict.fromkeys(str(layer) for layer in layout.recipe.layers)),
        bits_per_element=8 * layout.bytes_per_token / elements,
        bytes_per_token=layout.bytes_per_token,
        num_sequences=num_sequences,
        num_tokens=num_sequences * context,
        prefill_tokens_per_second=sum(w.num_tokens for w in windows) / sum(w.prefill_seconds for w in windows),
        decode_tokens_per_second=result.decode_tokens_per_second,
        perplexity=math.exp(-fmean(w.all.log_likelihood for w in windows)),
        late_perplexity=math.exp(-fmean(w.late.log_likelihood for w in windows)),
        loss_percent=_loss(reference, result, lambda window: window.all),
        late_loss_percent=_loss(reference, result, lambda window: window.late),
        kl=fmean(w.all.kl for w in windows),
        late_kl=fmean(w.late.kl for w in windows),
        agreement=fmean(w.all.agreement for w in windows),
        probes=_probe_scores(result, reference, cases),
        windows=windows,
        outcomes={case.name: result.outcomes[case.name] for case in cases},
    )


def _loss(reference: FormatResult, result: FormatResult, part: Callable[[WindowScore], Likeness]) -> Interval:
    theirs, ours = ([part(window).log_likelihood for window in each.windows] for each in (reference, result))
    return paired_loss(theirs, ours)


def _probe_scores(result: FormatResult, reference: FormatResult, cases: Sequence[Case]) -> tuple[ProbeScore, ...]:
    scores = []
    for probe in dict.fromkeys(case.probe for case in cases):
        names = [case.name for case in cases if case.probe == probe]
        counted = [name for name in names if reference.outcomes[name].is_passed]
        passed = sum(result.outcomes[name].is_passed for name in counted)
        values = [value for name in names if (value := result.outcomes[name].log_likelihood) is not None]
        scores.append(ProbeScore(probe, len(counted), passed, fmean(values) if values else None))
    return tuple(scores)


def to_json(study: Mapping[str, Any], formats: Sequence[FormatReport]) -> dict[str, Any]:
    """`study` says what was measured: model, text, context and the rest."""
    return {**study, "formats": [asdict(report) for report in formats]}
