"""The command `quire`."""

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence

from engine.config import EngineConfig
from engine.errors import StartupError
from server.config import ServerConfig
from server.options import Parser, build, options_of


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run the command line and return the exit code: 2 for anything wrong with what was asked for."""
    args = _parser().parse_args(argv)
    try:
        return _serve(args, os.environ if environ is None else environ)
    except StartupError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="quire", description="Serve a Llama or Qwen2 model from a paged, quantized KV pool.")
    parser.add_argument("--version", action="version", version=f"quire {importlib.metadata.version('quire')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve = commands.add_parser("serve", help="serve one model over HTTP and gRPC")
    serve.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="smollm2-135m-instruct, or a local folder in Hugging Face layout [QUIRE_MODEL]",
    )
    groups = {}
    for option in [*options_of(EngineConfig), *options_of(ServerConfig)]:
        if option.group not in groups:
            groups[option.group] = serve.add_argument_group(option.group)
        option.add_to(groups[option.group])
    return parser


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    known = {option.variable for config in (EngineConfig, ServerConfig) for option in options_of(config)}
    return sorted(name for name in environ if name.startswith("QUIRE_") and name not in known | {"QUIRE_MODEL"})


def _serve(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    model = args.model or environ.get("QUIRE_MODEL")
    if not model:
        raise StartupError("no model: name one, as in `quire serve smollm2-135m-instruct`, or set QUIRE_MODEL")
    engine_config = build(EngineConfig, args, environ, model=model)
    server_config = build(ServerConfig, args, environ)
    for name in _unknown_variables(environ):
        print(f"quire: {name} is set, but no option has that name; see quire serve --help", file=sys.stderr)
    # Here, so that --help and mistakes answer without loading the servers.
    from server.lifecycle import serve

    return serve(engine_config, server_config)


if __name__ == "__main__":
    sys.exit(main())
