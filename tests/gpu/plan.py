"""What is measured, in full on a GPU and as small as it can be for a dry run. No torch, so that a check that lacks it
can say so."""

from dataclasses import dataclass

FORMATS = ("native", "fp8_e5m2", "fp8_e4m3", "int8", "int4", "int2")


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int


@dataclass(frozen=True, slots=True)
class ModelSizes:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    few_layers: int  # where the time is short


@dataclass(frozen=True, slots=True)
class EndToEnd:
    """`prompt_tokens`, then `num_warm_up` decode steps, `num_steps` that are timed, and `num_plain_steps` that are
    timed without graphs, of each of these numbers of sequences."""

    model: ModelSizes
    formats: tuple[str, ...]
    batches: tuple[int, ...]
    prompt_tokens: int
    num_warm_up: int
    num_steps: int
    num_plain_steps: int
    dtype: str

    @property
    def num_generated(self) -> int:
        """Tokens of a sequence, with the one that its prompt gives."""
        return 1 + self.num_warm_up + self.num_steps + self.num_plain_steps


@dataclass(frozen=True, slots=True)
class Tests:
    """`most_seconds` for all; `chosen`: pytest's -k, or all; `num_direct`: cases to run without pytest, or all."""

    most_seconds: float
    chosen: str | None
    num_direct: int | None
    num_processes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """`decode`: contexts and batches; `prefill`: numbers and lengths of chunks. `copy_bytes`: of the copy that gives
    the bandwidth to compare with. `least_set_bytes`: what is read before the same memory is read again."""

    heads: Heads
    dtype: str
    formats: tuple[str, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]
    copy_bytes: int
    least_set_bytes: int
    end_to_end: EndToEnd
    tests: Tests

    @property
    def decode(self) -> list[tuple[int, int]]:
        return [(context, batch) for context in self.contexts for batch in self.batches]


FULL = Plan(
    heads=Heads(num_heads=32, num_kv_heads=8, head_dim=128, page_tokens=64),
    dtype="bfloat16",
    formats=FORMATS,
    contexts=(4096, 32768, 131072),
    batches=(1, 8, 64),
    prefill=((1, 8192), (8, 2048)),
    copy_bytes=4 * 2**30,
    least_set_bytes=4 * 2**26,  # four times an L2 of 64 MiB
    end_to_end=EndToEnd(
        ModelSizes(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, few_layers=8),
        formats=("int4", "native"),
        batches=(1, 32),
        prompt_tokens=1920,
        num_warm_up=4,
        num_steps=64,
        num_plain_steps=8,
        dtype="bfloat16",
    ),
    tests=Tests(most_seconds=130.0, chosen=None, num_direct=None, num_processes=12),
)
DRY = Plan(
    heads=Heads(num_heads=2, num_kv_heads=1, head_dim=64, page_tokens=64),
    dtype="bfloat16",
    formats=("native", "int4"),
    contexts=(130,),
    batches=(1, 2),
    prefill=((1, 70),),
    copy_bytes=2**20,
    least_set_bytes=1,
    end_to_end=EndToEnd(
        ModelSizes(vocab_size=500, hidden_size=64, intermediate_size=96, num_layers=1, few_layers=1),
        formats=("int8",),
        batches=(2,),
        prompt_tokens=62,
        num_warm_up=1,
        num_steps=3,
        num_plain_steps=1,
        dtype="float32",
    ),
    tests=Tests(
        most_seconds=60.0,
        chosen="first and token and not invariant or no_rows or are_refused or refused_at_start",
        num_direct=1,
        num_processes=1,
    ),
)
