"""How the served model is spoken to beyond plain text: its chat template, its tools, and grammars over its tokens."""

import asyncio
from typing import TYPE_CHECKING

from engine.errors import invalid
from engine.grammar import Grammar
from engine.tokenizer import Tokenizer
from server.ask import Ask
from server.structured.grammars import Grammars
from server.template_worker import TemplateWorkers
from server.tools.format import tool_format
from server.tools.grammar import tool_grammar
from server.tools.parser import Content, Piece, ToolParser

if TYPE_CHECKING:
    from engine.info import EngineInfo


class AnyText:
    """In the place of a `ToolParser` where no tool may be called."""

    num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class Dialect:
    """Starts processes only when they are needed; `start` does that beforehand. `close` ends them."""

    def __init__(self, tokenizer: Tokenizer, info: "EngineInfo"):
        template, special = tokenizer.chat_template, tokenizer.special_tokens
        self.templates = None if template is None else TemplateWorkers(template, special)
        self._tool_format = None if template is None else tool_format(template.source, special)
        self._grammars = Grammars(tokenizer, info.eos_token_ids, info.vocab_size)

    async def start(self) -> None:
        """Raises StartupError where a process does not start."""
        if self.templates is not None:
            await self.templates.start()
        await asyncio.to_thread(self._grammars.prepare)

    async def close(self) -> None:
        if self.templates is not None:
            await self.templates.close()
        await self._grammars.close()

    async def grammar(self, ask: Ask) -> Grammar | None:
        """What holds the answer to what was asked for, if anything. Raises RequestError."""
        use, text = ask.tools, ask.response
        if use.choice.is_allowed:
            if self._tool_format is None:
                raise invalid("this model's chat template has no place for tools", "tools", "unsupported_parameter")
            text = tool_grammar(self._tool_format, use.tools, use.choice, is_parallel=use.is_parallel)
        return None if text is None else await self._grammars.compile(text)

    def parser(self, ask: Ask) -> ToolParser | AnyText:
        """For the text of one choice."""
        if self._tool_format is None or not ask.tools.choice.is_allowed:
            return AnyText()
        return ToolParser(self._tool_format, {tool.name for tool in ask.tools.tools})
