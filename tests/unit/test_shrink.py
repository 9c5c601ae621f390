"""Shrink hooks: what `parse_shrink` takes, and which pages go, restated from the definitions."""

import random
from collections.abc import Sequence

import pytest

from engine.kv.shrink import HeavyHitters, Shrink, ShrinkView, SnapKV, Streaming, parse_shrink

MOST = 1_048_576


@pytest.mark.parametrize(
    ("text", "shrink"),
    [
        ("none", None),
        ("streaming", Streaming(recent=16)),
        ("streaming:recent=1", Streaming(recent=1)),
        (f"streaming:recent={MOST}", Streaming(recent=MOST)),
        ("h2o", HeavyHitters(heavy=16, recent=8, window=32)),
        ("h2o:recent=3", HeavyHitters(heavy=16, recent=3, window=32)),
        ("h2o:window=5,heavy=7,recent=0000009", HeavyHitters(heavy=7, recent=9, window=5)),
        ("snapkv", SnapKV(keep=16, window=32, kernel=3)),
        ("snapkv:kernel=1", SnapKV(keep=16, window=32, kernel=1)),
        ("snapkv:keep=2,window=100,kernel=7", SnapKV(keep=2, window=100, kernel=7)),
    ],
)
def test_parse_shrink(text: str, shrink: Shrink | None) -> None:
    assert parse_shrink(text) == shrink
    assert shrink is None or parse_shrink(str(shrink)) == shrink


NAMES = "none, or one of streaming, h2o, snapkv with options such as streaming:recent=32"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, NAMES) for text in ("", "None", "none:", "Streaming", " h2o", "h2o;heavy=2", "recent=3", "h2o\n")),
        ("streaming:heavy=3", "streaming takes each of recent at most once"),
        ("h2o:heavy=3,recent=4,heavy=3", "h2o takes each of heavy, recent, window at most once"),
        ("h2o:heavy=3,", "h2o takes each of heavy, recent, window at most once"),
        ("snapkv:Keep=3", "snapkv takes each of keep, window, kernel at most once"),
        ("snapkv: keep=3", "snapkv takes each of keep, window, kernel at most once"),
        *(
            (f"streaming:recent{value}", f"recent of streaming must be an integer from 1 to {MOST}")
            for value in (
                "",
                "=",
                "=0",
                "=-1",
                "=+1",
                "=1.0",
                "=1e3",
                "= 1",
                "=1_0",
                "=0x1",
                "=٣",
                "=²",
                f"={MOST + 1}",
            )
        ),
        (f"h2o:window={'9' * 5000}", f"window of h2o must be an integer from 1 to {MOST}"),
        ("snapkv:kernel=2", "kernel of snapkv must be odd"),
    ],
)
def test_refusals_say_what_is_taken(text: str, says: str) -> None:
    with pytest.raises(ValueError, match="must be|at most once") as caught:
        parse_shrink(text)
    assert says in str(caught.value)


def views(seed: object, count: int) -> list[ShrinkView]:
    """Of sequences without pages up to long ones, with equal masses among them."""
    rng = random.Random(f"{seed}")
    made = []
    for _ in range(count):
        length = rng.choice([rng.randrange(6), rng.randrange(40)])
        mass = tuple(float(rng.randrange(rng.choice([1, 4, 1000]))) for _ in range(length))
        is_first = rng.random() < 0.5
        is_prefilled = is_first or rng.random() < 0.5
        made.append(ShrinkView(mass, rng.randrange(4), rng.choice([2, 32, 64]), is_prefilled, is_first))
    return made


def kept(shrink: Shrink, view: ShrinkView) -> list[int]:
    dropped = list(shrink.drop(view))
    assert dropped == sorted(set(dropped))
    assert all(view.num_sinks <= place < len(view.mass) for place in dropped)  # sinks never go
    return [place for place in range(len(view.mass)) if place not in dropped]


def heaviest(weights: Sequence[float], places: Sequence[int], count: int) -> set[int]:
    """One after the other, the largest there is; of equal ones the newest."""
    left = list(places)
    taken: set[int] = set()
    while left and len(taken) < count:
        best = left[0]
        for place in left:
            if weights[place] >= weights[best]:
                best = place
        left.remove(best)
        taken.add(best)
    return taken


@pytest.mark.parametrize("recent", [1, 2, 7, 50])
def test_streaming_keeps_sinks_and_the_newest(recent: int) -> None:
    shrink = Streaming(recent)
    for view in views(recent, 200):
        count = len(view.mass)
        left = kept(shrink, view)
        assert left == [place for place in range(count) if place < view.num_sinks or place >= count - recent]
        assert len(left) == min(count, shrink.num_kept_pages(view.num_sinks))


@pytest.mark.parametrize("recent", [1, 3])
@pytest.mark.parametrize("num_sinks", [0, 1, 2])
def test_streaming_computes_its_first_pages_from_everything(recent: int, num_sinks: int) -> None:
    """Up to the first page that finds one of those before it dropped."""
    shrink, index = Streaming(recent), 0
    while not list(shrink.drop(ShrinkView([0.0] * index, num_sinks, 32, False, False))):
        index += 1
    assert shrink.num_whole_pages(num_sinks) == index


@pytest.mark.parametrize("heavy", [1, 3, 10])
@pytest.mark.parametrize("recent", [1, 4])
def test_h2o_keeps_sinks_the_newest_and_the_heaviest(heavy: int, recent: int) -> None:
    shrink = HeavyHitters(heavy, recent)
    num_drops = 0
    for view in views((heavy, recent), 200):
        count = len(view.mass)
        always = {place for place in range(count) if place < view.num_sinks or place >= count - recent}
        middle = [place for place in range(count) if place not in always]
        left = kept(shrink, view)
        if not view.is_prefilled:  # every query of the prompt sees all of it
            assert left == list(range(count))
            continue
        assert set(left) == always | heaviest(view.mass, middle, heavy)
        assert len(left) == min(count, shrink.num_kept_pages(view.num_sinks))
        num_drops += len(left) < count
    assert num_drops > 10


@pytest.mark.parametrize("kernel", [1, 3, 7])
@pytest.mark.parametrize("window", [1, 32, 33, 130])
def test_snapkv_keeps_once_the_pages_whose_surroundings_are_heaviest(kernel: int, window: int) -> None:
    shrink = SnapKV(3, window, kernel)
    num_drops = 0
    for view in views((kernel, window), 200):
        count = len(view.mass)
        left = kept(shrink, view)
        if not view.is_first:
            assert left == list(range(count))
            continue
        recent = 0
        while recent * view.page_tokens < window:  # whole pages that could hold the window
            recent += 1
        always = {place for place in range(count) if place < view.num_sinks or place >= count - recent}
        middle = [place for place in range(count) if place not in always]
        pooled = {
            place: max(view.mass[other] for other in middle if 2 * abs(other - place) < kernel) for place in middle
        }
        assert set(left) == always | heaviest(pooled, middle, 3)
        num_drops += len(left) < count
    assert num_drops > 10


@pytest.mark.parametrize(
    ("shrink", "observes_prompt", "observes_decode", "is_positional"),
    [(Streaming(), False, False, True), (HeavyHitters(), True, True, False), (SnapKV(), True, False, False)],
)
def test_what_is_observed_decides_whether_it_can_be_computed_again(
    shrink: Shrink, observes_prompt: bool, observes_decode: bool, is_positional: bool
) -> None:
    assert (shrink.window > 0, shrink.observes_decode) == (observes_prompt, observes_decode)
    assert shrink.is_positional == is_positional
    assert shrink.is_positional != (observes_prompt or observes_decode)
    assert (shrink.num_whole_pages(1) is None) != is_positional
