"""How the two endpoints word one choice of an answer: its pieces in a stream, or the whole. Nothing here does I/O."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

from engine.request import Delta, Finished, FinishReason, Scored
from engine.tokenizer import Tokenizer
from server.dialect import Dialect
from server.logprobs import Offsets, TokenTexts, chat_logprobs, completion_logprobs
from server.openai import Call, CompletionCall
from server.prompts import TextPrompt
from server.tools.parser import CallArguments, CallStart, Content, Piece

NOTHING = Delta("", ())


class Choice(Protocol):
    """A choice in the making. A stream takes `opening`, then what `delta` gives for each event, then `end`; an answer
    in one piece takes `whole`. What has nothing to say is empty."""

    def opening(self) -> list[dict[str, Any]]: ...
    def delta(self, event: Scored | Delta) -> list[dict[str, Any]]: ...
    def end(self, finished: Finished) -> list[dict[str, Any]]: ...
    def whole(self, events: Sequence[Scored | Delta], finished: Finished) -> dict[str, Any]: ...


class CompletionChoice:
    """A choice of /v1/completions, which continues `prompt`."""

    def __init__(
        self, index: int, call: CompletionCall, dialect: Dialect, tokenizer: Tokenizer, prompt: tuple[int, ...]
    ):
        self._index = index
        self._call = call
        self._prompt = prompt
        self._text = ""
        if call.echo:
            written = call.ask.prompts[index // call.ask.n]
            self._text = written.text if isinstance(written, TextPrompt) else tokenizer.decode(prompt)
        self._texts = TokenTexts(tokenizer, call.tokens_as_ids)
        self._prompt_offsets = Offsets(tokenizer, prompt=self._text)
        self._offsets = Offsets(tokenizer, len(self._text))
        self._is_opened = False

    def opening(self) -> list[dict[str, Any]]:
        """With echo the prompt, unless its logprobs are to come with it."""
        if self._call.echo and self._call.ask.num_prompt_logprobs is None:
            return [self._piece(self._text)]
        return []

    def delta(self, event: Scored | Delta) -> list[dict[str, Any]]:
        if isinstance(event, Scored):
            return [self._piece(self._text, logprobs=self._prompt_logprobs(event))]
        if not event.text and not event.logprobs and not (self._call.return_token_ids and event.token_ids):
            return []
        return [self._piece(event.text, event.token_ids, logprobs=self._logprobs(event))]

    def end(self, finished: Finished) -> list[dict[str, Any]]:
        return [self._piece("", finished=finished)]

    def whole(self, events: Sequence[Scored | Delta], finished: Finished) -> dict[str, Any]:
        """The pieces of the stream put together."""
        pieces = [*self.opening(), *(piece for event in events for piece in self.delta(event)), *self.end(finished)]
        choice = pieces[-1]
        choice["text"] = "".join(piece["text"] for piece in pieces)
        logprobs = [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
        if logprobs:
            choice["logprobs"] = {name: [entry for one in logprobs for entry in one[name]] for name in logprobs[0]}
        if self._call.return_token_ids:
            choice["prompt_token_ids"] = list(self._prompt)
            choice["token_ids"] = [id for piece in pieces for id in piece["token_ids"]]
        return choice

    def _piece(
        self,
        text: str,
        token_ids: Sequence[int] = (),
        *,
        logprobs: dict[str, Any] | None = None,
        finished: Finished | None = None,
    ) -> dict[str, Any]:
        reason = None if finished is None else finished.reason.value
        piece: dict[str, Any] = {"text": text, "index": self._index, "logprobs": logprobs, "finish_reason": reason}
        if finished is not None:
            piece["stop_reason"] = finished.matched_stop
        if self._call.return_token_ids:
            piece["token_ids"] = list(token_ids)
            if not self._is_opened:
                piece["prompt_token_ids"] = list(self._prompt)
        self._is_opened = True
        return piece

    def _prompt_logprobs(self, event: Scored) -> dict[str, Any] | None:
        if self._call.ask.num_logprobs is None:
            return None
        return completion_logprobs(self._texts, self._prompt_offsets, self._prompt, event.logprobs)

    def _logprobs(self, event: Delta) -> dict[str, Any] | None:
        if not event.logprobs:
            return None
        return completion_logprobs(self._texts, self._offsets, event.token_ids, event.logprobs)


class ChatChoice:
    """A choice of /v1/chat/completions. The role comes once, and so do the names of calls: clients join the strings of
    deltas."""

    def __init__(self, index: int, call: Call, dialect: Dialect, tokenizer: Tokenizer, prompt: tuple[int, ...]):
        self._index = index
        self._call = call
        self._parser = dialect.parser(call.ask)
        self._texts = TokenTexts(tokenizer, call.tokens_as_ids)

    def opening(self) -> list[dict[str, Any]]:
        return [self._piece({"role": "assistant", "content": ""})]

    def delta(self, event: Scored | Delta) -> list[dict[str, Any]]:
        if isinstance(event, Scored):
            return []
        deltas = [_chat_delta(piece) for piece in self._parser.feed(event.text)]
        if not deltas and (event.logprobs or (self._call.return_token_ids and event.token_ids)):
            deltas = [{"content": ""}]
        # What is known of the tokens comes with the first piece of their text.
        return [self._piece(delta, NOTHING if number else event) for number, delta in enumerate(deltas)]

    def end(self, finished: Finished) -> list[dict[str, Any]]:
        rest = [self._piece(_chat_delta(piece)) for piece in self._parser.finish()]
        return [*rest, self._piece({}, finished=finished)]

    def whole(self, events: Sequence[Scored | Delta], finished: Finished) -> dict[str, Any]:
        delta = next((event for event in events if isinstance(event, Delta)), NOTHING)
        pieces = [*self._parser.feed(delta.text), *self._parser.finish()]
        content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls := _calls(pieces):
            message |= {"content": content or None, "tool_calls": calls}
        choice = self._piece({}, delta, finished)
        del choice["delta"]
        return {"index": self._index, "message": message, **choice}

    def _piece(self, delta: dict[str, Any], event: Delta = NOTHING, finished: Finished | None = None) -> dict[str, Any]:
        reason = None if finished is None else finish_reason(finished, self._parser.num_calls)
        logprobs = chat_logprobs(self._texts, event.logprobs) if event.logprobs else None
        piece: dict[str, Any] = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if finished is not None:
            piece["stop_reason"] = finished.matched_stop
        if self._call.return_token_ids:
            piece["token_ids"] = list(event.token_ids)
        return piece


def finish_reason(finished: Finished, num_calls: int) -> str:
    is_call = num_calls > 0 and finished.reason is FinishReason.STOP
    return "tool_calls" if is_call else finished.reason.value


def _chat_delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case Content(text):
            return {"content": text}
        case CallStart(index, id, name):
            call = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _calls(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """Whole calls out of their pieces."""
    arguments: dict[int, str] = defaultdict(str)
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[piece.index] += piece.text
    return [
        {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": arguments[piece.index]}}
        for piece in pieces
        if isinstance(piece, CallStart)
    ]
