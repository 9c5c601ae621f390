"""Which pages each sequence holds: found at admission, sealed and shared after each step, given back at the end. What a
step writes is taken in step_pages.py. No torch.

For a sequence with `c` computed tokens, pages of P tokens and S sink pages:

    [0, S·P)            sink pages, in slots, kept when full
    [S·P, c // P · P)   sealed pages, but for those that a shrink hook dropped
    [c // P · P, c)     the open page, in a slot (none where c is a multiple of P)

With a window of W pages, the newest W of the sealed pages lie in slots as well.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as List

from engine.errors import invalid
from engine.kv.audit import check_cache
from engine.kv.cache import PageCache
from engine.kv.rules import PageRules
from engine.kv.step_pages import StepPages
from engine.sequence import Sequence, SwappedPage
from kernels.format.layout import PageRef, Pool


class PagePools:
    """Applies `PageRules` to the pages of a `PageCache`."""

    def __init__(self, cache: PageCache, rules: PageRules):
        self.cache = cache
        self.rules = rules
        self.page_tokens = rules.page_tokens
        self.step = StepPages(cache, rules)

    def refuse_oversized(self, sequence: Sequence) -> None:
        """Raise RequestError where a sequence could never run, even alone."""
        pages, total = self.rules.most_sealed(sequence), self.cache.sealed.num_total
        if pages > total:
            remedy = "lower max_tokens, or keep fewer pages (kv_shrink)"
            raise invalid(f"the request needs up to {pages} pages and the pool has {total}; {remedy}", "max_tokens")
        records, total = self.rules.most_records(sequence) * sequence.num_seats, self.cache.host.allocator.num_total
        if records > total:
            raise invalid(
                f"the request needs up to {records} records of host memory to be swapped out and there are {total}; "
                "lower max_tokens or n, keep fewer pages, or start the server with more --host-memory",
                "kv_shrink",
            )

    def match(self, sequence: Sequence) -> object | None:
        """Bring `sequence.matched` up to date with the tree. Returns the sequence that is computing the next page, if
        this one may wait for it: not where logprobs of its prompt are asked for. That one computes all rows itself, but
        for those whose logprobs it has."""
        if sequence.swapped:
            return None
        root, num_pages = self.cache.tree.root(sequence.request.salt), self.rules.num_matched(sequence)
        if sequence.num_prompt_logprobs is None:
            return self.cache.tree.extend(sequence.matched, root, sequence.tokens, num_pages)
        num_pages = min(num_pages, len(sequence.scores) // self.page_tokens)
        self.cache.tree.extend(sequence.matched, root, sequence.tokens, num_pages)
        return None

    def can_admit(self, sequence: Sequence) -> bool:
        """Whether all known tokens of a sequence can be computed, and the next one. Call after `match`."""
        cache = self.cache
        if sequence.swapped:
            slots = sum(page.pool is Pool.OPEN for page in sequence.swapped)
            return cache.open.can_reserve(slots + 1) and cache.sealed.can_reserve(len(sequence.swapped) - slots + 1)
        held = [node.page.pool for node in sequence.matched if node.page is not None and not node.is_loose]
        return (
            cache.open.can_reserve(self.rules.num_slots(sequence) - held.count(Pool.OPEN))
            and cache.sealed.can_reserve(self.rules.num_sealed(sequence) - held.count(Pool.SEALED))
            and self.has_records(sequence)
        )

    def has_records(self, sequence: Sequence) -> bool:
        """Whether the host records can be promised that it may be swapped out to."""
        num_records = 0 if sequence.swapped else self.rules.most_records(sequence) * sequence.num_seats
        return self.cache.host.allocator.can_reserve(num_records)

    def admit(self, sequence: Sequence) -> None:
        """Take what the tree holds of it, and promise the sealed pages that the other known tokens fill."""
        if sequence.swapped:
            self._swap_in(sequence)
            return
        cache, path = self.cache, sequence.matched
        num_tokens = len(path) * self.page_tokens
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.num_cached_tokens = num_tokens
            cache.stats.num_query_tokens += len(sequence.tokens)
            cache.stats.num_hit_tokens += num_tokens
            cache.stats.num_host_hit_tokens += self.page_tokens * sum(node.page is None for node in path)
            cache.hit(path, sequence.request.priority)
        sequence.pages = cache.take(path)
        sequence.node = path[-1] if path else cache.tree.root(sequence.request.salt)
        sequence.matched = []
        sequence.can_share = self.rules.window_pages == 0
        sequence.num_computed_tokens = num_tokens
        num_sealed = sum(page.pool is Pool.SEALED for page in sequence.pages)
        full = len(sequence.tokens) // self.page_tokens
        known = min(full - self.rules.sink_pages, self.rules.num_sealed(sequence))
        sequence.num_reserved_pages = max(0, known - num_sealed)
        cache.sealed.reserve(sequence.num_reserved_pages)
        sequence.num_reserved_records = self.rules.most_records(sequence) * sequence.num_seats
        cache.host.allocator.reserve(sequence.num_reserved_records)
        cache.tree.claim(sequence.node, sequence.tokens, self.rules.num_shared(sequence), sequence)
        self._drop(sequence, len(path), False)  # what a hook drops by position alone is not read from here on

    def seal(self, sequence: Sequence, target: PageRef) -> None:
        """The last page was sealed into `target`: its slot moves to the window, or is free again."""
        if self.rules.window_pages:
            sequence.window.append(sequence.pages[-1])
        else:
            self.cache.release(sequence.pages[-1])
        sequence.pages[-1] = target

    def slide(self, sequence: Sequence) -> None:
        """Let go of slots of full pages that are behind the window of the next token."""
        while len(sequence.window) > self.rules.window_pages:
            self.cache.release(sequence.window.pop(0))

    def share(self, sequence: Sequence) -> None:
        """Put the pages that were filled into the tree, or go over to equal ones that are there."""
        num_full = sequence.num_computed_tokens // self.page_tokens
        while self.rules.shares_next(sequence):
            assert sequence.node is not None
            index = sequence.node.depth + 1
            if index >= num_full:
                return
            tokens = self.cache.tree.page_at(sequence.tokens, index)
            node = self.cache.insert(sequence.node, tokens, sequence.pages[index], sequence.request.priority)
            assert node.page is not None
            sequence.pages[index] = node.page
            sequence.node = node

    def observe(self, sequence: Sequence, mass: List[float]) -> None:
        """Add what queries of this step gave to the sequence's pages."""
        self._pad_mass(sequence)
        for place, value in enumerate(mass):
            sequence.mass[place] += value

    def _pad_mass(self, sequence: Sequence) -> None:
        sequence.mass.extend([0.0] * (len(sequence.pages) - len(sequence.mass)))

    def shrink(self, sequence: Sequence) -> None:
        """Let the request's hook drop pages, after a step that filled one or ended the prompt."""
        is_first = sequence.num_pending_tokens == 0 and not sequence.is_prefilled
        sequence.is_prefilled |= is_first
        has_open = sequence.num_computed_tokens % self.page_tokens > 0
        if is_first or not has_open:
            self._drop(sequence, len(sequence.pages) - has_open, is_first)

    def _drop(self, sequence: Sequence, num_full: int, is_first: bool) -> None:
        shrink = sequence.request.shrink
        if shrink is None:
            return
        self._pad_mass(sequence)
        for place in reversed(shrink.drop(self.rules.view(sequence, sequence.mass[:num_full], is_first))):
            sequence.can_share = False
            self.cache.release(sequence.pages.pop(place))
            del sequence.mass[place]
            sequence.num_dropped_pages += 1
            self.cache.stats.num_dropped_pages += 1

    def fork(self, leader: Sequence, sibling: Sequence, slot: PageRef | None) -> None:
        """Give `sibling` the leader's full pages, and `slot` with a copy of the open one, if there is one."""
        full = leader.pages[:-1] if slot else leader.pages
        for page in (*full, *leader.window):
            self.cache.allocator(page.pool).retain(page.id)
        sibling.window = list(leader.window)
        sibling.pages = [*full, slot] if slot else list(full)
        sibling.mass, sibling.marks = list(leader.mass), list(leader.marks)
        sibling.node, sibling.can_share = leader.node, leader.can_share
        sibling.num_computed_tokens = leader.num_computed_tokens
        sibling.num_reserved_records = self.rules.most_records(sibling)
        leader.num_reserved_records -= sibling.num_reserved_records
        sibling.inherit(leader)
        leader.siblings.remove(sibling)

    def preempt(self, sequence: Sequence) -> None:
        """Give up its pages: what is shared stays cached; a sequence that must be swapped takes them with it."""
        stats = self.cache.stats
        stats.num_preemptions += 1
        if sequence.must_swap:
            stats.num_swaps += 1
            self._swap_out(sequence)
            return
        num_kept = (sequence.node.depth + 1) * self.page_tokens if sequence.node is not None else 0
        stats.num_lost_tokens += max(0, sequence.num_computed_tokens - num_kept)
        self.free(sequence)

    def _swap_out(self, sequence: Sequence) -> None:
        """Move all its pages to host memory, to records that were promised to it."""
        num_pages = -(-sequence.num_computed_tokens // self.page_tokens) - sequence.num_dropped_pages
        while len(sequence.pages) > num_pages:  # taken for a step that it will not be in
            self.cache.release(sequence.pages.pop())
        for page in sequence.pages:
            count = self.cache.num_records(page.pool)
            self.cache.host.allocator.unreserve(count)
            sequence.num_reserved_records -= count
            sequence.swapped.append(SwappedPage(page.pool, self.cache.swap_out(page)))
        sequence.pages.clear()
        sequence.can_share = False
        self._unreserve_pages(sequence)

    def _swap_in(self, sequence: Sequence) -> None:
        for page in sequence.swapped:
            sequence.pages.append(self.cache.swap_in(page.pool, page.records))
            sequence.num_reserved_records += len(page.records)
            self.cache.host.allocator.reserve(len(page.records))
        sequence.swapped.clear()

    def free(self, sequence: Sequence) -> None:
        """Give back everything the sequence holds or was promised. Its shared pages stay cached."""
        if sequence.node is not None and sequence.can_share:
            self.cache.tree.disclaim(sequence.node, sequence.tokens, sequence)
        for page in (*reversed(sequence.pages), *sequence.window):
            self.cache.release(page)
        for swapped in sequence.swapped:
            self.cache.host.release(swapped.records)
        self._unreserve_pages(sequence)
        self.cache.host.allocator.unreserve(sequence.num_reserved_records)
        sequence.reset()

    def _unreserve_pages(self, sequence: Sequence) -> None:
        self.cache.sealed.unreserve(sequence.num_reserved_pages)
        sequence.num_reserved_pages = 0

    def check(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Raise RuntimeError unless exactly the pages of `running` are held, `waiting` have no more than host records,
        and the tree agrees with the pools."""
        running = list(running)
        held = Counter(page for sequence in running for page in (*sequence.pages, *sequence.window))
        records = Counter(record for sequence in waiting for page in sequence.swapped for record in page.records)
        check_cache(self.cache, held, records, running)
