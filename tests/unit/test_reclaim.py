"""Reclaim hooks: the built-in ones against a brute-force model, and what becomes of hooks that fail."""

import logging
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engine.errors import StartupError
from engine.kv.prefix import Node
from engine.kv.reclaim import Fifo, Guard, Lfu, Lru, PageUse, Priority, Reclaim, Slru, make_reclaim
from engine.kv.reclaim_queue import ReclaimQueue
from engine.kv.stats import Reclaimed
from kernels.format.layout import Pool
from tests.unit.reclaim_model import HOST, Choose, Model, Rig, fifo, lfu, lru, priority, slru
from tests.unit.simulation import Clock

POLICIES: dict[str, tuple[Reclaim, Choose]] = {
    "lru": (Lru(), lru),
    "lfu": (Lfu(), lfu),
    "fifo": (Fifo(), fifo),
    "slru:ttl=10": (Slru(10), slru(10)),
    "slru:ttl=20": (Slru(20), slru(20)),
    "priority": (Priority(), priority()),
    "priority:ttl=12.5": (Priority(12.5), priority(12.5)),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", POLICIES)
def test_the_page_that_the_definition_names_goes(name: str, seed: int) -> None:
    """With sink pages, each of which takes all behind it."""
    reclaim, choose = POLICIES[name]
    model = Model(choose, choose, sinks=1, capacity={Pool.OPEN: 6, Pool.SEALED: 12, HOST: 0})
    Rig(reclaim, model).rounds(random.Random(f"{name} {seed}"), 600)
    assert {place for place, _ in model.victims} == {Pool.OPEN, Pool.SEALED}
    assert len(model.victims) > 150 and (model.num_odd > 0) == (name != "lru")


@pytest.mark.parametrize("host_name", POLICIES)
@pytest.mark.parametrize("name", ["lru", "lfu", "slru:ttl=20"])
def test_host_memory_has_a_policy_of_its_own(name: str, host_name: str) -> None:
    reclaim, choose = POLICIES[name]
    host_reclaim, host_choose = POLICIES[host_name]
    model = Model(choose, host_choose, sinks=0, capacity={Pool.OPEN: 1, Pool.SEALED: 10, HOST: 9})
    Rig(reclaim, model, host_reclaim).rounds(random.Random(f"{name} {host_name}"), 500)
    assert min(sum(place is which for place, _ in model.victims) for which in (Pool.SEALED, HOST)) > 100


def test_a_sink_page_goes_with_all_behind_it_though_that_was_used_later() -> None:
    model = Model(fifo, fifo, sinks=1, capacity={Pool.OPEN: 2, Pool.SEALED: 8, HOST: 0})
    rig = Rig(Fifo(), model)
    cache, tree = rig.cache, rig.cache.tree

    def cached(parent: Node, token: int, pool: Pool) -> Node:
        rig.clock.now += 1
        page = cache.allocate(pool)
        node = cache.insert(parent, (token,), page, 0)
        cache.release(page)
        return node

    first = cached(tree.root("a"), 1, Pool.OPEN)
    second = cached(tree.root("b"), 1, Pool.OPEN)
    kept = cached(second, 2, Pool.SEALED)
    gone = [first, *(cached(first, token, Pool.SEALED) for token in (2, 3, 4))]
    gone.append(cached(gone[-1], 5, Pool.SEALED))
    third = cached(tree.root("c"), 1, Pool.OPEN)
    assert {node for _, node in tree.nodes()} == {second, kept, third}
    assert cache.stats.reclaimed == {Reclaimed.SLOT_NEEDED: 5}
    assert all(node.page is None for node in gone)


class Unfriendly:
    """Compares, prints and converts to nothing."""

    def _raise(self, *_: object) -> Any:
        raise RuntimeError("hands off")

    __lt__ = __eq__ = __float__ = __repr__ = __len__ = __iter__ = __hash__ = _raise


class UnfriendlyFloat(float):
    def __lt__(self, other: object) -> bool:
        raise RuntimeError("hands off")

    __gt__ = __le__ = __ge__ = __eq__ = __lt__


def fail(error: BaseException) -> Any:
    raise error


def recurse(page: PageUse) -> Any:
    return recurse(page)


Key = Callable[[PageUse], Any]
NONSENSE: dict[str, Key] = {
    "raises": lambda page: fail(ZeroDivisionError("division by zero")),
    "exits": lambda page: fail(SystemExit(3)),
    "leaves": lambda page: fail(GeneratorExit()),
    "interrupts": lambda page: fail(KeyboardInterrupt()),
    "recurses": recurse,
    "no number": lambda page: None,
    "text": lambda page: "12",
    "texts": lambda page: ("1", "2"),
    "bytes": lambda page: b"12",
    "nan": lambda page: float("nan"),
    "nan inside": lambda page: (1, float("nan")),
    "empty": lambda page: (),
    "too long": lambda page: (0,) * 9,
    "huge": lambda page: 10**400,
    "minus huge": lambda page: [0, -(10**5000)],  # longer than what Python prints
    "complex": lambda page: 1j,
    "nested": lambda page: ((1, 2), 3),
    "itself": lambda page: page,
    "unfriendly": lambda page: Unfriendly(),
    "unfriendly inside": lambda page: (1, Unfriendly()),
}


class Hook:
    """The user's: newest first, but for pages for which `nonsense` is asked."""

    ttl = None

    def __init__(self, nonsense: Key, is_asked: Callable[[PageUse], bool] = lambda page: True):
        self.nonsense = nonsense
        self.is_asked = is_asked

    def key(self, page: PageUse, now: float) -> Any:
        return self.nonsense(page) if self.is_asked(page) else -page.last_use


def is_logged_once(caplog: pytest.LogCaptureFixture) -> bool:
    """With what the user needs to find it: the option, and a traceback."""
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.exc_info and record.exc_info[2] is not None
    return "--reclaim h.py:Hook" in record.getMessage() and "Traceback" in caplog.text


@pytest.mark.parametrize("name", NONSENSE)
def test_a_hook_that_always_fails_is_lru(name: str, caplog: pytest.LogCaptureFixture) -> None:
    reclaim = Guard(Hook(NONSENSE[name]), None, "--reclaim h.py:Hook")
    model = Model(lru, lru, sinks=1, capacity={Pool.OPEN: 4, Pool.SEALED: 8, HOST: 0})
    Rig(reclaim, model).rounds(random.Random(name), 120)
    assert len(model.victims) > 20
    assert is_logged_once(caplog)


@pytest.mark.parametrize("name", NONSENSE)
def test_pages_without_a_key_go_first_and_by_lru(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def is_asked(page: PageUse) -> bool:
        return page.num_hits % 2 == 1

    def choose(pages: list[Any], now: float) -> Any:
        failing = [page for page in pages if page.num_hits % 2 == 1]
        return lru(failing, now) if failing else max(pages, key=lambda page: page.last_use)

    reclaim = Guard(Hook(NONSENSE[name], is_asked), None, "--reclaim h.py:Hook")
    model = Model(choose, choose, sinks=1, capacity={Pool.OPEN: 4, Pool.SEALED: 8, HOST: 0})
    Rig(reclaim, model).rounds(random.Random(name), 120)
    assert model.num_odd > 5
    assert is_logged_once(caplog)


def order(hook: Hook, last_uses: list[float]) -> list[float]:
    queue = ReclaimQueue(Guard(hook, None, "--reclaim h.py:Hook"), Clock())
    for last_use in last_uses:
        node = Node(None, (), 0)
        node.last_use = last_use
        queue.push(node)
    popped = [queue.pop() for _ in last_uses]
    assert queue.pop() is None
    return [node.last_use for node in popped if node is not None]


def test_keys_have_the_length_of_the_first(caplog: pytest.LogCaptureFixture) -> None:
    lengths = count(1)
    hook = Hook(lambda page: (-page.last_use,) * (1 if next(lengths) % 2 else 2))
    assert order(hook, [4, 7, 5, 6, 3, 8]) == [6, 7, 8, 5, 4, 3]  # 7, 6 and 8 have keys of two numbers
    assert is_logged_once(caplog)


def test_a_failing_key_does_not_fix_the_length(caplog: pytest.LogCaptureFixture) -> None:
    first = iter([(1, float("nan"))])
    assert order(Hook(lambda page: next(first, -page.last_use)), [4, 7, 5]) == [4, 7, 5]
    assert is_logged_once(caplog)


def test_odd_numbers_that_do_have_an_order(caplog: pytest.LogCaptureFixture) -> None:
    keys = iter([float("inf"), -(10**300), True, UnfriendlyFloat(0.5), float("-inf"), [2]])
    assert order(Hook(lambda page: next(keys)), [1, 2, 3, 4, 5, 6]) == [5, 2, 4, 3, 6, 1]
    assert not caplog.records


def test_equal_keys_go_in_the_order_in_which_they_came() -> None:
    uses = [float(random.Random(5).random()) for _ in range(200)]
    assert order(Hook(lambda page: 0), uses) == uses


@pytest.mark.parametrize(
    ("text", "policy"),
    [*((text, policy) for text, (policy, _) in POLICIES.items()), ("slru", Slru(600)), ("slru:ttl=1e-3", Slru(0.001))],
)
def test_make_reclaim(text: str, policy: Reclaim) -> None:
    assert make_reclaim(text, "--reclaim") == policy


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must be one of lru, lfu, slru, fifo, priority, or path.py:Class"),
        ("LRU", "must be one of lru"),
        ("lru\nlfu", "must be one of lru"),
        ("hook.py", "must be one of lru, lfu, slru, fifo, priority, or path.py:Class"),
        ("hook.txt:Hook", "must be one of lru"),
        ("lru:ttl=3", "only slru and priority have an option, ttl=SECONDS"),
        ("slru:seconds=3", "only slru and priority have an option, ttl=SECONDS"),
        *((f"slru:ttl={ttl}", "a number of seconds above 0") for ttl in ("", "0", "-1", "x", "nan", "inf", "1e999")),
        ("priority:ttl=1,ttl=2", "a number of seconds above 0"),
        ("nowhere.py:Hook", "there is no file 'nowhere.py'"),
        ("folder.py:Hook", "there is no file 'folder.py'"),
        ("a\0b.py:Hook", "there is no file"),
        ("hook.py:", "'hook.py' has no class ''"),
        ("hook.py:Other", "'hook.py' has no class 'Other'"),
        ("hook.py:number", "'int' object is not callable"),
        ("hook.py:KeyLess", "has no method key(page, now)"),
        ("hook.py:Demanding", "missing 1 required positional argument: 'size'"),
        ("hook.py:Failing", "ValueError: two lines"),
        ("hook.py:Leaving", "SystemExit: 0"),
        ("hook.py:Mute", "Mute failed: "),
        *((f"hook.py:{name}", "must be None or a number of seconds above 0") for name in ("Late", "Never", "Worded")),
        ("syntax.py:Hook", "SyntaxError: "),
        ("raises.py:Hook", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("exits.py:Hook", "SystemExit: 5"),
        ("binary.py:Hook", "SyntaxError: "),
    ],
)
def test_what_cannot_be_a_policy_is_one_line(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "hook.txt").write_text("class Hook: pass")
    (tmp_path / "syntax.py").write_text("class Hook:\n    def key(self, page, now\n        return 0\n")
    (tmp_path / "raises.py").write_text("import no_such_module")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(5)")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "hook.py").write_text(HOOKS)
    with pytest.raises(StartupError) as caught:
        make_reclaim(text, "--host-reclaim")
    message = str(caught.value)
    assert message.startswith("--host-reclaim") and says in message and len(message.splitlines()) == 1


HOOKS = """
class Hook:
    def key(self, page, now): return 0
class KeyLess:
    key = 3
class Demanding(Hook):
    def __init__(self, size): pass
class Failing:
    def __init__(self): raise ValueError("two\\nlines")
class Leaving:
    def __init__(self): raise SystemExit(0)
class Wordless(Exception):
    def __str__(self): raise self
class Mute:
    def __init__(self): raise Wordless
class Late(Hook): ttl = 0
class Never(Hook): ttl = float("nan")
class Worded(Hook): ttl = "60"
number = 3
"""


WITH_DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass(frozen=True)
class Hook:
    ttl: float | None = 2.5

    def key(self, page, now):
        return -page.depth, page.created, now
"""


def test_a_file_may_use_dataclasses_and_have_a_ttl(tmp_path: Path) -> None:
    path = tmp_path / "with:colon.py"
    path.write_text(WITH_DATACLASS)
    policy = make_reclaim(f"{path}:Hook", "--reclaim")
    assert policy.ttl == 2.5
    shallow, deep = (policy.key(PageUse(1.0, 2.0, 3, 0, depth), 9.0) for depth in (0, 1))
    assert deep < shallow  # type: ignore[operator]
