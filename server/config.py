"""Where and how the server listens."""

from dataclasses import dataclass

from engine.config import option
from engine.errors import StartupError

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Addresses, shutdown and logging. Port 0 takes a free port, which is printed."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all", "server")
    http_port: int = option(8000, "port of the OpenAI API; 0 for a free one", "server")
    grpc_port: int = option(50051, "port of gRPC; 0 for a free one", "server")
    drain_seconds: float = option(30.0, "how long running requests may take to finish after SIGTERM", "server")
    log_level: str = option("info", "least severe messages that are logged", "server", choices=LOG_LEVELS)

    def __post_init__(self) -> None:
        for flag, port in (("--http-port", self.http_port), ("--grpc-port", self.grpc_port)):
            if not 0 <= port < 2**16:
                raise StartupError(f"{flag} is {port}; it must be from 0 to {2**16 - 1}")
        if not 0 <= self.drain_seconds < float("inf"):
            raise StartupError(f"--drain-seconds is {self.drain_seconds}; it must be at least 0")
