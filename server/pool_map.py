"""The pool map as front ends show it. It is made, and worded as JSON, at most once in `MAP_SECONDS`, however many
watch, and only while somebody does."""

from collections.abc import Callable, Coroutine, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from engine.errors import invalid
from engine.kv.cells import cells, pages_per_cell
from engine.kv.map import MAX_RUNS, Pages, PoolMap, Row, Run
from engine.kv.prefix import Tokens
from kernels.format.layout import ITEM_BYTES, Pool
from server.latest import Latest
from server.wire import dump_json

if TYPE_CHECKING:
    from engine.info import EngineInfo
    from engine.tokenizer import Tokenizer

MAP_SECONDS = 2.0
PREVIEW_CHARS = 40
MAX_ID_CHARS = 256


def read_selected(query: Mapping[str, str]) -> str | None:
    """The id of the request whose pages the query asks for. Raises RequestError."""
    given = query.get("request")
    if given is not None and len(given) > MAX_ID_CHARS:
        raise invalid(f"request must be the id of a running request, at most {MAX_ID_CHARS} characters", "request")
    return given


class Previews:
    """The first characters of pages. Those of pages that are shown again and again are decoded once."""

    def __init__(self, tokenizer: "Tokenizer"):
        self._tokenizer = tokenizer
        self.text = lru_cache(maxsize=2 * MAX_RUNS)(self._text)

    def _text(self, tokens: Tokens) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)[:PREVIEW_CHARS]


class MapWatch:
    """The latest map for all who watch. `previews`: None where users' text is not to be shown."""

    def __init__(
        self,
        make: Callable[[], Coroutine[Any, Any, PoolMap]],
        info: "EngineInfo",
        totals: Callable[[], dict[str, float]],
        previews: Previews | None,
    ):
        self._make = make
        self._info = info
        self._totals = totals
        self._previews = previews
        self._latest = Latest(self._worded, MAP_SECONDS)

    async def json(self, selected: str | None) -> bytes:
        """The map as a JSON object, with the pages of one running request. Raises RequestError."""
        pool_map, worded = await self._latest.get()
        row = next((row for row in pool_map.rows if row.request_id == selected), None)
        return with_member(worded, "selected", dump_json(None if row is None else _pages_of(row)))

    async def _worded(self) -> tuple[PoolMap, bytes]:
        pool_map = await self._make()
        return pool_map, dump_json(map_object(pool_map, self._info, self._totals(), self._previews))


def with_member(json_object: bytes, name: str, value: bytes) -> bytes:
    """A JSON object that is not empty, with one member more."""
    return json_object[:-1] + b"," + dump_json(name) + b":" + value + b"}"


def map_object(
    pool_map: PoolMap, info: "EngineInfo", totals: dict[str, float], previews: Previews | None
) -> dict[str, Any]:
    """Everything but `selected`. Numbers of pages count from 0, as `cells` do."""
    item_bytes = ITEM_BYTES[info.dtype]
    bytes_in_16_bit = info.page_sizes.slot_bytes * 2 / item_bytes / info.page_tokens
    return {
        "seconds": round(pool_map.now, 3),
        "page_tokens": pool_map.page_tokens,
        "sealed": _pool(pool_map.sealed),
        "open": _pool(pool_map.open),
        "tree": {
            "pages": pool_map.num_nodes,
            "roots": [
                {"root": number, "children": size} for number, size in enumerate(pool_map.root_sizes, start=1) if size
            ],
            "runs": [_run(run, pool_map.page_tokens, previews) for run in pool_map.runs],
        },
        "running": pool_map.num_running,
        "requests": [_row(row) for row in pool_map.rows],
        "memory": {
            "tokens": pool_map.num_tokens,
            "bytes": pool_map.num_bytes,
            "open_bytes": pool_map.num_open_bytes,
            "open_bits": 8 * item_bytes,
            "bytes_in_16_bit": round(pool_map.num_tokens * bytes_in_16_bit),
        },
        "counters": totals,
    }


def _pool(pages: Pages) -> dict[str, Any]:
    return {"pages": len(pages.holders), "pages_per_cell": pages_per_cell(pages), "cells": cells(pages)}


def _run(run: Run, page_tokens: int, previews: Previews | None) -> dict[str, Any]:
    return {
        "id": run.id,
        "parent": run.parent,
        "root": run.root,
        "state": run.state.value,
        "pages": run.num_pages,
        "tokens": run.num_pages * page_tokens,
        "sequences": run.num_holders,
        "hits": run.num_hits,
        "idle_seconds": round(run.idle, 1),
        "children": run.num_children,
        "cut": run.is_cut,
        **({} if previews is None else {"preview": previews.text(run.tokens)}),
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "id": row.request_id,
        "prompt_tokens": row.num_prompt_tokens,
        "cached_tokens": row.num_cached_tokens,
        "generated_tokens": row.num_generated_tokens,
        "pages": len(row.pages),
        "phase": "decode" if row.is_decoding else "prefill",
    }


def _pages_of(row: Row) -> dict[str, Any]:
    ids = {pool.value: [page.id - 1 for page in row.pages if page.pool is pool] for pool in Pool}
    return {"id": row.request_id, **ids}
