"""Where and how the server listens, and what it bears."""

import re
from dataclasses import dataclass

from engine.config import option
from engine.errors import StartupError

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
MAX_SECONDS = 86_400  # some of the clocks below count milliseconds in 32 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of connections, in seconds where they are times."""

    max_connections: int
    request_seconds: float
    write_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Addresses, limits, shutdown and logging. Port 0 takes a free port, which is printed."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all", "server")
    http_port: int = option(8000, "port of the OpenAI API; 0 for a free one", "server")
    grpc_port: int = option(50051, "port of gRPC; 0 for a free one", "server")
    admin_port: int | None = option(
        None,
        "port on 127.0.0.1 for GET /ready, POST /flush, GET /check, GET /stacks; 0 for a free one (default: none)",
        "server",
    )
    pool_previews: bool = option(
        False,
        "let the pool page show how cached texts begin, those of every user to every key",
        "server",
    )
    drain_seconds: float = option(30.0, "how long running requests may take to finish after SIGTERM", "server")
    step_seconds: float = option(
        120.0, "a step that takes longer is a failure: open requests fail and the process ends", "server"
    )
    log_level: str = option("info", "least severe messages that are logged", "server", choices=LOG_LEVELS)
    log_format: str = option("text", "text, or json: one object a line", "server", choices=LOG_FORMATS)
    otlp_endpoint: str | None = option(
        None,
        "base URL of an OpenTelemetry collector that takes OTLP over HTTP; needs quire[traces] "
        "(default: OTEL_EXPORTER_OTLP_ENDPOINT, else no traces)",
        "server",
    )
    max_connections: int = option(1024, "open HTTP connections, and as many of gRPC", "limits")
    request_seconds: float = option(30.0, "how long a request may take to arrive, head and body", "limits")
    write_seconds: float = option(30.0, "a client that takes nothing of its answer for so long is cut off", "limits")
    api_keys: str | None = option(
        None, "file with a line `NAME KEY` for each key (docs/serving.md); read again when it changes", "keys and TLS"
    )
    tls_cert: str | None = option(
        None, "certificate chain in PEM for both ports; read again when it changes", "keys and TLS"
    )
    tls_key: str | None = option(None, "private key of --tls-cert, in PEM", "keys and TLS")
    tls_client_ca: str | None = option(
        None, "certificates in PEM of which one must have signed a client's", "keys and TLS"
    )

    def __post_init__(self) -> None:
        ports = (("--http-port", self.http_port), ("--grpc-port", self.grpc_port), ("--admin-port", self.admin_port))
        for flag, port in ports:
            if port is not None and not 0 <= port < 2**16:
                raise StartupError(f"{flag} is {port}; it must be from 0 to {2**16 - 1}")
        given = [(flag, port) for flag, port in ports if port]
        for index, (flag, port) in enumerate(given):
            for other, taken in given[:index]:
                if port == taken:
                    raise StartupError(f"{flag} and {other} are both {port}; they must differ")
        if not 0 <= self.drain_seconds <= MAX_SECONDS:
            raise StartupError(f"--drain-seconds is {self.drain_seconds}; it must be from 0 to {MAX_SECONDS:,}")
        for name in ("step_seconds", "request_seconds", "write_seconds"):
            if not 0 < (value := getattr(self, name)) <= MAX_SECONDS:
                option = f"--{name.replace('_', '-')}"
                raise StartupError(f"{option} is {value}; it must be greater than 0 and at most {MAX_SECONDS:,}")
        if self.max_connections < 1:
            raise StartupError(f"--max-connections is {self.max_connections}; it must be at least 1")
        if self.otlp_endpoint is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.otlp_endpoint):
            raise StartupError("--otlp-endpoint must be a URL, as in http://127.0.0.1:4318")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise StartupError("--tls-cert and --tls-key belong together; give both")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise StartupError("--tls-client-ca needs --tls-cert and --tls-key")

    @property
    def limits(self) -> ConnectionLimits:
        return ConnectionLimits(
            max_connections=self.max_connections,
            request_seconds=self.request_seconds,
            write_seconds=self.write_seconds,
        )
