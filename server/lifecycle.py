"""From a config to a running server and back: ports, engine, readiness, drain, exit code."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from starlette.types import ASGIApp

from engine.config import EngineConfig
from engine.errors import StartupError
from server.config import ServerConfig
from server.grpc import GrpcServer
from server.http import build_app
from server.service import Service
from server.signals import exit_now
from server.terminal import open_console

if TYPE_CHECKING:
    from engine.engine import Engine

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
WATCH_SECONDS = 0.1
# What open connections get to take their last bytes, once nothing runs any more.
CLOSE_SECONDS = 2


def serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Run the server until a signal, and return the exit code. Raises StartupError if it cannot start."""
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for number in SIGNALS:
        # Also for the time of loading: the first process of a container has no default action for SIGTERM.
        signal.signal(number, exit_now)
    return asyncio.run(_serve(engine_config, config))


def _load_engine(config: EngineConfig, progress: Callable[[int, int], None]) -> "Engine":
    # Here, because it imports torch, which takes seconds, and a port that is taken should be told before.
    from engine.load import load_engine

    return load_engine(config, progress)


async def _serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    console = open_console()
    with bind_http(config) as http_socket:
        grpc_server = GrpcServer()
        grpc_port = bind_grpc(grpc_server, config)
        try:
            # Blocks the loop, which has nothing else to do yet.
            with _progress_bar(console) as progress:
                engine = _load_engine(engine_config, progress)
            gc.freeze()  # what is loaded stays: looking through it would stop the engine for a tenth of a second
            http_url = f"http://{_address(config.host, http_socket.getsockname()[1])}"
            grpc_url = f"grpc://{_address(config.host, grpc_port)}"
            rows = [*engine.describe_start(), ("HTTP", http_url), ("gRPC", grpc_url)]
            console.print(_table(rows))
            engine.start()
            runner = Runner(Service(engine), grpc_server, http_socket, config)
            return await runner.run(f"ready: {http_url} {grpc_url}")
        finally:
            await grpc_server.stop(0)


class Runner:
    """Serves one loaded engine until a signal comes or the engine dies."""

    def __init__(self, service: Service, grpc_server: GrpcServer, http_socket: socket.socket, config: ServerConfig):
        self._service = service
        self._grpc = grpc_server
        self._http_socket = http_socket
        self._drain_seconds = config.drain_seconds
        self._http = http_server(build_app(service))
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self, ready_line: str) -> int:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        http_task = asyncio.create_task(self._http.serve(sockets=[self._http_socket]))
        try:
            await self._grpc.start(self._service)
            code = await self._watch(http_task, ready_line)
            await self._drain()
        finally:
            await asyncio.to_thread(self._service.engine.stop)
            # What still ran has failed now; let those streams say so before their connections close.
            await _first_of(self._service.wait_idle(), timeout=CLOSE_SECONDS)
            self._http.should_exit = True
            await asyncio.gather(http_task, self._grpc.stop(CLOSE_SECONDS))
        return code

    def _on_signal(self) -> None:
        if not self._stop.is_set():
            log.info(
                "shutting down: running requests may finish for %g s; another signal ends them", self._drain_seconds
            )
            self._stop.set()
            return
        self._hurry.set()
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            # A third one kills the process.
            loop.remove_signal_handler(number)

    async def _watch(self, http_task: asyncio.Task[None], ready_line: str) -> int:
        """Say when all is up, then wait for a signal or a failure. Returns the exit code when it is time to leave."""
        was_ready = False
        while not self._stop.is_set():
            if not self._service.engine.is_ready:
                log.error("the engine has stopped; the server ends")
                return 1
            if http_task.done():
                log.error("the HTTP server has stopped; the server ends")
                return 1
            if self._http.started and not was_ready:
                was_ready = True
                await self._grpc.set_ready(True)
                print(ready_line, flush=True)
            await _first_of(self._stop.wait(), timeout=WATCH_SECONDS)
        return 0

    async def _drain(self) -> None:
        self._service.drain()
        await self._grpc.set_ready(False)
        if self._service.engine.is_ready:
            await _first_of(self._service.wait_idle(), self._hurry.wait(), timeout=self._drain_seconds)


class HttpServer(uvicorn.Server):
    """Uvicorn without its signal handlers: signals mean drain here, for both protocols together."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(app: ASGIApp) -> HttpServer:
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    return HttpServer(config)


async def _first_of(*waits: Coroutine[Any, Any, Any], timeout: float) -> None:
    """Return when one of them has, or after `timeout` seconds."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def bind_http(config: ServerConfig) -> socket.socket:
    """A socket that has its port and does not listen: until the engine is there, connections are refused.

    Raises StartupError naming the port and why it is not free.
    """
    return _bind(config.host, config.http_port, "--http-port")


def bind_grpc(server: GrpcServer, config: ServerConfig) -> int:
    """Bind gRPC and return the port. Raises StartupError as `bind_http` does."""
    if config.grpc_port:
        # gRPC does not say why a bind failed, so ask the system first.
        _bind(config.host, config.grpc_port, "--grpc-port").close()
    try:
        return server.bind(_address(config.host, config.grpc_port))
    except RuntimeError as error:
        raise _port_error(config.host, config.grpc_port, "--grpc-port", str(error)) from None


def _bind(host: str, port: int, flag: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol's number: without it asyncio leaves TCP_NODELAY off, and every answer takes 40 ms longer.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise _port_error(host, port, flag, error.strerror or str(error)) from None
    return bound


def _port_error(host: str, port: int, flag: str, why: str) -> StartupError:
    return StartupError(
        f"cannot listen on port {port} of {host}: {why}; choose another {flag} (0: a free one) or --host"
    )


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(name, value)
    return table


@contextlib.contextmanager
def _progress_bar(console: Console) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("loading weights, layer"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
