"""What tests of `quire eval` share: evaluations of the tiny model."""

from collections.abc import Callable, Sequence
from pathlib import Path

from engine.config import EngineConfig, ModelConfig
from engine.study.evaluation import Contender, Evaluation, FormatResult, Subject
from engine.study.probes import Case
from engine.study.results import ResultsFolder
from engine.study.windows import Tokens
from tests.helpers import TINY, RandomCheckpoint, byte_tokenizer


def subject(model: ModelConfig = TINY) -> Subject:
    return Subject(RandomCheckpoint(model), byte_tokenizer())


def contender(recipe: str, context: int, name: str | None = None) -> Contender:
    """In fp32 on the CPU; prompts are computed in chunks of two pages."""
    config = EngineConfig(
        model="tiny",
        kv_format=recipe,
        dtype="float32",
        device="cpu",
        page_tokens=32,
        max_num_seqs=1,
        max_step_tokens=64,
        max_model_len=context,
    )
    return Contender(name or recipe, config)


def evaluate(
    folder: Path,
    windows: Sequence[Tokens],
    contenders: Sequence[Contender],
    *,
    model: ModelConfig = TINY,
    cases: Sequence[Case] = (),
    listen: Callable[[str, int], None] = lambda name, count: None,
) -> list[FormatResult]:
    evaluation = Evaluation(subject(model), windows, cases, ResultsFolder.open(folder, {"context": 0}), listen)
    return [evaluation.measure(item) for item in contenders]
