"""The run of `quire generate`: one call to an engine of its own, along the way that calls to a server go."""

import asyncio
import json
import sys
import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol, TextIO

from rich.console import Console

from engine.chat_template import ChatPrompt
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import RequestError, StartupError
from engine.load import load_engine
from engine.request import Delta
from server.ask import Ask
from server.generate_config import GenerateConfig
from server.keys import ANYONE
from server.prompts import TextPrompt
from server.record import REFUSALS, Caller, CallRecord
from server.service import Service
from server.terminal import Bar, progress_bar
from server.validation import GenerationFields, parse


class Writer(Protocol):
    """Takes the text as it comes, and what is known of the call when it is over, in whatever way it ended."""

    def hear(self, text: str) -> None: ...
    def end(self, record: CallRecord) -> None: ...


class StreamWriter:
    """Writes the text at once, and a line break behind it."""

    def __init__(self, output: TextIO):
        self._output = output

    def hear(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()

    def end(self, record: CallRecord) -> None:
        self.hear("\n")


class JsonWriter:
    """Writes one object at the end."""

    def __init__(self, output: TextIO):
        self._output = output
        self._text = ""

    def hear(self, text: str) -> None:
        self._text += text

    def end(self, record: CallRecord) -> None:
        json.dump({"text": self._text, **_figures(record)}, self._output)
        self._output.write("\n")


def generate(
    engine_config: EngineConfig,
    config: GenerateConfig,
    prompt: str,
    *,
    is_chat: bool,
    writer: Writer,
    errors: Console,
) -> int:
    """Load the model, answer, and return the exit code. Raises StartupError for what was asked for and cannot be."""
    try:
        fields = parse(GenerationFields, asdict(config))
        # Before there is an event loop, which would keep Ctrl-C for itself until all is loaded.
        with progress_bar(errors) as bar:
            engine = load_engine(engine_config, _progress(bar))
        engine.start()
        try:
            ask = Ask(
                model=engine.info.model_name,
                prompts=(ChatPrompt([{"role": "user", "content": prompt}]) if is_chat else TextPrompt(prompt),),
                prompt_param="prompt",
                fields=fields,
                default_max_tokens=None,
            )
            asyncio.run(_answer(engine, ask, writer))
        finally:
            engine.stop()
    except RequestError as error:
        if error.kind in REFUSALS:
            raise StartupError(error.message) from error
        print(f"quire: {error.message}", file=sys.stderr)
        return 1
    return 0


async def _answer(engine: Engine, ask: Ask, writer: Writer) -> None:
    service = Service(engine)
    id = f"once-{uuid.uuid4().hex}"
    with service.generation(Caller("command line", ANYONE, id)) as generation:
        generation.submit(await service.forks(ask, id, generation.record))
        try:
            async for _, event in generation.events():
                if isinstance(event, Delta):
                    writer.hear(event.text)
        finally:
            writer.end(generation.record)
            await service.dialect.close()


def _progress(bar: Bar) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        bar.expect(total)
        bar.advance("loading weights", 1)

    return progress


def _figures(record: CallRecord) -> dict[str, Any]:
    """What is null was not reached. Times are in seconds: until the first token from the start of the call, not of the
    program; `tokens_per_second` are those behind the first."""
    (choice,) = record.choices
    finished, first, last = choice.finished, choice.first_token, choice.last_token
    seconds = last - first if first is not None and last is not None else 0.0
    return {
        "finish_reason": None if finished is None else finished.reason.value,
        "usage": {
            "prompt_tokens": record.num_prompt_tokens,
            "completion_tokens": choice.num_tokens,
            "total_tokens": record.num_prompt_tokens + choice.num_tokens,
        },
        "seconds_to_first_token": None if first is None else first - record.opened,
        "tokens_per_second": (choice.num_tokens - 1) / seconds if seconds > 0 else None,
    }
