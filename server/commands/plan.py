"""`quire plan`: what a model's K and V take, what fits on which GPU, and which recipe is prescribed."""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import StartupError
from server.terminal import open_console

if TYPE_CHECKING:
    from engine.study.capacity import CapacityPlan
    from server.options import Commands

DESCRIPTION = (
    "Work out from a model's sizes how much memory K and V take in each format, how many users fit on which GPU, and "
    "what --kv-format auto would take there. No weights are needed. docs/capacity.md explains the figures and the JSON."
)
UNITS = {"": 1, "k": 1024, "m": 1024**2}
MAX_CONTEXT = 2**31 - 1
MAX_USERS = 10**6
STDOUT = "-"
PIPE_WIDTH = 120


def add(commands: "Commands") -> None:
    parser = commands.add_parser(
        "plan", help="memory, GPUs and recipe for a model, without running it", description=DESCRIPTION
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "model",
        metavar="MODEL_OR_CONFIG",
        help="a config.json, a folder with one, or a name: smollm2-135m-instruct, llama-3-8b, llama-3.1-70b, ...",
    )
    parser.add_argument(
        "--context",
        default="32k,128k,1M",
        metavar="N,...",
        help="tokens of each user; k is 1024, M is 1024 k (default: %(default)s)",
    )
    parser.add_argument("--users", default="8", metavar="N", help="requests at once (default: %(default)s)")
    parser.add_argument(
        "--gpu",
        default="",
        metavar="GPU,...",
        help="GPUs to say more about, such as L40S or 4xL40S; all known ones are in the table anyway",
    )
    parser.add_argument(
        "--kv-format",
        default="native,fp8_e5m2,int8,int4",
        metavar="NAME,...",
        help="formats as in quire serve --kv-format; fp16 means native (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-recipe", default="", metavar="DIR,...", help="also recipes that quire calibrate wrote: folders"
    )
    parser.add_argument("--json", metavar="FILE", help="write the plan as JSON; - writes it to stdout, without tables")
    parser.add_argument("--plot", metavar="FILE.png", help="draw gigabytes against context length")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    contexts = _contexts(args.context)
    num_users = _users(args.users)
    plot = _plot_path(args.plot)
    # Here, so that --help and mistakes answer without loading torch.
    from engine.recipe_file import read_recipe
    from engine.study.capacity import make_plan, parse_formats
    from engine.study.capacity_report import show
    from engine.study.cards import parse_gpus
    from engine.study.known_models import find_model

    formats = parse_formats(args.kv_format)
    plan = make_plan(
        find_model(args.model),
        contexts=contexts,
        num_users=num_users,
        formats=formats,
        recipes={name: read_recipe(folder) for name, folder in _recipe_folders(args.kv_recipe, formats).items()},
        gpus=tuple(dict.fromkeys(parse_gpus(text) for text in args.gpu.split(",") if args.gpu.strip())),
    )
    if plot is not None:
        from engine.study.capacity_plot import save_plot

        save_plot(plan, plot)
    if args.json is not None:
        _write_json(plan, args.json)
    if args.json != STDOUT:
        # a pipe has no width, and the tables need more than the 80 columns that rich takes then
        is_sized = sys.stdout.isatty() or "COLUMNS" in environ
        show(plan, open_console(width=None if is_sized else PIPE_WIDTH))
    return 0


def _contexts(text: str) -> tuple[int, ...]:
    found = set()
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,12})([kKmM]?)", item.strip())
        length = int(match[1]) * UNITS[match[2].lower()] if match else 0
        if not 1 <= length <= MAX_CONTEXT:
            raise StartupError(
                f"--context has {item.strip()!r}; it must be tokens from 1 to {MAX_CONTEXT}, as in 4096, 32k or 1M"
            )
        found.add(length)
    return tuple(sorted(found))


def _users(text: str) -> int:
    count = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0
    if not 1 <= count <= MAX_USERS:
        raise StartupError(f"--users is {text!r}; it must be a whole number from 1 to {MAX_USERS}")
    return count


def _recipe_folders(text: str, formats: Sequence[str]) -> dict[str, str]:
    """Folders by their names, which tables and JSON call them by."""
    found: dict[str, str] = {}
    for item in text.split(","):
        if folder := item.strip():
            name = Path(folder).resolve().name
            if name in found or name in formats:
                raise StartupError(f"--kv-recipe {folder}: {name!r} is the name of another format; rename the folder")
            found[name] = folder
    return found


def _plot_path(text: str | None) -> Path | None:
    if text is None:
        return None
    if Path(text).suffix.lower() != ".png":
        raise StartupError(f"--plot is {text!r}; it must be a file name that ends in .png")
    return Path(text)


def _write_json(plan: "CapacityPlan", target: str) -> None:
    from engine.study.capacity_report import as_json

    text = json.dumps(as_json(plan), indent=2) + "\n"
    if target == STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StartupError(
            f"--json {target}: cannot be written ({error.strerror}); name a file in a folder that is there"
        ) from error
