"""What a check found: a file of JSON, and short tables."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.gpu.workers import Outcome, counts

PRINTED = 1200  # characters of a failure; the file has more
Results = dict[str, Any]


def save(results: Results, tests: Sequence[Outcome], folder: Path) -> Path:
    """`gpu-<device>-<date>.json` in `folder`: all results, and the tests that did not pass."""
    device = re.sub(r"[^a-z0-9]+", "-", results["device"]["name"].lower()).strip("-")
    path = folder / f"gpu-{device}-{datetime.now(UTC):%Y-%m-%d}.json"
    not_passed = [asdict(test) for test in tests if test.outcome != "passed"]
    path.write_text(json.dumps(results | {"tests": counts(tests), "not_passed": not_passed}, indent=1) + "\n")
    return path


def lines(results: Results, tests: Sequence[Outcome]) -> list[str]:
    """What failed, then tables."""
    found = [f"{key}: {value}" for key, value in results["device"].items()]
    for test in tests:
        if test.outcome == "failed":
            found += ["", f"FAILED {test.test}", test.reason[-PRINTED:]]
    for step, reason in results["errors"].items():
        found += ["", f"FAILED {step}", reason[-PRINTED:]]
    found += ["", *_decode(results), "", *_prefill(results), "", *_end_to_end(results), ""]
    for group, outcomes in counts(tests).items():
        found.append(f"tests of {group}: " + (", ".join(f"{n} {name}" for name, n in outcomes.items()) or "none run"))
    found += [f"  left out: {test.test} ({test.reason})" for test in tests if test.outcome == "left out"][:20]
    found += [f"left out: {name}" for name in results["left_out"]]
    return found


def _decode(results: Results) -> list[str]:
    if "copy_bytes_per_second" not in results:
        return ["decode: not measured"]
    copy = results["copy_bytes_per_second"]
    baselines = {(item["context"], item["batch"]): item for item in results["sdpa_decode"]}
    natives = {(i["context"], i["batch"]): i.get("seconds") for i in results["decode"] if i["format"] == "native"}
    found = [
        f"copy on the device: {copy / 1e9:.0f} GB/s",
        f"{'decode':<10} {'context':>8} {'batch':>5} {'µs':>9} {'GB/s':>7} {'of copy':>8} {'× SDPA':>7} "
        f"{'× native':>8}",
    ]
    for item in [*({"format": "sdpa"} | item for item in baselines.values()), *results["decode"]]:
        key = item["context"], item["batch"]
        start = f"{item['format']:<10} {key[0]:>8} {key[1]:>5} "
        if "left_out" in item:
            found.append(start + item["left_out"])
            continue
        seconds, rate = item["seconds"], item["bytes_per_second"]
        ratios = [_ratio(other, seconds) for other in (baselines.get(key, {}).get("seconds"), natives.get(key))]
        way = f"  {item['way']}" if "way" in item else ""
        found.append(
            f"{start}{seconds * 1e6:>9.1f} {rate / 1e9:>7.0f} {rate / copy:>8.0%} {ratios[0]:>7} {ratios[1]:>8}{way}"
        )
    return found


def _ratio(other: float | None, seconds: float) -> str:
    return "" if other is None else f"{other / seconds:.2f}"


def _prefill(results: Results) -> list[str]:
    if not results["prefill"]:
        return ["prefill: not measured"]
    times = {(i["chunks"], i["length"]): i["seconds"] for i in results["prefill"] if i["format"] == "sdpa"}
    found = [f"{'prefill':<10} {'chunks':>12} {'ms':>8} {'TFLOP/s':>8} {'time ÷ SDPA':>12}"]
    for item in results["prefill"]:
        other = times.get((item["chunks"], item["length"]))
        ratio = "" if other is None else f"{item['seconds'] / other:.2f}"
        chunks = f"{item['chunks']} x {item['length']}"
        rate = item["operations_per_second"] / 1e12
        found.append(f"{item['format']:<10} {chunks:>12} {item['seconds'] * 1e3:>8.2f} {rate:>8.1f} {ratio:>12}")
    return found


def _end_to_end(results: Results) -> list[str]:
    if not results["end_to_end"]:
        return ["end to end: not measured"]
    found = [
        f"{'end to end':<10} {'layers':>6} {'batch':>5} {'tokens/s':>9} {'step ms':>8} {'graph ms':>8} {'kernels':>8} "
        f"{'gaps':>6} {'not kernels':>11} {'no graphs':>9}"
    ]
    for item in results["end_to_end"]:
        times = " ".join(f"{_milliseconds(item[name]):>8}" for name in ("step", "graph", "kernels"))
        found.append(
            f"{item['format']:<10} {item['layers']:>6} {item['batch']:>5} {item['tokens_per_second']:>9.0f} {times} "
            f"{_share(item['gaps_in_graph']):>6} {_share(item['not_kernels']):>11} "
            f"{_milliseconds(item['plain_step']):>9}"
        )
    return found


def _milliseconds(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds * 1e3:.2f}"


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.1%}"
