"""The parts of `quire eval` around the measurement: windows, intervals, probes, the report."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from engine.errors import StartupError
from engine.study.evaluation import FormatResult, WindowScore
from engine.study.interval import paired_loss, student_t
from engine.study.perplexity import Likeness
from engine.study.probes import NUM_QUOTED_TOKENS, Outcome, PasskeyCase, ProbePlan, QuoteCase
from engine.study.report import report_format
from engine.study.results import ResultsFolder, write_json
from engine.study.windows import cut_windows, read_text, tokenize
from tests.engine.studies import contender, evaluate
from tests.helpers import byte_tokenizer, greedy, random_prompt, run, tiny_core
from tests.kernels.builders import make_layout

TEXT = "".join(f"Line {number} of a text that nobody wrote. " for number in range(200))


@pytest.mark.parametrize(
    ("probability", "degrees", "quantile"),
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.975, 7, 2.365),
        (0.95, 7, 1.895),
        (0.995, 4, 4.604),
        (0.975, 30, 2.042),
        (0.975, 120, 1.980),
    ],
)
def test_students_t_is_that_of_the_printed_tables(probability: float, degrees: int, quantile: float) -> None:
    assert student_t(probability, degrees) == pytest.approx(quantile, abs=5e-4)


def test_interval_by_hand() -> None:
    """Losses of 0.01, 0.02 and 0.03 nats: mean 0.02, deviation 0.01, reach 4.3027 * 0.01 / sqrt(3) = 0.024841."""
    loss = paired_loss([-2.0, -3.0, -1.0], [-2.01, -3.02, -1.03])
    assert loss.mean == pytest.approx(100 * (math.exp(0.02) - 1), rel=1e-6)
    assert loss.low == pytest.approx(100 * (math.exp(-0.004841) - 1), rel=1e-3)
    assert loss.high == pytest.approx(100 * (math.exp(0.044841) - 1), rel=1e-4)


def test_one_window_has_no_interval() -> None:
    loss = paired_loss([-2.0], [-2.5])
    assert (loss.low, loss.high) == (None, None) and loss.mean == pytest.approx(100 * (math.sqrt(math.e) - 1))


def test_windows_lie_one_behind_the_other() -> None:
    assert cut_windows(range(10), 3, 8) == ((0, 1, 2), (3, 4, 5), (6, 7, 8))
    assert cut_windows(range(10), 3, 2) == ((0, 1, 2), (3, 4, 5))
    assert cut_windows(range(10), 10, 2) == (tuple(range(10)),)


@pytest.mark.parametrize(
    ("data", "says"),
    [(None, "No such file"), (b"", "the file is empty"), (b" \n", "the file is empty"), (b"abc\xff", "byte 3")],
)
def test_a_file_that_is_no_text_is_told(data: bytes | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "text"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(StartupError, match=says) as error:
        read_text(str(file))
    assert "--text" in str(error.value) and "\n" not in str(error.value)


def test_a_short_text_is_told_with_both_numbers() -> None:
    with pytest.raises(StartupError, match=r"5 tokens.*it is 6"):
        tokenize("abcde", byte_tokenizer(), 6, "t")
    assert len(tokenize("abcdef", byte_tokenizer(), 6, "t")) == 6


def test_a_folder_of_another_study_is_refused(tmp_path: Path) -> None:
    ResultsFolder.open(tmp_path / "new", {"context": 1, "model": "a"})
    ResultsFolder.open(tmp_path / "new", {"context": 1, "model": "a"})
    with pytest.raises(StartupError, match=r"another run \(context differ"):
        ResultsFolder.open(tmp_path / "new", {"context": 2, "model": "a"})
    (tmp_path / "diary.txt").write_text("mine")
    with pytest.raises(StartupError, match="other files"):
        ResultsFolder.open(tmp_path, {"context": 1})


@pytest.mark.parametrize("text", ["{", "[]", "null", "7", "[" * 10000])
def test_a_damaged_study_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(StartupError, match=r"study.json cannot be read .*; delete the folder") as error:
        ResultsFolder.open(tmp_path, {"context": 1})
    assert "\n" not in str(error.value)


def scores(**changes: Any) -> dict[str, Any]:
    likeness = {"log_likelihood": -1.0, "kl": 0, "agreement": 1}
    window = {"all": likeness, "late": likeness, "num_tokens": 7, "prefill_seconds": 0.5}
    return {"name": "int4", "recipe_id": "0", "windows": [window], "outcomes": {}} | changes


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"windows": 3},
        scores(windows=[{}]),
        scores(windows=[None]),
        scores(windows={"all": 1}),
        scores(outcomes=[]),
        scores(outcomes={"passkey": {"is_passed": "no"}}),
        scores(decode_tokens_per_second="3"),
        scores(recipe_id=None),
    ],
)
def test_damaged_results_are_told(value: Any, tmp_path: Path) -> None:
    folder = ResultsFolder.open(tmp_path, {})
    folder.save("int4", scores())
    whole = folder.load("int4", FormatResult)
    assert whole is not None and whole.windows[0].late.kl == 0
    folder.save("int4", value)
    with pytest.raises(StartupError, match=r"format-int4.json cannot be read .*; delete the folder") as error:
        folder.load("int4", FormatResult)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "found",
    [
        save({"hidden": torch.zeros(3, 4, dtype=torch.float64)}),
        save({"hidden": torch.zeros(4, 3)}),
        save({"hidden": torch.full((3, 4), math.nan)}),
        save({"other": torch.zeros(3, 4)}),
        save({"hidden": torch.zeros(3, 4)})[:-1],
        b"",
        b"PK\x03\x04 no archive",
        b"\xff" * 100,
    ],
)
def test_damaged_hidden_states_are_told(found: bytes, tmp_path: Path) -> None:
    folder, hidden = ResultsFolder.open(tmp_path, {}), torch.ones(3, 4)
    folder.save_reference(0, hidden)
    assert torch.equal(folder.load_reference(0, hidden.shape), hidden)
    (tmp_path / "reference-0.safetensors").write_bytes(found)
    with pytest.raises(StartupError, match=r"reference-0.safetensors cannot be read .*; delete the folder"):
        folder.load_reference(0, hidden.shape)


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    write_json(file, {"a": 1})
    with pytest.raises(ValueError):
        write_json(file, {"a": math.nan})
    assert file.read_text() == '{\n  "a": 1\n}\n' and list(tmp_path.iterdir()) == [file]
    with pytest.raises(StartupError, match="cannot be written"):
        write_json(tmp_path / "no" / "out.json", {})


@dataclass
class Parrot:
    """Says what it is told to; remembers what it was asked."""

    says: str = ""
    prompts: list[tuple[int, ...]] = field(default_factory=list)

    def answer(self, prompt: Sequence[int], num_tokens: int) -> str:
        self.prompts.append(tuple(prompt))
        return self.says

    def continue_as(self, prompt: Sequence[int], expected: Sequence[int]) -> tuple[bool, float]:
        self.prompts.append(tuple(prompt))
        return False, -1.0


def test_passkeys() -> None:
    tokenizer = byte_tokenizer()
    tokens = tuple(tokenizer.encode(TEXT))
    plan = ProbePlan(("passkey",), num_depths=3, num_repeats=2)
    cases = plan.cases(tokens, 2500, tokenizer)
    assert cases == plan.cases(tokens, 2500, tokenizer)
    assert len({case.name for case in cases}) == len(cases) == 3 * 2 * 3  # 1024, 2048 and 2500 tokens
    assert {len(case.prompt) + 12 for case in cases if isinstance(case, PasskeyCase)} == {1024, 2048, 2500}
    assert len({case.key for case in cases if isinstance(case, PasskeyCase)}) == len(cases)
    places = []
    for case in cases[:3]:
        assert isinstance(case, PasskeyCase)
        text = tokenizer.decode(case.prompt)
        assert text.count(case.key) == 2 and text.endswith("The pass key is")
        places.append(text.index(case.key) / len(text))
        for says, is_passed in ((f" {case.key}.", True), (f"{case.key}1", False), ("the key", False), ("", False)):
            assert case.ask(Parrot(says)) == Outcome(is_passed, None)
    assert places == sorted(places) and places[0] < 0.25 and places[-1] > 0.7


def test_quotes() -> None:
    tokenizer = byte_tokenizer()
    tokens = tuple(random_prompt(1, 3000))
    cases = ProbePlan(("quote",), num_depths=2, num_repeats=1).cases(tokens, 1024, tokenizer)
    assert len(cases) == 2
    for case in cases:
        assert isinstance(case, QuoteCase)
        assert len(case.prompt) + len(case.quoted) == 1024 and len(case.quoted) == NUM_QUOTED_TOKENS
        cue = case.prompt[-64:]
        (place,) = (start for start in range(1024 - 16 - 64) if case.prompt[start : start + 64] == cue)
        assert place < 512 and case.prompt[place + 64 : place + 80] == case.quoted
        assert case.ask(Parrot()) == Outcome(False, -1.0)


def test_probes_through_the_engine(tmp_path: Path) -> None:
    """What the engine generates, token by token, passes; the same with another last token does not."""
    context, prompt = 256, tuple(random_prompt(6, 200))
    (recorder,) = run(tiny_core(), [greedy("r", prompt, 16)])
    answer = recorder.token_ids
    wrong = (*answer[:-1], (answer[-1] + 1) % 256)
    cases = [QuoteCase("right", prompt, answer), QuoteCase("wrong", prompt, wrong)]
    window = tuple(random_prompt(7, context))
    (native,) = evaluate(tmp_path, (window,), [contender("native", context)], cases=cases)
    right, other = native.outcomes["right"], native.outcomes["wrong"]
    assert (right.is_passed, other.is_passed) == (True, False)
    assert right.log_likelihood is not None and other.log_likelihood is not None
    assert other.log_likelihood < right.log_likelihood < 0


def test_passkeys_through_the_engine(tmp_path: Path) -> None:
    """A random model that happens to say "3" here: the case passes for that key only."""
    prompt = tuple(random_prompt(20, 200))
    (recorder,) = run(tiny_core(), [greedy("r", prompt, 12)])
    assert re.match(r"3\D", recorder.text)
    cases = [PasskeyCase("said", prompt, "3"), PasskeyCase("other", prompt, "33")]
    window = tuple(random_prompt(7, 256))
    (native,) = evaluate(tmp_path, (window,), [contender("native", 256)], cases=cases)
    assert native.outcomes == {"said": Outcome(True, None), "other": Outcome(False, None)}


def _result(name: str, scores: Sequence[float], outcomes: dict[str, Outcome]) -> FormatResult:
    windows = tuple(
        WindowScore(Likeness(score, 0.1, 0.9), Likeness(score / 2, 0.2, 0.8), num_tokens=100, prefill_seconds=0.5)
        for score in scores
    )
    return FormatResult(name, "0", windows, 7.0, outcomes)


def test_report() -> None:
    cases = [
        PasskeyCase("a", (1,), "1"),
        PasskeyCase("b", (1,), "2"),
        QuoteCase("c", (1,), (2,)),
        QuoteCase("d", (1,), (2,)),
    ]
    native = _result(
        "native",
        [-2.0, -3.0],
        {"a": Outcome(True, None), "b": Outcome(False, None), "c": Outcome(True, -0.5), "d": Outcome(False, -1.5)},
    )
    other = _result(
        "kivi4",
        [-2.1, -3.1],
        {"a": Outcome(False, None), "b": Outcome(True, None), "c": Outcome(True, -0.75), "d": Outcome(True, -1.75)},
    )
    report = report_format(other, native, make_layout("kivi4"), cases, context=8192, kv_memory=2**30)
    assert report.perplexity == pytest.approx(math.exp(2.6))
    assert report.late_perplexity == pytest.approx(math.exp(1.3))
    assert report.loss_percent.mean == pytest.approx(100 * math.expm1(0.1))
    assert report.late_loss_percent.mean == pytest.approx(100 * math.expm1(0.05))
    assert (report.prefill_tokens_per_second, report.decode_tokens_per_second) == (200, 7.0)
    assert (report.kl, report.late_kl, report.agreement) == (0.1, 0.2, 0.9)
    passkey, quote = report.probes
    assert (passkey.num_counted, passkey.num_passed, passkey.log_likelihood) == (1, 0, None)
    assert (quote.num_counted, quote.num_passed, quote.log_likelihood) == (1, 1, -1.25)


def test_bits_and_what_fits_come_from_the_bytes_of_a_page() -> None:
    """30 layers, 3 kv heads of 64 channels, pages of 64 tokens: K takes 4 bits and 2 fp16 numbers a channel, V the
    same a token, so 4 + 32 / 64 bits. 8192 tokens are 1 sink page in a slot and 127 sealed pages, with 1 in reserve."""
    layout, result = make_layout("kivi4"), _result("kivi4", [-2.0], {})
    report = report_format(result, result, layout, [], context=8192, kv_memory=2**30)
    assert report.bits_per_element == 4.5
    page, slot = 64 * 30 * 2 * 3 * 64 * 4.5 / 8, 64 * 30 * 2 * 3 * 64 * 2
    count = report.num_sequences
    needed = [(1 + n * 127) * page + (1 + 2 * n + 8) * slot for n in (count, count + 1)]
    assert needed[0] <= 2**30 < needed[1]
    assert report.num_tokens == count * 8192
    native = report_format(result, result, make_layout("native"), [], context=8192, kv_memory=2**30)
    assert native.bits_per_element == 16
