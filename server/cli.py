"""The command `quire`: each module in `server.commands` adds one word to it."""

import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence

from engine.errors import StartupError
from server.commands import calibrate, evaluate, inspect, plan, serve
from server.options import Parser

COMMANDS = (serve, plan, evaluate, calibrate, inspect)


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run the command line and return the exit code: 2 for anything wrong with what was asked for."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args, os.environ if environ is None else environ)
    except StartupError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> Parser:
    parser = Parser(prog="quire", description="Serve a Llama, Mistral or Qwen model from a paged, quantized KV pool.")
    parser.add_argument("--version", action="version", version=f"quire {importlib.metadata.version('quire')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
