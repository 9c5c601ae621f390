"""Tokens of a page whose rows of K and V are kept in 16 bit (`LargestValues`, `MarkedTokens`)."""

import torch
from torch import Tensor

from kernels.format.layout import NO_ROW
from kernels.format.recipe import LargestValues, MarkedTokens


def choose_rows(rule: LargestValues | MarkedTokens, v: Tensor, marks: Tensor) -> Tensor:
    """int64 [N, n] places of tokens, P where there is none. v: tile [N, H, P, D]; `marks`: bool [N, P]."""
    size = v.shape[2]
    if isinstance(rule, LargestValues):
        # in fp64 the order of the sum does not decide
        norms = v.double().square().sum((1, 3))
        order: Tensor = norms.sort(dim=-1, descending=True, stable=True).indices
        return order[:, : rule.num]
    places = torch.arange(size, device=v.device).expand_as(marks).masked_fill(~marks, size)
    return places.sort(dim=-1).values[:, : rule.num]


def take_rows(tile: Tensor, places: Tensor) -> Tensor:
    """[N, H, n, D] of tile [N, H, P, D]: its tokens at `places` [N, n], zero where there is none."""
    padded = torch.nn.functional.pad(tile, (0, 0, 0, 1))
    index = places[:, None, :, None].expand(-1, tile.shape[1], -1, tile.shape[3])
    return padded.gather(2, index)


def put_rows(tile: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """The tile with `rows` in place of its tokens at `places`."""
    padded = torch.nn.functional.pad(tile, (0, 0, 0, 1))
    index = places[:, None, :, None].expand(-1, tile.shape[1], -1, tile.shape[3])
    return padded.scatter(2, index, rows.to(tile.dtype))[:, :, :-1]


def is_row(places: Tensor, size: int) -> Tensor:
    """bool [N, P]: tokens that are among `places` [N, n]."""
    found = torch.zeros(len(places), size + 1, dtype=torch.bool, device=places.device)
    return found.scatter_(1, places, True)[:, :-1]


def to_stored(places: Tensor, size: int) -> Tensor:
    return places.masked_fill(places == size, NO_ROW).to(torch.uint8)


def from_stored(places: Tensor, size: int) -> Tensor:
    return places.long().clamp(max=size)
