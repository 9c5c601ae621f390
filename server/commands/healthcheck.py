"""`quire healthcheck`: whether the server beside it is ready, for the health check of a container."""

import argparse
import re
import socket
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine.errors import StartupError
from server.config import ServerConfig
from server.options import add_options, build

if TYPE_CHECKING:
    from server.options import Commands

SECONDS = 3.0
REQUEST = b"GET /ready HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
MAX_LINE = 1024
DESCRIPTION = (
    "Ask the server on this machine, through its admin port, whether it takes requests. Give the options, or the "
    "variables, that quire serve has. The admin port needs no key and no certificate. Exit code 0: ready; 1: not."
)


def add(commands: "Commands") -> None:
    parser = commands.add_parser("healthcheck", help="ask the server here whether it is ready", description=DESCRIPTION)
    parser.set_defaults(run=run)
    add_options(parser, ServerConfig)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Never 2, which Docker keeps for itself; only a wrong command line ends with it."""
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
    """What speaks against it, None if nothing does; after SECONDS at most, however slowly the server talks."""
    if not port:
        return f"--admin-port is {'not set' if port is None else port}; give quire serve and quire healthcheck the same"
    try:
        line = _first_line(port, time.monotonic() + SECONDS)
    except ConnectionRefusedError:
        return f"nothing listens on port {port} yet; the server is starting, or has another --admin-port"
    except TimeoutError:
        return f"the server on port {port} has not answered for {SECONDS:g} s"
    except OSError as error:
        return f"port {port} does not answer as a server does ({error.strerror})"
    status = re.match(rb"HTTP/1\.\d (\d{3}) ", line)
    if status is None:
        return f"port {port} does not answer as a server does"
    return None if status[1] == b"200" else f"not ready: the server on port {port} answers {status[1].decode()}"


def _first_line(port: int, deadline: float) -> bytes:
    """Of the answer. The status is in it, so nothing behind it is waited for."""
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        connection.sendall(REQUEST)
        line = b""
        while b"\n" not in line and len(line) < MAX_LINE:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            connection.settimeout(left)
            if not (more := connection.recv(MAX_LINE)):
                break
            line += more
    return line
