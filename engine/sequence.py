"""A request inside the engine. Only the engine thread touches it. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.grammar import Constraint
from engine.kv.prefix import Node
from engine.request import Request, TokenLogprob
from engine.token_counts import TokenCounts
from kernels.format.layout import PageRef, Pool


@dataclass(frozen=True, slots=True)
class SwappedPage:
    """A page of a swapped sequence: the pool that it came from, and the host records that hold it."""

    pool: Pool
    records: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is the prompt and what was generated; K and V exist for the first `num_computed_tokens` of them, in
    `pages` (but for those that a shrink hook dropped) or in `swapped`.

    It waits (with siblings, if it leads a fork; or with `swapped` pages), or `is_running`: then it holds `pages`, first
    computing its prompt, and once `is_prefilled` a token a step. Preempted, it waits again.

    `window`: slots of its newest full pages but for sink pages, which lie in `pages` sealed; both are held.
    `node`: the last page of it that is in the prefix tree; `can_share`: pages behind it may follow. `matched`: what the
    tree was found to hold while it waited. `num_reserved_pages` sealed pages and `num_reserved_records` host records
    are promised to it. `marks`: places in its open page of tokens that the recipe's sink rule marks. `siblings` have
    the same prompt and wait for this one, their `leader`, to compute it.

    `end_ids`: tokens that end it. `counts`: what penalties are about, if there are any. `constraint`: where it stands
    in its grammar, if it has one. `scores`: where asked for, logprobs of the prompt's tokens but the first, as far as
    they were computed (None where logits were not finite), until they are told.
    """

    request: Request
    arrival: int
    tokens: list[int] = field(default_factory=list)
    pages: list[PageRef] = field(default_factory=list)
    window: list[PageRef] = field(default_factory=list)
    swapped: list[SwappedPage] = field(default_factory=list)
    mass: list[float] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    node: Node | None = None
    can_share: bool = True
    matched: list[Node] = field(default_factory=list)
    siblings: "list[Sequence]" = field(default_factory=list)
    leader: "Sequence | None" = None
    end_ids: frozenset[int] = frozenset()
    counts: TokenCounts | None = None
    constraint: Constraint | None = None
    scores: list[TokenLogprob | None] = field(default_factory=list)
    started: float | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_reserved_pages: int = 0
    num_reserved_records: int = 0
    num_dropped_pages: int = 0
    num_passed_over: int = 0
    is_running: bool = False
    was_admitted: bool = False
    is_prefilled: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        sampling = self.request.sampling
        if sampling.repetition_penalty != 1:
            self.counts = TokenCounts(self.request.prompt)
        elif sampling.presence_penalty or sampling.frequency_penalty:
            self.counts = TokenCounts(())

    def append(self, token: int) -> None:
        """A token was generated."""
        self.tokens.append(token)
        if self.counts is not None:
            self.counts.add(token)

    def reset(self) -> None:
        """Nothing of it is in memory any more."""
        self.pages, self.window, self.swapped, self.mass, self.marks, self.node = [], [], [], [], [], None
        self.num_computed_tokens = self.num_dropped_pages = 0
        self.num_reserved_pages = self.num_reserved_records = 0
        self.is_prefilled = False

    def advance(self, num_tokens: int, marks: Iterable[int], page_tokens: int) -> None:
        """K and V of its next tokens were computed. `marks`: places of marked ones in the last page of them."""
        self.num_computed_tokens += num_tokens
        self.marks = [*self.marks, *marks] if self.num_computed_tokens % page_tokens else []

    def inherit(self, leader: "Sequence") -> None:
        """It no longer waits for its leader, whose admission was its own."""
        self.leader, self.started = None, leader.started
        self.was_admitted, self.num_cached_tokens = leader.was_admitted, leader.num_cached_tokens
        self.scores = leader.scores

    def abdicate(self) -> "Sequence":
        """Name the first of its siblings leader of the others, in its place."""
        heir, *others = self.siblings
        heir.inherit(self)
        heir.siblings, self.siblings = others, []
        for sibling in others:
            sibling.leader = heir
        return heir

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many likeliest tokens it and its siblings must still be told in each place of the prompt; None where no
        logprobs of the prompt are asked for."""
        if self.num_generated_tokens:
            return None
        asked = [sequence.request.sampling.num_prompt_logprobs for sequence in (self, *self.siblings)]
        return max((count for count in asked if count is not None), default=None)

    @property
    def banned_ids(self) -> frozenset[int]:
        """Tokens that may not come next, because it would end too early."""
        return self.end_ids if self.num_generated_tokens < self.request.sampling.min_tokens else frozenset()

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens without K and V."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def num_seats(self) -> int:
        """Sequences that this one is or becomes."""
        return 1 + len(self.siblings)

    @property
    def num_pages_there(self) -> int:
        """Pages that need not be computed for it once it is admitted."""
        return len(self.swapped) or len(self.matched)

    @property
    def is_decoding(self) -> bool:
        """One pending token behind computed ones: the step for it is a decode row."""
        return self.num_computed_tokens > 0 and self.num_pending_tokens == 1

    @property
    def is_row_observed(self) -> bool:
        """Whether its shrink hook asks what its next decode row attends to. It may be the last token of the prompt."""
        shrink = self.request.shrink
        if shrink is None:
            return False
        return shrink.observes_decode or (shrink.window > 0 and not self.is_prefilled)

    @property
    def must_swap(self) -> bool:
        """Whether its pages cannot be computed again: what a hook dropped does not follow from the tokens alone."""
        shrink = self.request.shrink
        return shrink is not None and not shrink.is_positional and self.is_prefilled

    @property
    def urgency(self) -> tuple[int, int]:
        """Sort key: a lower priority number first, then the earlier arrival."""
        return (self.request.priority, self.arrival)
