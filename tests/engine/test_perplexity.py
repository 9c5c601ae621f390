"""Perplexity, KL divergence and agreement through the engine, against computations that share no code with it."""

import json
import math
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import StartupError
from engine.request import Request, SamplingParams
from engine.study import perplexity
from engine.study.evaluation import FormatResult, WindowScore
from engine.study.perplexity import Likeness, compare
from engine.study.probes import Outcome
from engine.study.results import ResultsFolder
from tests.engine import oracle_model, plain_model
from tests.engine.studies import contender, evaluate, subject
from tests.helpers import TINY, TINY_QWEN2, RandomCheckpoint, random_prompt, run, tiny_core

CONTEXT = 200
FREQUENCIES = [10000.0 ** (-2 * pair / TINY.head_dim) for pair in range(TINY.head_dim // 2)]
MODELS = {"llama": TINY, "qwen2": TINY_QWEN2}


@cache
def likely_text(length: int, model: str = "llama") -> tuple[int, ...]:
    """Drawn from the model itself, so that whatever disturbs it makes the text less likely."""
    sampling = SamplingParams(max_tokens=length - 8, temperature=1.0, seed=3, ignore_eos=True)
    prompt = tuple(random_prompt(1, 8))
    (recorder,) = run(tiny_core(MODELS[model]), [Request(id="r", prompt=prompt, sampling=sampling)])
    return prompt + recorder.token_ids


def log_likelihood(result: FormatResult) -> float:
    return fmean(window.all.log_likelihood for window in result.windows)


def test_scores_are_those_of_the_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "BLOCK_ROWS", 5)
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(8, 30, generator=generator)
    hidden, reference = (torch.randn(13, 8, generator=generator) for _ in range(2))
    targets = torch.randint(30, (13,), generator=generator)
    whole, late = compare(lambda rows: rows @ head, hidden, reference, targets)

    def probabilities(rows: torch.Tensor) -> np.ndarray:
        weights = np.exp(rows.double().numpy() @ head.double().numpy())
        return weights / weights.sum(-1, keepdims=True)

    ours, theirs = probabilities(hidden), probabilities(reference)
    likelihood = np.log(ours[range(13), targets.numpy()])
    divergence = (theirs * np.log(theirs / ours)).sum(-1)
    agreement = ours.argmax(-1) == theirs.argmax(-1)
    assert 0 < agreement.mean() < 1
    for found, rows in ((whole, slice(0, 13)), (late, slice(6, 13))):
        assert found.log_likelihood == pytest.approx(likelihood[rows].mean(), abs=1e-5)
        assert found.kl == pytest.approx(divergence[rows].mean(), abs=1e-5)
        assert found.agreement == agreement[rows].mean()


def test_logits_that_are_not_finite_are_told() -> None:
    hidden = torch.zeros(4, 3)
    hidden[2, 0] = torch.nan
    with pytest.raises(StartupError, match="token 2 are not finite"):
        compare(lambda rows: rows, hidden, None, torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("name", MODELS)
def test_native_perplexity_is_that_of_a_plain_model(name: str, tmp_path: Path) -> None:
    """A logit is off by at most 1e-4 (test_model), so a log-likelihood by at most twice that."""
    windows = (likely_text(CONTEXT, name), tuple(random_prompt(2, CONTEXT)))
    (result,) = evaluate(tmp_path, windows, [contender("native", CONTEXT)], model=MODELS[name])
    for window, score in zip(windows, result.windows, strict=True):
        model = MODELS[name]
        logits = plain_model.logits(model, RandomCheckpoint(model).tensor, FREQUENCIES, window)[:-1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(window[1:])[:, None])[:, 0]
        assert score.num_tokens == CONTEXT - 1
        assert score.all.log_likelihood == pytest.approx(float(expected.mean()), abs=2e-4)
        assert score.late.log_likelihood == pytest.approx(float(expected[(CONTEXT - 1) // 2 :].mean()), abs=2e-4)


def test_native_beside_itself_is_equal_and_int4_is_not(tmp_path: Path) -> None:
    """The second engine reads what the first one kept of the reference."""
    windows = (likely_text(CONTEXT),)
    native, again, int4 = evaluate(
        tmp_path,
        windows,
        [contender("native", CONTEXT), contender("native", CONTEXT, "again"), contender("int4", CONTEXT)],
    )
    assert again.windows[0].all == native.windows[0].all
    assert (again.windows[0].all.kl, again.windows[0].all.agreement) == (0.0, 1.0)
    assert int4.windows[0].all.kl > 1e-4
    assert int4.windows[0].all.agreement < 1
    assert log_likelihood(int4) < log_likelihood(native)
    assert native.decode_tokens_per_second is not None


def test_equal_windows_are_both_computed(tmp_path: Path) -> None:
    """Nothing of a window is served from the pages of the one before it."""
    window, computed = tuple(random_prompt(4, CONTEXT)), []
    (result,) = evaluate(
        tmp_path,
        (window, window),
        [contender("kivi4", CONTEXT, "native")],
        listen=lambda name, count: computed.append(count),
    )
    first, second = result.windows
    assert (first.all, first.late) == (second.all, second.late)
    # both windows, and the first half of the last one before the decoded tokens
    assert sum(computed) == 2 * (CONTEXT - 1) + CONTEXT - 64


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", ["native", "int8", "int4", "fp8_e5m2", "fp8_e4m3", "kivi4", "kivi2"])
def test_engine_and_oracle_agree_on_perplexity(recipe: str, name: str, tmp_path: Path) -> None:
    """To 0.1 %; what the oracle must see, the loss of the coarse formats, is several times that."""
    model, window = MODELS[name], likely_text(CONTEXT, name)
    results = evaluate(tmp_path, (window,), [contender("native", CONTEXT), contender(recipe, CONTEXT)], model=model)
    engine = subject(model).build(contender(recipe, CONTEXT).config)
    expected = fmean(oracle_model.log_likelihoods(engine, window))
    assert math.exp(expected - log_likelihood(results[1])) == pytest.approx(1, abs=1e-3)
    if recipe in ("int4", "kivi4", "kivi2", "fp8_e5m2"):
        assert math.exp(log_likelihood(results[0]) - expected) > 1.005


class Stopped(Exception):
    pass


def without_times(result: FormatResult) -> FormatResult:
    windows = tuple(replace(window, prefill_seconds=0.0) for window in result.windows)
    return replace(result, windows=windows, decode_tokens_per_second=None)


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    windows = tuple(tuple(random_prompt(seed, CONTEXT)) for seed in range(3))
    contenders = [contender(recipe, CONTEXT) for recipe in ("native", "int4", "kivi2")]
    whole = evaluate(tmp_path / "whole", windows, contenders)
    total = 0

    def stop(name: str, count: int) -> None:
        nonlocal total
        total += count if name == "int4" else 0
        if total > CONTEXT:  # in the second window
            raise Stopped

    with pytest.raises(Stopped):
        evaluate(tmp_path / "parts", windows, contenders, listen=stop)
    computed: list[tuple[str, int]] = []
    parts = evaluate(tmp_path / "parts", windows, contenders, listen=lambda name, count: computed.append((name, count)))
    assert list(map(without_times, parts)) == list(map(without_times, whole))
    decode = CONTEXT - 64
    assert [count for name, count in computed if name == "native"] == [3 * (CONTEXT - 1) + decode]  # skipped at once
    assert [count for name, count in computed if name == "int4"][0] == CONTEXT - 1
    again = evaluate(tmp_path / "parts", windows, contenders, listen=lambda name, count: None)
    assert again == parts


def test_results_of_another_recipe_are_refused(tmp_path: Path) -> None:
    windows = (tuple(random_prompt(1, CONTEXT)),)
    evaluate(tmp_path, windows, [contender("native", CONTEXT), contender("int8", CONTEXT, "mine")])
    with pytest.raises(StartupError, match="mine of another recipe"):
        evaluate(tmp_path, windows, [contender("int4", CONTEXT, "mine")])


@pytest.mark.parametrize(
    "damage",
    [
        {"name": "native"},
        {"decode_tokens_per_second": 0.0},
        {"decode_tokens_per_second": -1.0},
        {"windows": {"num_tokens": 7}},
        {"windows": {"prefill_seconds": 0.0}},
        {"all": {"log_likelihood": 0.5}},
        {"all": {"log_likelihood": -1e300}},
        {"late": {"kl": 1e9}},
        {"late": {"agreement": 1.5}},
        None,
    ],
    ids=str,
)
def test_results_that_cannot_be_are_refused(damage: dict[str, Any] | None, tmp_path: Path) -> None:
    """None: of more windows than there are."""
    windows = (tuple(random_prompt(1, CONTEXT)),)
    chosen = [contender("native", CONTEXT), contender("int8", CONTEXT)]
    evaluate(tmp_path, windows, chosen)
    evaluate(tmp_path, windows, chosen)  # takes up what is there
    file = tmp_path / "format-int8.json"
    found = json.loads(file.read_text())
    match damage:
        case None:
            found["windows"] *= 2
        case {"windows": change}:
            found["windows"][0] |= change
        case {"all": change}:
            found["windows"][0]["all"] |= change
        case {"late": change}:
            found["windows"][0]["late"] |= change
        case _:
            found |= damage
    file.write_text(json.dumps(found))
    with pytest.raises(StartupError, match="numbers of int8 that cannot be"):
        evaluate(tmp_path, windows, chosen)


def test_scores_survive_json(tmp_path: Path) -> None:
    score = WindowScore(Likeness(-1.5, 0.25, 0.75), Likeness(-1.0, 0.5, 1.0), 7, 0.1)
    result = FormatResult("int4", "0", (score,), 3.5, {"quote": Outcome(True, None)})
    folder = ResultsFolder.open(tmp_path, {})
    folder.save("int4", asdict(result))
    assert folder.load("int4", FormatResult) == result
