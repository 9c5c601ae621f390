"""The engine without its thread: add and cancel requests, run one step, emit events."""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass

from engine.detokenizer import TextStream
from engine.errors import ErrorKind, RequestError
from engine.masks import GRAMMAR_FAILED
from engine.request import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    Request,
    Scored,
    TokenLogprob,
    Usage,
)
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NOT_FINITE = "the model gave no finite numbers for this prompt; if the model is sound, try --dtype float32"

Sink = Callable[[Event], None]


@dataclass(slots=True)
class _Running:
    """A request in the engine: its sequence, its text so far, and who listens."""

    sequence: Sequence
    text: TextStream
    emit: Sink


class EngineCore:
    """Not thread-safe: one thread calls everything. Every added request gets exactly one terminal event."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: frozenset[int],
    ):
        self.scheduler = scheduler
        self.runner = runner
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._requests: dict[str, _Running] = {}
        self._arrivals = 0

    def add(self, requests: List[Request], emits: List[Sink]) -> None:
        """Take requests with the same prompt, which is computed once, and who listens to each."""
        sequences = [Sequence(request, self._arrivals + index) for index, request in enumerate(requests)]
        leader, *siblings = sequences
        leader.siblings = siblings
        try:
            self.scheduler.refuse_oversized(leader)
            for sequence in sequences:
                self._prepare(sequence)
        except RequestError as error:
            for emit in emits:
                emit(Failed(error))
            return
        self._arrivals += len(requests)
        for sequence, emit in zip(sequences, emits, strict=True):
            request, sampling = sequence.request, sequence.request.sampling
            sequence.leader = leader if sequence is not leader else None
            text = TextStream(self._tokenizer, sampling.stop, request.prompt, sampling.min_tokens)
            self._requests[request.id] = _Running(sequence, text, emit)
        self.scheduler.add(leader)

    def _prepare(self, sequence: Sequence) -> None:
        """What generating needs beyond tokens. Raises RequestError where the grammar cannot be started."""
        request = sequence.request
        eos = frozenset() if request.sampling.ignore_eos else self._eos_token_ids
        sequence.end_ids = request.sampling.stop_token_ids | eos
        if request.grammar is not None:
            try:
                sequence.constraint = request.grammar.start()
            except Exception:
                logger.warning("a grammar failed to start", exc_info=True)
                raise RequestError(ErrorKind.INTERNAL, GRAMMAR_FAILED) from None

    def cancel(self, request_id: str) -> None:
        """End a request now; a request that has ended is left alone."""
        if running := self._requests.get(request_id):
            self._finish(running, FinishReason.CANCELLED, None)

    def fail_all(self, error: RequestError) -> None:
        """The engine cannot go on: end every request with `error`. Pages are not freed any more."""
        for running in self._requests.values():
            running.emit(Failed(error))
        self._requests.clear()

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle

    def step(self) -> None:
        """Plan, run, commit."""
        plan = self.scheduler.plan()
        now = time.monotonic()
        for item in plan.items:
            if item.sequence.started is None:
                item.sequence.started = now
        output = self.runner.run(plan)
        for sequence, scores in output.scores.items():
            sequence.scores += scores
        self.scheduler.commit(plan, output.mass, output.marks)
        for sequence, token in zip(plan.sampled, output.tokens, strict=True):
            running = self._requests[sequence.request.id]
            if reason := output.refusals.get(sequence):
                self._fail(running, reason)
            elif token is None or not self._emit_scores(running):
                self._fail(running, NOT_FINITE)
            elif sequence.request.sampling.max_tokens == 0:
                self._finish(running, FinishReason.LENGTH, None)
            else:
                self._commit_token(running, token, output.logprobs.get(sequence))

    def _emit_scores(self, running: _Running) -> bool:
        """Before the first token, tell the logprobs of the prompt where asked. False where they are not finite."""
        sequence = running.sequence
        scores, sequence.scores = sequence.scores, []
        num_top = sequence.request.sampling.num_prompt_logprobs
        if num_top is None or sequence.num_generated_tokens:
            return True
        known = [score.limited(num_top) for score in scores if score is not None]
        if len(known) == len(scores):
            running.emit(Scored((None, *known)))
        return len(known) == len(scores)

    def _commit_token(self, running: _Running, token: int, logprob: TokenLogprob | None) -> None:
        sequence, sampling = running.sequence, running.sequence.request.sampling
        is_end = token in sequence.end_ids
        is_complete = False
        if sequence.constraint is not None and not is_end:
            try:
                sequence.constraint.accept(token)
                is_complete = sequence.constraint.is_complete
            except Exception:
                logger.warning("a grammar failed to take a token that it had allowed", exc_info=True)
                self._fail(running, GRAMMAR_FAILED)
                return
        sequence.append(token)
        logprobs = () if logprob is None else (logprob,)
        text = "" if is_end else running.text.feed(token)
        is_stopped = is_end or is_complete or running.text.matched is not None
        is_full = sequence.num_generated_tokens == sampling.max_tokens
        if not is_stopped and not is_full:
            running.emit(Delta(text, (token,), logprobs))
            return
        running.emit(Delta(text + running.text.finish(), (token,), logprobs))
        matched = token if token in sampling.stop_token_ids else running.text.matched
        is_stopped = is_stopped or matched is not None  # the last flush may complete a stop string
        self._finish(running, FinishReason.STOP if is_stopped else FinishReason.LENGTH, matched)

    def _fail(self, running: _Running, reason: str) -> None:
        self._remove(running)
        running.emit(Failed(RequestError(ErrorKind.INTERNAL, reason)))

    def _remove(self, running: _Running) -> None:
        self.scheduler.remove(running.sequence)
        del self._requests[running.sequence.request.id]

    def _finish(self, running: _Running, reason: FinishReason, matched: str | int | None) -> None:
        self._remove(running)
        sequence = running.sequence
        usage = Usage(sequence.num_prompt_tokens, sequence.num_cached_tokens, sequence.num_generated_tokens)
        running.emit(Finished(reason, usage, matched, sequence.started))
