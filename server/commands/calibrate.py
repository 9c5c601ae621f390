"""`quire calibrate`: a recipe made for a model from a text."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import StartupError
from server.calibrate_config import CalibrateConfig
from server.options import add_options, build
from server.terminal import open_console

if TYPE_CHECKING:
    from server.options import Commands


def add(commands: "Commands") -> None:
    parser = commands.add_parser("calibrate", help="make a recipe for your model from a text")
    parser.set_defaults(run=run)
    parser.add_argument("model", metavar="MODEL", help="as for quire serve")
    parser.add_argument("-o", "--output", metavar="DIR", help="folder to write, for --kv-recipe (required)")
    parser.add_argument("--force", action="store_true", help="replace the files of a recipe that is there")
    add_options(parser, CalibrateConfig)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    config = build(CalibrateConfig, args, environ)
    if not args.output:
        raise StartupError("no output: name a folder to write, as in -o recipe")
    # Here, so that --help and mistakes answer without loading torch.
    from server.calibrate import calibrate

    return calibrate(
        args.model,
        config,
        Path(args.output),
        force=args.force,
        output=open_console(),
        errors=open_console(stderr=True),
    )
