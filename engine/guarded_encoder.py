"""Token ids of a rendered prompt in which only the template's own special tokens are special."""

import tokenizers
from tokenizers import AddedToken, models

from engine.chat_template import Rendered
from engine.errors import invalid
from engine.special_text import NONCHARACTERS

# A marker is these two and three digits of base 32, all noncharacters: no text holds one unless it was written for it.
MARK = NONCHARACTERS[0] + NONCHARACTERS[31]


class GuardedEncoder:
    """Encodes with the model, the splitting rules and the added tokens of `backend`, but the special tokens of the
    template stand in the text as markers, and their own spelling means nothing. It is one text in one call, so what
    lies around a marker gets the ids that it gets around the token itself. Safe to share between threads.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        added = backend.get_added_tokens_decoder()
        self._special = {id: token.content for id, token in added.items() if token.special}
        self._markers = {id: _marker(index) for index, id in enumerate(self._special)}
        unknown = getattr(backend.model, "unk_token", None)
        # A model also has this id for text that it has no token for.
        self._refused = self._special.keys() - {unknown and backend.token_to_id(unknown)}

        # Finds special tokens as the library does, with the blanks that belong to them, and knows no other tokens.
        self._finder = tokenizers.Tokenizer(models.BPE())
        self._finder.normalizer = backend.normalizer
        self._finder.add_tokens(list(added.values()))
        self._found = {self._finder.token_to_id(content): id for id, content in self._special.items()}

        # Shares the model with `backend`.
        self._encoder = tokenizers.Tokenizer(backend.model)
        self._encoder.normalizer = backend.normalizer
        self._encoder.pre_tokenizer = backend.pre_tokenizer
        _fill_gaps(self._encoder)
        marked = [self._marked(id, token) for id, token in added.items()]
        self._encoder.add_tokens(marked)
        self._ids = {self._encoder.token_to_id(token.content): id for id, token in zip(added, marked, strict=True)}

    def _marked(self, id: int, token: AddedToken) -> AddedToken:
        if not token.special:
            return token
        # Whether a word stands alone is decided where the token is found.
        return AddedToken(
            self._markers[id], lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized, special=True
        )

    def encode(self, rendered: Rendered) -> list[int]:
        """Raises RequestError where text and special tokens cannot be told apart: it spells a marker, or the model
        itself, without any merge, has a special token for it."""
        parts: list[str] = []
        done = 0
        found = self._finder.encode(rendered.text, add_special_tokens=False)
        for found_id, (start, stop) in zip(found.ids, found.offsets, strict=True):
            id = self._found.get(found_id)
            if id is None:
                continue
            content = self._special[id]
            at = rendered.text.find(content, start, stop)
            # Templates write special tokens as they are; what only became one by normalizing is a client's.
            if at >= 0:
                parts += [_plain(rendered.text[done:at], rendered.sentinel), self._markers[id]]
                done = at + len(content)
        parts.append(_plain(rendered.text[done:], rendered.sentinel))
        ids = self._encoder.encode_batch_fast(["".join(parts)], add_special_tokens=False)[0].ids
        return [self._known(id) for id in ids]

    def _known(self, id: int) -> int:
        if id in self._ids:
            return self._ids[id]
        if id in self._refused:
            raise invalid("messages hold text that this model can read only as a special token", "messages")
        return id


def _marker(index: int) -> str:
    return MARK + "".join(NONCHARACTERS[index >> shift & 31] for shift in (10, 5, 0))


def _plain(text: str, sentinel: str | None) -> str:
    text = text.replace(sentinel, "") if sentinel else text
    if MARK in text:
        raise invalid("messages hold noncharacters that mark special tokens here; leave them out", "messages")
    return text


def _fill_gaps(encoder: tokenizers.Tokenizer) -> None:
    """The library numbers added tokens from the size of the vocabulary on; where ids were left out, into others."""
    vocab = encoder.get_vocab(with_added_tokens=False)
    missing = max(vocab.values(), default=-1) + 1 - len(vocab)
    encoder.add_tokens([MARK + str(number) for number in range(missing)])
