"""`quire generate`: the text and nothing else on stdout, and ends that leave no mess."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.load import load_engine
from server.cli import main
from tests.e2e.servers import write_lively_model
from tests.helpers import greedy, run
from tests.model_folders import byte_tokenizer, write_json

OPTIONS = ("--device", "cpu", "--dtype", "float32", "--kv-format", "native", "--kv-memory", "16MiB")
PROMPT = "Tell me: é"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lively_model(tmp_path_factory.mktemp("models") / "lively")


def expected(folder: Path, prompt: list[int], num_tokens: int) -> str:
    """What the engine itself says, step by step."""
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", kv_format="native", kv_memory=2**24)
    engine = load_engine(config, lambda done, total: None)
    (recorder,) = run(engine.core, [greedy("a", prompt, num_tokens)])
    return recorder.text


def ids(text: str) -> list[int]:
    return list(byte_tokenizer().encode(text).ids)


def generate(folder: Path, *arguments: str) -> int:
    return main(["generate", str(folder), *OPTIONS, *arguments], {})


def test_the_text_comes_as_the_engine_gives_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--prompt", PROMPT, "--temperature", "0", "--max-tokens", "24")
    text = expected(folder, ids(PROMPT), 24)
    assert generate(folder, *arguments) == 0
    streamed = capsys.readouterr()
    assert streamed.out == text + "\n" and "loading weights" in streamed.err
    assert generate(folder, *arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["text"], result["finish_reason"]) == (text, "length")
    assert result["usage"] == {"prompt_tokens": 11, "completion_tokens": 24, "total_tokens": 35}
    assert result["seconds_to_first_token"] > 0 and result["tokens_per_second"] > 0


def test_a_chat_goes_through_the_template(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, "--prompt", "hi</s>", "--chat", "--temperature", "0", "--max-tokens", "8") == 0
    # the template of tests/model_folders.py; what a user writes is text, and no special token
    prompt = [256, *ids("[user]hi<"), *ids("/s>"), 257, *ids("[assistant]")]
    assert capsys.readouterr().out == expected(folder, prompt, 8) + "\n"


def test_a_seed_gives_the_same_text_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("5", "5", "6"):
        assert generate(folder, "--prompt", PROMPT, "--seed", seed, "--max-tokens", "16") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_a_prompt_from_stdin(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for content in (PROMPT + "\n", PROMPT, PROMPT + "\n\n"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode()), "ascii"))
        assert generate(folder, "--prompt", "-", "--temperature", "0", "--max-tokens", "4", "--json") == 0
        outputs.append(json.loads(capsys.readouterr().out))
    assert [output["usage"]["prompt_tokens"] for output in outputs] == [11, 11, 12]
    assert outputs[0]["text"] == outputs[1]["text"]


def test_a_terminal_that_cannot_show_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, "ascii"))
    assert generate(folder, "--prompt", PROMPT, "--temperature", "0", "--max-tokens", "24") == 0
    text = expected(folder, ids(PROMPT), 24)
    assert not text.isascii()
    assert output.getvalue() == (text + "\n").encode("ascii", "replace")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--prompt", ""), "prompt is empty"),
        (("--prompt", "x", "--temperature", "9"), "temperature must be a number from 0 to 2"),
        (("--prompt", "x", "--temperature", "warm"), "--temperature is 'warm'; it must be a number"),
        (("--prompt", "x", "--max-tokens", "0"), "max_tokens must be an integer from 1"),
        (("--prompt", "x", "--max-tokens", "4000"), "context"),
        (("--prompt", "x" * 600), "context"),
        (("--prompt", "\udcff"), "--prompt is not UTF-8 text"),
        (("--prompt", "x", "--kv-format", "int5"), "--kv-format is 'int5'"),
        (("--prompt", "x", "--revision", "v1"), "--revision is given"),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    assert generate(folder, *arguments) == 2
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert captured.out == "" and last.startswith("quire: ") and says in last


def test_a_model_without_a_template_cannot_chat(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    write_json(tmp_path / "tokenizer_config.json", {})
    assert generate(tmp_path, "--prompt", "x", "--chat") == 2
    assert "template" in capsys.readouterr().err


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`quire generate` at work on a text that takes its time, after its first byte."""
    command = [sys.executable, "-m", "server.cli", "generate", str(folder), *OPTIONS, "--prompt", "x", *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_keep_what_there_is(folder: Path, number: signal.Signals, code: int) -> None:
    with started(folder, "--seed", "1") as process:
        assert process.stdout and process.stderr
        first = process.stdout.read1(1)
        process.send_signal(number)
        rest, errors = process.communicate(timeout=30)
    assert process.returncode == code and first and rest.endswith(b"\n")
    (first + rest).decode()  # no character is cut in two
    assert b"Traceback" not in errors


def test_a_reader_that_has_seen_enough(folder: Path) -> None:
    with started(folder, "--seed", "1") as process:
        assert process.stdout and process.stderr
        assert process.stdout.read1(1)
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(30) == 1
    assert b"Traceback" not in errors and b"quire:" not in errors
