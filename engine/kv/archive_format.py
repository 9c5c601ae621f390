"""What an archive of cached pages looks like: its index, and where pages lie in safetensors files. No torch.

index.json is one JSON object with one page a line. Its last member is the SHA-256 of all bytes before that member, so
that a damaged file is noticed before it is parsed. Where a page lies follows from the entries alone: a shard's header
must be the very bytes that they call for.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from engine.kv.moves import num_page_bytes
from kernels.format.layout import PageLayout, Pool

VERSION = 1
SHARD_BYTES = 2**30
MAX_INDEX_BYTES = 2**30


class Mismatch(Exception):
    """Something on disk is not what this server can use; the message says what."""


@dataclass(frozen=True, slots=True)
class SavedPage:
    """A page of the prefix tree. `parent` is the index of an earlier page with equal `salt`; None: a first page."""

    parent: int | None
    salt: str
    tokens: tuple[int, ...]
    pool: Pool
    priority: int
    num_hits: int


@dataclass(frozen=True, slots=True)
class Index:
    """The pages of an archive, each with the SHA-256 of its bytes in hex."""

    pages: Sequence[SavedPage]
    checksums: Sequence[str]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page's bytes lie in its shard."""

    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A safetensors file with consecutive pages, the first of them page `first` of the index.

    It holds two uint8 tensors: `sealed` [pages, page_bytes] and `open` [sink pages, slot_bytes].
    """

    name: str
    first: int
    header: bytes
    places: tuple[Place, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(place.num_bytes for place in self.places)


class ArchiveFormat:
    """The format for pages of one layout, computed by one model. `model` is its fingerprint."""

    def __init__(self, layout: PageLayout, model: str):
        self._page_tokens = layout.page_tokens
        self._sink_pages = layout.recipe.sink_pages
        self._num_bytes = {pool: num_page_bytes(pool, layout) for pool in Pool}
        self._identity = {
            "model": model,
            "recipe": layout.recipe.id,
            "page_bytes": layout.page_bytes,
            "slot_bytes": layout.slot_bytes,
        }

    def shards(self, pages: Sequence[SavedPage]) -> Iterator[Shard]:
        """The files that hold `pages`, each of at most `SHARD_BYTES` or one page."""
        first = size = number = 0
        for end, page in enumerate(pages):
            num_bytes = self._num_bytes[page.pool]
            if size and size + num_bytes > SHARD_BYTES:
                yield self._shard(number, first, pages[first:end])
                first, size, number = end, 0, number + 1
            size += num_bytes
        if size:
            yield self._shard(number, first, pages[first:])

    def _shard(self, number: int, first: int, pages: Sequence[SavedPage]) -> Shard:
        tensors, ends, start = {}, {}, 0
        for pool, num_bytes in self._num_bytes.items():
            count = sum(page.pool is pool for page in pages)
            end = start + count * num_bytes
            tensors[pool.value] = {"dtype": "U8", "shape": [count, num_bytes], "data_offsets": [start, end]}
            ends[pool], start = start, end
        text = json.dumps(tensors, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        places = []
        for page in pages:
            places.append(Place(len(header) + ends[page.pool], self._num_bytes[page.pool]))
            ends[page.pool] += self._num_bytes[page.pool]
        return Shard(f"pages-{number:05}.safetensors", first, header, tuple(places))

    def index_lines(self, index: Index) -> Iterator[bytes]:
        """The content of index.json."""
        digest = hashlib.sha256()
        for line in self._index_body(index):
            digest.update(line)
            yield line
        yield _seal(digest.hexdigest())

    def _index_body(self, index: Index) -> Iterator[bytes]:
        head = json.dumps({"version": VERSION, **self._identity})
        yield f'{head[:-1]}, "pages": ['.encode()
        separator = ""
        for page, checksum in zip(index.pages, index.checksums, strict=True):
            entry = {
                "parent": page.parent,
                "salt": page.salt,
                "tokens": page.tokens,
                "pool": page.pool.value,
                "priority": page.priority,
                "num_hits": page.num_hits,
                "sha256": checksum,
            }
            yield f"{separator}\n{json.dumps(entry)}".encode()
            separator = ","
        yield b"\n], "

    def parse_index(self, data: bytes) -> Index:
        """Raises Mismatch unless `data` is an undamaged index for this layout and model."""
        body = memoryview(data)[: -len(_seal(64 * "0"))]
        if not data.endswith(_seal(hashlib.sha256(body).hexdigest())):
            raise Mismatch("wrong checksum")
        try:
            index = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Mismatch("it is not JSON") from error
        if not isinstance(index, dict) or index.get("version") != VERSION:
            raise Mismatch(f"its format is not version {VERSION}")
        if differing := [key for key, value in self._identity.items() if index.get(key) != value]:
            raise Mismatch(f"its pages are of another {' and '.join(differing)}")
        entries = index.get("pages")
        if not isinstance(entries, list):
            raise Mismatch("it has no list of pages")
        pages: list[SavedPage] = []
        depths: list[int] = []
        for entry in entries:
            page = _parse_page(entry)
            if page is None or len(page.tokens) != self._page_tokens:
                raise Mismatch(f"page {len(pages)} is malformed")
            depth = 0
            if page.parent is not None:
                if page.parent >= len(pages) or pages[page.parent].salt != page.salt:
                    raise Mismatch(f"page {len(pages)} has no such parent")
                depth = depths[page.parent] + 1
            if page.pool is not (Pool.OPEN if depth < self._sink_pages else Pool.SEALED):
                raise Mismatch(f"page {len(pages)} is in the wrong pool")
            pages.append(page)
            depths.append(depth)
        return Index(pages, [entry["sha256"] for entry in entries])


def _seal(checksum: str) -> bytes:
    """The last member of the index."""
    return f'"sha256": "{checksum}"}}\n'.encode()


def _parse_page(entry: Any) -> SavedPage | None:
    """None where a field is missing or could not have been written."""
    if not isinstance(entry, dict) or entry.keys() != {"sha256", *(field.name for field in fields(SavedPage))}:
        return None
    parent, salt, tokens, pool = entry["parent"], entry["salt"], entry["tokens"], entry["pool"]
    if not (
        (parent is None or _is_int(parent, 0, 2**31))
        and isinstance(salt, str)
        and isinstance(tokens, list)
        and all(_is_int(token, 0, 2**31) for token in tokens)
        and pool in [item.value for item in Pool]
        and _is_int(entry["priority"], -(2**31), 2**31)
        and _is_int(entry["num_hits"], 0, 2**63)
        and isinstance(entry["sha256"], str)
    ):
        return None
    return SavedPage(parent, salt, tuple(tokens), Pool(pool), entry["priority"], entry["num_hits"])


def _is_int(value: object, least: int, end: int) -> bool:
    return type(value) is int and least <= value < end
