"""Sealed pages and slots as tensors: quantize into records, read back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.backend import PoolTensors
from kernels.format.hadamard import hadamard
from kernels.format.layout import PageRef, Pool
from kernels.format.recipe import LayerRecipe
from kernels.rope import Rotary, turn
from kernels.torch_backend.codec import LARGEST, SMALLEST_NORMAL
from kernels.torch_backend.rows import choose_rows, from_stored, is_row, put_rows, take_rows, to_stored
from kernels.torch_backend.softmax import Partial
from kernels.torch_backend.stores import LayerView


class Turns:
    """RoPE of the places of pages, for K that is stored before it: `cos` and `sin` fp32 [page numbers, P, D/2]."""

    def __init__(self, cos: Tensor, sin: Tensor):
        self._cos, self._sin = cos, sin

    @classmethod
    def up_to(cls, count: int, page_tokens: int, rotary: Rotary, device: torch.device) -> "Turns":
        """Of the first `count` pages."""
        cos, sin = rotary.at(torch.arange(count * page_tokens, device=device))
        return cls(*(x.view(count, page_tokens, -1) for x in (cos, sin)))

    def of(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """[N, 1, P, D/2] of pages by their number in the sequence."""
        return self._cos[numbers].unsqueeze(1), self._sin[numbers].unsqueeze(1)

    def rows(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """[count, 1, D/2] of `count` tokens from page number `first` on."""
        size = self._cos.shape[1]
        pages = slice(first, first - -count // size)
        return tuple(x[pages].flatten(0, 1)[:count].unsqueeze(1) for x in (self._cos, self._sin))  # type: ignore[return-value]


class PageIndex:
    """Pages of one sequence as index tensors: `slots` [m] of sink pages, then `pages` [n]; `slot_numbers` and
    `page_numbers`: which pages of the sequence they are, the first of `refs` being number `first`."""

    def __init__(self, refs: Sequence[PageRef], device: torch.device, first: int = 0):
        def tensors(pool: Pool) -> Tensor:
            items = [(ref.id, number) for number, ref in enumerate(refs, start=first) if ref.pool is pool]
            return torch.tensor(items, dtype=torch.int64, device=device).view(-1, 2)

        self.slots, self.slot_numbers = tensors(Pool.OPEN).unbind(1)
        self.pages, self.page_numbers = tensors(Pool.SEALED).unbind(1)


class LayerPages:
    """One layer of both pools. Tiles are [N, kv_heads, P, D]."""

    def __init__(self, pool: PoolTensors, layer: int):
        self.recipe: LayerRecipe = pool.layout.recipe.layers[layer]
        self._fields = pool.layout.layers[layer]
        self._sealed = LayerView(pool.sealed, self._fields, 0)
        self._start, end = self._fields.span
        self._records = pool.sealed[:, self._start : end]
        self.open = pool.open[:, layer]
        self.open_k, self.open_v = self.open[:, 0], self.open[:, 1]
        # PyTorch's CPU attention takes 16-bit keys and values as they are
        self.attends_in_16bit = (
            self.recipe.is_raw and not self.recipe.before_rope and pool.open.is_cpu and pool.open.dtype != torch.float32
        )
        has_rows = self.recipe.outliers is not None
        self._folds_k = self._sealed.k.folds_as_key and not self.recipe.before_rope and not has_rows
        self._folds_v = self._sealed.v.folds_as_value and not has_rows
        is_undone = self.recipe.before_rope and self.recipe.rotate_k
        self._k_rotation = torch.tensor(hadamard(pool.layout.head_dim), device=pool.open.device) if is_undone else None

    def seal(self, k: Tensor, v: Tensor, pages: Tensor, marks: Tensor) -> None:
        """Quantize contiguous tiles of the model's dtype into `pages` [N]. `marks`: bool [N, P], tokens that the sink
        rule marks."""
        sealed = self._sealed
        if self.recipe.is_raw:
            sealed.k.codes[pages], sealed.v.codes[pages] = k, v
            return
        keys, values = k.float(), v.float()
        if sealed.k_norm is not None:
            # one norm a token over all heads; rows of one length and layout, so that sums do not depend on N
            rows = keys.transpose(1, 2).flatten(2)
            norm = rows.square().sum(-1).sqrt().clamp(SMALLEST_NORMAL, LARGEST).half()
            sealed.k_norm[pages] = norm
            keys = keys / norm.float()[:, None, :, None]
        excluded: Tensor | None = None
        if self.recipe.outliers is not None:
            assert sealed.row_places is not None and sealed.k_rows is not None and sealed.v_rows is not None
            places = choose_rows(self.recipe.outliers, v, marks)
            sealed.row_places[pages] = to_stored(places, v.shape[2])
            sealed.k_rows[pages], sealed.v_rows[pages] = take_rows(k, places), take_rows(v, places)
            excluded = is_row(places, v.shape[2])[:, None, :, None].expand_as(v)
        sealed.k.write(keys, pages, excluded, is_key=True)
        sealed.v.write(values, pages, excluded, is_key=False)

    def _gather(self, pages: Tensor) -> LayerView:
        """The fields of `pages` [N] in one copy of their records: far faster than gathering field by field."""
        return LayerView(self._records.index_select(0, pages), self._fields, self._start)

    def attend_pages(self, q: Tensor, pages: Tensor, numbers: Tensor, turns: Turns | None) -> Partial:
        """Attention of one query tile a page: fp32 q [N, kv_heads, M, D] (scaled) over `pages` [N]. Scales are folded
        into the query and the weights where the recipe allows it."""
        view = self._gather(pages)
        if self._folds_k:
            logits = view.k.logits(q)
            if view.k_norm is not None:
                logits *= view.k_norm.float()[:, None, None]
        else:
            logits = torch.matmul(q, self._keys(view, numbers, turns).transpose(-1, -2))
        largest = logits.amax(-1)
        weights = logits.sub_(largest.unsqueeze(-1)).exp_()
        mixed = view.v.mix(weights) if self._folds_v else torch.matmul(weights, self._values(view))
        return Partial(largest, weights.sum(-1), mixed)

    def _keys(self, view: LayerView, numbers: Tensor, turns: Turns | None) -> Tensor:
        """fp32 tiles of K after RoPE."""
        keys = view.k.read(is_key=True)
        if view.k_norm is not None:
            keys = keys * view.k_norm.float()[:, None, :, None]
        if view.row_places is not None and view.k_rows is not None:
            keys = put_rows(keys, from_stored(view.row_places, keys.shape[2]), view.k_rows)
        return self.turned(keys, numbers, turns)

    def _values(self, view: LayerView) -> Tensor:
        values = view.v.read(is_key=False)
        if view.row_places is not None and view.v_rows is not None:
            values = put_rows(values, from_stored(view.row_places, values.shape[2]), view.v_rows)
        return values

    def turned(self, keys: Tensor, numbers: Tensor, turns: Turns | None) -> Tensor:
        """Tiles of K as attention wants them: RoPE at the places of pages `numbers` [N], where they are stored before
        it."""
        if not self.recipe.before_rope:
            return keys
        assert turns is not None
        return self.turned_at(keys, *turns.of(numbers))

    def turned_at(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """K [..., D] that is stored before RoPE, after it."""
        if self._k_rotation is not None:
            keys = torch.matmul(keys.float(), self._k_rotation)
        return turn(keys, cos, sin)

    def tiles_16bit(self, slots: Tensor, pages: Tensor) -> Tensor:
        """[m + n, 2 (K, V), kv_heads, P, D] of `slots` [m] and raw `pages` [n], whose records are laid out as slots."""
        tiles = self.open.new_empty(len(slots) + len(pages), *self.open.shape[1:])
        records = self._records.view(tiles.dtype)
        torch.index_select(self.open, 0, slots, out=tiles[: len(slots)])
        torch.index_select(records, 0, pages, out=tiles[len(slots) :].view(len(pages), records.shape[1]))
        return tiles

    def read_open(self, slots: Tensor, numbers: Tensor, turns: Turns | None) -> tuple[Tensor, Tensor]:
        """fp32 K and V [N, kv_heads, P, D] of `slots` [N]."""
        k, v = self.open.index_select(0, slots).float().unbind(1)
        return self.turned(k, numbers, turns), v

    def read_refs(self, refs: PageIndex, turns: Turns | None) -> tuple[Tensor, Tensor]:
        """fp32 K and V [kv_heads, M·P, D] of sink and sealed pages of one sequence, sinks first."""
        parts = []
        if refs.slots.numel():
            parts.append(self.read_open(refs.slots, refs.slot_numbers, turns))
        if refs.pages.numel():
            view = self._gather(refs.pages)
            parts.append((self._keys(view, refs.page_numbers, turns), self._values(view)))
        k, v = (torch.cat(tensors) if len(parts) > 1 else tensors[0] for tensors in zip(*parts, strict=True))
        return k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2)
