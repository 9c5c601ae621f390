"""`quire generate`: one request without a server."""

import argparse
import io
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import StartupError
from server.generate_config import GenerateConfig
from server.options import add_options, build
from server.terminal import open_console

if TYPE_CHECKING:
    from server.options import Commands

STDIN = "-"
DESCRIPTION = (
    "Load a model, continue one text and write it to stdout as it comes. What else there is to say goes to stderr."
)


def add(commands: "Commands") -> None:
    parser = commands.add_parser("generate", help="continue one text, without a server", description=DESCRIPTION)
    parser.set_defaults(run=run)
    parser.add_argument("model", metavar="MODEL", help="as for quire serve")
    parser.add_argument(
        "--prompt",
        required=True,
        metavar="TEXT",
        help="text to continue; - reads it from stdin, where a line break at its end is left out",
    )
    parser.add_argument("--chat", action="store_true", help="take it as a user's message, through the chat template")
    parser.add_argument(
        "--json", action="store_true", help="write one JSON object at the end: text, finish_reason, usage and times"
    )
    add_options(parser, GenerateConfig, EngineConfig)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    config = build(GenerateConfig, args, environ)
    engine_config = build(EngineConfig, args, environ, model=args.model)
    prompt = _read_prompt(args.prompt)
    # Here, so that --help and mistakes answer without loading torch.
    from server.once import JsonWriter, StreamWriter, generate

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what the terminal's encoding does not have
    writer = JsonWriter(sys.stdout) if args.json else StreamWriter(sys.stdout)
    # There is one sequence: pages for others would only take memory.
    engine_config = replace(engine_config, max_num_seqs=1)
    return generate(engine_config, config, prompt, is_chat=args.chat, writer=writer, errors=open_console(stderr=True))


def _read_prompt(given: str) -> str:
    try:
        if given != STDIN:
            given.encode()  # an argument that is not text has surrogates
            return given
        if sys.stdin is None:
            raise StartupError("--prompt is -, but stdin is closed")
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeError:
        raise StartupError(f"--prompt{' -: stdin' if given == STDIN else ''} is not UTF-8 text") from None
