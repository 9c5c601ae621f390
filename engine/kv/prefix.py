"""The prefix tree: which page holds the K and V of which tokens. No torch.

A node is one full page. Its path from the root gives all tokens up to its end, so equal paths mean equal content
(the sealed-page rule). Children are looked up by their tokens, compared exactly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.kv.reclaim import PageUse
from kernels.format.layout import PageRef

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """A full page, in one of three states: `page` says where it lies in a pool; `records` where in host memory; with
    neither, `owner` is computing it.

    `is_loose`: in a pool and held by no sequence. `num_loose_children` counts children in the same pool.
    `is_pinned`: about to be restored, so host memory must keep it.
    """

    parent: "Node | None"
    tokens: Tokens
    depth: int
    page: PageRef | None = None
    records: tuple[int, ...] | None = None
    owner: object | None = None
    children: "dict[Tokens, Node]" = field(default_factory=dict)
    is_loose: bool = False
    is_pinned: bool = False
    num_loose_children: int = 0
    created: float = 0.0
    last_use: float = 0.0
    num_hits: int = 0
    priority: int = 0

    @property
    def is_filled(self) -> bool:
        return self.page is not None or self.records is not None

    @property
    def use(self) -> PageUse:
        return PageUse(self.created, self.last_use, self.num_hits, self.priority, self.depth)

    def subtree(self) -> Iterator["Node"]:
        """This node and all below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class PrefixTree:
    """Paths of pages of `page_tokens` tokens, one root for each salt; all pages have one recipe. Only the shape: what
    lies where and who holds it is `PageCache`'s."""

    def __init__(self, page_tokens: int):
        self._page_tokens = page_tokens
        self._roots: dict[str, Node] = {}

    def root(self, salt: str) -> Node:
        """The node above the first pages of one salt; holds no page itself."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(None, (), -1)
        return root

    def page_at(self, tokens: Sequence[int], index: int) -> Tokens:
        return tuple(tokens[index * self._page_tokens : (index + 1) * self._page_tokens])

    def extend(self, path: list[Node], root: Node, tokens: Sequence[int], num_pages: int) -> object | None:
        """Walk on from the end of `path`, which may hold nodes that are gone, over at most `num_pages` in all.

        Appends the filled nodes that match `tokens`. Returns who is computing the next one, if somebody is.
        """
        while path and not path[-1].is_filled:
            path.pop()
        del path[num_pages:]
        node = path[-1] if path else root
        while len(path) < num_pages:
            child = node.children.get(self.page_at(tokens, len(path)))
            if child is None:
                return None
            if not child.is_filled:
                return child.owner
            path.append(child)
            node = child
        return None

    def add(self, parent: Node, tokens: Tokens) -> Node:
        """The child of `parent` for these tokens, made if it is not there."""
        child = parent.children.get(tokens)
        if child is None:
            child = parent.children[tokens] = Node(parent, tokens, parent.depth + 1)
        return child

    def claim(self, node: Node, tokens: Sequence[int], num_pages: int, owner: object) -> None:
        """Say that `owner` is computing the pages behind `node`, up to `num_pages` in all."""
        for index in range(node.depth + 1, num_pages):
            node = self.add(node, self.page_at(tokens, index))
            if not node.is_filled:
                node.owner = owner

    def disclaim(self, node: Node, tokens: Sequence[int], owner: object) -> None:
        """Take back what `owner` claimed behind `node` and has not filled.

        Below a node without a page there are only such nodes. They may be another's, who then only loses that later
        requests wait for it.
        """
        index = node.depth + 1
        while (child := node.children.get(self.page_at(tokens, index))) is not None:
            if not child.is_filled and child.owner is owner:
                del node.children[child.tokens]
                return
            node, index = child, index + 1

    def unlink(self, node: Node) -> None:
        """Take a node, and what is below it, out of the tree."""
        assert node.parent is not None
        del node.parent.children[node.tokens]

    def roots(self) -> Iterator[tuple[str, Node]]:
        """(salt, root) of all salts."""
        return iter(self._roots.items())

    def nodes(self) -> Iterator[tuple[str, Node]]:
        """(salt, node) of all nodes with a page, parents first."""
        for salt, root in self._roots.items():
            for node in root.subtree():
                if node.is_filled:
                    yield salt, node
