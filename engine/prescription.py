"""Which recipe `--kv-format auto` takes; the table is in docs/capacity.md. Pure values, no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from engine.kv.sizing import num_sequence_pages, smallest_pool
from kernels.format.layout import PageLayout

SHORT = 32 * 1024
LONG = 256 * 1024


class Processor(Enum):
    """What attention runs on, as far as the choice of a recipe depends on it."""

    CPU = "CPU"
    AMPERE = "Ampere or older"
    ADA = "Ada"
    HOPPER = "Hopper or newer"


def gpu_processor(major: int, minor: int) -> Processor:
    """The generation of a GPU by its CUDA compute capability."""
    if major >= 9:
        return Processor.HOPPER
    return Processor.ADA if (major, minor) >= (8, 9) else Processor.AMPERE


@dataclass(frozen=True, slots=True)
class Prescription:
    """`num_full`: how many of the requests that were asked for fit at full length at once. `reason` is a sentence."""

    recipe: str
    num_full: int
    reason: str


def prescribe(
    processor: Processor,
    layout_of: Callable[[str], PageLayout],
    *,
    memory: int,
    max_num_seqs: int,
    max_model_len: int,
) -> Prescription:
    """The first recipe of the table's row with which `max_num_seqs` requests of `max_model_len` tokens fit in `memory`
    bytes. Where there is none: the one with which most of them fit, of equals the last. `layout_of` gives a recipe's
    page layout."""
    row, where = _row(processor, max_model_len)
    recipe, num_full = row[0], 0
    for name in row:
        fit = _num_full(layout_of(name), memory, max_num_seqs, max_model_len)
        # short contexts can fit worse with a later recipe, because native has no sink pages in slots
        if fit >= num_full:
            recipe, num_full = name, fit
        if fit == max_num_seqs:
            break
    subject = recipe if len(row) > 1 else "it"
    asked = f"{max_num_seqs} requests of {max_model_len} tokens"
    if num_full < max_num_seqs:
        holds = f"{subject} holds {num_full} of {asked}, and auto goes no lower"
    elif recipe == row[0]:
        holds = f"{subject} holds {asked}"
    else:
        holds = f"{subject} is the first that holds {asked}"
    return Prescription(recipe, num_full, f"{where}: {', then '.join(row)}; {holds}")


def _row(processor: Processor, max_model_len: int) -> tuple[tuple[str, ...], str]:
    """Recipes from the first to the last resort, each smaller than the one before, and the situation in words."""
    match processor:
        case Processor.CPU:
            return ("native", "int8", "int4"), processor.value
        case _ if max_model_len >= LONG:
            return ("int4",), "any GPU from 256k tokens on"
        case Processor.AMPERE:
            # fp8 is decoded in software there, but takes a little less room
            return ("int8", "fp8_e5m2"), processor.value
        case Processor.HOPPER if max_model_len > SHORT:
            return ("fp8_e4m3",), f"{processor.value} above 32k tokens"
        case Processor.HOPPER:
            return ("fp8_e5m2",), f"{processor.value} up to 32k tokens"
        case _:
            return ("fp8_e5m2",), processor.value


def _num_full(layout: PageLayout, memory: int, max_num_seqs: int, max_model_len: int) -> int:
    """Sequences of full length, at most `max_num_seqs`, beside the slots for that many."""
    spare = memory - smallest_pool(layout, max_num_seqs, max_model_len, num_full=0).num_bytes
    pages = num_sequence_pages(max_model_len, layout.page_tokens, layout.recipe.sink_pages)
    return max(0, min(max_num_seqs, spare // (pages * layout.page_bytes)))
