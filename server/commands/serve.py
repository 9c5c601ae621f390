"""`quire serve`: one model over HTTP and gRPC."""

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import StartupError
from server.config import ServerConfig
from server.options import add_options, build, options_of

if TYPE_CHECKING:
    from server.options import Commands

OTLP_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
# Of the model, of other commands, and of the tests.
OTHERS = {
    "QUIRE_MODEL", "QUIRE_BENCH_API_KEY", "QUIRE_MAX_TOKENS", "QUIRE_TEMPERATURE", "QUIRE_SEED", "QUIRE_CLIENTS_DIR",
    "QUIRE_TRANSFORMERS_PYTHON", "QUIRE_SCREENSHOTS",
}  # fmt: skip
CONFIGS = (EngineConfig, ServerConfig)


def add(commands: "Commands") -> None:
    parser = commands.add_parser("serve", help="serve one model over HTTP and gRPC")
    parser.set_defaults(run=run)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="smollm2-135m-instruct, a local folder in Hugging Face layout, or ORG/NAME on a hub [QUIRE_MODEL]",
    )
    add_options(parser, *CONFIGS)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    model = args.model or environ.get("QUIRE_MODEL")
    if not model:
        raise StartupError("no model: name one, as in `quire serve smollm2-135m-instruct`, or set QUIRE_MODEL")
    engine_config = build(EngineConfig, args, environ, model=model)
    server_config = build(ServerConfig, args, environ)
    if server_config.otlp_endpoint is None and environ.get(OTLP_ENDPOINT):
        server_config = replace(server_config, otlp_endpoint=environ[OTLP_ENDPOINT])
    _check_tmpdir(environ)
    for name in _unknown_variables(environ):
        print(f"quire: {name} is set, but no option has that name; see quire serve --help", file=sys.stderr)
    # Here, so that --help and mistakes answer without loading the servers.
    from server.lifecycle import serve

    return serve(engine_config, server_config)


def _check_tmpdir(environ: Mapping[str, str]) -> None:
    """A folder that is named and cannot be written is a mistake to tell at once: in the container images it is the
    volume of all caches. Raises StartupError."""
    folder = environ.get("TMPDIR")
    if folder and not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise StartupError(
            f"TMPDIR is {folder}, where user {os.geteuid()} with group {os.getegid()} may not write; give one of them "
            "the folder (chown, or chgrp and chmod g+w), or mount a volume there"
        )


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    known = {option.variable for config in CONFIGS for option in options_of(config)}
    return sorted(name for name in environ if name.startswith("QUIRE_") and name not in known | OTHERS)
