"""`make bench-pool`: what the pool must show. docs/benchmarks.md says what each row means.

The last line is one JSON object. Exit code 1: something that must be exact was not. Times have targets, no code.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

from tests.bench.pool_equalities import (
    BF16_RECIPES,
    FULL_LOAD,
    SMALL_LOAD,
    Equality,
    Load,
    equal_texts,
    equalities,
    quarter_pool,
)
from tests.bench.pool_latency import CLIENTS, HERD_PAGES, first_tokens, herds
from tests.bench.pool_load import PAGE, DemoModel
from tests.bench.pool_micro import CACHED_PAGES, ROWS, call_costs, step_costs

EXACT_RECIPES = ("int8", "int4", "int2")
FIRST_TOKEN_RATIO = 0.35
STEP_MS = 0.5
MATCH_US = 1000.0


def table(title: str, columns: Iterable[str]) -> Table:
    result = Table(title=title, title_justify="left", min_width=len(title))
    for column in columns:
        result.add_column(column)
    return result


def verdict(is_met: bool) -> str:
    return "yes" if is_met else "[bold red]NO[/]"


def herd(console: Console, model: DemoModel) -> tuple[list[dict[str, Any]], bool]:
    shown = table(
        f"{CLIENTS} clients, one prompt of {HERD_PAGES}·{PAGE} + r tokens", ("r", "computed", "must be", "exact")
    )
    results = list(herds(model))
    for row in results:
        shown.add_row(str(row.rest), str(row.num_computed_tokens), str(row.num_expected_tokens), verdict(row.is_exact))
    console.print(shown)
    return [asdict(row) for row in results], all(row.is_exact for row in results)


def first_token(console: Console, model: DemoModel, num_tokens: int, num_rounds: int) -> list[dict[str, Any]]:
    title = f"time to first token, {num_tokens} tokens, medians of {num_rounds}"
    shown = table(title, ("recipe", "miss ms", "hit ms", "ratio", f"below {FIRST_TOKEN_RATIO}"))
    results = first_tokens(model, num_tokens, num_rounds)
    for row in results:
        is_met = row.ratio < FIRST_TOKEN_RATIO
        shown.add_row(row.recipe, f"{row.miss * 1e3:.0f}", f"{row.hit * 1e3:.0f}", f"{row.ratio:.3f}", verdict(is_met))
    console.print(shown)
    return [asdict(row) | {"ratio": row.ratio} for row in results]


def equality(console: Console, model: DemoModel, recipe: str, load: Load) -> tuple[list[dict[str, Any]], bool]:
    columns = ("run", "equal", "cancelled", "preempted", "hit tokens", "restored", "reclaimed", "use", "running", "s")
    shown = table(f"equal tokens, fp32, --batch-invariant, {recipe}", (*columns, "exact"))
    results: list[Equality] = []
    with Live(shown, console=console):  # they take minutes each
        for row in equalities(model, recipe, load):
            results.append(row)
            seen = row.outcome.summary()
            shown.add_row(
                row.name,
                f"{row.num_equal} of {seen['num_requests']}",
                *(str(seen[name]) for name in ("num_cancelled", "num_preemptions", "num_hit_tokens")),
                str(seen["num_restored_pages"]) + (f" of {row.num_loaded_pages}" if row.num_loaded_pages else ""),
                str(seen["num_reclaimed_pages"]),
                f"{seen['mean_use']:.0%}, {seen['max_use']:.0%}",
                f"{seen['mean_running']:.0f}, {seen['max_running']}",
                f"{seen['seconds']:.0f}",
                verdict(row.is_exact),
            )
    console.print()  # where the console is a file, a live table ends without a new line
    numbers = [
        {"run": row.name, "num_equal": row.num_equal, "num_loaded_pages": row.num_loaded_pages} | row.outcome.summary()
        for row in results
    ]
    return numbers, all(row.is_exact for row in results)


def quarter(console: Console, model: DemoModel, load: Load) -> tuple[dict[str, Any], bool]:
    result = quarter_pool(model, "int4", load)
    title = f"a pool for a quarter of {load.num_separate} requests, fp32, --batch-invariant, int4"
    shown = table(title, ("pool", "pages", "equal", "preemptions", "use", "tokens a second", "exact"))
    for name, share, outcome in (("whole", 1, result.whole), ("quarter", 4, result.quarter)):
        seen = outcome.summary()
        shown.add_row(
            name,
            str(result.num_pages // share),
            f"{result.num_equal} of {seen['num_requests']}" if share > 1 else "",
            str(seen["num_preemptions"]),
            f"{seen['mean_use']:.0%}, {seen['max_use']:.0%}",
            f"{seen['tokens_per_second']:.1f}",
            verdict(result.is_exact) if share > 1 else "",
        )
    console.print(shown)
    numbers = {"num_pages": result.num_pages, "num_equal": result.num_equal}
    return numbers | {"whole": result.whole.summary(), "quarter": result.quarter.summary()}, result.is_exact


def texts(console: Console, model: DemoModel, load: Load, recipes: Iterable[str]) -> list[dict[str, Any]]:
    shown = table("greedy texts equal to a miss, default dtype", ("recipe", "hits", "preempted", "others in that run"))
    results = [equal_texts(model, recipe, load) for recipe in recipes]
    for row in results:
        num_others = row.num_texts - row.num_preempted
        shown.add_row(
            row.recipe,
            f"{row.hit:.0%} of {row.num_hit}",
            f"{row.preempted:.0%} of {row.num_preempted}",
            f"{row.others:.0%} of {num_others}",
        )
    console.print(shown)
    return [asdict(row) for row in results]


def planning(console: Console) -> dict[str, Any]:
    title = f"planning, {ROWS} rows, {CACHED_PAGES} cached pages, full pool: CPU ms a step"
    shown = table(title, ("step", "median", "p99", "largest", "plan", "commit", f"below {STEP_MS}"))
    steps = list(step_costs())
    for row in steps:
        numbers = (row.median, row.p99, row.largest, row.plan, row.commit)
        shown.add_row(row.name, *(f"{number:.3f}" for number in numbers), verdict(row.median < STEP_MS))
    console.print(shown)
    shown = table(f"one call, {CACHED_PAGES} cached pages: CPU µs", ("call", "median", f"below {MATCH_US:.0f}"))
    calls = list(call_costs())
    for call in calls:
        has_target = call.name.startswith("match ")
        shown.add_row(call.name, f"{call.median:.1f}", verdict(call.median < MATCH_US) if has_target else "")
    console.print(shown)
    return {"steps": [asdict(row) for row in steps], "calls": [asdict(call) for call in calls]}


def machine() -> dict[str, Any]:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokenizers": version("tokenizers"),
        "cpu": names[0] if names else platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(names),
        "threads": torch.get_num_threads(),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-pool")
    parser.add_argument("--small", action="store_true", help="a smoke test: few requests, one recipe, short prompts")
    is_small = parser.parse_args().small
    load = SMALL_LOAD if is_small else FULL_LOAD
    console, start = Console(width=150), time.perf_counter()
    results: dict[str, Any] = {"small": is_small, "machine": machine()}
    console.print(results["machine"])
    results["planning"] = planning(console)  # before the model is there: nothing of it is needed
    model = DemoModel()
    results["herd"], is_exact = herd(console, model)
    results["first_token"] = first_token(console, model, *(1024, 1) if is_small else (4096, 3))
    results["equal_texts"] = texts(console, model, load, BF16_RECIPES[:1] if is_small else BF16_RECIPES)
    results["quarter_pool"], is_same = quarter(console, model, load)
    is_exact &= is_same
    results["equalities"] = {}
    for recipe in EXACT_RECIPES:
        if not is_small or recipe == "int4":
            results["equalities"][recipe], is_same = equality(console, model, recipe, load)
            is_exact &= is_same
    results |= {"is_exact": is_exact, "seconds": time.perf_counter() - start}
    console.print(f"all that must be exact is: {verdict(is_exact)}; {results['seconds']:.0f} s")
    print(json.dumps(results))
    return 0 if is_exact else 1


if __name__ == "__main__":
    sys.exit(main())
