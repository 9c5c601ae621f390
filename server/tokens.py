"""Text to token ids and back, for both protocols."""

from collections.abc import Mapping, Sequence
from typing import Any

from server.prompts import encode_chat, run_sized
from server.service import Service
from server.validation import check_token_ids


async def tokenize_text(service: Service, text: str, *, add_special_tokens: bool) -> list[int]:
    tokenizer = service.engine.tokenizer
    return await run_sized(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens), len(text))


async def tokenize_chat(service: Service, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    return await encode_chat(service.engine.tokenizer, messages, templates=service.dialect.templates)


async def detokenize(service: Service, raw: object, param: str) -> str:
    """Special tokens are written out. Raises RequestError naming `param` for what are no token ids."""
    size = len(raw) if isinstance(raw, list) else 0
    vocab_size = service.engine.info.vocab_size
    return await run_sized(lambda: text_of(service, check_token_ids(raw, param, vocab_size)), size)


def text_of(service: Service, tokens: Sequence[int]) -> str:
    return service.engine.tokenizer.decode(tokens, skip_special_tokens=False)


def tokenizer_object(service: Service) -> dict[str, Any]:
    """What clients want to know that tokenize through the server, such as lm-eval, in vLLM's words."""
    tokenizer, info = service.engine.tokenizer, service.engine.info
    template = tokenizer.chat_template
    eos = text_of(service, [min(info.eos_token_ids)]) if info.eos_token_ids else None
    return {
        "eos_token": eos,
        "bos_token": template.tokens.get("bos_token") if template is not None else None,
        "pad_token": eos,
        "chat_template": None if template is None else template.source,
    }
