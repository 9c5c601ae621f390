"""`quire bench` as a command, on servers over a fake engine, and the prompts that it makes."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ErrorKind, RequestError
from server.bench.dataset import Dataset, read_dataset
from server.bench.endpoints import Prompt
from server.bench.prompts import Synthetic, make_ruler
from server.bench.recording import Recording, RequestFailed, TokenUsage
from server.cli import main
from tests.fakes import FakeInfo
from tests.server.bench_server import DONE, STREAM, ScriptedServer, finish, text, usage
from tests.server.bench_server import running as running_server
from tests.server.conftest import Running, Web, within


async def bench(*arguments: str, environ: dict[str, str] | None = None) -> int:
    """In a thread: the command has an event loop of its own."""
    code: int = await within(asyncio.to_thread(main, ["bench", *arguments], environ or {}), 30)
    return code


def result(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


SHORT = ("--concurrency", "1,3", "--input-tokens", "60", "--output-tokens", "4", "--seed", "1", "--json", "-")


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_http(web: Web, capsys: pytest.CaptureFixture[str], endpoint: str) -> None:
    assert await bench("--url", f"{web.url}/v1/", "--endpoint", endpoint, *SHORT) == 0
    found = result(capsys)
    assert (found["model"], found["is_complete"], found["seed"]) == ("tiny", True, 1)
    assert [level["concurrency"] for level in found["levels"]] == [1, 3]
    for level, num_requests in zip(found["levels"], (8, 12), strict=True):
        assert (level["num_requests"], level["num_done"], level["num_failed"]) == (num_requests, num_requests, 0)
        # the fake says 4 tokens and that 3 of the prompt were cached; one of them has no text
        assert (level["mean_prompt_tokens"], level["mean_output_tokens"], level["cached_share"]) == (60, 4, 3 / 60)
        assert level["interval_unit"] == "chunk"
        latencies = [level[name]["p50"] for name in ("interval_ms", "time_to_first_token_ms", "end_to_end_ms")]
        assert 0 <= latencies[0] <= latencies[1] <= latencies[2]
    assert len({request.prompt for request in web.engine.requests}) == 1 + 8 + 12
    assert {request.sampling.max_tokens for request in web.engine.requests} == {4}
    assert all(request.sampling.ignore_eos for request in web.engine.requests)


async def test_grpc(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no tokenizing call: the lengths come from the usage of two requests for one token."""
    running.engine.info = FakeInfo(max_model_len=4096)
    assert await bench("--url", f"127.0.0.1:{running.port}", "--grpc", *SHORT) == 0
    found = result(capsys)
    for level, num_requests in zip(found["levels"], (8, 12), strict=True):
        assert (level["num_done"], level["num_failed"], level["interval_unit"]) == (num_requests, 0, "token")
        assert level["mean_output_tokens"] == 4
    lengths = [len(request.prompt) for request in running.engine.requests if request.sampling.max_tokens == 4]
    assert len(lengths) == 1 + 8 + 12
    assert sum(lengths) / len(lengths) == pytest.approx(60, rel=0.1)  # words differ in length, and a token is a byte


async def test_the_shared_part_and_the_warm_up(web: Web, capsys: pytest.CaptureFixture[str]) -> None:
    assert await bench("--url", web.url, *SHORT, "--requests", "5", "--prefix-share", "0.5") == 0
    prompts = [bytes(request.prompt[1:]) for request in web.engine.requests]
    assert len(prompts) == 1 + 5 + 5
    assert len(os.path.commonprefix(prompts)) in range(30 - 5, 30 + 10)
    assert len(set(prompts)) == len(prompts)


async def test_the_table(web: Web, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert await bench("--url", web.url, *SHORT[:-1], str(file)) == 0
    captured = capsys.readouterr()
    rows = [line.split() for line in captured.out.splitlines()]
    assert [row[:4] for row in rows if row and row[0] in ("1", "3")] == [["1", "8", "0", "0"], ["3", "12", "0", "0"]]
    assert "concurrency 3: 12 of 12 requests done" in captured.err
    assert len(json.loads(file.read_text())["levels"]) == 2


async def test_a_rate(web: Web, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--rate", "500", "--requests", "20", "--input-tokens", "60", "--output-tokens", "4", "--json", "-")
    assert await bench("--url", web.url, *arguments) == 0
    (level,) = result(capsys)["levels"]
    assert (level["rate"], level["num_done"]) == (500, 20)


@pytest.mark.parametrize("more", [("--json", "-"), ()])
async def test_where_every_request_fails(web: Web, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]) -> None:
    web.engine.refusal = RequestError(ErrorKind.OVERLOADED, "too many wait", code="queue_full")
    assert await bench("--url", web.url, *SHORT[:-2], *more) == 1
    captured = capsys.readouterr()
    assert "every request failed; the first: HTTP 429: too many wait" in captured.err
    if more:
        assert [level["failures"] for level in json.loads(captured.out)["levels"]] == [
            {"HTTP 429": 8},
            {"HTTP 429": 12},
        ]
    else:
        assert "concurrency 3: 12 failed: HTTP 429" in captured.out


async def test_grpc_refusals_are_counted_by_status(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    running.engine.info = FakeInfo(max_model_len=4096)
    running.engine.refusal = RequestError(ErrorKind.OVERLOADED, "too many wait", code="queue_full")
    assert await bench("--url", f"127.0.0.1:{running.port}", "--grpc", *SHORT) == 1
    failures = [level["failures"] for level in result(capsys)["levels"]]
    assert failures == [{"gRPC RESOURCE_EXHAUSTED": 8}, {"gRPC RESOURCE_EXHAUSTED": 12}]


@pytest.mark.parametrize("form", ["http://127.0.0.1:{} --model x", "127.0.0.1:{} --grpc"])
def test_a_server_that_is_not_there(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        assert main(["bench", "--url", *form.format(taken.getsockname()[1]).split()], {}) == 2
    captured = capsys.readouterr()
    assert re.fullmatch(r"quire: --url [^\n]*: no answer [^\n]*\n", captured.err)
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--url localhost:8000", "--url is 'localhost:8000'; it must be http://HOST:PORT"),
        ("--url http://h:99999", "it must be http://HOST:PORT"),
        ("--url http://h:1?x=1", "it must be http://HOST:PORT"),
        ("--url http://h:1 --grpc", "with --grpc it must be HOST:PORT"),
        ("--url h:1 --grpc --ca f", "--ca is given, but --url is grpc://h:1, which has no TLS"),
        ("--url https://h:1 --ca /nowhere/f", "--ca /nowhere/f: No such file or directory"),
        (f"--url grpcs://h:1 --grpc --ca {__file__}", "no certificates in PEM"),
        ("--url https://h:1 --grpc", "with --grpc it must be HOST:PORT"),
        ("--url h:1 --grpc --endpoint chat", "--endpoint chat is HTTP's"),
        ("--url http://h:1 --concurrency 0", "--concurrency has '0'; it must be a whole number from 1 to 4096"),
        ("--url http://h:1 --concurrency ,", "it must be numbers separated by commas"),
        ("--url http://h:1 --concurrency 1 --rate 2", "--rate is given beside --concurrency"),
        ("--url http://h:1 --rate nan", "--rate has 'nan'"),
        ("--url http://h:1 --prefix-share 1.5", "it must be a number from 0 to 1"),
        ("--url http://h:1 --max-seconds 0", "--max-seconds has '0'"),
        ("--url http://h:1 --requests 1e3", "--requests has '1e3'"),
        ("--url http://h:1 --dataset f --input-tokens 4", "--input-tokens is given beside --dataset"),
        ("--url http://h:1 --dataset /nowhere/f", "cannot be read (No such file or directory)"),
        ("--url http://h:1 --json /nowhere/f", "there is no such folder"),
    ],
)
def test_mistakes(arguments: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments.split()], {}) == 2
    captured = capsys.readouterr().err
    assert says in captured
    assert captured.count("\n") == 1


def test_a_bad_key_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://h:1"], {"QUIRE_BENCH_API_KEY": "s3\ncret"}) == 2
    captured = capsys.readouterr().err
    assert "QUIRE_BENCH_API_KEY" in captured
    assert "cret" not in captured


async def test_ctrl_c_tells_what_was_measured() -> None:
    good = [(0.0, STREAM + text("a") + finish() + usage(9, 1) + DONE)]
    # four requests try to measure the words, two are the first level's, and the next ones hang
    async with running_server(ScriptedServer(*[good] * 6, [])) as server:
        options = ("--concurrency", "1,2", "--requests", "2", "--no-warm-up", "--json", "-")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "server.cli", "bench", "--url", server.url, *options),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        await within(server.saw_silence.wait(), 60)
        process.send_signal(signal.SIGINT)
        out, errors = await within(process.communicate(), 30)
    assert process.returncode == 130
    found = json.loads(out)
    assert not found["is_complete"]
    assert found["levels"][0]["num_done"] == 2
    assert found["levels"][1]["num_done"] == 0
    assert found["levels"][1]["num_abandoned"] >= 1
    assert errors.decode().splitlines()[-1] == "quire: stopped; what was measured until then is above"


class Counter:
    """A client that only counts: `length` of a text, for nothing or as usage of a request."""

    model = "tiny"

    def __init__(self, length: Any, *, is_free: bool):
        self._length = length
        self._is_free = is_free

    async def connect(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def generate(self, prompt: Prompt, recording: Recording) -> None:
        if self._length is None:
            raise RequestFailed("HTTP 500")
        recording.usage = TokenUsage(self._length(prompt.content), 1, None)

    async def count_tokens(self, text: str) -> int | None:
        return self._length(text) if self._is_free and self._length else None


def of_words(content: str) -> int:
    return 5 + len(content.split())


def of_bytes(content: str) -> int:
    return 1 + len(content)


async def source(counter: Counter, num_tokens: int, share: float = 0.0) -> Synthetic:
    return Synthetic(num_tokens, 4, share, 7, await make_ruler(counter, 7))


@pytest.mark.parametrize("num_tokens", [6, 7, 64, 513])
@pytest.mark.parametrize("length", [of_words, of_bytes])
async def test_a_server_that_counts_gives_exact_lengths(length: Any, num_tokens: int) -> None:
    prompts = await (await source(Counter(length, is_free=True), num_tokens)).take(0, 50)
    assert [length(prompt.content) for prompt in prompts] == [num_tokens] * 50
    assert {prompt.num_tokens for prompt in prompts} == {num_tokens}


async def test_usage_gives_exact_lengths_where_a_word_is_a_token() -> None:
    prompts = await (await source(Counter(of_words, is_free=False), 100)).take(0, 10)
    assert {of_words(str(prompt.content)) for prompt in prompts} == {100}


async def test_a_server_that_says_nothing_gets_words() -> None:
    prompts = await (await source(Counter(None, is_free=False), 100)).take(0, 3)
    assert [(len(str(prompt.content).split()), prompt.num_tokens) for prompt in prompts] == [(100, None)] * 3


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
async def test_the_shared_part(share: float) -> None:
    """It is the same over levels; behind it no two prompts go on alike for more than a few words."""
    made = await source(Counter(of_words, is_free=True), 105, share)
    prompts = [str(prompt.content).split() for level in range(3) for prompt in await made.take(level, 4)]
    for one, other in combinations(prompts, 2):
        common = len(os.path.commonprefix([one, other]))
        assert common == 100 if share == 1 else share * 105 - 1 <= common <= share * 105 + 5


async def test_equal_seeds_give_equal_prompts() -> None:
    one, other = [await (await source(Counter(of_words, is_free=True), 50)).take(2, 3) for _ in range(2)]
    assert one == other


async def test_a_dataset(tmp_path: Path, web: Web, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"prompt": "two", "max_tokens": 2}\n{"prompt": "three"}\n')
    options = ("--concurrency", "1,1", "--requests", "2", "--output-tokens", "3", "--no-warm-up", "--json", "-")
    assert await bench("--url", web.url, "--dataset", str(file), *options) == 0
    sent = [(bytes(request.prompt[1:]), request.sampling.max_tokens) for request in web.engine.requests]
    assert sent == [(b"one", 3), (b"two", 2), (b"three", 3), (b"one", 3)]
    assert result(capsys)["input_tokens"] is None


async def test_sharegpt_and_messages(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    messages = [{"role": "user", "content": "hey"}]
    file = tmp_path / "list.json"
    file.write_text(json.dumps([{"conversations": turns}, {"messages": messages}]))
    prompts = read_dataset(str(file), max_tokens=5, takes_messages=True)
    assert await Dataset(prompts).take(0, 3) == [Prompt("hi", 5), Prompt(tuple(messages), 5), Prompt("hi", 5)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "there is no prompt in it"),
        (b'{"prompt": "s3cret"}\nnope s3cret', "line 2: it is not valid JSON"),
        (b'{"text": "s3cret"}', "line 1: it must have prompt, a string"),
        (b'{"prompt": "s3cret", "max_tokens": 0}', "max_tokens must be a whole number from 1"),
        (b'{"messages": [{"role": "user"}]}', "they need --endpoint chat"),
        (b"[3]", "item 1: it must be a JSON object"),
        (b"\xff", "it is not UTF-8"),
    ],
)
async def test_bad_datasets(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, says: str) -> None:
    file = tmp_path / "f"
    file.write_bytes(content)
    assert await bench("--url", "http://127.0.0.1:1", "--dataset", str(file)) == 2
    captured = capsys.readouterr().err
    assert says in captured
    assert "s3cret" not in captured
