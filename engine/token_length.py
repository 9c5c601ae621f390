"""How few tokens a text can have: known without tokenizing it."""

import json
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import models

from engine.token_bytes import SPACE_MARK, byte_level_alphabet

# The others occur in no character.
UTF8_BYTES = (*range(0xC0), *range(0xC2, 0xF5))


@dataclass(frozen=True, slots=True)
class TokenLength:
    """No token stands for more than `longest` UTF-8 bytes of text; those in `lost` get no token at all."""

    longest: int
    lost: bytes

    def fewest_tokens(self, text: str) -> int:
        kept = text.encode("utf-8", "surrogatepass").translate(None, self.lost)
        return -(-len(kept) // self.longest)


def token_length(backend: tokenizers.Tokenizer) -> TokenLength | None:
    """None where it is not known: where blanks are stripped, characters composed, or text is dropped."""
    added = backend.get_added_tokens_decoder().values()
    splits = _steps(backend.pre_tokenizer)
    keeps_text = all(_keeps_text(step) for step in [*_steps(backend.normalizer), *splits])
    # Other models make one unknown token of a long word.
    if (
        not isinstance(backend.model, models.BPE)
        or not keeps_text
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return None
    vocab = backend.get_vocab(with_added_tokens=False)
    longest = max((len(token.content.encode()) for token in added), default=1)
    if any(step["type"] == "ByteLevel" for step in splits):
        alphabet = byte_level_alphabet()
        lost = bytes(byte for byte in UTF8_BYTES if alphabet[byte] not in vocab)
        # In this alphabet a character is a byte.
        return TokenLength(max(longest, *map(len, vocab)), lost)
    if backend.model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in UTF8_BYTES):
        return TokenLength(max(longest, *(len(token.replace(SPACE_MARK, " ").encode()) for token in vocab)), b"")
    return None


def _steps(part: Any) -> list[dict[str, Any]]:
    if part is None:
        return []
    state: dict[str, Any] = json.loads(part.__getstate__())
    if state["type"] == "Sequence":
        return list(state.get("normalizers") or state.get("pretokenizers") or [])
    return [state]


def _keeps_text(step: dict[str, Any]) -> bool:
    match step["type"]:
        case "Replace":
            return bool(step["pattern"] == {"String": " "} and step["content"] == SPACE_MARK)
        case "Split":
            return bool(step["behavior"] != "Removed")
    return step["type"] in ("Prepend", "ByteLevel", "Digits", "Metaspace")
