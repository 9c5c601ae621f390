"""From a config to a running server and back: ports, engine, readiness, drain, exit code."""

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from engine.config import EngineConfig
from engine.errors import ErrorKind, RequestError, StartupError
from server.admin import build_admin_app
from server.config import ServerConfig
from server.dialect import Dialect
from server.grpc import GrpcServer
from server.http import build_app
from server.keys import KeyFile, OpenDoor
from server.log_lines import set_up
from server.ports import address, bind_admin, bind_grpc, bind_http
from server.service import CLOSED, Service, shutting_down
from server.signals import exit_on, is_hangup_heard
from server.terminal import open_console
from server.tls import Certificates
from server.tracing import Traces
from server.web import CLOSE_SECONDS, HttpServer, http_server

if TYPE_CHECKING:
    from engine.engine import Engine

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
WATCH_SECONDS = 0.1
SPARE_DESCRIPTORS = 256


def serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Run the server until a signal, and return the exit code. Raises StartupError if it cannot start."""
    _raise_descriptors(config.max_connections)
    set_up(config.log_level, is_json=config.log_format == "json")
    # Also for the time of loading: the first process of a container has no default action for SIGTERM.
    exit_on(*SIGNALS, signal.SIGHUP)
    return asyncio.run(_serve(engine_config, config))


def _load_engine(config: EngineConfig, progress: Callable[[int, int], None]) -> "Engine":
    # Here, because it imports torch, which takes seconds, and a port that is taken should be told before.
    from engine.load import load_engine

    return load_engine(config, progress)


def _raise_descriptors(max_connections: int) -> None:
    """A descriptor for each connection of both protocols and some for files. Raises StartupError."""
    needed = 2 * max_connections + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise StartupError(
            f"--max-connections is {max_connections}, for which {needed} files must be open at once; this process may "
            f"have {hard}; lower it, or raise `ulimit -Hn`"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


async def _serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    console = open_console()
    door = OpenDoor() if config.api_keys is None else KeyFile(Path(config.api_keys))
    certificates = Certificates.of(config)
    traces = None if config.otlp_endpoint is None else Traces.to(config.otlp_endpoint)
    async with contextlib.AsyncExitStack() as closing:
        if traces is not None:
            closing.push_async_callback(traces.close)
        http_socket = closing.enter_context(bind_http(config))
        admin_socket = bind_admin(config)
        if admin_socket is not None:
            closing.enter_context(admin_socket)
        grpc_server = GrpcServer(config.limits)
        credentials = None if certificates is None else certificates.grpc_credentials()
        grpc_port = bind_grpc(grpc_server, config, credentials)
        try:
            # Blocks the loop, which has nothing else to do yet.
            with _progress_bar(console) as progress:
                engine = _load_engine(engine_config, progress)
            gc.freeze()  # what is loaded stays: looking through it would stop the engine for a tenth of a second
            secure = "s" if certificates else ""
            http_url = f"http{secure}://{address(config.host, http_socket.getsockname()[1])}"
            grpc_url = f"grpc{secure}://{address(config.host, grpc_port)}"
            rows = [*engine.describe_start(), ("HTTP", http_url), ("gRPC", grpc_url)]
            if admin_socket is not None:
                rows.append(("admin", f"http://{address('127.0.0.1', admin_socket.getsockname()[1])}"))
            console.print(_table(rows))
            engine.start()
            dialect = Dialect(engine.tokenizer, engine.info)
            closing.push_async_callback(dialect.close)
            await dialect.start()
            service = Service(engine, door, dialect, traces, shows_previews=config.pool_previews)
            tls = None if certificates is None else certificates.context
            web = [(http_server(build_app(service), config.limits, tls), http_socket)]
            if admin_socket is not None:
                web.append((http_server(build_admin_app(service), config.limits), admin_socket))
            runner = Runner(service, grpc_server, web, config, certificates)
            return await runner.run(f"ready: {http_url} {grpc_url}")
        finally:
            await grpc_server.stop(0)


class Runner:
    """Serves one loaded engine until a signal comes or the engine dies."""

    def __init__(
        self,
        service: Service,
        grpc_server: GrpcServer,
        web: Sequence[tuple[HttpServer, socket.socket]],
        config: ServerConfig,
        certificates: Certificates | None,
    ):
        self._service = service
        self._grpc = grpc_server
        self._web = web
        self._drain_seconds = config.drain_seconds
        self._step_seconds = config.step_seconds
        self._certificates = certificates
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self, ready_line: str) -> int:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        if is_hangup_heard():
            # A terminal that closes may send it more than once, which asks for no hurry.
            loop.add_signal_handler(signal.SIGHUP, self._begin_stop)
        tasks = [asyncio.create_task(server.serve(sockets=[bound])) for server, bound in self._web]
        engine = self._service.engine
        try:
            await self._grpc.start(self._service)
            code = await self._watch(tasks, ready_line)
            await self._drain()
        finally:
            # A step that never ends is left behind; the thread dies with the process.
            await asyncio.to_thread(engine.stop, CLOSE_SECONDS if self._is_stuck else None)
            self._service.fail(shutting_down())  # also what had not come to the engine yet
            # What still ran has failed now; let those streams say so before their connections close.
            await _first_of(self._service.wait_idle(), timeout=CLOSE_SECONDS)
            for server, _ in self._web:
                server.should_exit = True
            await asyncio.gather(*tasks, self._grpc.stop(CLOSE_SECONDS))
        return code

    @property
    def _is_stuck(self) -> bool:
        return self._service.engine.step_seconds > self._step_seconds

    def _begin_stop(self) -> None:
        if not self._stop.is_set():
            log.info(
                "shutting down: running requests may finish for %g s; another signal ends them", self._drain_seconds
            )
            self._stop.set()

    def _on_signal(self) -> None:
        if not self._stop.is_set():
            self._begin_stop()
            return
        self._hurry.set()
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            # A third one kills the process.
            loop.remove_signal_handler(number)

    async def _watch(self, tasks: Sequence[asyncio.Task[None]], ready_line: str) -> int:
        """Say when all is up, then wait for a signal or a failure. Returns the exit code when it is time to leave."""
        was_ready = False
        while not self._stop.is_set():
            if not self._service.engine.is_ready:
                log.error("the engine has stopped; the server ends")
                return 1
            if self._is_stuck:
                log.error("a step has taken more than --step-seconds %g; the server ends", self._step_seconds)
                message = "the engine does not answer; try another server"
                self._service.fail(RequestError(ErrorKind.UNAVAILABLE, message, code=CLOSED))
                return 1
            if any(task.done() for task in tasks):
                log.error("the HTTP server has stopped; the server ends")
                return 1
            if all(server.started for server, _ in self._web) and not was_ready:
                was_ready = True
                await self._grpc.set_ready(True)
                print(ready_line, flush=True)
            if self._certificates is not None:
                self._certificates.refresh()
            await _first_of(self._stop.wait(), timeout=WATCH_SECONDS)
        return 0

    async def _drain(self) -> None:
        self._service.drain()
        await self._grpc.set_ready(False)
        if self._service.is_answering:
            await _first_of(self._service.wait_idle(), self._hurry.wait(), timeout=self._drain_seconds)


async def _first_of(*waits: Coroutine[Any, Any, Any], timeout: float) -> None:
    """Return when one of them has, or after `timeout` seconds."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(name, value)
    return table


@contextlib.contextmanager
def _progress_bar(console: Console) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("loading weights, layer"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("", total=None)

    def progress(done: int, total: int) -> None:
        if not bar.live.is_started:
            log.info("loading the weights of %d layers", total)  # minutes may go by, and a log shows no bar
        bar.start()  # not before: a download shows bars of its own
        bar.update(task, completed=done, total=total)

    try:
        yield progress
    finally:
        if bar.live.is_started:  # else it would write an empty line
            bar.stop()
