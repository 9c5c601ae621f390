"""An engine without a model: it plays a script, and remembers what it was asked and told to stop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from engine.chat_template import ChatPrompt, Rendered
from engine.config import EngineConfig
from engine.errors import ErrorKind, RequestError
from engine.kv.map import Pages, PoolMap, Row, Run, RunState
from engine.kv.report import PageSizes
from engine.kv.shrink import Shrink
from engine.kv.stats import SECONDS, HistogramSnapshot, PoolSnapshot, SharedPrefix, TierSnapshot
from engine.request import Delta, Event, Failed, Finished, FinishReason, Request, SamplingDefaults, Usage
from kernels.format.layout import PageRef, Pool

Script = Callable[[Request], AsyncIterator[Event]]
BOS = 256
TURNS = 3  # of the event loop after an event: a reader in the same loop takes each before the next one comes


@dataclass(frozen=True)
class FakeInfo:
    model_name: str = "tiny"
    max_model_len: int = 128
    vocab_size: int = 300
    eos_token_ids: frozenset[int] = frozenset({257})
    page_tokens: int = 64
    sink_pages: int = 1
    recipe: str = "int4"
    dtype: str = "float32"
    device: str = "cpu"
    num_sealed_pages: int = 10
    num_slots: int = 4
    bytes_per_token: float = 12.5
    max_num_seqs: int = 4
    max_queued_requests: int = 64
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    shrink: Shrink | None = None
    why_none_is_dropped: str | None = None
    has_host_memory: bool = False
    page_sizes: PageSizes = PageSizes(1000, 4000)


# Every number is another one, so that none can be shown in another's place.
SNAPSHOT = PoolSnapshot(
    tiers=(
        TierSnapshot("sealed", 100, 1000, {"free": 40, "held": 35, "cached": 25}, {"held": 2240, "cached": 1600}),
        TierSnapshot("open", 20, 4000, {"free": 7, "open": 11, "sink": 2}, {"free": 0, "open": 333, "sink": 128}),
        TierSnapshot("host", 50, 1000, {"free": 49, "cached": 1}, {"free": 0, "cached": 64}, "records"),
    ),
    num_running=3,
    num_waiting=5,
    num_cached_nodes=27,
    counters={
        "num_query_tokens": 8000, "num_hit_tokens": 2000, "num_host_hit_tokens": 130, "num_sealed_pages": 131,
        "num_adopted_pages": 132, "num_dropped_pages": 133, "num_saved_pages": 134, "num_restored_pages": 135,
        "num_preemptions": 136, "num_swaps": 137, "num_lost_tokens": 138,
    },
    reclaimed={"sealed_needed": 12, "slot_needed": 13},
    histograms={
        name: HistogramSnapshot(tuple(range(first, first + len(SECONDS) + 1)), total)
        for name, first, total in (("lifetime", 0, 1.5), ("idle", 30, 2.5), ("reuse_gap", 60, 3.5))
    },
    shared_prefixes=(SharedPrefix(640, 4), SharedPrefix(64, 9)),
)  # fmt: skip

BEGINNING = tuple(b"Dear <user> of mine, how do you do and more")
MAP = PoolMap(
    now=1000.5,
    page_tokens=64,
    sealed=Pages([0, 0, 1, 12, 3], [False, True, False, True, True], {}),
    open=Pages([0, 1, 1, 0], [False, True, False, True], {2: "s", 3: "o"}),
    runs=(
        Run("open-1", None, 2, RunState.POOL, 3, 12, 7, 1.25, BEGINNING, 2, False),
        Run("sealed-4", "open-1", 2, RunState.POOL, 2, 3, 1, 2.0, (104, 105), 1, True),
        Run("host-9", "open-1", 2, RunState.HOST, 1, 0, 0, 60.0, (104, 111), 0, False),
    ),
    root_sizes=(0, 4),
    num_nodes=77,
    rows=(
        Row("chatcmpl-1", 10, 4, 3, True, (PageRef(Pool.OPEN, 2), PageRef(Pool.SEALED, 4), PageRef(Pool.OPEN, 3))),
        Row("cmpl-2", 900, 0, 0, False, (PageRef(Pool.SEALED, 4),)),
    ),
    num_running=300,
    num_tokens=640,
    num_bytes=9000,
    num_open_bytes=8000,
)


class FakeTokenizer:
    """A token is a byte; 256 starts a text, and ids from 257 have no text."""

    vocab_size = 300
    special_ids = frozenset(range(BOS, 300))
    special_tokens = ("<s>",)
    strips_leading_space = False
    chat_template = None

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < BOS else f"<{token_id}>".encode()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def fewest_tokens(self, text: str) -> int:
        return 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in prompt.messages))

    def encode_rendered(self, rendered: Rendered) -> list[int]:
        return self.encode(rendered.text.replace(rendered.sentinel or "", ""))


def usage(request: Request, generated: int) -> Usage:
    return Usage(len(request.prompt), 3, generated)


async def say_hello(request: Request) -> AsyncIterator[Event]:
    """`Héllo`, an empty delta in between as while a character is incomplete, cut at max_tokens."""
    pieces = ["H", "", "é", "llo"][: request.sampling.max_tokens]
    for number, text in enumerate(pieces):
        yield Delta(text, (number + 1,))
    reason = FinishReason.STOP if len(pieces) == 4 else FinishReason.LENGTH
    yield Finished(reason, usage(request, len(pieces)))


async def echo_params(request: Request) -> AsyncIterator[Event]:
    """The sampling parameters and the prompt as text, so that two protocols can be compared."""
    yield Delta(repr((request.sampling, request.prompt)), (1,))
    yield Finished(FinishReason.STOP, usage(request, 1), "END")


def hang_after(deltas: int) -> Script:
    async def script(request: Request) -> AsyncIterator[Event]:
        for number in range(deltas):
            yield Delta(f"t{number} ", (number,))
        await asyncio.Event().wait()

    return script


def fail_after(deltas: int, error: RequestError | None = None) -> Script:
    async def script(request: Request) -> AsyncIterator[Event]:
        for number in range(deltas):
            yield Delta(f"t{number} ", (number,))
        yield Failed(error or RequestError(ErrorKind.INTERNAL, "the step failed", code="internal_error"))

    return script


class FakeRun:
    """One request: its script plays into its sink."""

    def __init__(self, engine: "FakeEngine", request: Request, sink: Callable[[Event], None]):
        self.request = request
        self._engine = engine
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._play())

    async def _play(self) -> None:
        async for event in self._engine.script(self.request):
            self._sink(event)
            for _ in range(TURNS):
                await asyncio.sleep(0)
        self._engine.running.discard(self)

    def cancel(self) -> None:
        self._end(Finished(FinishReason.CANCELLED, usage(self.request, 0)))
        self._engine.cancelled.append(self.request.id)
        self._engine.saw_cancel.set()

    def fail(self, error: RequestError) -> None:
        self._loop.call_soon_threadsafe(self._end, Failed(error))

    def _end(self, event: Event) -> None:
        self._engine.running.discard(self)
        self._task.cancel()
        self._sink(event)


class FakeEngine:
    """Implements what the server uses of `engine.engine.Engine`."""

    def __init__(self, script: Script = say_hello, info: FakeInfo | None = None):
        self.config = EngineConfig(model="tiny")
        self.info = info or FakeInfo()
        self.tokenizer = FakeTokenizer()
        self.script = script
        self.is_ready = True
        self.refusal: RequestError | None = None
        self.lack_of_room: RequestError | None = None
        self.forks: list[list[Request]] = []
        self.running: set[FakeRun] = set()
        self.cancelled: list[str] = []
        self.saw_cancel = asyncio.Event()
        self.saw_submit = asyncio.Event()
        self.snapshot = SNAPSHOT
        self.checks: list[bool] = []
        self.map = MAP
        self.num_maps = 0
        self.step_seconds = 0.0
        self.num_waiting_tokens = 777
        self.step_ends = asyncio.Event()  # what `inspect` waits for
        self.step_ends.set()

    def start(self) -> None:
        self.is_ready = True

    def check_room(self, num_requests: int, num_tokens: int = 0) -> None:
        if self.lack_of_room:
            raise self.lack_of_room

    def submit(self, requests: Sequence[Request], sinks: Sequence[Callable[[Event], None]]) -> None:
        if self.refusal:
            raise self.refusal
        assert len({request.prompt for request in requests}) == 1
        self.forks.append(list(requests))
        self.running |= {FakeRun(self, request, sink) for request, sink in zip(requests, sinks, strict=True)}
        self.saw_submit.set()

    def cancel(self, request_id: str) -> None:
        for run in [run for run in self.running if run.request.id == request_id]:
            run.cancel()

    @property
    def requests(self) -> list[Request]:
        return [request for fork in self.forks for request in fork]

    async def inspect(self, check: bool = False) -> PoolSnapshot:
        self.checks.append(check)
        await self.step_ends.wait()
        if self.refusal:
            raise self.refusal
        return self.snapshot

    async def map_pool(self) -> PoolMap:
        self.num_maps += 1
        await self.step_ends.wait()
        if self.refusal:
            raise self.refusal
        return self.map

    async def flush(self) -> int:
        return 17

    def stop(self, timeout: float | None = None) -> None:
        self.is_ready = False
        for run in list(self.running):
            run.fail(RequestError(ErrorKind.UNAVAILABLE, "the server is shutting down"))

    def describe_start(self) -> list[tuple[str, str]]:
        return [("model", self.info.model_name)]
