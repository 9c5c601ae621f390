"""The bytes behind one token, which a library's whole-text `decode` hides.

Bytes are what streaming needs: they can be joined token by token, and only at their end can a character be incomplete.
"""

import json
import re
from typing import Any

import tokenizers

from engine.errors import StartupError

SPACE_MARK = "▁"


class TokenBytes:
    """Maps a token id to the bytes that it adds to a text.

    Raises StartupError for a decoder that is neither byte-level (Llama 3, SmolLM2, Qwen2) nor sentencepiece-style
    (Llama 2).
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        steps = _decoder_steps(backend)
        names = [step["type"] for step in steps]
        self._is_byte_level = names == ["ByteLevel"]
        self._has_byte_tokens = "ByteFallback" in names
        self.strips_leading_space = any(_strips_leading_space(step) for step in steps)
        self._byte_of = {char: byte for byte, char in enumerate(byte_level_alphabet())}

    def __call__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            try:
                return bytes(self._byte_of[char] for char in token)
            except KeyError:
                # An added token is written as plain text, not in the byte alphabet.
                return token.encode()
        if self._has_byte_tokens and (match := re.fullmatch("<0x([0-9A-F]{2})>", token)):
            return bytes.fromhex(match[1])
        return token.replace(SPACE_MARK, " ").encode()


def byte_level_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary, as GPT-2 defined it."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    state: dict[str, Any] = {"type": "none"}
    if backend.decoder is not None:
        state = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return steps
    for step in steps:
        if not _is_sentencepiece_step(step):
            raise StartupError(
                f"tokenizer.json: decoder step {step['type']} is not supported; supported: ByteLevel alone, or "
                f"Replace of {SPACE_MARK!r} by a space, Metaspace, ByteFallback, Fuse and Strip of one leading space"
            )
    return steps


def _is_sentencepiece_step(step: dict[str, Any]) -> bool:
    match step["type"]:
        case "Replace":
            return bool(step["pattern"] == {"String": SPACE_MARK} and step["content"] == " ")
        case "Metaspace":
            return bool(step["replacement"] == SPACE_MARK)
        case "Strip":
            return bool(step["content"] == " " and step["start"] <= 1 and step["stop"] == 0)
    return step["type"] in ("ByteFallback", "Fuse")


def _strips_leading_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step["prepend_scheme"] != "never")
    return bool(step["type"] == "Strip" and step["start"] == 1)
