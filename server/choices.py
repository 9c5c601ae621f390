"""How the two endpoints word one choice of an answer: its pieces in a stream, or the whole. Nothing here does I/O."""

from collections.abc import Sequence
from typing import Any, Protocol

from engine.request import Delta, Finished, Scored
from engine.tokenizer import Tokenizer
from server.logprobs import Offsets, TokenTexts, chat_logprobs, completion_logprobs
from server.openai import ChatCall, CompletionCall
from server.prompts import TextPrompt

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

    def __init__(self, index: int, call: CompletionCall, tokenizer: Tokenizer, prompt: tuple[int, ...]):
        self._index = index
        self._call = call
        self._prompt = prompt
        self._text = ""
        if call.echo:
            written = call.ask.prompts[index // call.ask.n]
            self._text = written.text if isinstance(written, TextPrompt) else tokenizer.decode(prompt)
        self._texts = TokenTexts(tokenizer, call.tokens_as_ids)
        start = len(self._text)
        self._prompt_offsets = Offsets(tokenizer, 0, is_text_start=True)
        self._offsets = Offsets(tokenizer, start, is_text_start=False)
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
    """A choice of /v1/chat/completions. The role comes once: clients join the strings of deltas."""

    def __init__(self, index: int, call: ChatCall, tokenizer: Tokenizer, prompt: tuple[int, ...]):
        self._index = index
        self._call = call
        self._texts = TokenTexts(tokenizer, call.tokens_as_ids)

    def opening(self) -> list[dict[str, Any]]:
        return [self._piece({"role": "assistant", "content": ""})]

    def delta(self, event: Scored | Delta) -> list[dict[str, Any]]:
        if isinstance(event, Scored):
            return []
        has_ids = self._call.return_token_ids and event.token_ids
        if not event.text and not event.logprobs and not has_ids:
            return []
        return [self._piece({"content": event.text}, event)]

    def end(self, finished: Finished) -> list[dict[str, Any]]:
        return [self._piece({}, finished=finished)]

    def whole(self, events: Sequence[Scored | Delta], finished: Finished) -> dict[str, Any]:
        delta = next((event for event in events if isinstance(event, Delta)), NOTHING)
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        choice = self._piece({}, delta, finished)
        del choice["delta"]
        return {"index": self._index, "message": message, **choice}

    def _piece(self, delta: dict[str, Any], event: Delta = NOTHING, finished: Finished | None = None) -> dict[str, Any]:
        reason = None if finished is None else finished.reason.value
        logprobs = chat_logprobs(self._texts, event.logprobs) if event.logprobs else None
        piece: dict[str, Any] = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if finished is not None:
            piece["stop_reason"] = finished.matched_stop
        if self._call.return_token_ids:
            piece["token_ids"] = list(event.token_ids)
        return piece
