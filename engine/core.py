"""The engine without its thread: add and cancel requests, run one step, emit events."""

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass

from engine.detokenizer import TextStream
from engine.errors import ErrorKind, RequestError
from engine.request import Delta, Event, Failed, Finished, FinishReason, Request, Usage
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.tokenizer import Tokenizer

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
        except RequestError as error:
            for emit in emits:
                emit(Failed(error))
            return
        self._arrivals += len(requests)
        for sequence, emit in zip(sequences, emits, strict=True):
            request = sequence.request
            sequence.leader = leader if sequence is not leader else None
            text = TextStream(self._tokenizer, request.sampling.stop, request.prompt)
            self._requests[request.id] = _Running(sequence, text, emit)
        self.scheduler.add(leader)

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
        output = self.runner.run(plan)
        self.scheduler.commit(plan, output.mass, output.marks)
        for sequence, token in zip(plan.sampled, output.tokens, strict=True):
            running = self._requests[sequence.request.id]
            if token is None:
                self._fail(running, RequestError(ErrorKind.INTERNAL, NOT_FINITE))
            else:
                self._commit_token(running, token)

    def _commit_token(self, running: _Running, token: int) -> None:
        sequence, sampling = running.sequence, running.sequence.request.sampling
        sequence.tokens.append(token)
        is_eos = token in self._eos_token_ids and not sampling.ignore_eos
        is_stop = token in sampling.stop_token_ids
        text = "" if is_eos or is_stop else running.text.feed(token)
        is_stopped = is_eos or is_stop or running.text.matched is not None
        is_full = sequence.num_generated_tokens == sampling.max_tokens
        if not is_stopped and not is_full:
            running.emit(Delta(text, (token,)))
            return
        running.emit(Delta(text + running.text.finish(), (token,)))
        matched = token if is_stop else running.text.matched
        is_stopped = is_stopped or matched is not None  # the last flush may complete a stop string
        self._finish(running, FinishReason.STOP if is_stopped else FinishReason.LENGTH, matched)

    def _fail(self, running: _Running, error: RequestError) -> None:
        self._remove(running)
        running.emit(Failed(error))

    def _remove(self, running: _Running) -> None:
        self.scheduler.remove(running.sequence)
        del self._requests[running.sequence.request.id]

    def _finish(self, running: _Running, reason: FinishReason, matched: str | int | None) -> None:
        self._remove(running)
        sequence = running.sequence
        usage = Usage(sequence.num_prompt_tokens, sequence.num_cached_tokens, sequence.num_generated_tokens)
        running.emit(Finished(reason, usage, matched))
