"""`make bench`: what the issue of a release must show, each figure beside what it is compared with.

The last line is one JSON object. Set QUIRE_TRANSFORMERS_PYTHON to a Python that has transformers to compare with it.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.kv.sizing import max_full_sequences
from engine.model.demo_checkpoint import DEMO_NAME
from kernels.format.layout import PageLayout
from kernels.format.named import RECIPE_NAMES, named_recipe
from tests.bench import decode
from tests.bench.agreement import share_of_equal_texts
from tests.bench.speed import PROMPT_TOKENS, RECIPES, Transformers, measure_speed, transformers

GIBIBYTE = 2**30
SHAPES = {  # layers, kv heads, head_dim, sequence length, memory
    "SmolLM2-135M, 8k": (30, 3, 64, 8192, 4 * GIBIBYTE),
    "Llama-3-8B, 32k": (32, 8, 128, 32768, 64 * GIBIBYTE),
}


def capacity(console: Console) -> dict[str, Any]:
    """Full-length sequences by recipe in a fixed memory, with max_num_seqs set to that number."""
    results: dict[str, Any] = {}
    for shape, (layers, heads, head_dim, length, memory) in SHAPES.items():
        counts = {}
        for name in RECIPE_NAMES:
            recipe = named_recipe(name, num_layers=layers, has_k_bias=False, page_tokens=64, sink_pages=1)
            layout = PageLayout(recipe, num_kv_heads=heads, head_dim=head_dim, dtype="bfloat16")
            counts[name] = max_full_sequences(layout, memory, length)
        table = Table(title=f"sequences that fit: {shape}, {memory // GIBIBYTE} GiB")
        for column in ("recipe", "sequences", "times native"):
            table.add_column(column)
        for name, count in counts.items():
            table.add_row(name, str(count), f"{count / counts['native']:.2f}")
        console.print(table)
        results[shape] = counts
    return results


def speed(console: Console, peer: Transformers | None) -> list[dict[str, Any]]:
    table = Table(title=f"{PROMPT_TOKENS} tokens a prompt, bf16, medians")
    for column in ("prompts", "who", "prefill ms", "decode ms a step", "prefill ÷ peer", "decode ÷ peer"):
        table.add_column(column)
    results = []
    rows = list(measure_speed(peer))
    peers = {batch: timing for batch, who, timing in rows if who == "transformers"}
    for batch, who, timing in rows:
        other = peers.get(batch)
        ratios = [f"{other.prefill / timing.prefill:.2f}", f"{other.decode / timing.decode:.2f}"] if other else ["", ""]
        table.add_row(str(batch), who, f"{timing.prefill * 1e3:.0f}", f"{timing.decode * 1e3:.1f}", *ratios)
        results.append({"batch": batch, "who": who, "prefill_s": timing.prefill, "decode_s": timing.decode})
    console.print(table)
    console.print("÷ peer: how many times as fast as transformers; over 1 is faster")
    return results


def seconds_to_ready() -> float:
    """From starting `quire serve` to its ready line."""
    command = [sys.executable, "-m", "server.cli", "serve", DEMO_NAME, "--kv-format", "int4"]
    command += ["--http-port", "0", "--grpc-port", "0"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = any(line.startswith("ready:") for line in process.stdout)
        seconds = time.perf_counter() - start
        process.terminate()
    if not found:
        raise RuntimeError("the server ended without a ready line")
    return seconds


def main() -> None:
    console = Console(width=110)
    python = os.environ.get("QUIRE_TRANSFORMERS_PYTHON")
    results: dict[str, Any] = {"capacity": capacity(console), "ready_s": seconds_to_ready()}
    console.print(f"start to ready: {results['ready_s']:.1f} s")
    results["equal_texts"] = {recipe: share_of_equal_texts(recipe) for recipe in RECIPES}
    for recipe, share in results["equal_texts"].items():
        console.print(f"greedy texts equal alone and batched, bf16, {recipe}: {share:.0%}")
    with transformers(python) if python else nullcontext() as peer:
        if peer is None:
            console.print("QUIRE_TRANSFORMERS_PYTHON is not set: no comparison with transformers")
        else:
            results["peer"] = peer.versions
            console.print(f"peer: {peer.versions}")
        results["speed"] = speed(console, peer)
    results |= decode.measure(console)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
