"""Token ids of a rendered prompt in which only the template's own special tokens are special."""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from engine.errors import invalid
from engine.special_text import NONCHARACTERS

# A marker is these two and two digits, all noncharacters: what no text holds unless it was written for it.
MARK = NONCHARACTERS[0] + NONCHARACTERS[31]
DIGITS = NONCHARACTERS[:32]


class GuardedEncoder:
    """Encodes with the model, the splitting rules and the added tokens of `backend`, but special tokens stand in the
    text as markers that cannot be spelled. Everything around them is encoded as it would be around the tokens
    themselves: one text, in one call. Safe to share between threads.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        added = backend.get_added_tokens_decoder()
        self._special = {id: token for id, token in added.items() if token.special}
        self._markers = {id: _marker(index) for index, id in enumerate(self._special)}
        # Finds special tokens as the library does, with the blanks that they take up; it knows no other tokens.
        self._finder = tokenizers.Tokenizer(models.BPE())
        # The model itself is shared, not copied.
        self._encoder = tokenizers.Tokenizer(backend.model)
        self._encoder.pre_tokenizer = backend.pre_tokenizer
        for each in (self._finder, self._encoder):
            each.normalizer = backend.normalizer
        marked = [self._marked(id, token) for id, token in added.items()]
        self._add_past(backend, marked)
        self._finder.add_tokens(list(added.values()))
        self._found = {self._finder.token_to_id(token.content): id for id, token in self._special.items()}
        self._ids = {self._encoder.token_to_id(token.content): id for id, token in zip(added, marked, strict=True)}
        unknown = getattr(backend.model, "unk_token", None)
        self._unknown = None if unknown is None else backend.token_to_id(unknown)

    def _marked(self, id: int, token: AddedToken) -> AddedToken:
        """`token`, or what stands for it. Whether a single word is one was decided when it was found."""
        if id not in self._markers:
            return token
        return AddedToken(
            self._markers[id], lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized, special=True
        )

    def encode(self, text: str, sentinel: str | None) -> list[int]:
        """Ids of `text` without `sentinel`. Raises RequestError where that cannot be told apart from special tokens."""
        found = self._finder.encode(text, add_special_tokens=False)
        parts: list[str] = []
        done = 0
        for found_id, (start, stop) in zip(found.ids, found.offsets, strict=True):
            id = self._found.get(found_id)
            at = -1 if id is None else text.find(self._special[id].content, start, stop)
            # Elsewhere it is an ordinary added token, or one that another spelling was normalized to: a client's.
            if id is not None and at >= 0:
                parts += [self._plain(text[done:at], sentinel), self._markers[id]]
                done = at + len(self._special[id].content)
        parts.append(self._plain(text[done:], sentinel))
        ids = self._encoder.encode_batch_fast(["".join(parts)], add_special_tokens=False)[0].ids
        return [self._known(id) for id in ids]
