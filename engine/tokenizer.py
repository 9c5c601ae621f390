"""Text to token ids and back, and chat messages to token ids."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from engine.chat_template import ChatTemplate
from engine.errors import invalid
from engine.token_bytes import TokenBytes


class Tokenizer:
    """A model's vocabulary, its splitting rules and its chat template. Safe to share between threads.

    `backend` must decode with a byte-level or a sentencepiece-style decoder; others raise StartupError.
    """

    def __init__(self, backend: tokenizers.Tokenizer, chat_template: ChatTemplate | None):
        # Some files keep the padding or truncation of a training run, which would change prompts.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._chat_template = chat_template
        self._token_bytes = TokenBytes(backend)
        self.special_ids = frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def strips_leading_space(self) -> bool:
        """Whether the first space of a text is an artefact of tokenization, not part of the text."""
        return self._token_bytes.strips_leading_space

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Ids of `text`. A special token written out in `text` becomes that token.

        `add_special_tokens` adds what the tokenizer puts around a text, such as a BOS. Raises RequestError, naming
        `param`, if `text` holds lone surrogates, which no UTF-8 text can.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise invalid(
                f"{param} has a lone surrogate at character {error.start}; expected text that UTF-8 can encode", param
            ) from error
        # Without the offsets into the text that plain `encode` also computes.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token adds to a text; a part of a character is possible.

        Empty for an id without a token: models pad their vocabulary.
        """
        return self._token_bytes(token_id)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD, one for each broken sequence."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(id) for id in ids if id not in skipped)
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text for `messages`. Raises RequestError if the model has no template or the template refuses."""
        if self._chat_template is None:
            raise invalid("this model has no chat template; use /v1/completions with a prompt", "messages")
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """The prompt ids for `messages`. The template writes the special tokens itself, so none are added."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False, param="messages")
