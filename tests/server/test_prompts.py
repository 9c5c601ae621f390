"""From prompts as clients write them to token ids: what is refused on the way, and templates rendered elsewhere."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from engine.chat_template import ChatPrompt, ChatTemplate
from engine.errors import ErrorKind, RequestError
from engine.tokenizer import Tokenizer
from server.prompts import TextPrompt, check_template_variables, encode
from server.template_worker import TemplateWorkers
from tests.fakes import FakeInfo
from tests.model_folders import CHAT_TEMPLATE, byte_tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture
async def start() -> AsyncIterator[Callable[[str], TemplateWorkers]]:
    made: list[TemplateWorkers] = []

    def start(source: str) -> TemplateWorkers:
        made.append(TemplateWorkers(ChatTemplate(source, TOKENS), tuple(TOKENS.values())))
        return made[-1]

    yield start
    for workers in made:
        await workers.close()


class Counted:
    """A tokenizer that must not be asked to split anything."""

    def fewest_tokens(self, text: str) -> int:
        return len(text) // 10

    def encode(self, text: str) -> list[int]:
        raise AssertionError

    encode_rendered = encode


@pytest.mark.parametrize("num_tokens", [128, 129, 10**5])
async def test_what_cannot_fit_is_refused_before_it_is_tokenized(
    start: Callable[..., TemplateWorkers], num_tokens: int
) -> None:
    info: Any = FakeInfo()
    text = "x" * (10 * num_tokens)
    says = f"at least {num_tokens} tokens, which leaves no room for output; this server's context is 128 tokens"
    workers = start("{{ messages[0].content }}")
    for prompt in (TextPrompt(text), ChatPrompt([{"role": "user", "content": text}])):
        with pytest.raises(RequestError, match=says) as caught:
            await encode(prompt, Counted(), info, "prompt", templates=workers)  # type: ignore[arg-type]
        assert (caught.value.kind, caught.value.code, caught.value.param) == (
            ErrorKind.INVALID, "context_length_exceeded", "prompt"
        )  # fmt: skip


async def test_a_byte_more_than_fits_is_told_by_arithmetic() -> None:
    info: Any = FakeInfo()
    tokenizer = Tokenizer(byte_tokenizer(), None)
    longest = len("</s>")
    assert len(await encode(TextPrompt("x" * (128 * longest - longest)), tokenizer, info, "prompt")) == 127 * longest
    with pytest.raises(RequestError, match="at least 128 tokens"):
        await encode(TextPrompt("x" * (128 * longest - longest + 1)), tokenizer, info, "prompt")


async def test_a_chat_is_encoded_the_same_either_way(start: Callable[..., TemplateWorkers]) -> None:
    info: Any = FakeInfo()
    tokenizer = Tokenizer(byte_tokenizer(), ChatTemplate(CHAT_TEMPLATE, TOKENS))
    prompt = ChatPrompt([{"role": "user", "content": "a</s>b"}])
    here = await encode(prompt, tokenizer, info, "messages")
    assert await encode(prompt, tokenizer, info, "messages", templates=start(CHAT_TEMPLATE)) == here
    assert [id for id in here if id in tokenizer.special_ids] == [256, 257]


@pytest.mark.parametrize("raw", [None, {}, {"enable_thinking": False, "n": 1, "f": 0.5, "s": "x", "none": None}])
def test_template_variables(raw: Any) -> None:
    assert check_template_variables(raw) == (raw or {})


@pytest.mark.parametrize(
    "raw",
    [
        [], "x", {"a": []}, {"a": {}}, {"a b": 1}, {"": 1}, {"1a": 1}, {f"a{n}": n for n in range(17)},
        *({name: "x"} for name in ("messages", "tools", "documents", "add_generation_prompt", "chat_template",
                                   "bos_token", "eos_token")),
    ],
)  # fmt: skip
def test_template_variables_that_are_refused(raw: Any) -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs") as caught:
        check_template_variables(raw)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "chat_template_kwargs")
