"""What one call wants generated, and the engine's requests for it: the one path that HTTP and gRPC share."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.errors import invalid
from engine.grammar import Grammar
from engine.kv.shrink import Shrink, Streaming
from engine.request import Request, SamplingParams
from server.prompts import Prompt
from server.structured.texts import GrammarText
from server.tools.request import ToolUse
from server.validation import (
    GenerationFields,
    check_count,
    check_length,
    check_logit_bias,
    check_shrink,
    check_stop,
    check_stop_token_ids,
)

if TYPE_CHECKING:
    from engine.info import EngineInfo


MAX_SCORES = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """`fields.n` continuations of each of `prompts`, as parsed and not yet checked against the model.

    `prompt_param` names the prompts' field in errors. `default_max_tokens` None: what is left of the context.
    `num_logprobs`, `num_prompt_logprobs`: see `SamplingParams`.
    """

    model: str
    prompts: tuple[Prompt, ...]
    prompt_param: str
    fields: GenerationFields
    default_max_tokens: int | None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    response: GrammarText | None = None
    """What the answer must be; None: any text."""
    tools: ToolUse = ToolUse()

    @property
    def n(self) -> int:
        return self.fields.n or 1

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked values of an ask that do not depend on its prompts."""

    ask: Ask
    info: "EngineInfo"
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    logit_bias: tuple[tuple[int, float], ...]
    shrink: Shrink | None

    @classmethod
    def check(cls, ask: Ask, info: "EngineInfo") -> "Settings":
        """Raises RequestError for the first thing that this server cannot do."""
        fields = ask.fields
        if (fields.top_k or 0) > info.vocab_size:
            raise invalid(f"top_k must be at most the vocabulary size, {info.vocab_size} (-1 and 0: off)", "top_k")
        check_count(len(ask.prompts), ask.n, info, ask.prompt_param)
        return cls(
            ask=ask,
            info=info,
            stop=check_stop(fields.stop),
            stop_token_ids=check_stop_token_ids(fields.stop_token_ids, info.vocab_size),
            logit_bias=check_logit_bias(fields.logit_bias, info.vocab_size),
            shrink=info.shrink if fields.kv_shrink is None else check_shrink(fields.kv_shrink, info),
        )

    def forks(
        self, id: str, prompts: Sequence[tuple[int, ...]], salt: str, grammar: Grammar | None
    ) -> list[list[Request]]:
        """For each prompt its `n` requests. They are named `id`, or `id-INDEX` where there are several."""
        self._check_scores(prompts)
        n = self.ask.n
        ids = [id] if len(prompts) * n == 1 else [f"{id}-{index}" for index in range(len(prompts) * n)]
        return [
            self._fork(ids[number * n : (number + 1) * n], prompt, salt, grammar)
            for number, prompt in enumerate(prompts)
        ]

    def _fork(self, ids: Sequence[str], prompt: tuple[int, ...], salt: str, grammar: Grammar | None) -> list[Request]:
        """One request per id, alike but for their seeds."""
        first = self._sampling(len(prompt))
        return [
            Request(
                id=id,
                prompt=prompt,
                sampling=replace(first, seed=(first.seed + sibling) % 2**64),
                priority=self.ask.fields.priority or 0,
                salt=salt,
                shrink=self.shrink,
                grammar=grammar,
            )
            for sibling, id in enumerate(ids)
        ]

    def _check_scores(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Refuse an answer that would be more of logprobs than anybody reads, and long work to write down."""
        num_top = self.ask.num_prompt_logprobs
        if num_top is None:
            return
        num_scores = sum(map(len, prompts)) * (num_top + 1) * self.ask.n
        if num_scores > MAX_SCORES:
            message = (
                f"the prompts would have {num_scores} logprobs, at most {MAX_SCORES} can be told; send fewer prompts"
            )
            raise invalid(message, self.ask.prompt_param)

    def _sampling(self, num_prompt_tokens: int) -> SamplingParams:
        fields, defaults = self.ask.fields, self.info.sampling_defaults
        max_tokens = self._max_tokens(num_prompt_tokens)
        min_tokens = fields.min_tokens or 0
        if min_tokens > max_tokens:
            raise invalid(f"min_tokens must be at most max_tokens, which is {max_tokens}", "min_tokens")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=defaults.temperature if fields.temperature is None else fields.temperature,
            top_k=defaults.top_k if fields.top_k is None else max(0, fields.top_k),
            top_p=defaults.top_p if fields.top_p is None else fields.top_p,
            min_p=fields.min_p or 0.0,
            seed=secrets.randbits(64) if fields.seed is None else fields.seed % 2**64,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=bool(fields.ignore_eos),
            min_tokens=min_tokens,
            repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
            presence_penalty=fields.presence_penalty or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            logit_bias=self.logit_bias,
            num_logprobs=self.ask.num_logprobs,
            num_prompt_logprobs=self.ask.num_prompt_logprobs,
        )

    def _max_tokens(self, num_prompt_tokens: int) -> int:
        explicit = self.ask.fields.max_tokens
        # Streaming drops pages as it goes: its output may be longer than what the context holds at once.
        counted = 0 if explicit is None or isinstance(self.shrink, Streaming) else explicit
        check_length(num_prompt_tokens, counted, self.info, self.ask.prompt_param)
        if explicit is not None:
            return explicit
        left = self.info.max_model_len - num_prompt_tokens
        return left if self.ask.default_max_tokens is None else min(self.ask.default_max_tokens, left)
