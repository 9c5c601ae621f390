"""What openai-python makes of the demo model's answers."""

import asyncio
from typing import Any, Literal
from urllib.request import urlopen

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

QUESTION = {"role": "user", "content": "What is the capital of France?"}
STARTED = "The capital of France is"
LONG = {"max_tokens": 900, "stream": True, "extra_body": {"ignore_eos": True}}


class Answers:
    """`url` ends in /v1 and needs no key; `model` is the demo model, with a context of 1024 tokens."""

    def __init__(self, url: str, model: str):
        self.url = url
        self.model = model
        self.client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
        self.chat: dict[str, Any] = {"model": model, "messages": [QUESTION], "temperature": 0}
        self.completion: dict[str, Any] = {"model": model, "prompt": STARTED, "temperature": 0, "max_tokens": 6}

    def answer(self) -> str:
        return self.client.chat.completions.create(**self.chat).choices[0].message.content or ""

    def refused(self, kind: type[openai.APIStatusError], **fields: Any) -> openai.APIStatusError:
        """What a chat call with `fields` raises."""
        try:
            self.client.chat.completions.create(**self.chat | fields)
        except kind as error:
            return error
        raise AssertionError(f"no {kind.__name__}")

    def metric(self, name: str) -> float:
        with urlopen(self.url.removesuffix("/v1") + "/metrics") as response:
            lines = response.read().decode().splitlines()
        return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")))

    def check_models(self) -> None:
        models = self.client.models.list()
        assert [model.id for model in models] == [self.model]
        assert self.client.models.retrieve(self.model) == models.data[0]
        try:
            self.client.models.retrieve("org/other")
        except openai.NotFoundError as error:
            assert error.code == "model_not_found"
        else:
            raise AssertionError("found")

    def check_chat_whole_and_streamed(self) -> None:
        whole = self.client.chat.completions.create(**self.chat)
        text = whole.choices[0].message.content
        assert text and "Paris" in text and whole.choices[0].finish_reason == "stop"
        assert whole.usage and whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        chunks = list(self.client.chat.completions.create(**self.chat, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}

    def check_stream_helper_with_three_choices(self) -> None:
        text = self.answer()
        options: dict[str, Any] = {"n": 3, "logprobs": True, "stream_options": {"include_usage": True}}
        with self.client.chat.completions.stream(**self.chat, **options) as stream:
            deltas = [event.delta for event in stream if event.type == "content.delta"]
            final = stream.get_final_completion()
        assert [choice.index for choice in final.choices] == [0, 1, 2]
        assert [choice.message.content for choice in final.choices] == [text] * 3
        assert {choice.message.role for choice in final.choices} == {"assistant"}
        assert {choice.finish_reason for choice in final.choices} == {"stop"}
        assert sum(map(len, deltas)) == 3 * len(text)
        counts = [len(choice.logprobs.content or ()) for choice in final.choices if choice.logprobs]
        assert final.usage and len(counts) == 3 and sum(counts) == final.usage.completion_tokens

    def check_fields_that_people_send(self) -> None:
        parts = [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}]
        harmless: dict[str, Any] = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
        neutral: dict[str, Any] = {"n": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}
        (choice,) = self.client.chat.completions.create(
            **self.chat | {"messages": [{"role": "user", "content": parts}]}, **harmless, **neutral, stop=[" Paris"]
        ).choices
        assert choice.finish_reason == "stop" and f"{choice.message.content} Paris." == self.answer()
        (choice,) = self.client.chat.completions.create(**self.chat, max_completion_tokens=3).choices
        assert choice.finish_reason == "length" and self.answer().startswith(f"{choice.message.content} ")

    def check_completions_whole_and_streamed(self) -> None:
        whole = self.client.completions.create(**self.completion)
        assert "Paris" in whole.choices[0].text and whole.choices[0].finish_reason == "length"
        assert whole.usage and whole.usage.completion_tokens == 6
        chunks = list(self.client.completions.create(**self.completion, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert {chunk.object for chunk in chunks} == {"text_completion"}

    def check_prompts_of_four_forms(self) -> None:
        ids_too = {"return_token_ids": True}
        (choice,) = self.client.completions.create(**self.completion, extra_body=ids_too).choices
        ids = choice.prompt_token_ids  # type: ignore[attr-defined]
        assert len(ids) == 5 and all(isinstance(id, int) for id in ids)
        for prompt in ([STARTED], ids, [ids]):
            (other,) = self.client.completions.create(**self.completion | {"prompt": prompt}).choices
            assert other.text == choice.text
        two = self.client.completions.create(**self.completion | {"prompt": [[ids[0]], ids], "n": 2})
        assert [one.index for one in two.choices] == [0, 1, 2, 3]
        texts = [one.text for one in two.choices]
        assert texts[2:] == [choice.text] * 2 and texts[0] == texts[1]

    def check_echo_and_logprobs(self) -> None:
        fields = self.completion | {"echo": True, "logprobs": 2}
        whole = self.client.completions.create(**fields)
        (choice,) = whole.choices
        logprobs = choice.logprobs
        assert whole.usage and logprobs and logprobs.tokens and logprobs.token_logprobs
        assert logprobs.top_logprobs and logprobs.text_offset
        assert choice.text.startswith(STARTED) and "".join(logprobs.tokens) == choice.text
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == whole.usage.total_tokens
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        ends = [offset + len(token) for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)]
        assert [0, *ends] == [*logprobs.text_offset, len(choice.text)]
        rows = list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True))[1:]
        assert all(top[token] == logprob <= 0 and len(top) in (2, 3) for token, logprob, top in rows)
        # Temperature 0 took the likeliest.
        assert all(logprob == max(top.values()) for _, logprob, top in rows[-6:])

        chunks = [chunk.choices[0] for chunk in self.client.completions.create(**fields, stream=True)]
        assert "".join(chunk.text for chunk in chunks) == choice.text
        parts = [chunk.logprobs for chunk in chunks if chunk.logprobs]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [value for part in parts for value in getattr(part, name)] == getattr(logprobs, name), name

        scored = self.client.completions.create(**fields | {"max_tokens": 0})
        assert scored.choices[0].text == STARTED and scored.choices[0].logprobs
        assert scored.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[:-6]

    def check_chat_logprobs(self) -> None:
        poem = [{"role": "user", "content": "Repeat after me: 😀 é 漢字 😀😀"}]
        fields = self.chat | {"messages": poem, "logprobs": True, "top_logprobs": 3, "max_tokens": 40}
        (choice,) = self.client.chat.completions.create(**fields).choices
        assert choice.logprobs and choice.logprobs.content
        tokens = choice.logprobs.content
        text = choice.message.content or ""
        assert any(ord(char) > 127 for char in text)  # or else bytes would prove nothing
        # The end of sequence has an entry and no text.
        pieces = [bytes(token.bytes or ()) for token in tokens if token.token != "<|im_end|>"]
        assert b"".join(pieces).decode() == text
        for token in tokens:
            assert len(token.top_logprobs) == 3 and token.logprob == token.top_logprobs[0].logprob
            assert [top.logprob for top in token.top_logprobs] == sorted(
                (top.logprob for top in token.top_logprobs), reverse=True
            )
        chunks = [chunk.choices[0] for chunk in self.client.chat.completions.create(**fields, stream=True)]
        assert [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.content or ()] == tokens, (
            "streamed"
        )

    def check_usage_chunk(self) -> None:
        create = self.client.chat.completions.create
        whole = create(**self.chat).usage
        asked = list(create(**self.chat, stream=True, stream_options={"include_usage": True}))
        *others, last = asked
        assert last.choices == [] and last.usage and whole
        assert last.usage.completion_tokens == whole.completion_tokens
        assert last.usage.prompt_tokens_details and last.usage.prompt_tokens == whole.prompt_tokens
        assert all(chunk.choices and chunk.usage is None and "usage" in chunk.model_fields_set for chunk in others)
        assert all(chunk.choices and chunk.usage is None for chunk in create(**self.chat, stream=True))
        *texts, count = self.client.completions.create(
            **self.completion, stream=True, stream_options={"include_usage": True}
        )
        assert count.choices == [] and count.usage and count.usage.completion_tokens == 6
        assert all(chunk.choices and chunk.usage is None for chunk in texts)

    def check_tools_are_refused(self) -> None:
        """The demo model's template has no place for them."""
        tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
        error = self.refused(openai.BadRequestError, tools=[tool])
        assert (error.code, error.param, error.type) == ("unsupported_parameter", "tools", "invalid_request_error")

    def check_json_schema(self) -> None:
        class City(BaseModel):
            name: Literal["Paris", "Rome"]
            is_capital: bool

        (choice,) = self.client.chat.completions.parse(**self.chat, response_format=City, max_tokens=60).choices
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, City)
        assert City.model_validate_json(choice.message.content or "") == choice.message.parsed
        with self.client.chat.completions.stream(**self.chat, response_format=City, max_tokens=60) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed
        schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": City.model_json_schema()}}
        (choice,) = self.client.chat.completions.create(
            **self.chat | {"temperature": 1, "seed": 3}, response_format=schema, max_tokens=60
        ).choices
        assert City.model_validate_json(choice.message.content or "")
        (choice,) = self.client.chat.completions.create(
            **self.chat, response_format={"type": "json_object"}, max_tokens=60
        ).choices
        assert (choice.message.content or "").lstrip().startswith("{")

    def check_seeds(self) -> None:
        def drawn(seed: int) -> str:
            fields = self.completion | {"temperature": 1.5, "max_tokens": 12, "seed": seed}
            return self.client.completions.create(**fields).choices[0].text

        first = drawn(7)
        assert drawn(7) == first and len({first, drawn(8), drawn(9)}) == 3

    def check_errors(self) -> None:
        error = self.refused(openai.NotFoundError, model="other")
        assert error.status_code == 404 and error.code == "model_not_found" and error.request_id
        error = self.refused(openai.BadRequestError, messages=[{"role": "user", "content": "word " * 2000}])
        assert error.code == "context_length_exceeded" and error.param == "messages"
        error = self.refused(openai.BadRequestError, temperature=2.5)
        assert error.param == "temperature" and isinstance(error.code, str) and "2.5" not in error.message
        error = self.refused(openai.BadRequestError, max_tokens=2000, stream=True)
        assert error.code == "context_length_exceeded"  # before the stream begins

    def check_async_calls_at_once(self) -> None:
        async def ask() -> list[str | None]:
            async with AsyncOpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60) as client:
                calls = [client.chat.completions.create(**self.chat) for _ in range(6)]
                return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

        assert set(asyncio.run(ask())) == {self.answer()}

    def check_async_stream_closed_early_frees_the_request(self) -> None:
        left = 'quire_requests_aborted_total{reason="client"}'

        async def leave() -> None:
            async with AsyncOpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60) as client:
                stream = await client.chat.completions.create(**self.chat | LONG)
                await anext(aiter(stream))
                assert await asyncio.to_thread(self.metric, "quire_requests_running") == 1
                await stream.close()
                async with asyncio.timeout(10):
                    while await asyncio.to_thread(self.metric, "quire_requests_running") > 0:
                        await asyncio.sleep(0.02)

        before = self.metric(left)
        asyncio.run(leave())
        assert self.metric(left) == before + 1  # and so it has not come to its end
