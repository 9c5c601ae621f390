"""A request inside the engine. Only the engine thread touches it. No torch."""

from dataclasses import dataclass, field

from engine.request import Request
from kernels.format.layout import PageRef


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is the prompt and what was generated; K and V exist for the first `num_computed_tokens` of them, in
    `pages`. `num_reserved_pages` sealed pages are promised for tokens that are known but not computed."""

    request: Request
    arrival: int
    tokens: list[int] = field(default_factory=list)
    pages: list[PageRef] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_reserved_pages: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens without K and V."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """One pending token behind computed ones: the step for it is a decode row."""
        return self.num_computed_tokens > 0 and self.num_pending_tokens == 1

    @property
    def urgency(self) -> tuple[int, int]:
        """Sort key: a lower priority number first, then the earlier arrival."""
        return (self.request.priority, self.arrival)
