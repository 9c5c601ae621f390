"""What `quire bench` was asked for, checked."""

from dataclasses import dataclass

from server.bench.client import ClientOptions
from server.bench.endpoints import Endpoint
from server.bench.load import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Times are in seconds. `url`: without trailing slash and /v1; for gRPC, grpc[s]://host:port. No `endpoint`: gRPC.

    `requests` None: what each load takes by default. `dataset` None: random words.
    """

    url: str
    endpoint: Endpoint | None
    loads: tuple[Load, ...]
    input_tokens: int
    output_tokens: int
    prefix_share: float
    dataset: str | None
    client: ClientOptions
    requests: int | None
    max_seconds: float
    seed: int
    warm_up: bool

    @property
    def protocol(self) -> str:
        return self.endpoint.path if self.endpoint else "gRPC Generate"

    @property
    def what(self) -> str:
        source = self.dataset or f"{self.input_tokens} tokens in"
        shared = f" ({self.prefix_share:.0%} shared)" if self.prefix_share else ""
        return f"{source}{shared}, {self.output_tokens} out"
