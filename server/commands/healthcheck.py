"""`quire healthcheck`: whether the server beside it is ready, for the health check of a container."""

import argparse
import http.client
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine.errors import StartupError
from server.config import ServerConfig
from server.options import add_options, build

if TYPE_CHECKING:
    from server.options import Commands

SECONDS = 3.0
DESCRIPTION = (
    "Ask the server on this machine, through its admin port, whether it takes requests. Give the options, or the "
    "variables, that quire serve has. The admin port needs no key and no certificate. Exit code 0: ready; 1: not."
)


def add(commands: "Commands") -> None:
    parser = commands.add_parser("healthcheck", help="ask the server here whether it is ready", description=DESCRIPTION)
    parser.set_defaults(run=run)
    add_options(parser, ServerConfig)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Never 2, which Docker keeps for itself."""
    try:
        reason = _why_not_ready(build(ServerConfig, args, environ).admin_port)
    except StartupError as error:
        reason = str(error)
    if reason is None:
        print("ready")
        return 0
    print(f"quire: {reason}", file=sys.stderr)
    return 1


def _why_not_ready(port: int | None) -> str | None:
    """What speaks against it, None if nothing does. Each wait for the server ends after SECONDS."""
    if not port:
        return f"--admin-port is {'not set' if port is None else port}; give quire serve and quire healthcheck the same"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("GET", "/ready", headers={"Connection": "close"})
        status = connection.getresponse().status
    except ConnectionRefusedError:
        return f"nothing listens on port {port} yet; the server is starting, or has another --admin-port"
    except TimeoutError:
        return f"the server on port {port} has not answered for {SECONDS:g} s"
    except (OSError, http.client.HTTPException) as error:
        return f"port {port} does not answer as a server does ({type(error).__name__})"
    finally:
        connection.close()
    return None if status == 200 else f"not ready: the server on port {port} answers {status}"
