"""`quire inspect`: how K and V of a model are distributed, and what that says about KV formats."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine.study.output_folder import check_output
from server.inspect_config import InspectConfig
from server.options import add_options, build
from server.terminal import open_console

if TYPE_CHECKING:
    from server.options import Commands

DESCRIPTION = (
    "Run a model over the start of a text and look at K and V: magnitudes by channel and token, what quantizing by "
    "channel or by token does to attention, and tokens that are attention sinks. Writes figures and CSV files."
)


def add(commands: "Commands") -> None:
    parser = commands.add_parser("inspect", help="figures and tables of a model's K and V", description=DESCRIPTION)
    parser.set_defaults(run=run)
    parser.add_argument("model", metavar="MODEL", help="as for quire serve")
    parser.add_argument("-o", "--output", metavar="FOLDER", required=True, help="new folder for PNG and CSV files")
    parser.add_argument("--force", action="store_true", help="replace files in a folder that is there")
    add_options(parser, InspectConfig)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    config = build(InspectConfig, args, environ)
    check_output(Path(args.output), force=args.force)
    # Here, so that --help and mistakes answer without loading torch.
    from server.inspection import inspect_model

    return inspect_model(
        args.model,
        config,
        Path(args.output),
        force=args.force,
        output=open_console(),
        errors=open_console(stderr=True),
    )
