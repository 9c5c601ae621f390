"""The program behind the HTTP ports: uvicorn with our connections and without its signal handlers."""

import contextlib
import ssl
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from server.config import ConnectionLimits
from server.connection import BoundedConnection

# What open connections get to take their last bytes, once nothing runs any more.
CLOSE_SECONDS = 2


class HttpServer(uvicorn.Server):
    """Uvicorn without its signal handlers: signals mean drain here, for both protocols together."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(app: ASGIApp, limits: ConnectionLimits, tls: ssl.SSLContext | None = None) -> HttpServer:
    config = uvicorn.Config(
        app,
        http=partial(BoundedConnection, limits),  # type: ignore[arg-type]  # called as the class would be
        ssl_context_factory=None if tls is None else lambda config, default: tls,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    return HttpServer(config)
