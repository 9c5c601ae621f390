"""`quire eval`: what KV formats cost and lose, measured on the user's own model and text."""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import StartupError
from server.eval_config import EvalConfig
from server.options import add_options, build
from server.terminal import open_console

if TYPE_CHECKING:
    from server.options import Commands


def add(commands: "Commands") -> None:
    parser = commands.add_parser("eval", help="measure what KV formats cost and lose, on your model and text")
    parser.set_defaults(run=run)
    parser.add_argument("model", metavar="MODEL", help="as for quire serve")
    add_options(parser, EvalConfig)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    config = build(EvalConfig, args, environ)
    if config.json is not None:
        file = Path(config.json).absolute()
        if not file.parent.is_dir():
            raise StartupError(f"--json {config.json}: there is no such folder")
        if file.is_dir():
            raise StartupError(f"--json {config.json!r} is a folder; name a file")
    # Here, so that --help and mistakes answer without loading torch.
    from server.study import measure

    with _results_folder(config) as folder:
        try:
            return measure(args.model, config, folder, output=open_console(), errors=open_console(stderr=True))
        except KeyboardInterrupt:
            is_kept = config.resume is not None or config.json is not None
            print("quire: stopped" + ("; the same command goes on from here" if is_kept else ""), file=sys.stderr)
            return 130


@contextmanager
def _results_folder(config: EvalConfig) -> Iterator[Path]:
    if config.resume is not None:
        yield Path(config.resume)
    elif config.json is not None:
        yield Path(config.json + ".resume")
    else:
        with tempfile.TemporaryDirectory(prefix="quire-eval-") as folder:
            yield Path(folder)
