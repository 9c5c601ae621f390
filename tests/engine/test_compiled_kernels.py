"""The engine over the compiled CPU kernels: the tokens of the torch backend, in fp32; how they are chosen."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import engine.kernel_choice
import engine.load
from engine.core import EngineCore
from engine.errors import StartupError
from engine.kv.shrink import HeavyHitters
from engine.model.rows import AllRows, TiledRows
from engine.request import Delta, Request
from kernels.cpu.build import build_id
from kernels.cpu.library import CpuLibrary
from tests.helpers import TINY, TINY_QWEN2, TINY_QWEN3, greedy, random_prompt, run, tiny_core, tiny_engine
from tests.kernels.compiled import kernel_path

P = 32
PROMPT = random_prompt(5, 11 * P + 9)  # two splits
MODELS = {model.architecture: model for model in (TINY, TINY_QWEN2, TINY_QWEN3)}


def core(kernels: str, recipe: str, architecture: str = "LlamaForCausalLM", **options: object) -> EngineCore:
    return tiny_core(MODELS[architecture], kv_format=recipe, kernels=kernels, **options)


def requests() -> list[Request]:
    """A page fills up while one decodes; one has the first's prompt, one drops pages by attention mass."""
    whole = PROMPT + random_prompt(7, P - 11)
    shrunk = replace(greedy("shrunk", whole, 6), shrink=HeavyHitters(heavy=1, recent=1, window=20))
    return [greedy("long", whole, 6), greedy("short", PROMPT[:7], 9), greedy("shared", PROMPT, 5), shrunk]


@pytest.mark.parametrize(
    "recipe, architecture",
    [
        ("native", "LlamaForCausalLM"),
        ("int4", "LlamaForCausalLM"),
        ("int2", "LlamaForCausalLM"),
        ("int8", "Qwen2ForCausalLM"),
        ("fp8_e4m3", "Qwen2ForCausalLM"),
    ],
)
def test_tokens_are_those_of_the_torch_backend(recipe: str, architecture: str):
    kernel_path()
    options: dict[str, object] = {"host_memory": 2**26}
    wanted, found = (
        [recorder.token_ids for recorder in run(core(kernels, recipe, architecture, **options), requests())]
        for kernels in ("torch", "cpu")
    )
    assert [len(tokens) for tokens in wanted] == [6, 9, 5, 6]
    assert found == wanted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "recipe, architecture",
    [
        ("native", "LlamaForCausalLM"),
        ("int4", "LlamaForCausalLM"),  # K is balanced
        ("int8", "Qwen2ForCausalLM"),
        ("int2", "Qwen3ForCausalLM"),
    ],
)
def test_a_step_in_one_call_gives_the_bits_of_many(recipe: str, architecture: str, dtype: str):
    """Steps with chunks run the model call by call, so that both are in each run but the second."""
    kernel_path()
    found = []
    for has_replay in (True, False):
        one = core("cpu", recipe, architecture, dtype=dtype)
        assert one.runner.replay is not None
        if not has_replay:
            one.runner.replay = None
        asked = [logged(request) for request in requests()[:3]]
        found.append([recorder.events for recorder in run(one, asked)])
    assert found[0] == found[1]
    assert all(event.logprobs for events in found[0] for event in events if isinstance(event, Delta))


def logged(request: Request) -> Request:
    return replace(request, sampling=replace(request.sampling, num_logprobs=3))


@pytest.mark.parametrize("options", [{"kv_format": "int8", "dtype": "float16"}, {"poison": True}])
def test_what_is_not_written_or_seen_in_one_call_runs_in_many(options: dict[str, object]):
    kernel_path()
    one = tiny_core(kernels="cpu", **options)
    assert one.runner.replay is None
    (recorder,) = run(one, [greedy("a", PROMPT, 5)])
    assert len(recorder.token_ids) == 5


@pytest.fixture
def without_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.kernel_choice, "CpuLibrary", partial(CpuLibrary, tmp_path / "library.so"))


def backend_row(**options: object) -> str:
    return dict(tiny_engine(**options).describe_start())["backend"]  # type: ignore[arg-type]


@pytest.mark.parametrize("kernels", ["auto", "cpu"])
def test_the_fastest_that_the_cpu_runs_serve(kernels: str):
    assert backend_row(kernels=kernels) == f"cpu ({kernel_path().name})"


def test_without_them_auto_says_so_and_goes_on(without_library: None, caplog: pytest.LogCaptureFixture):
    assert backend_row(kernels="auto", dtype="auto") == "torch"
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "\n" not in record.getMessage()
    assert "run `python -m kernels.cpu.build`" in record.getMessage()


def test_auto_computes_in_bfloat16_where_they_serve():
    kernel_path()
    assert tiny_engine(dtype="auto").info.dtype == "bfloat16"
    assert tiny_engine(dtype="float32").info.dtype == "float32"


def test_batch_invariant_keeps_their_products():
    """Which treat rows alone, so that steps need no padding; attention is that of the torch backend."""
    kernel_path()
    engine = tiny_engine(batch_invariant=True)
    assert engine.core.runner.backend.name == "torch (batch-invariant)"
    assert engine.core.runner.model._rows == AllRows()
    assert tiny_engine(batch_invariant=True, kernels="torch").core.runner.model._rows == TiledRows(P)


def test_pages_on_disk_tell_what_computed_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Attention under --batch-invariant gives other last bits, and so may kernels of other sources."""
    kernel_path()
    asked: list[str] = []
    monkeypatch.setattr(engine.load, "fingerprint", lambda model, kernels: asked.append(kernels) or "0" * 32)
    for number, options in enumerate(({}, {"batch_invariant": True}, {"kernels": "torch"})):
        tiny_engine(cache_dir=str(tmp_path / str(number)), **options)
    assert len(set(asked)) == 3
    assert all(build_id() in name for name in asked[:2])


def test_a_tied_head_counts_twice_where_it_is_kept_in_another_order(monkeypatch: pytest.MonkeyPatch):
    kernel_path()
    rooms: list[int] = []
    monkeypatch.setattr(engine.load, "check_room", lambda device, num_bytes, *others: rooms.append(num_bytes))
    head = TINY.vocab_size * TINY.hidden_size * 4
    for model in (TINY, TINY_QWEN2):  # the second is not tied
        for kernels in ("cpu", "torch"):
            held = tiny_engine(model, kernels=kernels).core.runner.model.num_bytes
            assert held <= rooms[-1] < held + head / 2
    assert rooms[0] - rooms[1] == head and rooms[2] == rooms[3]


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(StartupError) as error:
        make()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_is_refused_at_start(without_library: None):
    says = refusal(lambda: core("cpu", "int4"))
    assert says.startswith("--kernels is cpu, but the CPU kernels are not built; run `python -m kernels.cpu.build`")
