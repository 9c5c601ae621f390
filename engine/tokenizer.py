"""Text to token ids and back, and chat messages to token ids."""

from collections.abc import Iterable

import tokenizers

from engine.chat_template import ChatPrompt, ChatRenderer, ChatTemplate, Rendered
from engine.errors import invalid
from engine.guarded_encoder import GuardedEncoder
from engine.token_bytes import TokenBytes
from engine.token_length import token_length


class Tokenizer:
    """A model's vocabulary, its splitting rules and its chat template. Safe to share between threads.

    `backend` must decode with a byte-level or a sentencepiece-style decoder; others raise StartupError.
    """

    def __init__(self, backend: tokenizers.Tokenizer, chat_template: ChatTemplate | None):
        # Some files keep the padding or truncation of a training run, which would change prompts.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._token_bytes = TokenBytes(backend)
        special = {id: token for id, token in backend.get_added_tokens_decoder().items() if token.special}
        self.chat_template = chat_template
        self.special_ids = frozenset(special)
        self.special_tokens = tuple(token.content for token in special.values())
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._token_length = token_length(backend)
        self._renderer = None if chat_template is None else ChatRenderer(chat_template, self.special_tokens)
        self._guarded = GuardedEncoder(backend)
        # Then text that spells no special token can become one.
        self._normalizes_special = backend.normalizer is not None and any(t.normalized for t in special.values())

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    @property
    def strips_leading_space(self) -> bool:
        """Whether the first space of a text is an artefact of tokenization, not part of the text."""
        return self._token_bytes.strips_leading_space

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Ids of `text`. A special token written out in `text` becomes that token.

        `add_special_tokens` adds what the tokenizer puts around a text, such as a BOS. Raises RequestError, naming
        `param`, if `text` holds lone surrogates, which no UTF-8 text can.
        """
        _check_unicode(text, param)
        # Without the offsets into the text that plain `encode` also computes.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def fewest_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of `text`, at the cost of counting its bytes; 0 where none is known."""
        return 0 if self._token_length is None else self._token_length.fewest_tokens(text)

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

    def render_chat(self, prompt: ChatPrompt) -> Rendered:
        """The prompt text. Raises RequestError if the model has no template or the template refuses."""
        if self._renderer is None:
            raise invalid("this model has no chat template; use /v1/completions with a prompt", "messages")
        return self._renderer.render(prompt)

    def encode_rendered(self, rendered: Rendered) -> list[int]:
        """Ids of a rendered prompt. Special tokens of the template become such tokens, those that a client spelled out
        stay text. The template writes all of them itself, so none are added. Raises RequestError."""
        if rendered.sentinel is None and not self._normalizes_special:
            return self.encode(rendered.text, add_special_tokens=False, param="messages")
        _check_unicode(rendered.text, "messages")
        return self._guarded.encode(rendered)

    def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """The prompt ids for `prompt`, rendered here. Raises RequestError."""
        return self.encode_rendered(self.render_chat(prompt))


def _check_unicode(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(
            f"{param} has a lone surrogate at character {error.start}; expected text that UTF-8 can encode", param
        ) from error
