"""The command `quire`: each module in `server.commands` adds one word to it."""

import errno
import importlib.metadata
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from engine.errors import StartupError
from server.commands import bench, calibrate, evaluate, generate, healthcheck, inspect, plan, serve
from server.options import Parser
from server.signals import exit_on

COMMANDS = (serve, healthcheck, generate, plan, evaluate, calibrate, inspect, bench)
OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC)


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run the command line and return the exit code: 2 for anything wrong with what was asked for."""
    if argv is None:
        # This is the process: without a handler, these would leave temporary folders behind.
        exit_on(signal.SIGTERM, signal.SIGHUP)
        # Python has none where the descriptor is closed
        sys.stdout, sys.stderr = sys.stdout or _nowhere(), sys.stderr or _nowhere()
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args, os.environ if environ is None else environ)
        sys.stdout.flush()
    except StartupError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("quire: stopped", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS or error.filename is not None:
            raise
        return _lose_stdout(error)
    return code


def _nowhere() -> TextIO:
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _lose_stdout(error: OSError) -> int:
    """A reader that has seen enough, as in `quire plan ... | head`, is no mistake to tell; a full disk is."""
    # What is left in the buffer would fail again when Python exits.
    with _nowhere() as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    if error.errno != errno.EPIPE:
        print(f"quire: stdout cannot be written: {error.strerror}", file=sys.stderr)
    return 1


def _parser() -> Parser:
    parser = Parser(prog="quire", description="Serve a Llama, Mistral or Qwen model from a paged, quantized KV pool.")
    parser.add_argument("--version", action="version", version=f"quire {importlib.metadata.version('quire')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
